--[[ renew: extend the leases of many jobs of one worker, and tell for each whether to stop.
A lease that has lapsed is renewed too, as long as nobody else has taken the job.
KEYS  leases job...
ARGV  now lease_ms relief job...
REPLY ok | cancel | lost, for each job
      ARGV job: id token, in the order of KEYS; relief: 1 after an OOM answer
]]
local leases = KEYS[1]
local now_arg, lease, relief = ARGV[1], ARGV[2], ARGV[3] == '1'

local now, answers, scores = clock(now_arg), {}, {}
for i = 2, #KEYS do
  local id, token = ARGV[2 * i], ARGV[2 * i + 1]
  local held = redis.call('HMGET', KEYS[i], 'token', 'cancelRequested')
  if held[1] == token then
    scores[#scores + 1], scores[#scores + 2] = int(now + lease), id
    answers[#answers + 1] = held[2] == '1' and 'cancel' or 'ok'
  else
    answers[#answers + 1] = 'lost'
  end
end
if #scores > 0 then
  if relief then
    -- A full database refuses a script whose first write needs memory; one that frees memory lets the rest pass.
    redis.call('ZREM', leases, '')
  end
  for i = 1, #scores, 2 * BATCH do
    redis.call('ZADD', leases, unpack(scores, i, math.min(i + 2 * BATCH - 1, #scores)))
  end
end
return answers
