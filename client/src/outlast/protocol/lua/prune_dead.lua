--[[ prune_dead: drop dead-letter entries whose record has expired.
KEYS  dead
ARGV  base
REPLY checked
      checked: entries looked at, oldest first; as many as a batch holds means there may be more
]]
local dead, base = KEYS[1], ARGV[1]

local ids = redis.call('ZRANGE', dead, 0, BATCH - 1)
local gone = {}
for _, id in ipairs(ids) do
  if redis.call('EXISTS', base .. 'job:' .. id) == 0 then
    gone[#gone + 1] = id
  end
end
if #gone > 0 then
  redis.call('ZREM', dead, unpack(gone))
end
return #ids
