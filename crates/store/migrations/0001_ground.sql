-- Owners of machines and keys.
CREATE TABLE projects (
    id :text PRIMARY KEY,
    created_at :int NOT NULL
) :strict;

-- Secrets are kept as their SHA-256 only.
CREATE TABLE api_keys (
    id :text PRIMARY KEY,
    project :text NOT NULL REFERENCES projects (id),
    name :text NOT NULL,
    role :text NOT NULL CHECK (role IN ('admin', 'user')),
    prefix :text NOT NULL UNIQUE,
    secret_hash :blob NOT NULL,
    created_at :int NOT NULL,
    last_used_at :int,
    revoked_at :int
) :strict;
CREATE INDEX api_keys_list ON api_keys (project, created_at, id);

-- The last creation instant given out in each slot; outlives the machines of the slot.
CREATE TABLE slots (
    project :text NOT NULL REFERENCES projects (id),
    id :text NOT NULL,
    high_water :int NOT NULL,
    PRIMARY KEY (project, id)
) :strict;
CREATE INDEX slots_sweep ON slots (high_water);

-- One row a generation.
CREATE TABLE machines (
    key :text PRIMARY KEY,
    project :text NOT NULL REFERENCES projects (id),
    id :text NOT NULL,
    created_at :int NOT NULL,
    host :text NOT NULL,
    template :text NOT NULL,
    size :text NOT NULL,
    internet :int NOT NULL CHECK (internet IN (0, 1)),
    ttl_ms :int NOT NULL,
    spec_idle_timeout_ms :int,
    metadata :text NOT NULL,
    env :text NOT NULL,
    state :text NOT NULL,
    ending_kind :text,
    ending_message :text,
    hard_deadline :int NOT NULL,
    idle_timeout_ms :int,
    last_activity :int NOT NULL,
    running_at :int,
    ended_at :int,
    revision :int NOT NULL,
    CHECK ((ending_kind IS NULL) = (ending_message IS NULL)),
    CHECK (state NOT IN ('stopped', 'failed') OR (ended_at IS NOT NULL AND ending_kind IS NOT NULL))
) :strict;
CREATE UNIQUE INDEX machines_generation ON machines (project, id, created_at);
CREATE UNIQUE INDEX machines_slot_living ON machines (project, id) WHERE state NOT IN ('stopped', 'failed');
CREATE INDEX machines_host_living ON machines (host, key) WHERE state NOT IN ('stopped', 'failed');
CREATE INDEX machines_list ON machines (project, created_at, key);
CREATE INDEX machines_list_state ON machines (project, state, created_at, key);
CREATE INDEX machines_finished ON machines (ended_at) WHERE state IN ('stopped', 'failed');

-- The labels of machines, for filtered lists.
CREATE TABLE machine_metadata (
    machine_key :text NOT NULL REFERENCES machines (key) ON DELETE CASCADE,
    project :text NOT NULL,
    name :text NOT NULL,
    value :text NOT NULL,
    created_at :int NOT NULL,
    PRIMARY KEY (machine_key, name)
) :strict;
CREATE INDEX machine_metadata_list ON machine_metadata (project, name, value, created_at, machine_key);

-- Which machine a key of the caller stands for.
CREATE TABLE idempotency (
    project :text NOT NULL REFERENCES projects (id),
    operation :text NOT NULL,
    key :text NOT NULL,
    body_hash :blob NOT NULL,
    machine_key :text NOT NULL REFERENCES machines (key) DEFERRABLE INITIALLY DEFERRED,
    created_at :int NOT NULL,
    expires_at :int NOT NULL,
    PRIMARY KEY (project, operation, key)
) :strict;
CREATE INDEX idempotency_expiry ON idempotency (expires_at);
CREATE INDEX idempotency_machine ON idempotency (machine_key);
