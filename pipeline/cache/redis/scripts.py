"""What the server does in one step, as Lua: it happens whole or not at all, whoever dies meanwhile.

All names begin with a prefix, which the scripts get as their first argument:

    entry:KEY     hash     scope, engine, tenant (hex), turn, answer, created, the embedding; expires by itself, as a
                           safety net
    known         hash     KEY -> "bytes embedded scope": the accounts of an entry, also once it has expired
    used          sorted   KEY by the time of its last use: what is evicted
    expires       sorted   KEY by the time at which it expires
    order         sorted   KEY by id: a number that rises with every put, also after the server lost everything
    scope:SCOPE   sorted   KEY by id, of the entries of one scope that have an embedding
    totals        hash     bytes, embedded, removals, id
"""

from __future__ import annotations

_DROP = """
local P = ARGV[1]
local totals = P .. 'totals'
local function drop(key)
  local known = redis.call('HGET', P .. 'known', key)
  if not known then return 0 end
  local bytes, embedded, scope = string.match(known, '^(%d+) (%d) (%x+)$')
  redis.call('DEL', P .. 'entry:' .. key)
  redis.call('HDEL', P .. 'known', key)
  redis.call('ZREM', P .. 'used', key)
  redis.call('ZREM', P .. 'expires', key)
  redis.call('ZREM', P .. 'order', key)
  redis.call('ZREM', P .. 'scope:' .. scope, key)
  redis.call('HINCRBY', totals, 'bytes', 0 - bytes)
  redis.call('HINCRBY', totals, 'embedded', 0 - embedded)
  redis.call('HINCRBY', totals, 'removals', 1)
  return 1
end
"""

# prefix, key, scope, created, expires, ms to live, bytes, embedded (0, 1), most entries, most bytes, and the fields of
# the entry: name, value, …
PUT = (
    _DROP
    + """
local key, scope, created, expires = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local bytes, most, most_bytes = tonumber(ARGV[7]), tonumber(ARGV[9]), tonumber(ARGV[10])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
redis.call('HSETNX', totals, 'removals', string.format('%.0f', now))
drop(key)
for _, old in ipairs(redis.call('ZRANGEBYSCORE', P .. 'expires', '-inf', created, 'LIMIT', 0, 16)) do drop(old) end
for _ = 1, 256 do
  local have = tonumber(redis.call('HGET', totals, 'bytes') or 0)
  if redis.call('ZCARD', P .. 'used') < most and have + bytes <= most_bytes then break end
  local oldest = redis.call('ZRANGE', P .. 'used', 0, 0)[1]
  if not oldest then break end
  drop(oldest)
end
local id = string.format('%.0f', math.max(now, tonumber(redis.call('HGET', totals, 'id') or 0) + 1))
redis.call('HSET', totals, 'id', id)
local entry = P .. 'entry:' .. key
redis.call('HSET', entry, 'scope', scope, 'created', created, unpack(ARGV, 11))
redis.call('PEXPIRE', entry, ARGV[6])
redis.call('HSET', P .. 'known', key, ARGV[7] .. ' ' .. ARGV[8] .. ' ' .. scope)
redis.call('ZADD', P .. 'used', created, key)
redis.call('ZADD', P .. 'expires', expires, key)
redis.call('ZADD', P .. 'order', id, key)
if ARGV[8] == '1' then redis.call('ZADD', P .. 'scope:' .. scope, id, key) end
redis.call('HINCRBY', totals, 'bytes', bytes)
redis.call('HINCRBY', totals, 'embedded', ARGV[8])
return 1
"""
)

# prefix, key, …
REMOVE = (
    _DROP
    + """
local gone = 0
for at = 2, #ARGV do gone = gone + drop(ARGV[at]) end
return gone
"""
)

# prefix, created before or "", after this id, at most so many, scope or "", engine or "", tenant or ""; the last id,
# "" at the end, and how many
PURGE = (
    _DROP
    + """
local before = tonumber(ARGV[2])
local page = redis.call('ZRANGEBYSCORE', P .. 'order', '(' .. ARGV[3], '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[4])
local gone, last = 0, ''
for at = 1, #page, 2 do
  local key = page[at]
  last = page[at + 1]
  local of = redis.call('HMGET', P .. 'entry:' .. key, 'scope', 'engine', 'tenant', 'created')
  local chosen = not before or not of[4] or tonumber(of[4]) < before
  for id = 1, 3 do chosen = chosen and (ARGV[4 + id] == '' or ARGV[4 + id] == of[id]) end
  if chosen then gone = gone + drop(key) end
end
return {last, gone}
"""
)

# prefix, id, …; for each id its key and turn, or false
TURNS = """
local P, found = ARGV[1], {}
for at = 2, #ARGV do
  local key = redis.call('ZRANGEBYSCORE', P .. 'order', ARGV[at], ARGV[at])[1]
  local turn = key and redis.call('HGET', P .. 'entry:' .. key, 'turn')
  found[at - 1] = turn and {key, turn} or false
end
return found
"""
