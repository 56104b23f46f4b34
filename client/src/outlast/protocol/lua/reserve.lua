--[[ reserve: promote due jobs, reclaim lapsed leases, then take up to k jobs.
A repeat (`again`) of a request whose reply was lost gives back what that request took, and nothing more.
KEYS  ready scheduled leases signal seq take config dead
ARGV  now token k lease_ms again stale_at grace_ms result_ttl_ms dead_ttl_ms bell base max_bytes
REPLY ok now hint_ms limited job... | stale now
      hint_ms: until something becomes due, 0 call again, -1 nothing known; limited: 1 nothing may be taken till then
      job: id payload attempt maxAttempts priority createdAt starts gen b n rank idempotencyKey timeoutMs
           deadlineAt expiresAt resultTtlMs owner trace usage counted budget
]]
local ready, scheduled, leases, signal, seq = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local take, config, dead = KEYS[6], KEYS[7], KEYS[8]
local now_arg, token, k, lease, again = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5] == '1'
local stale_at, grace, result_ttl, dead_ttl = ARGV[6], tonumber(ARGV[7]), ARGV[8], ARGV[9]
local bell, base, max_bytes = ARGV[10] == '1', ARGV[11], tonumber(ARGV[12])

local more = k > BATCH
k = math.min(k, BATCH)
local now = clock(now_arg)
local FIELDS = {
  'id', 'payload', 'attempt', 'maxAttempts', 'priority', 'createdAt', 'starts', 'gen', 'status', 'startedAt',
  'idempotencyKey', 'timeoutMs', 'deadlineAt', 'expiresAt', 'resultTtlMs', 'owner', 'trace', 'token',
  'usage', 'counted', 'budget',
}

local function describe(r, attempt, starts, b, n, rank)
  return {
    r[1], r[2] or '', attempt, r[4] or '1', r[5] or '0', r[6] or '', starts, r[8], int(b), int(n), rank,
    r[11] or '', r[12] or '', r[13] or '', r[14] or '', r[15] or '', r[16] or '', r[17] or '',
    r[19] or '', r[20] or '', r[21] or '',
  }
end

-- A full database refuses a script whose first write needs memory; one that frees memory lets the rest pass. Taking
-- jobs begins with one anyway, so finding lapsed leases must not be what stops a worker.
local function relieve()
  redis.call('ZREM', leases, '')
end

