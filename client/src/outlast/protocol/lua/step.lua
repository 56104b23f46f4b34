--[[ step: keep the value of a finished step. Only the holder may; a repeat changes nothing.
KEYS  job steps
ARGV  token gen field value ttl_ms stale
REPLY ok | cancel | lost
      stale: 1 when the holder found steps of another life of this id, or of another job
]]
local job, steps = KEYS[1], KEYS[2]
local token, gen, field, value, ttl, stale = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6] == '1'

local held = redis.call('HMGET', job, 'token', 'cancelRequested')
if held[1] ~= token then
  return 'lost'
end
-- Looked at anew: another step of the same attempt may have been kept since, or this very one.
if stale and redis.call('HMGET', steps, 'gen')[1] ~= gen then
  redis.call('DEL', steps)
end
redis.call('HSET', steps, 'gen', gen, field, value)
-- Each save renews it: a foreign worker that ends the job lets the record expire, and not this.
redis.call('PEXPIRE', steps, ttl)
return held[2] == '1' and 'cancel' or 'ok'
