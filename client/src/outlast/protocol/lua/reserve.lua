--[[ reserve: promote due jobs, reclaim lapsed leases, then take up to k jobs.
A repeat (`again`) of a request whose reply was lost gives back what that request took, and nothing more.
KEYS  ready scheduled leases signal seq take config dead room watch absent
ARGV  now token k lease_ms again stale_at grace_ms result_ttl_ms dead_ttl_ms bell base max_bytes was_limited
REPLY ok now hint_ms limited rules job... | stale now
      hint_ms: until something becomes due, 0 call again, -1 nothing known
      limited: why nothing may be taken after this: paused, rate (both till the hint), room (till some is made), or 0;
      was_limited: what the worker's last one said
      rules: of the queue, empty in a repeat: leaseMs timeoutMs resultTtlMs maxPayload concurrency ownerCap
      job: id payload attempt maxAttempts priority createdAt starts gen b n rank idempotencyKey timeoutMs
           deadlineAt expiresAt resultTtlMs owner trace usage counted budget; as far as the last that is not empty
]]
local ready, scheduled, leases, signal, seq = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local take, config, dead, room, watch, absent = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11]
local now_arg, token, k, lease, again = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5] == '1'
local stale_at, grace, result_ttl, dead_ttl = ARGV[6], tonumber(ARGV[7]), ARGV[8], ARGV[9]
local bell, base, max_bytes, was_limited = ARGV[10] == '1', ARGV[11], tonumber(ARGV[12]), ARGV[13]

local more = k > BATCH
k = math.min(k, BATCH)
local now, part = clock(now_arg)
local FIELDS = {
  'id', 'payload', 'attempt', 'maxAttempts', 'priority', 'createdAt', 'starts', 'gen', 'status', 'startedAt',
  'idempotencyKey', 'timeoutMs', 'deadlineAt', 'expiresAt', 'resultTtlMs', 'owner', 'trace', 'token',
  'usage', 'counted', 'budget', 'attemptsGiven',
}

local function describe(r, attempt, starts, b, n, rank)
  local row = {
    r[1], r[2] or '', attempt, r[4] or '1', r[5] or '0', r[6] or '', starts, r[8], int(b), int(n), rank,
    r[11] or '', r[12] or '', r[13] or '', r[14] or '', r[15] or '', r[16] or '', r[17] or '',
    r[19] or '', r[20] or '', r[21] or '',
  }
  for last = #row, 1, -1 do
    if row[last] ~= '' then
      break
    end
    row[last] = nil
  end
  return row
end

-- A full database refuses a script whose first write needs memory; one that frees memory lets the rest pass. Taking
-- jobs begins with one anyway, so finding lapsed leases must not be what stops a worker.
local function relieve()
  redis.call('ZREM', leases, '')
end

