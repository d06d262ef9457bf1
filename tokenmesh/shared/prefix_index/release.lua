-- Gives reservations back, each once: wholly, or what is computed already.
-- KEYS 1 expiries (ZSET), then reservations (STRING). ARGV the tokens that are left of each; -1: the
-- reservation is over. Reply how many of those were there.
local num_released = 0
for index = 2, #KEYS do
  local left = tonumber(ARGV[index - 1])
  if left >= 0 then
    lower(KEYS[index], left)
  elseif give_back(KEYS[1], KEYS[index]) then
    num_released = num_released + 1
  end
end
return num_released
