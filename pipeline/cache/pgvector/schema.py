"""Tables and functions in PostgreSQL, in a schema of their own.

All changes to one cache hold its row of `totals`, so that they come one after the other: ids rise in the order in which
entries become visible (indexes read on from the last they saw), and no two changes wait for each other.
`nearest` discourages sorting, because the planner, which knows nothing of a new table, would sort a whole scope.
Uses are a table of their own: changing a row of `entries` would put its embedding into the index once more.
"""

from __future__ import annotations

VERSION = 1  # part of the schema's name: another version is another schema
NAME = f"pipeline_cache_{VERSION}"
_EXACT = 1000  # entries of a scope that are compared one by one

STATEMENTS = f"""
CREATE EXTENSION IF NOT EXISTS vector;
SELECT '[1]'::halfvec;                          -- loads it: before that only a superuser may name its settings
CREATE SCHEMA IF NOT EXISTS {NAME};
CREATE TABLE {NAME}.totals (
    cache text PRIMARY KEY, entries bigint NOT NULL DEFAULT 0, bytes bigint NOT NULL DEFAULT 0,
    vectors bigint NOT NULL DEFAULT 0,
    removals bigint NOT NULL                    -- rises with every entry that goes, or is replaced
);
CREATE TABLE {NAME}.entries (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    cache text NOT NULL, key bytea NOT NULL, scope bytea NOT NULL, engine bytea NOT NULL, tenant bytea NOT NULL,
    turn bytea NOT NULL, answer bytea NOT NULL,
    near halfvec, sealed bytea,                 -- the embedding in the clear, or sealed, or neither
    created float8 NOT NULL, expires float8 NOT NULL, bytes bigint NOT NULL,
    UNIQUE (cache, key)
);
CREATE INDEX by_expiry ON {NAME}.entries (cache, expires);
CREATE INDEX by_scope ON {NAME}.entries (cache, scope, id);
CREATE TABLE {NAME}.uses (
    id bigint PRIMARY KEY REFERENCES {NAME}.entries ON DELETE CASCADE, cache text NOT NULL, used float8 NOT NULL
);
CREATE INDEX by_use ON {NAME}.uses (cache, used);

CREATE FUNCTION {NAME}.count_come() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE {NAME}.totals t SET entries = t.entries + c.n, bytes = t.bytes + c.b, vectors = t.vectors + c.v FROM
        (SELECT cache, count(*) n, sum(bytes) b, sum(num_nonnulls(near, sealed)) v FROM come GROUP BY cache) c
    WHERE t.cache = c.cache;
    RETURN NULL;
END $$;
CREATE FUNCTION {NAME}.count_gone() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE {NAME}.totals t SET entries = t.entries - g.n, bytes = t.bytes - g.b, vectors = t.vectors - g.v,
        removals = removals + g.n FROM
        (SELECT cache, count(*) n, sum(bytes) b, sum(num_nonnulls(near, sealed)) v FROM gone GROUP BY cache) g
    WHERE t.cache = g.cache;
    RETURN NULL;
END $$;
CREATE TRIGGER come AFTER INSERT ON {NAME}.entries REFERENCING NEW TABLE AS come
    FOR EACH STATEMENT EXECUTE FUNCTION {NAME}.count_come();
CREATE TRIGGER gone AFTER DELETE ON {NAME}.entries REFERENCING OLD TABLE AS gone
    FOR EACH STATEMENT EXECUTE FUNCTION {NAME}.count_gone();

CREATE FUNCTION {NAME}.change(the_cache text) RETURNS {NAME}.totals LANGUAGE plpgsql AS $$
DECLARE have {NAME}.totals;
BEGIN
    INSERT INTO {NAME}.totals (cache, removals) VALUES (the_cache, extract(epoch FROM clock_timestamp()) * 1e6)
        ON CONFLICT DO NOTHING;
    SELECT * INTO have FROM {NAME}.totals WHERE cache = the_cache FOR UPDATE;
    RETURN have;
END $$;

CREATE FUNCTION {NAME}.put(
    the_cache text, the_key bytea, the_scope bytea, the_engine bytea, the_tenant bytea, the_turn bytea,
    the_answer bytea, in_clear halfvec, in_secret bytea, now float8, expiry float8,
    size bigint, most_entries bigint, most_bytes bigint
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE have {NAME}.totals; the_id bigint;
BEGIN
    PERFORM {NAME}.change(the_cache);
    DELETE FROM {NAME}.entries e WHERE e.cache = the_cache AND (e.key = the_key OR e.expires <= now);
    LOOP
        SELECT * INTO have FROM {NAME}.totals t WHERE t.cache = the_cache;
        EXIT WHEN have.entries < most_entries AND have.bytes + size <= most_bytes;
        DELETE FROM {NAME}.entries WHERE id IN (
            SELECT u.id FROM {NAME}.uses u WHERE u.cache = the_cache ORDER BY u.used
            LIMIT greatest(1, least(512, have.entries / 64))
        );
        EXIT WHEN NOT FOUND;
    END LOOP;
    INSERT INTO {NAME}.entries
        (cache, key, scope, engine, tenant, turn, answer, near, sealed, created, expires, bytes) VALUES
        (the_cache, the_key, the_scope, the_engine, the_tenant, the_turn, the_answer, in_clear, in_secret, now,
         expiry, size) RETURNING id INTO the_id;
    INSERT INTO {NAME}.uses VALUES (the_id, the_cache, now);
END $$;

CREATE FUNCTION {NAME}.nearest(the_cache text, the_scope bytea, wanted halfvec, count int)
RETURNS TABLE (key bytea, turn bytea, cosine float8) LANGUAGE plpgsql STABLE
SET hnsw.iterative_scan = strict_order SET hnsw.ef_search = 64 SET hnsw.max_scan_tuples = 200000
SET enable_sort = off AS $$
DECLARE dimensions int := vector_dims(wanted);
BEGIN
    IF (SELECT count(*) FROM (
        SELECT FROM {NAME}.entries e WHERE e.cache = the_cache AND e.scope = the_scope LIMIT {_EXACT + 1}
    ) few) <= {_EXACT} THEN
        RETURN QUERY SELECT e.key, e.turn, 1 - (e.near <=> wanted) FROM (
            SELECT s.key, s.turn, s.near FROM {NAME}.entries s
            WHERE s.cache = the_cache AND s.scope = the_scope AND vector_dims(s.near) = dimensions OFFSET 0
        ) e ORDER BY e.near <=> wanted LIMIT count;
    ELSE
        RETURN QUERY EXECUTE format(
            'SELECT e.key, e.turn, 1 - (e.near::halfvec(%1$s) <=> $3) FROM {NAME}.entries e'
            ' WHERE e.cache = $1 AND e.scope = $2 AND vector_dims(e.near) = %1$s'
            ' ORDER BY e.near::halfvec(%1$s) <=> $3 LIMIT $4', dimensions
        ) USING the_cache, the_scope, wanted, count;
    END IF;
END $$;
"""


def index(dimensions: int) -> str:
    """The statement that makes the index of embeddings of a length, if it is not there."""
    return (
        f"CREATE INDEX IF NOT EXISTS near_{dimensions} ON {NAME}.entries"
        f" USING hnsw ((near::halfvec({dimensions})) halfvec_cosine_ops) WITH (m = 16, ef_construction = 128)"
        f" WHERE vector_dims(near) = {dimensions}"
    )
