-- Entries of a cache in one file, and their totals, which triggers keep.
CREATE TABLE entries (
    id INTEGER PRIMARY KEY AUTOINCREMENT,   -- rises with every put: indexes read on from the last they saw
    key BLOB NOT NULL UNIQUE,
    scope BLOB NOT NULL,
    engine BLOB NOT NULL,
    tenant BLOB NOT NULL,
    turn BLOB NOT NULL,
    answer BLOB NOT NULL,
    vector BLOB,                            -- float16, or nothing
    created REAL NOT NULL,
    expires REAL NOT NULL,
    used REAL NOT NULL,
    bytes INTEGER NOT NULL
);
CREATE INDEX by_use ON entries (used);
CREATE INDEX by_scope ON entries (scope);
CREATE TABLE totals (
    entries INTEGER NOT NULL, bytes INTEGER NOT NULL, vectors INTEGER NOT NULL,
    removals INTEGER NOT NULL               -- rises with every entry that goes, or is replaced
);
INSERT INTO totals VALUES (0, 0, 0, 0);
CREATE TRIGGER come AFTER INSERT ON entries BEGIN
    UPDATE totals SET entries = entries + 1, bytes = bytes + new.bytes, vectors = vectors + (new.vector IS NOT NULL);
END;
CREATE TRIGGER gone AFTER DELETE ON entries BEGIN
    UPDATE totals SET entries = entries - 1, bytes = bytes - old.bytes, vectors = vectors - (old.vector IS NOT NULL),
        removals = removals + 1;
END;
