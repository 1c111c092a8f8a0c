"""Changes that the server makes in one step, as Lua scripts: they happen whole or not at all, whoever dies meanwhile.

All names begin with a prefix, which the scripts get as their first argument:

    entry:KEY     hash     turn, answer, the embedding, and for the query engine the scope (hex); expires by itself, as
                           a safety net
    known         hash     KEY -> "bytes embedded scope engine tenant created" (ids in hex): the account of an entry,
                           which stays when it has expired until the next put
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
  local bytes, embedded, scope = string.match(known, '^(%d+) (%d) (%x+)')
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

# prefix, key, created, expires, ms to live, most entries, most bytes, bytes, embedded (0, 1), scope, engine, tenant,
# and the fields of the entry: name, value, …
PUT = (
    _DROP
    + """
local key, created, expires, lives, embedded, scope = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[9], ARGV[10]
local most, most_bytes, bytes = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
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
redis.call('HSET', entry, unpack(ARGV, 13))
redis.call('PEXPIRE', entry, lives)
redis.call('HSET', P .. 'known', key, table.concat({ARGV[8], embedded, scope, ARGV[11], ARGV[12], created}, ' '))
redis.call('ZADD', P .. 'used', created, key)
redis.call('ZADD', P .. 'expires', expires, key)
redis.call('ZADD', P .. 'order', id, key)
if embedded == '1' then redis.call('ZADD', P .. 'scope:' .. scope, id, key) end
redis.call('HINCRBY', totals, 'bytes', bytes)
redis.call('HINCRBY', totals, 'embedded', embedded)
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
  local known = redis.call('HGET', P .. 'known', key)
  local of = {string.match(known, '^%d+ %d (%x+) (%x+) (%x+) (.+)$')}
  local chosen = not before or tonumber(of[4]) < before
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
