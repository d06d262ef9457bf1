-- Places one request in one atomic step: finds the longest prefix on each worker, estimates the time
-- to first token, and reserves on the best worker.
--
-- KEYS  the reservations of each worker (HASH), then the route hashes of each worker (SET), then the
--       reservations of the worker that this request was placed on before, if any.
-- ARGV  1 route hashes, 8 bytes each.
--       2 doubles: prompt tokens, tokens of a route block, streams, lifetime of a worker's keys (ms),
--       the share and the seconds within which costs count as equal, the extra weight of a second of
--       computing against one of waiting, the number of blocks that most workers are predicted to
--       hold; then seven for each worker: prefill tokens/s, queued tokens by its heartbeat, seconds
--       on top, streams past and before their first token by its heartbeat, streams it may hold, and
--       1 if it releases reservations (if not, they are not counted).
--       3 the reservation to make, 4 the one that was made before.
-- Reply a msgpack array: the chosen worker (from 1; 0: none has room), and an array with one array for
--       each worker: blocks matched, tokens and streams reserved before this request, estimate in
--       seconds, whether it has room, cost.
-- A command costs 0.4 us, plus 0.4 us if its set is not in the processor's cache, plus 0.4 us if its
-- reply is a table. Globals are looked up by name: the locals save 4 us in all.
local sub, floor, max, numbers_at = string.sub, math.floor, math.max, struct.unpack
local keys, hashes, numbers = KEYS, ARGV[1], ARGV[2]
local tokens, block, streams, lifetime, tie_share, tie_s, extra_weight, usual_depth =
  numbers_at('<dddddddd', numbers)
local num_hashes, num_workers = #hashes / 8, (#numbers - 64) / 56

-- A request that is placed again releases its earlier reservation.
if ARGV[4] then give_back(keys[2 * num_workers + 1], ARGV[4]) end

local function hash(index) return sub(hashes, index * 8 - 7, index * 8) end
local function holds(set, index) return call('SISMEMBER', set, hash(index)) == 1 end

-- The depths of the previous workers are the best predictions: many workers share a system prompt,
-- few a conversation. `within` is the last hash of a set of the likely depth, `beyond` the next one.
local likely, other, within, beyond = nil, 0, nil, nil
local function expect(depth)
  likely, other = depth, likely or 0
  within = depth > 0 and hash(depth)
  beyond = depth < num_hashes and hash(depth + 1)
end
expect(math.min(usual_depth, num_hashes))

-- A worker that holds a block holds all blocks before it, so the depth can be searched: the set holds
-- the first `low` blocks, and not block `high`. A worker that holds more of a prompt than others
-- usually holds nearly all of it, so the search goes down from the end in growing steps, then bisects.
local function depth_of(set)
  local low, high, step = 0, num_hashes + 1, 1
  if beyond and call('SISMEMBER', set, beyond) == 1 then
    low = likely + 1
  elseif within and call('SISMEMBER', set, within) == 0 then
    high = likely
  else
    return likely
  end
  if other >= low and other < high then
    if other + 1 < high and holds(set, other + 1) then
      low = other + 1
    elseif other == low or holds(set, other) then
      low, high = other, other + 1
    else
      high = other
    end
  end
  while high - low > 1 do
    local index = high - step
    if index <= low then index = floor((low + high) / 2) end
    if holds(set, index) then
      low, step = index, num_hashes
    else
      high, step = index, 2 * step
    end
  end
  expect(low)
  return low
end

local found, rates, all_uncached, all_taken, fewest = {}, {}, {}, {}, nil
for worker = 1, num_workers do
  local rate, queued, extra_s, started, starting, room, releases =
    numbers_at('<ddddddd', numbers, worker * 56 + 9)
  local depth = depth_of(keys[num_workers + worker])
  local reserved, reserved_streams = 0, 0
  if releases == 1 then
    local sum = tonumber(call('HGET', keys[worker], SUM))
    if sum then reserved, reserved_streams = tokens_and_streams(sum) end
  end
  -- The last token is always computed.
  local uncached = max(1, tokens - depth * block)
  -- A reservation lasts until the first token: it includes the heartbeat's queued and starting.
  local seconds = (max(reserved, queued) + uncached) / rate + extra_s
  local taken = started + max(starting, reserved_streams)
  local has_room = taken == 0 or taken + streams <= room
  if has_room and (fewest == nil or uncached < fewest) then fewest = uncached end
  rates[worker], all_uncached[worker], all_taken[worker] = rate, uncached, taken
  found[worker] = {depth, reserved, reserved_streams, seconds, has_room, seconds}
end
if fewest == nil then return cmsgpack.pack({0, found}) end

-- Computing what another worker holds delays later requests, and evicts blocks of other prompts.
local best
for worker = 1, num_workers do
  local each = found[worker]
  local cost = each[4] + extra_weight * (all_uncached[worker] - fewest) / rates[worker]
  each[6] = cost
  if each[5] and (best == nil or cost < best) then best = cost end
end

-- Of workers with equal costs: the longest prefix, then the fewest streams.
local limit, chosen = best * (1 + tie_share) + tie_s, 0
local least_uncached, least_taken, least_cost
for worker = 1, num_workers do
  local each = found[worker]
  local cost = each[6]
  if each[5] and cost <= limit then
    local uncached, taken = all_uncached[worker], all_taken[worker]
    if chosen == 0 or uncached < least_uncached or (uncached == least_uncached
        and (taken < least_taken or (taken == least_taken and cost < least_cost))) then
      chosen, least_uncached, least_taken, least_cost = worker, uncached, taken, cost
    end
  end
end

-- HSETNX: a call is repeated when its connection breaks, and may have been executed already.
local amount, reserved = amount_of(least_uncached, streams), keys[chosen]
if call('HSETNX', reserved, ARGV[3], as_text(amount)) == 1 then
  local sum = call('HINCRBY', reserved, SUM, as_text(amount))
  -- The worker renews its keys. If this is the only reservation the key is new, and the worker may
  -- be dead: the key must expire.
  if sum == amount then call('PEXPIRE', reserved, lifetime) end
end
return cmsgpack.pack({chosen, found})
