-- Stored responses of a tenant in Redis or Valkey, one command each: two gateways cannot both pass a bound.
--
-- KEYS[1] is pipeline:responses:TENANT, with which all names begin. ARGV: command, the time (s) before which a response
-- that was used last is forgotten, and what the command takes.
--
--     …:used       sorted set: id by the time of its last use (s since the epoch)
--     …:sizes      hash: id -> bytes of JSON; under "", of all together
--     …:one:ID     hash: response and input (sealed), previous, size
--
-- All keys expire after the age at which an unused response is forgotten. A response exists while it is in `used`: where
-- a server that is full evicts keys, a response is forgotten, and the bounds still hold.

local P, oldest = KEYS[1], tonumber(ARGV[2])
local used, sizes = P .. ':used', P .. ':sizes'

local function forget(id)
  local size = redis.call('HGET', sizes, id)
  redis.call('DEL', P .. ':one:' .. id)
  redis.call('ZREM', used, id)
  if not size then return 0 end
  redis.call('HDEL', sizes, id)
  redis.call('HINCRBY', sizes, '', 0 - size)
  return 1
end

local function is_stored(id)
  local at = redis.call('ZSCORE', used, id)
  return at and tonumber(at) >= oldest and redis.call('EXISTS', P .. ':one:' .. id) == 1
end

local commands = {}

-- Now (s), age (ms), id, previous or "", response, input, size, most responses, most bytes.
function commands.put(now, age, id, previous, response, input, size, most, most_bytes)
  if redis.call('EXISTS', used) ~= redis.call('EXISTS', sizes) then redis.call('DEL', used, sizes) end
  for _, old in ipairs(redis.call('ZRANGEBYSCORE', used, '-inf', '(' .. ARGV[2])) do forget(old) end
  forget(id)
  local key = P .. ':one:' .. id
  redis.call('HSET', key, 'previous', previous, 'response', response, 'input', input, 'size', size)
  redis.call('ZADD', used, now, id)
  redis.call('HSET', sizes, id, size)
  redis.call('HINCRBY', sizes, '', size)
  while redis.call('ZCARD', used) > tonumber(most)
    or tonumber(redis.call('HGET', sizes, '')) > tonumber(most_bytes) do
    local unused = redis.call('ZRANGE', used, 0, 1)
    if not unused[2] then break end
    forget(unused[1] ~= id and unused[1] or unused[2])
  end
  for _, name in ipairs({key, used, sizes}) do redis.call('PEXPIRE', name, age) end
  return 1
end

-- Ids. Returns for each response, input and previous; false if it is not stored.
function commands.find()
  local found = {}
  for at = 3, #ARGV do
    found[at - 2] = is_stored(ARGV[at])
      and redis.call('HMGET', P .. ':one:' .. ARGV[at], 'response', 'input', 'previous')
  end
  return found
end

-- Id.
function commands.delete(id)
  return is_stored(id) and forget(id) or 0
end

-- Now (s), age (ms), id. Returns id and size of each response of a conversation, the newest first; nothing if one is not
-- stored.
function commands.chain(now, age, id)
  local chain = {}
  while id ~= '' do
    if not is_stored(id) then return {} end
    local response = redis.call('HMGET', P .. ':one:' .. id, 'previous', 'size')
    chain[#chain + 1], chain[#chain + 2] = id, response[2]
    id = response[1]
  end
  for at = 1, #chain, 2 do
    redis.call('ZADD', used, now, chain[at])
    redis.call('PEXPIRE', P .. ':one:' .. chain[at], age)
  end
  redis.call('PEXPIRE', used, age)
  redis.call('PEXPIRE', sizes, age)
  return chain
end

return commands[ARGV[1]](unpack(ARGV, 3, 11))
