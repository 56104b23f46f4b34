--[[ cancel: end a job that has not started, or flag a running one and tell its worker.
KEYS  job events ready scheduled config absent
ARGV  now id result_ttl_ms base relief ctl_ttl_ms before
REPLY cancelled | requested | finished | unknown | kept
      finished: it completed or failed before; relief: 1 after an OOM answer;
      before: only a job that has not started and was made no later, else kept; may be empty;
      result_ttl_ms: where neither the job nor the queue's rules have one
]]
local job, events, ready, scheduled, config, absent = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local now_arg, id, result_ttl, base, relief, ctl_ttl = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5] == '1', ARGV[6]
local before = ARGV[7]

local r = redis.call('HMGET', job, 'id', 'status', 'token', 'cancelRequested', 'idempotencyKey', 'resultTtlMs', 'attempt',
  'startedAt', 'webhook', 'createdAt')
local status = r[2] or 'waiting'
if not r[1] then
  return 'unknown'
elseif status == 'cancelled' then
  return 'cancelled'
elseif status == 'completed' or status == 'failed' then
  return 'finished'
elseif before ~= '' and (status == 'active' or (tonumber(r[10]) or 0) > tonumber(before)) then
  return 'kept'
elseif status == 'active' then
  if r[4] == '1' then
    return 'requested'
  end
  local now = clock(now_arg)
  if relief then
    redis.call('ZREM', ready, '')
  end
  redis.call('HSET', job, 'cancelRequested', '1', 'updatedAt', int(now))
  -- A token of ours is <worker>:<request>; a foreign worker finds the flag at its next touch.
  local worker = string.match(r[3] or '', '^(.*):%d+$')
  if worker then
    local ctl = base .. 'ctl:' .. worker
    if redis.call('RPUSH', ctl, r[3] .. ' ' .. id) == 1 then
      redis.call('PEXPIRE', ctl, ctl_ttl)
    end
  end
  return 'requested'
end

result_ttl = r[6] or redis.call('HMGET', config, 'resultTtlMs')[1] or result_ttl
-- ZREM first: it frees memory, so a full database lets the whole script pass.
if status == 'scheduled' then
  if redis.call('ZREM', scheduled, id) == 0 then
    redis.call('ZREM', ready, id)
  end
elseif redis.call('ZREM', ready, id) == 0 then
  redis.call('ZREM', scheduled, id)
end
local ended = terminal(events, 'cancelled', '', r[7] or '0', nil, now_arg)
redis.call('HSET', job, 'status', 'cancelled', 'cancelRequested', '1', 'updatedAt', ended, 'finishedAt', ended)
redis.call('PEXPIRE', job, result_ttl)
redis.call('PEXPIRE', events, result_ttl)
if r[8] then
  redis.call('PEXPIRE', steps_of(job, id), result_ttl) -- of an attempt before this wait, if it kept any
end
if r[5] and r[5] ~= '' then
  free_key(base .. 'idem:' .. r[5], id)
end
announce(job, id, r[9], 'cancelled', ended)
return 'cancelled'
