-- Shared by the scripts of the index: gives one reservation back, once; whether it was there.
local function give_back(expiries, key)
  local held = redis.call('HMGET', key, 'load', 'pf', 'st')
  if held[1] and redis.call('EXISTS', held[1]) == 1 then
    redis.call('HINCRBY', held[1], 'pf', 0 - held[2])
    redis.call('HINCRBY', held[1], 'st', 0 - held[3])
  end
  redis.call('DEL', key)
  redis.call('ZREM', expiries, key)
  return held[1] ~= false
end

-- Lowers the tokens of a reservation to what is left of them.
local function lower(key, left)
  local held = redis.call('HMGET', key, 'load', 'pf')
  local done = tonumber(held[2] or 0) - left
  if done > 0 and redis.call('EXISTS', held[1]) == 1 then
    redis.call('HINCRBY', held[1], 'pf', -done)
    redis.call('HSET', key, 'pf', left)
  end
end
