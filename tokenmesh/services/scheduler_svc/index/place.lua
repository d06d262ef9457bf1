-- Places one request: longest prefix a worker, estimated time to first token, reservation; atomic.
--
-- KEYS  1 expiries (ZSET), 2 the reservation to make (STRING), 3 one that this request made before,
--       or the same key; then the load of each worker (STRING), then the route hashes of each (SET).
-- ARGV  1 route hashes, 8 bytes each, 2 doubles: prompt tokens, tokens of a route block, streams,
--       lifetime of a reservation (ms), share and seconds within which costs are equal, what a
--       second of computing weighs more than one of waiting, then seven a worker: prefill tokens/s,
--       queued tokens by its beat, seconds that come on top,
--       streams past their first token and streams before it by its beat, streams it may hold, and
--       1 where it gives reservations back: they count for nothing where it does not.
-- Reply a msgpack array: the chosen worker (from 1; 0: none has room), and for each worker an array:
--       blocks matched, tokens reserved before this request, streams reserved, estimate in seconds,
--       has room, cost.
-- A command costs about a microsecond before it does anything, a msgpack array more: few of each.
local hashes = ARGV[1]
local numbers = ARGV[2]
local tokens, block, streams, lifetime, tie_share, tie_s, extra_weight =
  struct.unpack('<ddddddd', numbers)
local num_hashes, num_workers = #hashes / 8, #numbers / 56 - 1
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- The reaper: whoever never came to its first token. A few at a time bound the work of one call.
for _, key in ipairs(call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, 32)) do
  give_back(KEYS[1], key)
end
-- A request that is placed again gives back what it held.
if KEYS[3] ~= KEYS[2] then give_back(KEYS[1], KEYS[3]) end

local sub, floor = string.sub, math.floor
local function at(index) return sub(hashes, index * 8 - 7, index * 8) end

-- What a worker holds is closed under prefixes, so its depth can be searched for. The depths found
-- for the workers before are the best guesses: many share a system prompt, few a conversation.
local last, other = 0, 0
local function depth_of(set)
  local low, high = 0, num_hashes + 1
  for turn = 1, 2 do
    local guess = turn == 1 and last or other
    if guess >= low and guess < high then
      if guess == low then
        if guess + 1 == high or call('SISMEMBER', set, at(guess + 1)) == 0 then return guess end
        low = guess + 1
      elseif guess + 1 == high then
        if call('SISMEMBER', set, at(guess)) == 1 then return guess end
        high = guess
      else
        local held = call('SMISMEMBER', set, at(guess), at(guess + 1))
        if held[1] == 0 then
          high = guess
        elseif held[2] == 0 then
          return guess
        else
          low = guess + 1
        end
      end
    end
  end
  while high - low > 1 do
    local step = (high - low) / 4
    local first, second, third = floor(low + step), floor(low + 2 * step), floor(low + 3 * step)
    if first == low then first = low + 1 end
    local held = call('SMISMEMBER', set, at(first), at(second), at(third))
    if held[1] == 0 then high = first
    elseif held[2] == 0 then low, high = first, second
    elseif held[3] == 0 then low, high = second, third
    else low = third end
  end
  return low
end

local loads = call('MGET', unpack(KEYS, 4, 3 + num_workers))
local reply, rates, all_uncached, all_taken, fewest = {0}, {}, {}, {}, nil
for worker = 1, num_workers do
  local rate, queued, extra_s, started, starting, room, gives_back =
    struct.unpack('<ddddddd', numbers, worker * 56 + 1)
  local depth = num_hashes == 0 and 0 or depth_of(KEYS[3 + num_workers + worker])
  if depth ~= last then last, other = depth, last end
  local reserved, reserved_streams = 0, 0
  if gives_back == 1 and loads[worker] then
    reserved, reserved_streams = tokens_and_streams(tonumber(loads[worker]) or 0)
  end
  -- The last token is always computed.
  local uncached = math.max(1, tokens - depth * block)
  -- A reservation lasts until the first token: it covers what the beat calls queued and starting.
  local seconds = (math.max(reserved, queued) + uncached) / rate + extra_s
  local taken = started + math.max(starting, reserved_streams)
  local has_room = taken == 0 or taken + streams <= room
  if has_room and (fewest == nil or uncached < fewest) then fewest = uncached end
  rates[worker], all_uncached[worker], all_taken[worker] = rate, uncached, taken
  reply[worker + 1] = {depth, reserved, reserved_streams, seconds, has_room, seconds}
end
if fewest == nil then return cmsgpack.pack(reply) end

-- To compute what another worker has delays all who come later, and drives out other prompts' blocks.
local best
for worker = 1, num_workers do
  local found = reply[worker + 1]
  local cost = found[4] + extra_weight * (all_uncached[worker] - fewest) / rates[worker]
  found[6] = cost
  if found[5] and (best == nil or cost < best) then best = cost end
end

-- Among equals whoever has most of the prompt, then the fewest streams.
local limit, chosen = best * (1 + tie_share) + tie_s, 0
local least_uncached, least_taken, least_cost
for worker = 1, num_workers do
  local found, uncached, taken = reply[worker + 1], all_uncached[worker], all_taken[worker]
  local cost = found[6]
  if found[5] and cost <= limit and (chosen == 0 or uncached < least_uncached
      or (uncached == least_uncached and (taken < least_taken
        or (taken == least_taken and cost < least_cost)))) then
    chosen, least_uncached, least_taken, least_cost = worker, uncached, taken, cost
  end
end
local amount = as_text(amount_of(all_uncached[chosen], streams))
local load = KEYS[3 + chosen]
call('INCRBY', load, amount)
call('PEXPIRE', load, lifetime)
call('SET', KEYS[2], amount .. ' ' .. load, 'PX', lifetime * 2)
call('ZADD', KEYS[1], now + lifetime, KEYS[2])
call('PEXPIRE', KEYS[1], lifetime * 2)
reply[1] = chosen
return cmsgpack.pack(reply)