if again then
  local taken = redis.call('GET', take)
  if taken and string.sub(taken, 1, #token + 1) == token .. '\n' then
    local reply, scores, at = { 'ok', int(now), '0', '0', {} }, {}, #token + 2
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

local rules = redis.call('HMGET', config, 'leaseMs', 'timeoutMs', 'resultTtlMs', 'maxPayload', 'concurrency', 'ownerCap',
  'maxAttempts', 'rate', 'interval', 'burst', 'tat', 'pausedUntil', 'paused')
local concurrency, cap, rate = tonumber(rules[5]), tonumber(rules[6]), tonumber(rules[8])
result_ttl = rules[3] or result_ttl
if rules[1] then
  lease = tonumber(rules[1])
  grace = math.min(grace, math.floor(lease / 3))
end
-- A pause that a provider asked for, and one that somebody set, which may be without end.
local paused = math.max(tonumber(rules[12]) or 0, rules[13] == '1' and math.huge or tonumber(rules[13]) or 0)
if paused > now then
  k, limited = 0, 'paused'
end

-- The entries of a set that are due, at most BATCH, as id, score, id, score, ...; and when the next one after them is.
local function due_of(set)
  local entries = redis.call('ZRANGE', set, 0, PEEK, 'WITHSCORES')
  if #entries > 2 * PEEK and tonumber(entries[#entries]) <= now then
    entries = redis.call('ZRANGE', set, 0, BATCH, 'WITHSCORES')
  end
  local due = {}
  for i = 1, #entries, 2 do
    local score = tonumber(entries[i + 1])
    if score > now or i > 2 * BATCH then
      return due, score
    end
    due[i], due[i + 1] = entries[i], score
  end
  return due
end

-- What a job's record says was used and no total of a day has: name, amount, ... Both are flat objects of numbers that a
-- worker of ours wrote; of anything else only what looks like that counts.
local function uncounted(used, counted)
  local more, before = {}, {}
  for name, amount in string.gmatch(counted or '', '[{,] ?"([^"\\]+)": ?([%d.eE+-]+)') do
    before[name] = tonumber(amount)
  end
  for name, amount in string.gmatch(used or '', '[{,] ?"([^"\\]+)": ?([%d.eE+-]+)') do
    amount = (tonumber(amount) or 0) - (before[name] or 0)
    if amount > 0 then
      more[#more + 1], more[#more + 2] = name, amount
    end
  end
  return more
end

-- The day (UTC) of a time, as 2026-11-30: the civil calendar counted from a 1 March, so that a leap day comes last.
local function day_of(ms)
  local days = math.floor(ms / 86400000) + 719468
  local era = math.floor(days / 146097)
  local of_era = days - era * 146097
  local year = math.floor((of_era - math.floor(of_era / 1460) + math.floor(of_era / 36524) - math.floor(of_era / 146096)) / 365)
  local of_year = of_era - (365 * year + math.floor(year / 4) - math.floor(year / 100))
  local month = math.floor((5 * of_year + 2) / 153)
  local day = of_year - math.floor((153 * month + 2) / 5) + 1
  return string.format('%04d-%02d-%02d', year + era * 400 + (month > 9 and 1 or 0), month > 9 and month - 9 or month + 3, day)
end

local moved = {} -- band, id pairs for ready
local function to_ready(id, priority)
  moved[#moved + 1] = { (9 - (tonumber(priority) or 0)) * RANK, id }
end

local due, next_due = due_of(scheduled)
local ids = {}
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
-- to renew. The fraction marks a lease that was looked at before, and by whom; renewals write whole numbers. Whoever
-- marked it looks again, and the others a little later, in case that worker has died by then.
local lapsed, next_lapse = due_of(leases)
local mark = (1 + (tonumber(string.sub(token, 1, 2), 16) or 0)) / 512
local first, second = {}, {}
if next_lapse then
  local theirs = next_lapse % 1 ~= 0 and next_lapse % 1 ~= mark
  due_in(next_lapse - now + (theirs and LATER or 0))
end
for i = 1, #lapsed, 2 do
  if lapsed[i + 1] % 1 == 0 then
    first[#first + 1], first[#first + 2] = string.format('%.9f', now + grace + mark), lapsed[i]
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
local admitted = 0
for _, id in ipairs(second) do
  local job, events = base .. 'job:' .. id, base .. 'events:' .. id
  local r = redis.call('HMGET', job, 'id', 'status', 'cancelRequested', 'attempt', 'maxAttempts', 'priority',
    'idempotencyKey', 'resultTtlMs', 'webhook', 'owner', 'usage', 'counted')
  if r[1] and r[2] == 'active' then
    redis.call('HDEL', job, 'token')
    local cancelled = r[3] == '1'
    if not cancelled and (tonumber(r[4]) or 0) < (tonumber(r[5]) or 1) then
      redis.call('HSET', job, 'status', 'waiting', 'error', LEASE_TEXT, 'updatedAt', int(now))
      to_ready(id, r[6])
    else
      local ttl = cancelled and (r[8] or result_ttl) or dead_ttl
      local status = cancelled and 'cancelled' or 'failed'
      local ended = terminal(events, status, cancelled and '' or LEASE_TEXT, r[4] or '0', nil, now_arg)
      local write = { 'status', status, 'updatedAt', ended, 'finishedAt', ended }
      if not cancelled then
        write[#write + 1], write[#write + 2] = 'error', LEASE_TEXT
        redis.call('ZADD', dead, ended, id)
      end
      local more = uncounted(r[11], r[12])
      if #more > 0 then
        note_usage(write, r[11])
        add_up(base .. 'usage:' .. day_of(now), more)
      end
      redis.call('HSET', job, unpack(write))
      redis.call('PEXPIRE', job, ttl)
      redis.call('PEXPIRE', events, ttl)
      redis.call('PEXPIRE', steps_of(job, id), ttl)
      if r[7] and r[7] ~= '' then
        free_key(base .. 'idem:' .. r[7], id)
      end
      announce(job, id, r[9], status, ended)
      if cap and r[10] then
        admitted = admitted + admit(base .. 'owner:' .. r[10], id, ready, scheduled, leases)
      end
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

-- What the limits leave. A job runs as long as it has a lease, whoever holds it. The rate is a leaky bucket (GCRA):
-- starts lie `interval / rate` apart, and `burst` of them may come early; `tat` is when the next one is due.
local left, tat, gap, early = math.huge, 0, 0, 0
if concurrency and limited == '0' and (k > 0 or was_limited ~= '0' or #second > 0) then
  left = math.max(0, concurrency - redis.call('ZCARD', leases))
end
local allowed = math.min(k, left)
if rate and allowed > 0 then
  gap = tonumber(rules[9]) / rate
  early = ((tonumber(rules[10]) or 1) - 1) * gap
  tat = math.max(tonumber(rules[11]) or 0, now)
  allowed = tat > now + early and 0 or math.min(allowed, math.floor((now + early - tat) / gap) + 1)
end

-- How many jobs of an owner run. Those that a foreign worker ended were not struck off: they have no lease.
local running = {}
local function runs(owner)
  if not running[owner] then
    local set = base .. 'owner:' .. owner
    running[owner] = redis.call('ZCOUNT', set, '-inf', '(0')
    if running[owner] >= cap then
      local ids, gone = redis.call('ZRANGE', set, 0, running[owner] - 1), {}
      for i, score in ipairs(redis.call('ZMSCORE', leases, unpack(ids))) do
        if not score then
          gone[#gone + 1] = ids[i]
        end
      end
      if #gone > 0 then
        redis.call('ZREM', set, unpack(gone))
        running[owner] = running[owner] - #gone
      end
    end
  end
  return running[owner]
end

local jobs, scores, taken, bytes = {}, {}, {}, 0
if allowed > 0 then
  -- Under a cap most of what comes first may be one owner's, so the look goes further than what is asked for.
  local wanted = cap and BATCH or allowed
  local popped = redis.call('ZPOPMIN', ready, wanted)
  local back, parked, owners = {}, {}, {}
  for i = 1, #popped, 2 do
    local id, rank = popped[i], popped[i + 1]
    local job, events = base .. 'job:' .. id, base .. 'events:' .. id
    if #back > 0 or #jobs == allowed then
      back[#back + 1], back[#back + 2] = rank, id
    else
      local r = redis.call('HMGET', job, unpack(FIELDS))
      local fresh = r[1] and not ELSEWHERE[r[9]]
      local owner = fresh and cap and r[16]
      bytes = bytes + #(r[2] or '')
      if fresh and #jobs > 0 and bytes > max_bytes then
        back[#back + 1], back[#back + 2] = rank, id -- one reply must stay under the gateway's size limit
      elseif owner and runs(owner) >= cap then
        parked[#parked + 1], parked[#parked + 2] = int(now + PARKED), id
        owners[owner] = owners[owner] or {}
        table.insert(owners[owner], rank)
        table.insert(owners[owner], id)
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
        if rules[7] and not r[22] and r[4] ~= rules[7] then
          r[4] = rules[7]
          write[#write + 1], write[#write + 2] = 'maxAttempts', r[4]
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
        if owner then
          local set = base .. 'owner:' .. owner
          redis.call('ZADD', set, '-' .. int(now), id)
          redis.call('PEXPIRE', set, OWNER_TTL)
          running[owner] = running[owner] + 1
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
  if #parked > 0 then
    redis.call('ZADD', scheduled, unpack(parked))
    for owner, held in pairs(owners) do
      redis.call('ZADD', base .. 'owner:' .. owner, 'LT', unpack(held)) -- at its first rank, if it was here before
    end
  end
  -- Strays were dropped, some were put back or held back, or more was asked for than a call takes: there may be more.
  if #jobs < allowed and (#popped == 2 * wanted or #back > 0) or more and #jobs == BATCH then
    due_in(0)
  end
  if #popped == 0 and bell then
    redis.call('DEL', signal)
  end
end
-- More came free than this call took: others may be asleep.
local free = #moved + admitted - #jobs
if free > 0 then
  ring(signal, free)
end

-- Limited means that nothing may be taken after this, never merely less than was asked for: limited workers are deaf to
-- the doorbell. They still have to come back for the leases of others that lapse.
if limited == 'paused' then
  if paused < math.huge then
    due_in(paused - now)
  end
elseif rate and #jobs > 0 then
  tat = tat + #jobs * gap
  redis.call('HSET', config, 'tat', string.format('%.3f', tat))
end
if limited == '0' and tat > now + early then
  limited = 'rate'
  due_in(tat - early - now)
elseif limited == '0' and left - #jobs <= 0 then
  limited = 'room'
end
-- Whoever leaves a pause or finds room wakes the next one; those that wait for the rate have timers of their own.
-- A limit that was taken away is room too, without end: it goes from one to the next until nobody waits for any.
local found = left > #jobs and (was_limited == 'room' or concurrency and #second > 0)
if limited ~= 'paused' and (was_limited == 'paused' or found) then
  make_room(room)
end
-- One worker waits for the next due time, and writes down that it does; the others come a little later, in case it has
-- died by then. (Leases lapse when a worker has died, perhaps the one that would wait.)
if next_due then
  local me = string.match(token, '^(.*):')
  local who, at = string.match(redis.call('GET', watch) or '', '^(.+) (%d+)$')
  at = tonumber(at or 0)
  local other = who ~= me and at > now and at <= next_due
  if next_due > now and not other and (who ~= me or at ~= next_due) then
    relieve()
    redis.call('SET', watch, me .. ' ' .. int(next_due), 'PX', int(next_due - now + LATER))
  end
  due_in(next_due - now + (other and LATER or 0))
end

-- A time has come when the clock's whole ms reach it; the part of one that has passed is not waited for again.
local wait = math.ceil(hint)
wait = wait > 0 and part and string.format('%.1f', math.max(wait - part, 0.1)) or int(wait)
local reply = { 'ok', int(now), wait, limited, {
  rules[1] or '', rules[2] or '', rules[3] or '', rules[4] or '', rules[5] or '', rules[6] or '',
} }
for i = 1, #jobs do
  reply[5 + i] = jobs[i]
end
return reply
