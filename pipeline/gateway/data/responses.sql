-- Stored responses, in what SQLite and PostgreSQL have in common.
CREATE TABLE responses (
    n {serial},
    tenant text NOT NULL,
    id text NOT NULL,
    previous text,                          -- id of the response that it continues
    response {blob} NOT NULL,
    input {blob} NOT NULL,
    size bigint NOT NULL,
    used double precision NOT NULL,
    UNIQUE (tenant, id)
);
CREATE INDEX responses_of ON responses (tenant, used);
CREATE INDEX responses_used ON responses (used);
