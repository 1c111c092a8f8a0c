-- Bytes of files, where there is no folder for them.
CREATE TABLE contents (
    file text NOT NULL,
    part bigint NOT NULL,                   -- from 0; all but the last have the same size
    written double precision NOT NULL,
    bytes {blob} NOT NULL,
    PRIMARY KEY (file, part)
);
