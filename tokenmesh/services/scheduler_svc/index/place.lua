-- Places one request in one atomic step: finds the longest prefix on each worker, estimates the time
-- to first token, and reserves on the best worker.
--
-- KEYS  the reservations of each worker (HASH), then the route hashes of each worker (SET), then the
--       reservations of the worker that this request was placed on before, if any.
-- ARGV  1 route hashes, 8 bytes each.
--       2 doubles: prompt tokens, tokens of a route block, streams, lifetime of a worker's keys (ms),
--       the share and the seconds within which costs count as equal, the extra weight of a second of
--       computing against one of waiting, the number of blocks that most workers are predicted to
--       hold, the seconds that KV of another worker has to gain; then eleven for each worker: prefill
--       tokens/s, queued tokens by its heartbeat, seconds on top, streams past and before their first
--       token by its heartbeat, streams it may hold, 1 if it releases reservations (if not, they are
--       not counted), tokens/s at which it reads KV (0: it reads none), a number that workers with
--       equal KV share (0: none), what it is for (1: it takes streams; 2: others may read what it
--       has; 3: both; 4: and it computes for others), the weight of its own computing, where streams
--       wait for that (0: the usual).
--       3 the reservation to make, 4 the one that was made before.
-- Reply a msgpack array: the chosen worker (from 1; 0: none has room), and an array with one array for
--       each worker: blocks matched, tokens and streams reserved before this request, estimate in
--       seconds, whether it has room, cost, and where it is cheaper the worker that its KV comes from
--       (from 1; negative: which computes it).
-- A command costs 0.4 us, plus 0.4 us if its set is not in the processor's cache, plus 0.4 us if its
-- reply is a table. Globals are looked up by name: the locals save 4 us in all.
local sub, floor, max, numbers_at = string.sub, math.floor, math.max, struct.unpack
local keys, hashes, numbers = KEYS, ARGV[1], ARGV[2]
local tokens, block, streams, lifetime, tie_share, tie_s, extra_weight, usual_depth, least_gain =
  numbers_at('<ddddddddd', numbers)
local num_hashes, num_workers = #hashes / 8, (#numbers - 72) / 88

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
-- By the number of equal KV: the worker that has most of the prompt, and the one that would compute it
-- first. Of each worker that may read: what the second loop needs.
local holders, computers, done_at, reads = {}, {}, {}, {}
for worker = 1, num_workers do
  local rate, queued, extra_s, started, starting, room, releases, kv_rate, kv, use, weight =
    numbers_at('<ddddddddddd', numbers, worker * 88 - 15)
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
  local has_room = (use == 1 or use == 3) and (taken == 0 or taken + streams <= room)
  if kv > 0 then
    if use > 1 and depth > 0 and (not holders[kv] or depth > found[holders[kv]][1]) then
      holders[kv] = worker
    end
    if use == 4 and (not computers[kv] or seconds < done_at[kv]) then
      computers[kv], done_at[kv] = worker, seconds
    end
    if kv_rate > 0 or weight > 0 then
      reads[worker] = {kv_rate, kv, weight, seconds - uncached / rate, extra_s}
    end
  end
  if has_room and (fewest == nil or uncached < fewest) then fewest = uncached end
  rates[worker], all_uncached[worker], all_taken[worker] = rate, uncached, taken
  found[worker] = {depth, reserved, reserved_streams, seconds, has_room, seconds}
end
if fewest == nil then return cmsgpack.pack({0, found}) end

-- Computing what another worker holds delays later requests, and evicts blocks of other prompts.
local best
for worker = 1, num_workers do
  local each = found[worker]
  local rate, uncached = rates[worker], all_uncached[worker]
  local cost = each[4] + extra_weight * (uncached - fewest) / rate
  local read = reads[worker]
  if read and each[5] then
    local kv_rate, kv, weight, wait = read[1], read[2], read[3], read[4]
    local held, holder, computer = each[1] * block, holders[kv], computers[kv]
    if weight > 0 then cost = each[4] + (weight - 1) * uncached / rate end
    local estimate, least, from, rest = each[4], cost - least_gain, nil, uncached
    if kv_rate > 0 and holder and holder ~= worker and found[holder][1] > each[1] then
      local lacking = max(1, tokens - found[holder][1] * block)
      local seconds = wait + (found[holder][1] * block - held) / kv_rate + lacking / rate
      local extra = extra_weight * max(0, lacking - fewest) / rate
      if weight > 0 then extra = (weight - 1) * lacking / rate end
      if seconds + extra < least then
        estimate, cost, least, from, rest = seconds, seconds + extra, seconds + extra, holder, lacking
      end
    end
    if kv_rate > 0 and computer and computer ~= worker then
      local seconds = max(wait, done_at[kv]) + (tokens - held) / kv_rate + read[5]
      if seconds < least then
        estimate, cost, from, rest = seconds, seconds, -computer, 1
      end
    end
    if from then each[4], each[7], all_uncached[worker] = estimate, from, rest end
  end
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
