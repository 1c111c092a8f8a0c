-- Renews leases of a tenant's choices. KEYS: their sorted set. ARGV: seconds, then names of choices that still run.

local time = redis.call('TIME')
for at = 2, #ARGV do
  redis.call('ZADD', KEYS[1], 'XX', time[1] + time[2] / 1000000 + ARGV[1], ARGV[at])
end
return redis.call('PEXPIRE', KEYS[1], ARGV[1] * 1000)
