-- Gives reservations back, each once.
-- KEYS 1 expiries (ZSET), then reservations (HASH). Reply how many were there.
local num_released = 0
for index = 2, #KEYS do
  if give_back(KEYS[1], KEYS[index]) then num_released = num_released + 1 end
end
return num_released
