-- Files and batches, in what SQLite and PostgreSQL have in common. Older folders lack the last two tables.
CREATE TABLE IF NOT EXISTS files (
    n {serial},
    id text NOT NULL UNIQUE,
    tenant text NOT NULL,
    bytes bigint NOT NULL,
    purpose text NOT NULL,
    expires_at bigint,
    object {blob} NOT NULL                -- JSON of FileObject
);
CREATE INDEX IF NOT EXISTS files_of ON files (tenant, n);
CREATE TABLE IF NOT EXISTS batches (
    n {serial},
    id text NOT NULL UNIQUE,
    tenant text NOT NULL,
    status text NOT NULL,
    completed bigint NOT NULL DEFAULT 0,    -- answers so far
    failed bigint NOT NULL DEFAULT 0,
    output_expires_s bigint,
    object {blob} NOT NULL                -- JSON of BatchObject
);
CREATE INDEX IF NOT EXISTS batches_of ON batches (tenant, n);
CREATE TABLE IF NOT EXISTS answers (
    batch text NOT NULL,
    line bigint NOT NULL,                   -- of the input file, from 0
    failed bigint NOT NULL,
    text {blob} NOT NULL,                 -- line of the output or error file, without its end
    PRIMARY KEY (batch, line)
);
CREATE TABLE IF NOT EXISTS claims (         -- the gateway that runs a batch
    batch text PRIMARY KEY,
    run bigint NOT NULL,                    -- number of the claim, without which nothing of the batch is changed
    until double precision NOT NULL
);
CREATE TABLE IF NOT EXISTS losses (
    batch text NOT NULL,
    line bigint NOT NULL,
    times bigint NOT NULL,                  -- that a server was lost while it worked on the line
    PRIMARY KEY (batch, line)
);
