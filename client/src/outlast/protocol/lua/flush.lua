--[[ flush: append the holder's events and tell it whether to stop; renew its lease when asked.
`again` marks a repeat whose first reply was lost: the events' ids show whether it ran.
KEYS  job events leases?
ARGV  now token id again lease_ms progress usage max_len b n attempt event...
REPLY ok | cancel | lost
      event: kind text, numbered b-n, b-(n+1), ...
]]
local job, events, leases = KEYS[1], KEYS[2], KEYS[3]
local now_arg, token, id, again, lease = ARGV[1], ARGV[2], ARGV[3], ARGV[4] == '1', ARGV[5]
local progress, usage, max_len, b, n, attempt = ARGV[6], ARGV[7], ARGV[8], ARGV[9], tonumber(ARGV[10]), ARGV[11]

local held = redis.call('HMGET', job, 'token', 'cancelRequested')
if held[1] ~= token then
  return 'lost'
end

local written = false
if again and #ARGV > 11 then
  local top = top_of(events)
  if top then
    local ms, seq = parts(top[1])
    written = ms > tonumber(b) or (ms == tonumber(b) and seq >= n)
  end
end
if not written then
  for i = 12, #ARGV, 2 do
    redis.call('XADD', events, 'MAXLEN', '~', max_len, b .. '-' .. int(n), 't', ARGV[i], 'd', ARGV[i + 1], 'a', attempt)
    n = n + 1
  end
end
local write = {}
local function note(field, value)
  if value ~= '' then
    write[#write + 1], write[#write + 2] = field, value
  end
end
note('progress', progress)
note('usage', usage)
if leases then
  local now = clock(now_arg)
  redis.call('ZADD', leases, int(now + lease), id)
  note('updatedAt', int(now))
end
if #write > 0 then
  redis.call('HSET', job, unpack(write))
end
return held[2] == '1' and 'cancel' or 'ok'
