--[[ retry: give the job back for another attempt after a delay. Only the holder may; a cancel that came first wins.
KEYS  job events leases scheduled absent signal? usage? idem?
ARGV  now token id reason delay_ms cancel_ttl_ms attempt count has_key rings used total...
REPLY scheduled | cancelled | lost
      signal is given exactly when rings is 1: a worker that stops will not be there to wake up for it;
      used, total: as of settle
]]
local job, events, leases, scheduled, absent = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local now_arg, token, id, reason, delay = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local cancel_ttl, attempt, count, has_key, rings = ARGV[6], ARGV[7], ARGV[8], ARGV[9] == '1', ARGV[10] == '1'
local used = ARGV[11]
next_key = 5
local signal, usage, idem = optional(rings), optional(#ARGV > 11), optional(has_key)

local r = redis.call('HMGET', job, 'token', 'cancelRequested', 'settled', 'status', 'webhook')
if r[1] ~= token then
  if r[3] == token then
    return r[4] == 'cancelled' and 'cancelled' or 'scheduled' -- the same call again
  end
  return 'lost'
end

if r[2] == '1' then
  redis.call('ZREM', leases, id)
  redis.call('HDEL', job, 'token')
  local ended = terminal(events, 'cancelled', '', attempt, count, now_arg)
  local write = { 'status', 'cancelled', 'error', reason, 'updatedAt', ended, 'finishedAt', ended, 'settled', token }
  note_usage(write, used)
  redis.call('HSET', job, unpack(write))
  redis.call('PEXPIRE', job, cancel_ttl)
  redis.call('PEXPIRE', events, cancel_ttl)
  redis.call('PEXPIRE', steps_of(job, id), cancel_ttl)
  if idem then
    free_key(idem, id)
  end
  announce(job, id, r[5], 'cancelled', ended)
  if usage then
    add_up(usage, { unpack(ARGV, 12) })
  end
  return 'cancelled'
end

local now = clock(now_arg)
redis.call('ZREM', leases, id)
redis.call('HDEL', job, 'token')
local write = { 'status', 'scheduled', 'error', reason, 'updatedAt', int(now), 'settled', token }
note_usage(write, used)
redis.call('HSET', job, unpack(write))
redis.call('ZADD', scheduled, int(now + delay), id)
if rings then
  ring(signal, 1)
end
if usage then
  add_up(usage, { unpack(ARGV, 12) })
end
return 'scheduled'
