-- Shared by the scripts of the index.
local call = redis.call

-- What is reserved, tokens and streams, is one integer: one field and one command for both. Streams
-- are its low part, signed, so that one that is given back too much takes no token along.
local STREAMS = 1048576

-- The field of a worker's HASH that holds the sum of the others, which are its reservations.
local SUM = ''

local function amount_of(tokens, streams) return tokens * STREAMS + streams end

local function tokens_and_streams(amount)
  local streams = amount % STREAMS
  if streams >= STREAMS / 2 then streams = streams - STREAMS end
  return (amount - streams) / STREAMS, streams
end

-- In full: Lua would write large ones with an exponent.
local function as_text(amount) return string.format('%.0f', amount) end

-- The value of a field; nil: missing, or not written by these scripts.
local function amount_in(key, field)
  return tonumber(string.match(call('HGET', key, field) or '', '^%d+$'))
end

-- What the sum does not hold was never part of it.
local function take_off(key, amount)
  local sum = amount_in(key, SUM)
  if sum and amount <= sum then call('HINCRBY', key, SUM, as_text(-amount)) end
end

-- Gives one reservation back, once; whether it was there.
local function give_back(key, field)
  if field == SUM then return false end
  local amount = amount_in(key, field)
  if call('HDEL', key, field) == 0 then return false end
  if amount then take_off(key, amount) end
  return true
end

-- Lowers the tokens of a reservation to what is left of them.
local function lower(key, field, left)
  local amount = amount_in(key, field)
  if field == SUM or not amount then return end
  local tokens, streams = tokens_and_streams(amount)
  if tokens > left then
    take_off(key, amount_of(tokens - left, 0))
    call('HSET', key, field, as_text(amount_of(left, streams)))
  end
end
