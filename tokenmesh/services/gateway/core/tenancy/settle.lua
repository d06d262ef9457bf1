-- Releases leases and charges tokens of what has ended. A batch counts once, however often it is sent.
-- KEYS: state, open, usage of the month, sequence, counted, expiry.
-- ARGV: number of the batch; limits of requests and tokens a minute (0: none); the largest number of
-- models; the seconds for which usage and names are kept; the number of leases; the leases; then for
-- each entry its name, model, requests, and tokens: prompt, cached, completion, image, audio, video.
-- An entry with a name counts once, even if several gateways send it.
-- Reply: 1, or 0 if the batch was counted before.
expect(KEYS[1], 'hash')
expect(KEYS[2], 'zset')
expect(KEYS[3], 'hash')
expect(KEYS[4], 'string')
expect(KEYS[5], 'zset')
expect(KEYS[6], 'zset')
local number = tonumber(ARGV[1])
if (tonumber(redis.call('GET', KEYS[4])) or 0) >= number then return 0 end
local rpm, tpm = tonumber(ARGV[2]), tonumber(ARGV[3])
local names_s, num_leases = tonumber(ARGV[6]), tonumber(ARGV[7])
for index = 8, 7 + num_leases do redis.call('ZREM', KEYS[2], ARGV[index]) end

local function add(field, count)
  if count == 0 then return end
  local done = redis.pcall('HINCRBY', KEYS[3], field, count)
  if type(done) == 'table' and done.err then redis.call('HSET', KEYS[3], field, count) end
end

local function is_counted(name)
  if name == '' then return false end
  redis.call('ZREMRANGEBYSCORE', KEYS[5], '-inf', now - names_s)
  local is_new = redis.call('ZADD', KEYS[5], 'NX', now, name) == 1
  keep_for(KEYS[6], KEYS[5], names_s)
  return not is_new
end

local kinds = {'requests:', 'prompt:', 'cached:', 'completion:', 'image:', 'audio:', 'video:'}

-- Adds the counts of an entry, which begin at an argument. Returns the tokens to be charged.
local function charge(model, first)
  if redis.call('HEXISTS', KEYS[3], 'requests:' .. model) == 0 then
    local models = tonumber(redis.call('HGET', KEYS[3], 'models')) or 0
    if models >= tonumber(ARGV[4]) then model = 'other' else add('models', 1) end
  end
  for place, kind in ipairs(kinds) do
    add(kind .. model, tonumber(ARGV[first + place - 1]))
  end
  return tonumber(ARGV[first + 1]) + tonumber(ARGV[first + 3])
end

local charged = 0
for index = 8 + num_leases, #ARGV, 2 + #kinds do
  if not is_counted(ARGV[index]) then
    charged = charged + charge(ARGV[index + 1], index + 2)
  end
end
if charged > 0 then
  add('tokens', charged)
  keep_for(KEYS[6], KEYS[3], tonumber(ARGV[5]))
  if tpm > 0 then
    local requests, tokens = levels(KEYS[1], rpm, tpm)
    keep(KEYS[6], KEYS[1], requests, tokens - charged, tpm)
  end
end
redis.call('SET', KEYS[4], number)
keep_for(KEYS[6], KEYS[4], 86400)
return 1
