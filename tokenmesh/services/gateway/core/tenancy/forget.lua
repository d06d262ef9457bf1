-- Deletes keys of a tenant whose time has passed.
-- KEYS: expiry, keys that may be due. Reply: the number of deleted keys.
expect(KEYS[1], 'zset')
local deleted = 0
for index = 2, #KEYS do
  local at = tonumber(redis.call('ZSCORE', KEYS[1], KEYS[index]))
  if at and at <= now then
    redis.call('UNLINK', KEYS[index])
    redis.call('ZREM', KEYS[1], KEYS[index])
    deleted = deleted + 1
  end
end
return deleted
