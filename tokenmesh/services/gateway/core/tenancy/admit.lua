-- Decides whether requests and sequences of a tenant may start, and counts them if so.
-- KEYS: state, open, usage of the month, expiry.
-- ARGV: seconds of a lease; the limits, 0 for none: requests and tokens a minute, sequences at a time,
-- tokens a month; the number of requests; the names of the sequences.
-- Reply: the verdict, seconds to wait, requests left, tokens left.
local lease_s, rpm, tpm = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local most, monthly, wanted = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
expect(KEYS[1], 'hash')
expect(KEYS[2], 'zset')
expect(KEYS[3], 'hash')
expect(KEYS[4], 'zset')
local requests, tokens = levels(KEYS[1], rpm, tpm)
local verdict, wait = 'ok', 0
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
if monthly > 0 and (tonumber(redis.call('HGET', KEYS[3], 'tokens')) or 0) >= monthly then
  verdict = 'budget'
elseif most > 0 and redis.call('ZCARD', KEYS[2]) + #ARGV - 6 > most then
  verdict, wait = 'concurrency', 1
elseif rpm > 0 and wanted > 0 and requests < wanted then
  verdict, wait = 'requests', (wanted - requests) * 60 / rpm
elseif tpm > 0 and tokens <= 0 then
  verdict, wait = 'tokens', (1 - tokens) * 60 / tpm
else
  if rpm > 0 then requests = requests - wanted end
  keep(KEYS[4], KEYS[1], requests, tokens, tpm)
  if most > 0 then
    for index = 7, #ARGV do redis.call('ZADD', KEYS[2], now + lease_s, ARGV[index]) end
    keep_for(KEYS[4], KEYS[2], lease_s + 60)
  end
end
return {verdict, tostring(wait), tostring(requests), tostring(tokens)}
