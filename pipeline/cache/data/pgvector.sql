-- Schema of caches in PostgreSQL with pgvector. {schema} stands for its name, which has the version of these statements.
--
-- All changes to one cache hold its row of `totals`, so that they come one after the other: ids rise in the order in
-- which entries become visible (indexes read on from the last they saw), and no two changes wait for each other.
-- `nearest` compares up to 1,000 entries of a scope one by one. It discourages sorting, because the planner, which knows
-- nothing of a new table, would sort a whole scope.
-- Access times are a table of their own: changing a row of `entries` would put its embedding into the index once more.

CREATE EXTENSION IF NOT EXISTS vector;
SELECT '[1]'::halfvec;                          -- loads it: before that only a superuser may name its settings
CREATE SCHEMA IF NOT EXISTS {schema};
CREATE TABLE {schema}.totals (
    cache text PRIMARY KEY, entries bigint NOT NULL DEFAULT 0, bytes bigint NOT NULL DEFAULT 0,
    vectors bigint NOT NULL DEFAULT 0,
    removals bigint NOT NULL                    -- rises with every entry that goes, or is replaced
);
CREATE TABLE {schema}.entries (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    cache text NOT NULL, key bytea NOT NULL, scope bytea NOT NULL, engine bytea NOT NULL, tenant bytea NOT NULL,
    turn bytea NOT NULL, answer bytea NOT NULL,
    near halfvec, sealed bytea,                 -- the embedding in the clear, or sealed, or neither
    created float8 NOT NULL, expires float8 NOT NULL, bytes bigint NOT NULL,
    UNIQUE (cache, key)
);
CREATE INDEX by_expiry ON {schema}.entries (cache, expires);
CREATE INDEX by_scope ON {schema}.entries (cache, scope, id);
CREATE TABLE {schema}.uses (
    id bigint PRIMARY KEY REFERENCES {schema}.entries ON DELETE CASCADE, cache text NOT NULL, used float8 NOT NULL
);
CREATE INDEX by_use ON {schema}.uses (cache, used);

CREATE FUNCTION {schema}.count_come() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE {schema}.totals t SET entries = t.entries + c.n, bytes = t.bytes + c.b, vectors = t.vectors + c.v FROM
        (SELECT cache, count(*) n, sum(bytes) b, sum(num_nonnulls(near, sealed)) v FROM come GROUP BY cache) c
    WHERE t.cache = c.cache;
    RETURN NULL;
END $$;
CREATE FUNCTION {schema}.count_gone() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE {schema}.totals t SET entries = t.entries - g.n, bytes = t.bytes - g.b, vectors = t.vectors - g.v,
        removals = removals + g.n FROM
        (SELECT cache, count(*) n, sum(bytes) b, sum(num_nonnulls(near, sealed)) v FROM gone GROUP BY cache) g
    WHERE t.cache = g.cache;
    RETURN NULL;
END $$;
CREATE TRIGGER come AFTER INSERT ON {schema}.entries REFERENCING NEW TABLE AS come
    FOR EACH STATEMENT EXECUTE FUNCTION {schema}.count_come();
CREATE TRIGGER gone AFTER DELETE ON {schema}.entries REFERENCING OLD TABLE AS gone
    FOR EACH STATEMENT EXECUTE FUNCTION {schema}.count_gone();

CREATE FUNCTION {schema}.change(the_cache text) RETURNS {schema}.totals LANGUAGE plpgsql AS $$
DECLARE have {schema}.totals;
BEGIN
    INSERT INTO {schema}.totals (cache, removals) VALUES (the_cache, extract(epoch FROM clock_timestamp()) * 1e6)
        ON CONFLICT DO NOTHING;
    SELECT * INTO have FROM {schema}.totals WHERE cache = the_cache FOR UPDATE;
    RETURN have;
END $$;

CREATE FUNCTION {schema}.put(
    the_cache text, the_key bytea, the_scope bytea, the_engine bytea, the_tenant bytea, the_turn bytea,
    the_answer bytea, in_clear halfvec, in_secret bytea, now float8, expiry float8,
    size bigint, most_entries bigint, most_bytes bigint
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE have {schema}.totals; the_id bigint;
BEGIN
    PERFORM {schema}.change(the_cache);
    DELETE FROM {schema}.entries e WHERE e.cache = the_cache AND (e.key = the_key OR e.expires <= now);
    LOOP
        SELECT * INTO have FROM {schema}.totals t WHERE t.cache = the_cache;
        EXIT WHEN have.entries < most_entries AND have.bytes + size <= most_bytes;
        DELETE FROM {schema}.entries WHERE id IN (
            SELECT u.id FROM {schema}.uses u WHERE u.cache = the_cache ORDER BY u.used
            LIMIT greatest(1, least(512, have.entries / 64))
        );
        EXIT WHEN NOT FOUND;
    END LOOP;
    INSERT INTO {schema}.entries
        (cache, key, scope, engine, tenant, turn, answer, near, sealed, created, expires, bytes) VALUES
        (the_cache, the_key, the_scope, the_engine, the_tenant, the_turn, the_answer, in_clear, in_secret, now,
         expiry, size) RETURNING id INTO the_id;
    INSERT INTO {schema}.uses VALUES (the_id, the_cache, now);
END $$;

CREATE FUNCTION {schema}.nearest(the_cache text, the_scope bytea, wanted halfvec, count int)
RETURNS TABLE (key bytea, turn bytea, cosine float8) LANGUAGE plpgsql STABLE
SET hnsw.iterative_scan = strict_order SET hnsw.ef_search = 64 SET hnsw.max_scan_tuples = 200000
SET enable_sort = off AS $$
DECLARE dimensions int := vector_dims(wanted);
BEGIN
    IF (SELECT count(*) FROM (
        SELECT FROM {schema}.entries e WHERE e.cache = the_cache AND e.scope = the_scope LIMIT 1001
    ) few) <= 1000 THEN
        RETURN QUERY SELECT e.key, e.turn, 1 - (e.near <=> wanted) FROM (
            SELECT s.key, s.turn, s.near FROM {schema}.entries s
            WHERE s.cache = the_cache AND s.scope = the_scope AND vector_dims(s.near) = dimensions OFFSET 0
        ) e ORDER BY e.near <=> wanted LIMIT count;
    ELSE
        RETURN QUERY EXECUTE format(
            'SELECT e.key, e.turn, 1 - (e.near::halfvec(%1$s) <=> $3) FROM {schema}.entries e'
            ' WHERE e.cache = $1 AND e.scope = $2 AND vector_dims(e.near) = %1$s'
            ' ORDER BY e.near::halfvec(%1$s) <=> $3 LIMIT $4', dimensions
        ) USING the_cache, the_scope, wanted, count;
    END IF;
END $$;
