-- Places one request: longest prefix a worker, estimated time to first token, reservation; atomic.
--
-- KEYS  1 expiries (ZSET), 2 the reservation to make (HASH), 3 one that this request made before,
--       or the same key, then for each worker its set of route hashes and its load (HASH).
-- ARGV  1 route hashes, 8 bytes each, 2 prompt tokens, 3 tokens of a route block, 4 streams,
--       5 lifetime of a reservation (ms), 6 share and 7 seconds within which estimates are equal,
--       then for each worker: prefill tokens/s, queued tokens by its beat, seconds that come on top,
--       streams past their first token and streams before it by its beat, streams it may hold, and
--       whether it gives reservations back (0, 1): they count for nothing where it does not.
-- Reply the chosen worker (from 1; 0: none has room), then for each worker: blocks matched, tokens
--       reserved before this request, streams reserved, estimate in microseconds, has room (0, 1).
local hashes, tokens, block = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local streams, lifetime = tonumber(ARGV[4]), tonumber(ARGV[5])
local tie_share, tie_s = tonumber(ARGV[6]), tonumber(ARGV[7])
local num_hashes, num_workers = math.floor(#hashes / 8), (#KEYS - 3) / 2
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function give_back(key)
  local held = redis.call('HMGET', key, 'load', 'pf', 'st')
  if held[1] and redis.call('EXISTS', held[1]) == 1 then
    redis.call('HINCRBY', held[1], 'pf', -held[2])
    redis.call('HINCRBY', held[1], 'st', -held[3])
  end
  redis.call('DEL', key)
  redis.call('ZREM', KEYS[1], key)
end

-- The reaper: whoever never came to its first token. A few at a time bound the work of one call.
for _, key in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, 32)) do
  give_back(key)
end
-- A request that is placed again gives back what it held.
give_back(KEYS[3])

local function holds(set, index)
  return redis.call('SISMEMBER', set, string.sub(hashes, index * 8 - 7, index * 8)) == 1
end

-- What a worker holds is closed under prefixes, so its depth can be searched for; the depth of the
-- worker before is the best guess, since many share the system prompt.
local function depth_of(set, hint)
  if num_hashes == 0 or not holds(set, 1) then return 0 end
  local low, high = 1, num_hashes + 1
  if hint > 1 and hint <= num_hashes then
    if holds(set, hint) then low = hint else high = hint end
    if low == hint and (hint == num_hashes or not holds(set, hint + 1)) then return hint end
  end
  local step = 1
  while low + step < high and holds(set, low + step) do
    low = low + step
    step = step * 2
  end
  high = math.min(high, low + step)
  while high - low > 1 do
    local middle = math.floor((low + high) / 2)
    if holds(set, middle) then low = middle else high = middle end
  end
  return low
end

local reply, facts, hint, best = {0}, {}, 0, nil
for worker = 1, num_workers do
  local first = 8 + (worker - 1) * 7
  local rate, queued = tonumber(ARGV[first]), tonumber(ARGV[first + 1])
  local extra_s, started = tonumber(ARGV[first + 2]), tonumber(ARGV[first + 3])
  local starting, room = tonumber(ARGV[first + 4]), tonumber(ARGV[first + 5])
  local depth = depth_of(KEYS[2 + worker * 2], hint)
  hint = depth > 0 and depth or hint
  local load = redis.call('HMGET', KEYS[3 + worker * 2], 'pf', 'st')
  local reserved, reserved_streams = tonumber(load[1] or 0), tonumber(load[2] or 0)
  if ARGV[first + 6] == '0' then reserved, reserved_streams = 0, 0 end
  -- The last token is always computed.
  local uncached = math.max(1, tokens - depth * block)
  -- A reservation lasts until the first token: it covers what the beat calls queued and starting.
  local seconds = (math.max(reserved, queued) + uncached) / rate + extra_s
  local taken = started + math.max(starting, reserved_streams)
  local has_room = taken == 0 or taken + streams <= room
  facts[worker] = {uncached = uncached, seconds = seconds, taken = taken, has_room = has_room}
  if has_room and (best == nil or seconds < best) then best = seconds end
  for _, number in ipairs({depth, reserved, reserved_streams, math.floor(seconds * 1e6 + 0.5),
                           has_room and 1 or 0}) do
    reply[#reply + 1] = number
  end
end
if best == nil then return reply end

local limit, chosen = best * (1 + tie_share) + tie_s, 0
for worker, each in ipairs(facts) do
  if each.has_room and each.seconds <= limit then
    local other = facts[chosen]
    if chosen == 0 or each.taken < other.taken
        or (each.taken == other.taken and each.seconds < other.seconds) then
      chosen = worker
    end
  end
end
local load = KEYS[3 + chosen * 2]
redis.call('HINCRBY', load, 'pf', facts[chosen].uncached)
redis.call('HINCRBY', load, 'st', streams)
redis.call('PEXPIRE', load, lifetime)
redis.call('HSET', KEYS[2], 'load', load, 'pf', facts[chosen].uncached, 'st', streams)
redis.call('PEXPIRE', KEYS[2], lifetime * 2)
redis.call('ZADD', KEYS[1], now + lifetime, KEYS[2])
redis.call('PEXPIRE', KEYS[1], lifetime * 2)
reply[1] = chosen
return reply
