--[[ admit: a job of an owner under a cap has ended, so the next one that the cap held back may come to its turn.
KEYS  owner ready scheduled signal leases
ARGV  id
REPLY admitted | none
]]
local owner, ready, scheduled, signal, leases = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local id = ARGV[1]

if admit(owner, id, ready, scheduled, leases) == 0 then
  return 'none'
end
ring(signal, 1)
return 'admitted'
