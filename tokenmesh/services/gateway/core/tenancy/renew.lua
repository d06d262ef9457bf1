-- Renews the leases of running requests, also those that a restarted Redis has lost.
-- KEYS: open, expiry. ARGV: seconds, the leases.
expect(KEYS[1], 'zset')
expect(KEYS[2], 'zset')
for index = 2, #ARGV do redis.call('ZADD', KEYS[1], now + tonumber(ARGV[1]), ARGV[index]) end
keep_for(KEYS[2], KEYS[1], tonumber(ARGV[1]) + 60)
return #ARGV - 1
