--[[ purge_dead: forget jobs that failed for good: their records, their output and their steps.
KEYS  dead absent
ARGV  base before
REPLY removed
      removed: how many of the 100 oldest entries that died no later than `before`; 100 means there may be more
]]
local dead, absent, base, before = KEYS[1], KEYS[2], ARGV[1], ARGV[2]

local ids = redis.call('ZRANGEBYSCORE', dead, '-inf', before, 'LIMIT', 0, BATCH)
local gone = {}
for _, id in ipairs(ids) do
  -- Under another status it is a newer job that has the same id.
  if redis.call('HMGET', base .. 'job:' .. id, 'status')[1] == 'failed' then
    for _, kind in ipairs({ 'job:', 'events:', 'steps:' }) do
      gone[#gone + 1] = base .. kind .. id
    end
  end
end
-- First what only an operator's login may: who is refused has changed nothing.
if #gone > 0 then
  redis.call('UNLINK', unpack(gone))
end
if #ids > 0 then
  redis.call('ZREM', dead, unpack(ids))
end
return #ids
