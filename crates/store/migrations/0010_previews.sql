-- Rights to reach ports of machines. Of the secret in a URL only its SHA-256 is kept.
CREATE TABLE previews (
    id :text PRIMARY KEY,
    machine_key :text NOT NULL REFERENCES machines (key) ON DELETE CASCADE,
    port :int NOT NULL,
    token_hash :blob NOT NULL UNIQUE,
    idempotency_key :text,
    body_hash :blob,
    created_at :int NOT NULL,
    expires_at :int NOT NULL,
    revoked_at :int,
    CHECK ((idempotency_key IS NULL) = (body_hash IS NULL))
) :strict;
CREATE UNIQUE INDEX previews_idempotency ON previews (machine_key, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX previews_machine ON previews (machine_key, expires_at, id);
