-- One take of a tenant from its buckets, all of them or none.
--
-- KEYS: pipeline:limits:TENANT, a hash with the levels of its buckets, which expires when all are full again; and
-- pipeline:running:TENANT, a sorted set of the leases of its choices, by the time until when.
-- ARGV: 1 to take what there is not, too; name of a lease, or nothing, its choices, how many may run, and its seconds;
-- then of each bucket its name, what it holds, and how much is wanted.
-- Returns of each bucket its level, and the seconds until as much is there; then with a lease how many run, and 1 if they
-- are too many. Numbers are texts, or they would be cut.

local time = redis.call('TIME')
local now, forced = time[1] + time[2] / 1000000, ARGV[1] == '1'
local lease, choices, running = ARGV[2], tonumber(ARGV[3]), 0
local levels, waits, short = {}, {}, false
if lease ~= '' then
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
  running = redis.call('ZCARD', KEYS[2])
  short = running + choices > tonumber(ARGV[4])
end
local crowded = short
for at = 6, #ARGV, 3 do
  local what, most, amount = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local kept = redis.call('HMGET', KEYS[1], what, what .. ':at')
  local level = most
  if kept[1] then
    level = math.min(most, tonumber(kept[1]) + math.max(0, now - tonumber(kept[2])) * most / 60)
  end
  local wait = forced and 0 or math.max(0, (math.min(amount, most) - level) / most * 60)
  levels[at], waits[at], short = level, wait, short or wait > 0
end
local states, full_ms = {}, redis.call('PTTL', KEYS[1])
for at = 6, #ARGV, 3 do
  local what, most, amount = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local level = levels[at]
  if not short then level = forced and math.max(level - amount, -most) or level - amount end
  level = string.format('%.17g', level)
  redis.call('HSET', KEYS[1], what, level, what .. ':at', string.format('%.17g', now))
  full_ms = math.max(full_ms, math.ceil((most - level) / most * 60000) + 1000)
  states[#states + 1] = level
  states[#states + 1] = string.format('%.17g', waits[at])
end
redis.call('PEXPIRE', KEYS[1], string.format('%.0f', full_ms))
if lease ~= '' then
  for number = 1, short and 0 or choices do
    redis.call('ZADD', KEYS[2], now + ARGV[5], lease .. ':' .. number)
  end
  redis.call('PEXPIRE', KEYS[2], ARGV[5] * 1000)
  states[#states + 1] = tostring(running)
  states[#states + 1] = crowded and '1' or '0'
end
return states
