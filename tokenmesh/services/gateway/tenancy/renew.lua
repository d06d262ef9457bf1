-- Requests that go on. Also those that a Redis without memory has forgotten.
-- KEYS: open. ARGV: seconds, the leases.
expect(KEYS[1], 'zset')
for index = 2, #ARGV do redis.call('ZADD', KEYS[1], now + tonumber(ARGV[1]), ARGV[index]) end
redis.call('EXPIRE', KEYS[1], math.ceil(tonumber(ARGV[1])) + 60)
return #ARGV - 1
