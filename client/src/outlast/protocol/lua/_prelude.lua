-- Shared by all scripts; put in front of each when it is loaded. Constants live here and are compared with
-- keys.py by a test: nothing is interpolated into Lua.
local LEASE_TEXT = 'Worker lease expired before the job finished'
local RANK = 1e13
local SIGNAL_CAP = 1000
local BATCH = 100
local USAGE_TTL = 34560000000 -- 400 days
local HOOK_ATTEMPTS = '100' -- the delivery handler ends its attempts before
local LARGE = 16384 -- bytes of a payload from which on the queue's limit is looked up
local PARKED = 3600000 -- after this a job that its owner's cap holds back shows up again, whoever works then
local OWNER_TTL = 604800000
local LATER = 1000 -- after a due time that another worker waits for
local PEEK = 10 -- entries that one look at a set reads; only when all of them are due, it reads a batch

-- Statuses under which a listing in ready or scheduled is a stray. One that is missing or unknown counts as waiting.
local ELSEWHERE = { active = true, completed = true, failed = true, cancelled = true }

-- Numbers leave a script as text without exponent: Upstash cuts Lua numbers to integers, Valkey does not.
local function int(number)
  return string.format('%.0f', number)
end

-- The server's clock, in whole ms and the part of one that has passed; `override` is for tests only.
local function clock(override)
  if override ~= '' then
    return tonumber(override)
  end
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000), time[2] % 1000 / 1000
end

-- The next of the keys that are given only when used: a script sets `next_key` to the last of those always given.
local next_key
local function optional(used)
  if used then
    next_key = next_key + 1
    return KEYS[next_key]
  end
end

local function parts(stream_id)
  local ms, seq = string.match(stream_id, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(seq)
end

-- The steps of a job, for scripts that seldom need them.
local function steps_of(job, id)
  return string.sub(job, 1, #job - #id - 4) .. 'steps:' .. id
end

local function top_of(events)
  local last = redis.call('XREVRANGE', events, '+', '-', 'COUNT', 1)[1]
  return last
end

-- A doorbell token is a hint, not a count, so the list is cut only when it has grown past its cap.
local function ring(signal, times)
  local bells = {}
  for i = 1, math.min(times, BATCH) do
    bells[i] = '1'
  end
  if redis.call('LPUSH', signal, unpack(bells)) > SIGNAL_CAP then
    redis.call('LTRIM', signal, 0, SIGNAL_CAP - 1)
  end
end

-- Capacity that nobody may be looking for: it wakes one limited worker, which passes it on.
local function make_room(room)
  if redis.call('LPUSH', room, '1') > 1 then
    redis.call('LTRIM', room, 0, 0)
  end
end

-- A job of an owner under a cap has ended: the next that the cap held back comes to its turn. `owner` has what runs
-- at scores below 0 and what is held back at its rank; those wait in `scheduled`, where any worker would find them.
local function admit(owner, id, ready, scheduled, leases)
  if not redis.call('ZSCORE', leases, id) then
    redis.call('ZREM', owner, id)
  end
  local held = redis.call('ZRANGEBYSCORE', owner, '(0', '+inf', 'WITHSCORES', 'LIMIT', 0, PEEK)
  for i = 1, #held, 2 do
    redis.call('ZREM', owner, held[i])
    if redis.call('ZREM', scheduled, held[i]) == 1 then
      redis.call('ZADD', ready, held[i + 1], held[i])
      return 1
    end
  end
  return 0
end

-- Only the job that a key points to may release it: a newer job can hold the same key by now.
local function free_key(idem, id)
  if redis.call('GET', idem) == id then
    redis.call('DEL', idem)
  end
end

-- What the job has used goes on its record, and `counted`: that much of it is in the totals of days.
local function note_usage(write, used)
  if used ~= '' then
    local n = #write
    write[n + 1], write[n + 2], write[n + 3], write[n + 4] = 'usage', used, 'counted', used
  end
end

-- Add amounts (name, amount, ...) to the totals of a day: two commands, however many they are.
local function add_up(totals, amounts)
  local names, sums, fresh = {}, {}, true
  for i = 1, #amounts, 2 do
    names[#names + 1] = amounts[i]
  end
  local before = redis.call('HMGET', totals, unpack(names))
  for i, name in ipairs(names) do
    fresh = fresh and not before[i]
    local sum = (tonumber(before[i]) or 0) + tonumber(amounts[2 * i])
    sums[2 * i - 1], sums[2 * i] = name, sum % 1 == 0 and int(sum) or string.format('%.15g', sum)
  end
  redis.call('HSET', totals, unpack(sums))
  if fresh then
    redis.call('PEXPIRE', totals, USAGE_TTL)
  end
end

-- Append the terminal event. Its id is the server's, so it cannot fail, and its time is the job's end.
local function terminal(events, kind, text, attempt, count, override)
  local id
  if count then
    id = redis.call('XADD', events, '*', 't', kind, 'd', text, 'a', attempt, 'n', count)
  else
    id = redis.call('XADD', events, '*', 't', kind, 'd', text, 'a', attempt)
  end
  if override ~= '' then
    return override
  end
  return (string.match(id, '^%d+'))
end

-- Write the marker and trim to exactly it. Never DEL: a reader's cursor could then lie above the new entries.
local function restart(events, id, attempt)
  redis.call('XADD', events, id, 't', 'restarted', 'd', attempt, 'a', attempt)
  redis.call('XTRIM', events, 'MINID', id)
end

-- What a job that has ended owes to its webhook: a job on the delivery queue, whose keys are the queue's own with
-- `hooks:` between. `webhook` is a JSON object that the producer wrote; how and when the job ended goes in front.
local function announce(job, id, webhook, status, ended)
  if not webhook or webhook == '' then
    return
  end
  local hooks = string.sub(job, 1, #job - #id - 4) .. 'hooks:'
  local seq = redis.call('INCR', hooks .. 'seq')
  local delivery = ended .. '-' .. int(seq)
  local payload = '{"status":"' .. status .. '","at":' .. ended .. ',' .. string.sub(webhook, 2)
  redis.call('HSET', hooks .. 'job:' .. delivery, 'id', delivery, 'payload', payload, 'status', 'waiting', 'attempt', '0',
    'maxAttempts', HOOK_ATTEMPTS, 'priority', '0', 'createdAt', ended, 'updatedAt', ended, 'progress', '0',
    'idempotencyKey', '', 'idemTtlMs', '0', 'gen', ended)
  redis.call('ZADD', hooks .. 'ready', int(9 * RANK + seq), delivery)
  ring(hooks .. 'signal', 1)
end
