-- Shared by the scripts of the index: gives one reservation back, once; whether it was there.
local function give_back(expiries, key)
  local held = redis.call('HMGET', key, 'load', 'pf', 'st')
  if held[1] and redis.call('EXISTS', held[1]) == 1 then
    redis.call('HINCRBY', held[1], 'pf', -held[2])
    redis.call('HINCRBY', held[1], 'st', -held[3])
  end
  redis.call('DEL', key)
  redis.call('ZREM', expiries, key)
  return held[1] ~= false
end
