--[[ prune_dead: drop dead-letter entries whose record has expired, or is that of a newer job under the same id.
KEYS  dead absent
ARGV  base
REPLY removed
      removed: how many of the 100 oldest entries; all of them means there may be more
]]
local dead, absent, base = KEYS[1], KEYS[2], ARGV[1]

local ids = redis.call('ZRANGE', dead, 0, BATCH - 1)
local gone = {}
for _, id in ipairs(ids) do
  if redis.call('HMGET', base .. 'job:' .. id, 'status')[1] ~= 'failed' then
    gone[#gone + 1] = id
  end
end
if #gone > 0 then
  redis.call('ZREM', dead, unpack(gone))
end
return #gone
