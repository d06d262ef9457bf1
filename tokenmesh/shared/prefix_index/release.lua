-- Gives reservations back, each once.
-- KEYS 1 expiries (ZSET), then reservations (HASH). Reply how many were there.
local num_released = 0
for index = 2, #KEYS do
  local held = redis.call('HMGET', KEYS[index], 'load', 'pf', 'st')
  if held[1] then
    if redis.call('EXISTS', held[1]) == 1 then
      redis.call('HINCRBY', held[1], 'pf', -held[2])
      redis.call('HINCRBY', held[1], 'st', -held[3])
    end
    redis.call('DEL', KEYS[index])
    redis.call('ZREM', KEYS[1], KEYS[index])
    num_released = num_released + 1
  end
end
return num_released
