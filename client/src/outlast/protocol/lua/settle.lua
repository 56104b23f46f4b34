--[[ settle: end the job. Only the holder of the lease may; a cancel that came first wins.
KEYS  job events leases absent dead? steps? usage? idem?
ARGV  now token id status body ttl_ms cancel_ttl_ms attempt count has_key has_steps used total...
REPLY completed | failed | cancelled | lost
      dead is given exactly when status is failed; count: events written so far under the job's current b;
      has_steps: 1 when this attempt read or kept steps, which then expire with the record;
      used: what the job has used, for its record; total: name amount, for the totals of the day in usage
]]
local job, events, leases, absent = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local now_arg, token, id, status, body, ttl = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local cancel_ttl, attempt, count, has_key, has_steps = ARGV[7], ARGV[8], ARGV[9], ARGV[10] == '1', ARGV[11] == '1'
local used = ARGV[12]
next_key = 4
local dead, steps, usage = optional(status == 'failed'), optional(has_steps), optional(#ARGV > 12)
local idem = optional(has_key)

local r = redis.call('HMGET', job, 'token', 'cancelRequested', 'settled', 'status', 'idemTtlMs', 'webhook')
if r[1] ~= token then
  if r[3] == token and (r[4] == 'completed' or r[4] == 'failed' or r[4] == 'cancelled') then
    return r[4] -- the same call again: its first reply was lost
  end
  return 'lost'
end
if r[2] == '1' then
  status, body, ttl = 'cancelled', '', cancel_ttl
end

-- ZREM first: it frees memory, so a full database lets the whole script pass.
redis.call('ZREM', leases, id)
redis.call('HDEL', job, 'token')
local ended = terminal(events, status, body, attempt, count, now_arg)
local write = { 'status', status, 'updatedAt', ended, 'finishedAt', ended, 'settled', token }
if status ~= 'cancelled' then
  write[#write + 1], write[#write + 2] = status == 'completed' and 'result' or 'error', body
end
note_usage(write, used)
redis.call('HSET', job, unpack(write))
if status == 'failed' then
  redis.call('ZADD', dead, ended, id)
end
redis.call('PEXPIRE', job, ttl)
redis.call('PEXPIRE', events, ttl)
if steps then
  redis.call('PEXPIRE', steps, ttl)
end
if idem then
  if status ~= 'completed' then
    free_key(idem, id)
  elseif redis.call('GET', idem) == id then
    redis.call('PEXPIRE', idem, int(math.min(tonumber(r[5]) or tonumber(ttl), tonumber(ttl))))
  end
end
announce(job, id, r[6], status, ended)
if usage then
  add_up(usage, { unpack(ARGV, 13) })
end
return status
