-- Gives reservations of a worker back, each once: wholly, or what is computed already.
-- KEYS 1 what is reserved on it (HASH). ARGV pairs: a reservation, and the tokens that are left of
-- it; -1: it is over. Reply how many of those were there.
local num_released = 0
for index = 1, #ARGV, 2 do
  local field, left = ARGV[index], tonumber(ARGV[index + 1])
  if left >= 0 then
    lower(KEYS[1], field, left)
  elseif give_back(KEYS[1], field) then
    num_released = num_released + 1
  end
end
return num_released
