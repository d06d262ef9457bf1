-- Shared by the scripts of the index.
local call = redis.call

-- What is reserved, tokens and streams, is one integer: one key and one command for both. Streams
-- are its low part, signed, so that one that is given back too much takes no token along.
local STREAMS = 1048576

local function amount_of(tokens, streams) return tokens * STREAMS + streams end

local function tokens_and_streams(amount)
  local streams = amount % STREAMS
  if streams >= STREAMS / 2 then streams = streams - STREAMS end
  return (amount - streams) / STREAMS, streams
end

-- In full: Lua would write large ones with an exponent.
local function as_text(amount) return string.format('%.0f', amount) end

-- What a reservation says: its amount and the key of the load that it is part of.
local function read(held)
  local amount, load = string.match(held or '', '^(%d+) (.+)$')
  return tonumber(amount), load
end

-- Gives one reservation back, once; whether it was there.
local function give_back(expiries, key)
  local held = call('GETDEL', key)
  call('ZREM', expiries, key)
  local amount, load = read(held)
  if amount and call('EXISTS', load) == 1 then call('DECRBY', load, as_text(amount)) end
  return held ~= false
end

-- Lowers the tokens of a reservation to what is left of them.
local function lower(key, left)
  local amount, load = read(call('GET', key))
  if not amount then return end
  local tokens, streams = tokens_and_streams(amount)
  if tokens > left and call('EXISTS', load) == 1 then
    call('DECRBY', load, as_text(amount_of(tokens - left, 0)))
    call('SET', key, as_text(amount_of(left, streams)) .. ' ' .. load, 'KEEPTTL')
  end
end
