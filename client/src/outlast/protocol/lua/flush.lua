--[[ flush: append the holder's events and tell it whether to stop; renew its lease when asked.
`again` marks a repeat whose first reply was lost: the events' ids show whether it ran.
KEYS  job events leases?
ARGV  now token id again lease_ms progress max_len b n attempt event...
REPLY ok | cancel | lost
      event: kind text, numbered b-n, b-(n+1), ...
]]
local job, events, leases = KEYS[1], KEYS[2], KEYS[3]
local now_arg, token, id, again, lease = ARGV[1], ARGV[2], ARGV[3], ARGV[4] == '1', ARGV[5]
local progress, max_len, b, n, attempt = ARGV[6], ARGV[7], ARGV[8], tonumber(ARGV[9]), ARGV[10]

local held = redis.call('HMGET', job, 'token', 'cancelRequested')
if held[1] ~= token then
  return 'lost'
end

local written = false
if again and #ARGV > 10 then
  local top = top_of(events)
  if top then
    local ms, seq = parts(top[1])
    written = ms > tonumber(b) or (ms == tonumber(b) and seq >= n)
  end
end
if not written then
  for i = 11, #ARGV, 2 do
    redis.call('XADD', events, 'MAXLEN', '~', max_len, b .. '-' .. int(n), 't', ARGV[i], 'd', ARGV[i + 1], 'a', attempt)
    n = n + 1
  end
end
if leases then
  local now = clock(now_arg)
  redis.call('ZADD', leases, int(now + lease), id)
  if progress ~= '' then
    redis.call('HSET', job, 'updatedAt', int(now), 'progress', progress)
  else
    redis.call('HSET', job, 'updatedAt', int(now))
  end
elseif progress ~= '' then
  redis.call('HSET', job, 'progress', progress)
end
return held[2] == '1' and 'cancel' or 'ok'
