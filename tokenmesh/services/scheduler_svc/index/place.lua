-- Places one request: longest prefix a worker, estimated time to first token, reservation; atomic.
--
-- KEYS  1 expiries (ZSET), 2 the reservation to make (HASH), 3 one that this request made before,
--       or the same key.
-- ARGV  1 route hashes, 8 bytes each, 2 a msgpack array: prompt tokens, tokens of a route block,
--       streams, lifetime of a reservation (ms), share and seconds within which costs are equal, what
--       a second of computing weighs more than one of waiting, and an array of workers. Each is an array: the key of its route hashes (SET), that of its
--       load (HASH), prefill tokens/s, queued tokens by its beat, seconds that come on top, streams
--       past their first token and streams before it by its beat, streams it may hold, and whether
--       it gives reservations back: they count for nothing where it does not.
-- Reply a msgpack array: the chosen worker (from 1; 0: none has room), and for each worker an array:
--       blocks matched, tokens reserved before this request, streams reserved, estimate in seconds,
--       has room, cost.
-- One argument for all numbers: packing each by itself costs the caller more than the lookup.
local call = redis.call
local hashes = ARGV[1]
local tokens, block, streams, lifetime, tie_share, tie_s, extra_weight, workers =
  unpack(cmsgpack.unpack(ARGV[2]))
local num_hashes = math.floor(#hashes / 8)
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- The reaper: whoever never came to its first token. A few at a time bound the work of one call.
for _, key in ipairs(call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, 32)) do
  give_back(KEYS[1], key)
end
-- A request that is placed again gives back what it held.
give_back(KEYS[1], KEYS[3])

local function holds(set, index)
  return call('SISMEMBER', set, string.sub(hashes, index * 8 - 7, index * 8)) == 1
end

-- What a worker holds is closed under prefixes, so its depth can be searched for. The depths found
-- for the workers before are the best guesses: many share a system prompt, few a conversation.
local function depth_of(set, last, other)
  if num_hashes == 0 or not holds(set, 1) then return 0 end
  local low, high = 1, num_hashes + 1
  for _, guess in ipairs({last, other}) do
    if guess > low and guess < high then
      if not holds(set, guess) then
        high = guess
      else
        low = guess
        if guess + 1 == high or not holds(set, guess + 1) then return guess end
      end
    end
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

local reply, facts, last, other, best, fewest = {0}, {}, 0, 0, nil, nil
for number, worker in ipairs(workers) do
  local set, load, rate, queued, extra_s, started, starting, room, gives_back = unpack(worker)
  local depth = depth_of(set, last, other)
  if depth > 0 and depth ~= last then last, other = depth, last end
  local held = call('HMGET', load, 'pf', 'st')
  local reserved, reserved_streams = tonumber(held[1] or 0), tonumber(held[2] or 0)
  if not gives_back then reserved, reserved_streams = 0, 0 end
  -- The last token is always computed.
  local uncached = math.max(1, tokens - depth * block)
  -- A reservation lasts until the first token: it covers what the beat calls queued and starting.
  local seconds = (math.max(reserved, queued) + uncached) / rate + extra_s
  local taken = started + math.max(starting, reserved_streams)
  local has_room = taken == 0 or taken + streams <= room
  facts[number] =
    {uncached = uncached, seconds = seconds, rate = rate, taken = taken, has_room = has_room}
  if has_room and (fewest == nil or uncached < fewest) then fewest = uncached end
  reply[number + 1] = {depth, reserved, reserved_streams, seconds, has_room, seconds}
end
if fewest == nil then return cmsgpack.pack(reply) end

-- To compute what another worker has delays all who come later, and drives out other prompts' blocks.
for worker, each in ipairs(facts) do
  each.cost = each.seconds + extra_weight * (each.uncached - fewest) / each.rate
  reply[worker + 1][6] = each.cost
  if each.has_room and (best == nil or each.cost < best) then best = each.cost end
end

-- Among equals whoever has most of the prompt, then the fewest streams.
local function goes_first(one, other)
  if one.uncached ~= other.uncached then return one.uncached < other.uncached end
  if one.taken ~= other.taken then return one.taken < other.taken end
  return one.cost < other.cost
end

local limit, chosen = best * (1 + tie_share) + tie_s, 0
for worker, each in ipairs(facts) do
  if each.has_room and each.cost <= limit then
    if chosen == 0 or goes_first(each, facts[chosen]) then chosen = worker end
  end
end
local load = workers[chosen][2]
call('HINCRBY', load, 'pf', facts[chosen].uncached)
call('HINCRBY', load, 'st', streams)
call('PEXPIRE', load, lifetime)
call('HSET', KEYS[2], 'load', load, 'pf', facts[chosen].uncached, 'st', streams)
call('PEXPIRE', KEYS[2], lifetime * 2)
call('ZADD', KEYS[1], now + lifetime, KEYS[2])
call('PEXPIRE', KEYS[1], lifetime * 2)
reply[1] = chosen
return cmsgpack.pack(reply)
