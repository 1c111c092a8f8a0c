-- Losses of servers by request, and what is not sent to a server meanwhile. ARGV: the name of a command, and its own.
--
-- count    KEYS: hash of a request. ARGV: for how many seconds it had run, and until its losses are forgotten. What was
--          sent before the last loss adds nothing: others were lost with the same server, or servers were lost together.
--          Returns the losses.
-- hold     KEYS: the sorted set of what is held, by the time until when. ARGV: member, seconds.
-- read     KEYS: the same. ARGV: most members. Returns members and seconds.

local time = redis.call('TIME')
local now, key, command = time[1] + time[2] / 1000000, KEYS[1], ARGV[1]
if command == 'count' then
  local last = redis.call('HGET', key, 'at')
  if not last or now - ARGV[2] > tonumber(last) then
    redis.call('HINCRBY', key, 'losses', 1)
    redis.call('HSET', key, 'at', string.format('%.6f', now))
    redis.call('EXPIRE', key, ARGV[3])
  end
  return redis.call('HGET', key, 'losses')
elseif command == 'hold' then
  return redis.call('ZADD', key, 'GT', time[1] + ARGV[3], ARGV[2])
end
redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
local held = redis.call('ZREVRANGE', key, 0, ARGV[2] - 1, 'WITHSCORES')
for at = 2, #held, 2 do held[at] = string.format('%.3f', held[at] - now) end
return held