if again then
  local taken = redis.call('GET', take)
  if taken and string.sub(taken, 1, #token + 1) == token .. '\n' then
    local reply, scores, at = { 'ok', int(now), '0', '0' }, {}, #token + 2
    while at <= #taken do
      local colon = string.find(taken, ':', at, true)
      local rank, size = string.match(string.sub(taken, at, colon - 1), '^(%S+) (%d+)$')
      local id = string.sub(taken, colon + 1, colon + size)
      at = colon + size + 1
      local r = redis.call('HMGET', base .. 'job:' .. id, unpack(FIELDS))
      if r[1] and r[18] == token then
        scores[#scores + 1], scores[#scores + 2] = int(now + lease), id
        local b, n, top = tonumber(r[8]), 0, top_of(base .. 'events:' .. id)
        if top then
          local ms, last = parts(top[1])
          if ms >= b then
            b, n = ms, last
          end
        end
        reply[#reply + 1] = describe(r, r[3], r[7] or r[3], b, n, rank)
      end
    end
    if #scores > 0 then
      relieve()
      redis.call('ZADD', leases, unpack(scores))
    end
    return reply
  end
end
-- A send that comes late (out of a dead socket's buffer) must take nothing: a repeat may have run.
if stale_at ~= '' and now > tonumber(stale_at) then
  return { 'stale', int(now) }
end

local limited, hint = '0', -1
local function due_in(ms)
  if hint < 0 or ms < hint then
    hint = math.max(ms, 0)
  end
end

local paused = tonumber((redis.call('HMGET', config, 'pausedUntil')[1]) or 0)
if paused > now then
  k, limited = 0, '1'
end

-- The entries of a set that are due, at most BATCH, as id, score, id, score, ...; the next one after them is noted.
local function due_of(set)
  local entries = redis.call('ZRANGE', set, 0, PEEK, 'WITHSCORES')
  if #entries > 2 * PEEK and tonumber(entries[#entries]) <= now then
    entries = redis.call('ZRANGE', set, 0, BATCH, 'WITHSCORES')
  end
  local due = {}
  for i = 1, #entries, 2 do
    local score = tonumber(entries[i + 1])
    if score > now or i > 2 * BATCH then
      due_in(score - now)
      break
    end
    due[i], due[i + 1] = entries[i], score
  end
  return due
end

local moved = {} -- band, id pairs for ready
local function to_ready(id, priority)
  moved[#moved + 1] = { (9 - (tonumber(priority) or 0)) * RANK, id }
end

local due, ids = due_of(scheduled), {}
for i = 1, #due, 2 do
  ids[#ids + 1] = due[i]
end
if #ids > 0 then
  redis.call('ZREM', scheduled, unpack(ids))
end
for _, id in ipairs(ids) do
  local job = base .. 'job:' .. id
  local r = redis.call('HMGET', job, 'id', 'status', 'priority')
  -- No record, or elsewhere by now: the entry is a stray and is dropped, never made half a record.
  if r[1] and not ELSEWHERE[r[2]] then
    redis.call('HSET', job, 'status', 'waiting', 'updatedAt', int(now))
    to_ready(id, r[3])
  end
end

-- Two looks: after a stall of the whole database every lease has lapsed at once, and live owners must get a chance
-- to renew. The fraction marks a lease that was looked at before; renewals write whole numbers.
local lapsed, first, second = due_of(leases), {}, {}
for i = 1, #lapsed, 2 do
  if lapsed[i + 1] % 1 == 0 then
    first[#first + 1], first[#first + 2] = string.format('%.1f', now + grace + 0.5), lapsed[i]
  else
    second[#second + 1] = lapsed[i]
  end
end
if #second > 0 then
  redis.call('ZREM', leases, unpack(second))
end
if #first > 0 then
  relieve()
  redis.call('ZADD', leases, unpack(first))
  due_in(grace + 1)
end
for _, id in ipairs(second) do
  local job, events = base .. 'job:' .. id, base .. 'events:' .. id
  local r = redis.call('HMGET', job, 'id', 'status', 'cancelRequested', 'attempt', 'maxAttempts', 'priority',
    'idempotencyKey', 'resultTtlMs', 'webhook')
  if r[1] and r[2] == 'active' then
    redis.call('HDEL', job, 'token')
    local cancelled = r[3] == '1'
    if not cancelled and (tonumber(r[4]) or 0) < (tonumber(r[5]) or 1) then
      redis.call('HSET', job, 'status', 'waiting', 'error', LEASE_TEXT, 'updatedAt', int(now))
      to_ready(id, r[6])
    else
      local ttl = cancelled and (r[8] or result_ttl) or dead_ttl
      local ended = terminal(events, cancelled and 'cancelled' or 'failed', cancelled and '' or LEASE_TEXT,
        r[4] or '0', nil, now_arg)
      if cancelled then
        redis.call('HSET', job, 'status', 'cancelled', 'updatedAt', ended, 'finishedAt', ended)
      else
        redis.call('HSET', job, 'status', 'failed', 'error', LEASE_TEXT, 'updatedAt', ended, 'finishedAt', ended)
        redis.call('ZADD', dead, ended, id)
      end
      redis.call('PEXPIRE', job, ttl)
      redis.call('PEXPIRE', events, ttl)
      redis.call('PEXPIRE', steps_of(job, id), ttl)
      if r[7] and r[7] ~= '' then
        free_key(base .. 'idem:' .. r[7], id)
      end
      announce(job, id, r[9], cancelled and 'cancelled' or 'failed', ended)
    end
  end
end

if #moved > 0 then
  local last, entries = redis.call('INCRBY', seq, #moved), {}
  for i, pair in ipairs(moved) do
    entries[#entries + 1] = int(pair[1] + last - #moved + i)
    entries[#entries + 1] = pair[2]
  end
  redis.call('ZADD', ready, unpack(entries))
end

local jobs, scores, taken, bytes = {}, {}, {}, 0
if k > 0 then
  local popped = redis.call('ZPOPMIN', ready, k)
  local back = {}
  for i = 1, #popped, 2 do
    local id, rank = popped[i], popped[i + 1]
    local job, events = base .. 'job:' .. id, base .. 'events:' .. id
    if #back > 0 then
      back[#back + 1], back[#back + 2] = rank, id
    else
      local r = redis.call('HMGET', job, unpack(FIELDS))
      local fresh = r[1] and not ELSEWHERE[r[9]]
      bytes = bytes + #(r[2] or '')
      if fresh and #jobs > 0 and bytes > max_bytes then
        back[#back + 1], back[#back + 2] = rank, id -- one reply must stay under the gateway's size limit
      elseif fresh then
        local attempt = (tonumber(r[3]) or 0) + 1
        local starts = (tonumber(r[7]) or tonumber(r[3]) or 0) + 1
        local gen = tonumber(r[8])
        local write = { 'status', 'active', 'attempt', int(attempt), 'token', token, 'updatedAt', int(now),
          'startedAt', int(now) }
        if not gen then
          gen = now -- enqueued by a foreign producer, or its id was reused by one
          r[8] = int(gen)
          write[#write + 1], write[#write + 2] = 'gen', r[8]
        end
        if r[7] or starts ~= attempt then
          write[#write + 1], write[#write + 2] = 'starts', int(starts)
        end
        local b, n = gen, 0
        if r[10] then
          local top = top_of(events)
          if top then
            local ms, last = parts(top[1])
            if ms >= gen then
              b, n = ms, last
            end
            if top[2][2] ~= 'restarted' and (attempt > 1 or starts > 1) then
              n = n + 1
              restart(events, int(b) .. '-' .. int(n), int(attempt))
            end
          else
            -- Started before, but no stream: a foreign retryDead deleted it, or nothing was emitted. A reader may
            -- hold a cursor from then, so the new entries must lie above anything it can have seen.
            b, n = math.max(gen, now), 1
            restart(events, int(b) .. '-1', int(attempt))
          end
        end
        redis.call('HSET', job, unpack(write))
        if r[9] == 'scheduled' then
          redis.call('ZREM', scheduled, id) -- a stray listing in ready; it must not stay in both
        end
        scores[#scores + 1], scores[#scores + 2] = int(now + lease), id
        taken[#taken + 1] = rank .. ' ' .. #id .. ':' .. id
        jobs[#jobs + 1] = describe(r, int(attempt), int(starts), b, n, rank)
      end
    end
  end
  if #scores > 0 then
    redis.call('ZADD', leases, unpack(scores))
    redis.call('SET', take, token .. '\n' .. table.concat(taken), 'PX', int(2 * lease))
  end
  if #back > 0 then
    redis.call('ZADD', ready, unpack(back))
  end
  -- Strays were dropped, some were put back, or more was asked for than a call takes: there may be more to have.
  if #popped > 2 * #jobs or (more and #popped == 2 * BATCH) then
    due_in(0)
  end
  if #popped == 0 and bell then
    redis.call('DEL', signal)
  end
end
-- More came free than this call took: others may be asleep.
if #moved > #jobs then
  ring(signal, #moved - #jobs)
end

-- A limited worker still has to come back for the leases of others that lapse.
if limited == '1' then
  due_in(paused - now)
end
local reply = { 'ok', int(now), int(math.ceil(hint)), limited }
for i = 1, #jobs do
  reply[4 + i] = jobs[i]
end
return reply
