-- Counts the stored bytes of one entry of a tenant. While all entries together are above the limit, the
-- oldest entry of the tenant that has most is no longer counted. Expired ones go first.
-- KEYS: bytes by tenant (those of all under ''), entries as '<bytes> <tenant>', expiry. Sorted sets hold a tenant's entries, and
-- all, by the time at which they expire; their keys begin with the first key.
-- ARGV: the tenant, the entry, its bytes (0: remove it), the seconds until it expires, the limit.
-- Reply: the entries that must be deleted, at most 256.
expect(KEYS[1], 'hash')
expect(KEYS[2], 'hash')
expect(KEYS[3], 'zset')
local tenant, entry, wanted = ARGV[1], ARGV[2], tonumber(ARGV[3])
local ttl_s, limit = tonumber(ARGV[4]), tonumber(ARGV[5])

local function order_of(name) return KEYS[1] .. ':' .. name end

local function add(name, bytes)
  if redis.call('HINCRBY', KEYS[1], name, bytes) <= 0 then redis.call('HDEL', KEYS[1], name) end
end

-- Returns the bytes of the entry.
local function forget(each)
  local bytes, owner = string.match(redis.call('HGET', KEYS[2], each) or '', '^(%d+) (.+)$')
  if not bytes then return 0 end
  redis.call('HDEL', KEYS[2], each)
  redis.call('ZREM', order_of(owner), each)
  redis.call('ZREM', order_of(''), each)
  add(owner, -bytes)
  add('', -bytes)
  return tonumber(bytes)
end

forget(entry)
if wanted > 0 then
  redis.call('HSET', KEYS[2], entry, string.format('%d %s', wanted, tenant))
  add(tenant, wanted)
  add('', wanted)
  for _, name in ipairs({tenant, ''}) do
    redis.call('ZADD', order_of(name), now + ttl_s, entry)
    keep_for(KEYS[3], order_of(name), ttl_s)
  end
  keep_for(KEYS[3], KEYS[1], ttl_s)
  keep_for(KEYS[3], KEYS[2], ttl_s)
end
for _, old in ipairs(redis.call('ZRANGEBYSCORE', order_of(''), '-inf', now, 'LIMIT', 0, 256)) do
  forget(old)
end

local total = tonumber(redis.call('HGET', KEYS[1], '')) or 0
if total <= limit then return {} end
local victims, held_by, found = {}, {}, redis.call('HGETALL', KEYS[1])
for i = 1, #found, 2 do
  if found[i] ~= '' then held_by[found[i]] = tonumber(found[i + 1]) or 0 end
end
for _ = 1, 256 do
  local name, most = nil, 0
  for each, held in pairs(held_by) do
    if held > most then name, most = each, held end
  end
  if not name or total <= limit then break end
  local first = redis.call('ZRANGE', order_of(name), 0, 0)
  local freed = first[1] and forget(first[1]) or 0
  if freed > 0 then
    held_by[name], total = held_by[name] - freed, total - freed
    victims[#victims + 1] = first[1]
  else
    -- Redis has lost a part: the tenant's count begins again.
    redis.call('DEL', order_of(name))
    redis.call('HDEL', KEYS[1], name)
    add('', -most)
    held_by[name], total = nil, total - most
  end
end
return victims
