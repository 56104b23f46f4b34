--[[ enqueue: make a job, or find the one that the idempotency key belongs to.
A job that is delayed goes to `scheduled`, any other to `ready`: `lane` is the one that applies.
KEYS  job signal lane seq? events? dead? steps? idem? config? schedules?
ARGV  now id nonce payload max_attempts priority delay_ms own key key_ttl_ms hash expires_ms deadline_ms schedule due extra...
REPLY created id | duplicate id | conflict id | in_use status | too_large limit
      config is given with a payload of more than 16 KiB: only those are held against the queue's limit;
      nonce: of the call; empty if its id is random and no key given, so that a record with that id is this call's
      schedule: the run that it has at `due`, which is made once; duplicate: it was made, and so was every earlier one
]]
local job, signal, lane = KEYS[1], KEYS[2], KEYS[3]
local now_arg, id, nonce, payload, max_attempts, priority = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local delay, own, key, key_ttl, hash = tonumber(ARGV[7]), ARGV[8] == '1', ARGV[9], ARGV[10], ARGV[11]
local expires, deadline, schedule, due = ARGV[12], ARGV[13], ARGV[14], ARGV[15]

next_key = 3
local seq = optional(delay == 0)
local events, dead, steps = optional(own), optional(own), optional(own)
local idem, config = optional(key ~= ''), optional(#payload > LARGE)
local schedules = optional(schedule ~= '')
local jobs = string.sub(job, 1, #job - #id)

if idem then
  local holder = redis.call('GET', idem)
  if holder then
    local held = redis.call('HMGET', jobs .. holder, 'id', 'nonce', 'payloadHash')
    -- A key whose record is gone (evicted, deleted) answers nobody: fall through and make a new job.
    if held[1] then
      if held[2] == nonce then
        return { 'created', holder }
      end
      if hash ~= '' and held[3] and held[3] ~= hash then
        return { 'conflict', holder }
      end
      return { 'duplicate', holder }
    end
  end
end

if schedules then
  local last = redis.call('HMGET', schedules, 'last:' .. schedule)[1]
  if last and tonumber(last) >= tonumber(due) then
    return { 'duplicate', id }
  end
end

local old = redis.call('HMGET', job, 'status', 'nonce', 'gen', 'idempotencyKey', 'id')
local status = old[1]
if old[2] == nonce or nonce == '' and old[5] then
  return { 'created', id } -- the same call again: its first reply was lost
end
if schedules and old[5] then -- somebody deleted `schedules`, but not the job
  redis.call('HSET', schedules, 'last:' .. schedule, due)
  return { 'duplicate', id }
end
-- A record without an id is nobody's job: a foreign worker made half a record for an id that had none.
if old[5] and (status == 'waiting' or status == 'scheduled' or status == 'active') then
  return { 'in_use', status }
end

local limit = config and redis.call('HMGET', config, 'maxPayload')[1]
if limit and #payload > tonumber(limit) then
  return { 'too_large', limit }
end

local now = clock(now_arg)
local gen, top = now, nil
if own then
  top = top_of(events)
  gen = math.max(gen, (tonumber(old[3]) or 0) + 1)
  if top then
    gen = math.max(gen, (parts(top[1])) + 1)
  end
end

-- The first write is one that a full database refuses, so that it refuses the whole script.
if delay > 0 then
  redis.call('ZADD', lane, int(now + delay), id)
else
  redis.call('ZADD', lane, int((9 - priority) * RANK + redis.call('INCR', seq)), id)
end
if schedules then
  redis.call('HSET', schedules, 'last:' .. schedule, due)
end
if idem then
  redis.call('SET', idem, id)
end
if status or old[5] then
  redis.call('DEL', job, steps)
  if status == 'failed' then
    redis.call('ZREM', dead, id)
  elseif status ~= 'completed' and status ~= 'cancelled' then
    -- Foreign, and never finished: it can still be listed anywhere.
    local base = string.sub(jobs, 1, -5)
    for _, name in ipairs({ 'ready', 'scheduled', 'leases', 'dead' }) do
      if base .. name ~= lane then
        redis.call('ZREM', base .. name, id)
      end
    end
  end
  if old[4] and old[4] ~= '' and old[4] ~= key then
    free_key(string.sub(jobs, 1, -5) .. 'idem:' .. old[4], id)
  end
end

local fields = {
  'id', id, 'payload', payload, 'status', delay > 0 and 'scheduled' or 'waiting', 'attempt', '0',
  'maxAttempts', max_attempts, 'priority', priority, 'createdAt', int(now), 'updatedAt', int(now),
  'progress', '0', 'idempotencyKey', key, 'idemTtlMs', key_ttl, 'gen', int(gen),
}
if nonce ~= '' then
  fields[#fields + 1], fields[#fields + 2] = 'nonce', nonce
end
if expires ~= '' then
  fields[#fields + 1], fields[#fields + 2] = 'expiresAt', int(now + expires)
end
if deadline ~= '' then
  fields[#fields + 1], fields[#fields + 2] = 'deadlineAt', int(now + deadline)
end
for i = 16, #ARGV do
  fields[#fields + 1] = ARGV[i]
end
redis.call('HSET', job, unpack(fields))

if top then
  -- {gen}-0, so that the job's own first event is {gen}-1 whether or not the id was used before.
  restart(events, int(gen) .. '-0', '1')
  redis.call('PERSIST', events)
end

-- A delayed job rings only when the next due time has moved: a blocked worker must then set its timer anew.
if delay == 0 or redis.call('ZRANGE', lane, 0, 0)[1] == id then
  ring(signal, 1)
end
return { 'created', id }
