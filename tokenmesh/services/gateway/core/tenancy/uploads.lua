-- Counts the bytes of one upload against a quota; expired uploads are removed first.
-- KEYS: uploads by expiry time, bytes by upload (their sum under ''), expiry.
-- ARGV: the quota, the upload, its bytes (0: remove it), the seconds until it expires.
-- Reply: whether they fit, bytes of the other uploads, bytes of this one before, and the seconds until
-- the first upload expires.
expect(KEYS[1], 'zset')
expect(KEYS[2], 'hash')
expect(KEYS[3], 'zset')
local quota, id, wanted, ttl_s = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])

local function bytes_of(field)
  return tonumber(redis.call('HGET', KEYS[2], field)) or 0
end

local function forget(upload)
  local total = math.max(0, bytes_of('') - bytes_of(upload))
  redis.call('ZREM', KEYS[1], upload)
  redis.call('HDEL', KEYS[2], upload)
  redis.call('HSET', KEYS[2], '', total)
end

for _, old in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, 1000)) do
  forget(old)
end
local held = bytes_of(id)
local others = bytes_of('') - held
if wanted > held and others + wanted > quota then
  local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
  return {0, others, held, math.ceil(math.max(1, (tonumber(first[2]) or now) - now))}
end
forget(id)
if wanted > 0 then
  redis.call('HSET', KEYS[2], id, wanted, '', others + wanted)
  redis.call('ZADD', KEYS[1], now + ttl_s, id)
end
keep_for(KEYS[3], KEYS[1], ttl_s)
keep_for(KEYS[3], KEYS[2], ttl_s)
return {1, others, held, 0}
