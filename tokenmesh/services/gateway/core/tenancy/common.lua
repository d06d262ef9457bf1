-- Deletes a key of another type: a foreign value must not block requests.
local function expect(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= 'none' and found ~= kind then redis.call('DEL', key) end
end

-- The clock of Redis: the gateways' clocks may differ.
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000

-- Requests and tokens left in buckets that hold a minute's worth.
local function levels(key, rpm, tpm)
  local kept = redis.call('HMGET', key, 'requests', 'tokens', 'at')
  local at = tonumber(kept[3])
  if not at or at ~= at or at > now + 60 then return rpm, tpm end
  local minutes = math.max(0, now - at) / 60
  local function level(value, rate)
    local number = tonumber(value)
    if not number or number ~= number then return rate end
    return math.min(rate, number + minutes * rate)
  end
  return level(kept[1], rpm), level(kept[2], tpm)
end

-- Tenants' keys have no EXPIRE, since policies such as volatile-lru evict keys that have one first.
-- A sorted set holds the time after which each key may be deleted; gateways delete them then.
local function keep_for(expiry, key, seconds)
  redis.call('PERSIST', key)
  redis.call('ZADD', expiry, 'GT', now + seconds, key)
end

local function keep(expiry, key, requests, tokens, tpm)
  redis.call('HSET', key, 'requests', string.format('%.6f', requests),
    'tokens', string.format('%.6f', tokens), 'at', string.format('%.6f', now))
  local debt_s = tpm > 0 and math.max(0, -tokens) * 60 / tpm or 0
  keep_for(expiry, key, math.min(31536000, 3600 + debt_s))
end
