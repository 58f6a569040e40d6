-- The snapshot a machine starts from, by its key; NULL for those made from a template. Snapshots may be gone before their machines.
ALTER TABLE machines ADD COLUMN restored_from :text;
-- What was saved of machines. A row with saved = 0 is an intent: what is on the host for it is removed after a crash. A row with
-- deleted_at only remembers its idempotency key.
CREATE TABLE snapshots (
    key :text PRIMARY KEY,
    project :text NOT NULL REFERENCES projects (id),
    host :text NOT NULL,
    name :text NOT NULL,
    kind :text NOT NULL,
    saved :int NOT NULL,
    source :text NOT NULL,
    template :text NOT NULL,
    template_digest :text NOT NULL,
    size :text NOT NULL,
    egress :text NOT NULL,
    env :text NOT NULL,
    bytes :int NOT NULL,
    created_at :int NOT NULL,
    expires_at :int,
    archived :int NOT NULL,
    deleted_at :int,
    idempotency_key :text,
    body_hash :blob,
    CHECK ((idempotency_key IS NULL) = (body_hash IS NULL))
) :strict;
CREATE UNIQUE INDEX snapshots_idempotency ON snapshots (project, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX snapshots_list ON snapshots (project, created_at, key);
CREATE INDEX snapshots_host ON snapshots (host, key);
CREATE INDEX snapshots_expiry ON snapshots (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX snapshots_deleted ON snapshots (created_at) WHERE deleted_at IS NOT NULL;
