-- Credentials that a machine's gateway adds to requests, and the key of the authority it shows itself with. Both only sealed.
CREATE TABLE machine_authorities (
    machine_key :text PRIMARY KEY REFERENCES machines (key) ON DELETE CASCADE,
    sealed :blob NOT NULL
) :strict;
CREATE TABLE machine_secrets (
    machine_key :text NOT NULL REFERENCES machines (key) ON DELETE CASCADE,
    name :text NOT NULL,
    host :text NOT NULL,
    port :int NOT NULL,
    header :text,
    username :text,
    sealed :blob NOT NULL,
    created_at :int NOT NULL,
    PRIMARY KEY (machine_key, name),
    CHECK ((header IS NULL) <> (username IS NULL))
) :strict;
