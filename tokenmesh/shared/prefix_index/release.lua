-- Gives a reservation back, once.
-- KEYS 1 expiries (ZSET), 2 the reservation (HASH). Reply 1 when it was there.
local held = redis.call('HMGET', KEYS[2], 'load', 'pf', 'st')
if not held[1] then return 0 end
if redis.call('EXISTS', held[1]) == 1 then
  redis.call('HINCRBY', held[1], 'pf', -held[2])
  redis.call('HINCRBY', held[1], 'st', -held[3])
end
redis.call('DEL', KEYS[2])
redis.call('ZREM', KEYS[1], KEYS[2])
return 1
