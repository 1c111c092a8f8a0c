-- Changes to a cache in Redis or Valkey, one command each: they happen whole or not at all, whoever dies meanwhile.
--
-- ARGV: prefix of all names, command, and what the command takes.
--
--     entry:KEY     hash     turn, answer, the embedding, and for the query engine the scope (hex); expires by itself,
--                            as a safety net
--     known         hash     KEY -> "bytes embedded scope engine tenant created" (ids in hex): the account of an entry,
--                            which stays when it has expired until the next put
--     used          sorted   KEY by the time of its last use: what is evicted
--     expires       sorted   KEY by the time at which it expires
--     order         sorted   KEY by id: a number that rises with every put, also after the server lost everything
--     scope:SCOPE   sorted   KEY by id, of the entries of one scope that have an embedding
--     totals        hash     bytes, embedded, removals, id

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

local commands = {}

-- Key, created, expires, ms to live, most entries, most bytes, bytes, embedded (0, 1), scope, engine, tenant, and the
-- fields of the entry: name, value, …
function commands.put(key, created, expires, lives, most, most_bytes, bytes, embedded, scope, engine, tenant)
  local time = redis.call('TIME')
  local now = time[1] * 1000000 + time[2]
  redis.call('HSETNX', totals, 'removals', string.format('%.0f', now))
  drop(key)
  local expired = redis.call('ZRANGEBYSCORE', P .. 'expires', '-inf', created, 'LIMIT', 0, 16)
  for _, old in ipairs(expired) do drop(old) end
  for _ = 1, 256 do
    local have = tonumber(redis.call('HGET', totals, 'bytes') or 0)
    if redis.call('ZCARD', P .. 'used') < tonumber(most) and have + bytes <= tonumber(most_bytes) then break end
    local oldest = redis.call('ZRANGE', P .. 'used', 0, 0)[1]
    if not oldest then break end
    drop(oldest)
  end
  local id = string.format('%.0f', math.max(now, tonumber(redis.call('HGET', totals, 'id') or 0) + 1))
  redis.call('HSET', totals, 'id', id)
  local entry = P .. 'entry:' .. key
  redis.call('HSET', entry, unpack(ARGV, 14))
  redis.call('PEXPIRE', entry, lives)
  redis.call('HSET', P .. 'known', key, table.concat({bytes, embedded, scope, engine, tenant, created}, ' '))
  redis.call('ZADD', P .. 'used', created, key)
  redis.call('ZADD', P .. 'expires', expires, key)
  redis.call('ZADD', P .. 'order', id, key)
  if embedded == '1' then redis.call('ZADD', P .. 'scope:' .. scope, id, key) end
  redis.call('HINCRBY', totals, 'bytes', bytes)
  redis.call('HINCRBY', totals, 'embedded', embedded)
  return 1
end

-- Keys. Returns how many were there.
function commands.remove()
  local gone = 0
  for at = 3, #ARGV do gone = gone + drop(ARGV[at]) end
  return gone
end

-- Created before or "", after this id, at most so many, scope or "", engine or "", tenant or "". Returns the last id, ""
-- at the end, and how many were removed.
function commands.purge(before, after, most, scope, engine, tenant)
  local page = redis.call('ZRANGEBYSCORE', P .. 'order', '(' .. after, '+inf', 'WITHSCORES', 'LIMIT', 0, most)
  local wanted, gone, last = {scope, engine, tenant}, 0, ''
  before = tonumber(before)
  for at = 1, #page, 2 do
    local key = page[at]
    last = page[at + 1]
    local known = redis.call('HGET', P .. 'known', key)
    local of = {string.match(known, '^%d+ %d (%x+) (%x+) (%x+) (.+)$')}
    local chosen = not before or tonumber(of[4]) < before
    for id = 1, 3 do chosen = chosen and (wanted[id] == '' or wanted[id] == of[id]) end
    if chosen then gone = gone + drop(key) end
  end
  return {last, gone}
end

-- Ids. Returns for each its key and turn, or false.
function commands.turns()
  local found = {}
  for at = 3, #ARGV do
    local key = redis.call('ZRANGEBYSCORE', P .. 'order', ARGV[at], ARGV[at])[1]
    local turn = key and redis.call('HGET', P .. 'entry:' .. key, 'turn')
    found[at - 2] = turn and {key, turn} or false
  end
  return found
end

return commands[ARGV[2]](unpack(ARGV, 3, 13))
