--[[ release: hand the job back at its old rank, the attempt not counted. Only the holder may; a cancel wins.
With `pause_ms` the whole queue takes nothing for that long; an earlier time never shortens a pause.
KEYS  job events leases ready signal absent config? usage? idem?
ARGV  now token id reason rank pause_ms cancel_ttl_ms attempt starts count emitted has_key used total...
REPLY waiting | cancelled | lost
      config is given exactly when pause_ms is not empty; emitted: 1 when this attempt wrote events, or may have;
      used, total: as of settle
]]
local job, events, leases, ready, signal, absent = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local now_arg, token, id, reason, rank, pause = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local cancel_ttl, attempt, starts, count = ARGV[7], ARGV[8], ARGV[9], ARGV[10]
local emitted, has_key = ARGV[11] == '1', ARGV[12] == '1'
local used = ARGV[13]
next_key = 6
local config, usage, idem = optional(pause ~= ''), optional(#ARGV > 13), optional(has_key)

local r = redis.call('HMGET', job, 'token', 'cancelRequested', 'settled', 'status', 'webhook')
if r[1] ~= token then
  if r[3] == token then
    return r[4] == 'cancelled' and 'cancelled' or 'waiting' -- the same call again
  end
  return 'lost'
end

redis.call('ZREM', leases, id)
redis.call('HDEL', job, 'token')
if r[2] == '1' then
  local ended = terminal(events, 'cancelled', '', attempt, count, now_arg)
  local write = { 'status', 'cancelled', 'updatedAt', ended, 'finishedAt', ended, 'settled', token }
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
    add_up(usage, { unpack(ARGV, 14) })
  end
  return 'cancelled'
end

local now = clock(now_arg)
local top = emitted and top_of(events)
if top and top[2][2] ~= 'restarted' then
  -- A foreign worker writes no marker at attempt 1, so the marker has to be there before it can take the job. Its
  -- place is read from the stream: the holder does not know whether a flush landed whose reply was lost.
  local ms, last = parts(top[1])
  restart(events, int(ms) .. '-' .. int(last + 1), attempt)
end
local write = { 'status', 'waiting', 'attempt', int(attempt - 1), 'starts', starts, 'updatedAt', int(now), 'settled', token }
if reason ~= '' then
  write[#write + 1], write[#write + 2] = 'error', reason
end
note_usage(write, used)
redis.call('HSET', job, unpack(write))
redis.call('ZADD', ready, rank, id)
if config then
  local old = tonumber((redis.call('HMGET', config, 'pausedUntil')[1]) or 0)
  if now + pause > old then
    redis.call('HSET', config, 'pausedUntil', int(now + pause))
  end
end
ring(signal, 1)
if usage then
  add_up(usage, { unpack(ARGV, 14) })
end
return 'waiting'
