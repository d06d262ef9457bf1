-- May this tenant's request begin? If so, it is counted.
-- KEYS: state, open, usage of the month. ARGV: lease, its seconds, then the limits, 0 for none:
-- requests and tokens a minute, requests at a time, tokens a month.
local rpm, tpm = tonumber(ARGV[3]), tonumber(ARGV[4])
local most, monthly = tonumber(ARGV[5]), tonumber(ARGV[6])
expect(KEYS[1], 'hash')
expect(KEYS[2], 'zset')
expect(KEYS[3], 'hash')
local requests, tokens = levels(KEYS[1], rpm, tpm)
local verdict, wait = 'ok', 0
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
if monthly > 0 and (tonumber(redis.call('HGET', KEYS[3], 'tokens')) or 0) >= monthly then
  verdict = 'budget'
elseif most > 0 and redis.call('ZCARD', KEYS[2]) >= most then
  verdict, wait = 'concurrency', 1
elseif rpm > 0 and requests < 1 then
  verdict, wait = 'requests', (1 - requests) * 60 / rpm
elseif tpm > 0 and tokens <= 0 then
  verdict, wait = 'tokens', (1 - tokens) * 60 / tpm
else
  if rpm > 0 then requests = requests - 1 end
  keep(KEYS[1], requests, tokens, tpm)
  if most > 0 then
    redis.call('ZADD', KEYS[2], now + tonumber(ARGV[2]), ARGV[1])
    redis.call('EXPIRE', KEYS[2], math.ceil(tonumber(ARGV[2])) + 60)
  end
end
return {verdict, tostring(wait), tostring(requests), tostring(tokens)}
