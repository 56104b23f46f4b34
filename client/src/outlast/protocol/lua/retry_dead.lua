--[[ retry_dead: put a dead-lettered job back with a fresh attempt count and an output that starts over.
The freed idempotency key is not bound again: a newer job may hold it.
KEYS  job events dead ready seq signal steps
ARGV  now id nonce max_attempts steps_ttl_ms given
REPLY waiting | not_dead
      steps_ttl_ms: how long finished steps are kept, 0 drops them; given: 1 when the caller named max_attempts
]]
local job, events, dead, ready, seq, signal, steps = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7]
local now_arg, id, nonce, max_attempts, steps_ttl, given = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6] == '1'

local r = redis.call('HMGET', job, 'id', 'status', 'revived', 'gen', 'priority', 'attempt', 'starts')
if r[1] and r[3] == nonce then
  return 'waiting' -- the same call again: its first reply was lost
end
if redis.call('ZREM', dead, id) == 0 or not r[1] or r[2] ~= 'failed' then
  return 'not_dead'
end

local now = clock(now_arg)
redis.call('HDEL', job, 'finishedAt', 'token', 'result', 'cancelRequested')
local write = { 'status', 'waiting', 'attempt', '0', 'maxAttempts', max_attempts, 'updatedAt', int(now),
  'revived', nonce, 'starts', r[7] or r[6] or '0' }
if given then
  write[#write + 1], write[#write + 2] = 'attemptsGiven', '1'
end
redis.call('HSET', job, unpack(write))
-- The marker lies above the terminal entry, so a reader that has seen the stale end is told to start over; above
-- `now` too, so that it does so even if that entry was lost.
local b, n, top = math.max(tonumber(r[4]) or 0, now), 0, top_of(events)
if top then
  local ms, last = parts(top[1])
  if ms >= b then
    b, n = ms, last
  end
end
restart(events, int(b) .. '-' .. int(n + 1), '1')
-- Both keys lost their owner's TTL rule when the job died; without PERSIST they vanish in mid-run.
redis.call('PERSIST', job)
redis.call('PERSIST', events)
redis.call('PEXPIRE', steps, steps_ttl) -- 0 deletes
redis.call('ZADD', ready, int((9 - (tonumber(r[5]) or 0)) * RANK + redis.call('INCR', seq)), id)
ring(signal, 1)
return 'waiting'
