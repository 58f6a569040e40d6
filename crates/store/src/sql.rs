//! Every statement, once. The same text runs on both databases; a test prepares each of them.

macro_rules! statements {
    ($($(#[$doc:meta])* $name:ident = $sql:expr;)*) => {
        $($(#[$doc])* pub(crate) const $name: &str = $sql;)*

        /// Every statement, by name.
        #[cfg(test)]
        pub(crate) const ALL: &[(&str, &str)] = &[$((stringify!($name), $name),)*];
    };
}

/// The columns of a machine, in the order in which `record::machine` reads them.
macro_rules! machine_columns {
    () => {
        "m.key, m.project, m.id, m.created_at, m.host, m.template, m.size, m.internet, m.ttl_ms, \
         m.spec_idle_timeout_ms, m.metadata, m.env, m.state, m.ending_kind, m.ending_message, m.hard_deadline, \
         m.idle_timeout_ms, m.last_activity, m.running_at, m.ended_at, m.revision, m.egress, \
         m.forked_from, m.restored_from, m.on_idle, m.auto_resume"
    };
}

/// The columns of an API key, in the order in which `keys::key` reads them.
macro_rules! key_columns {
    () => {
        "k.id, k.project, k.name, k.role, k.prefix, k.secret_hash, k.created_at, k.last_used_at, k.revoked_at"
    };
}

/// The columns of a preview, in the order in which `previews::preview` reads them.
macro_rules! preview_columns {
    () => {
        "p.id, p.machine_key, p.port, p.token_hash, p.created_at, p.expires_at, p.revoked_at"
    };
}

/// The columns of a snapshot, in the order in which `snapshots::snapshot` reads them.
macro_rules! snapshot_columns {
    () => {
        "s.key, s.project, s.host, s.name, s.kind, s.saved, s.source, s.template, s.template_digest, s.size, s.egress, \
         s.env, s.bytes, s.created_at, s.expires_at, s.archived"
    };
}

statements! {
    HEALTH = "SELECT value FROM meta WHERE name = 'schema_version'";
    META_GET = "SELECT value FROM meta WHERE name = $1";
    META_PUT = "INSERT INTO meta (name, value) VALUES ($1, $2) \
                ON CONFLICT (name) DO UPDATE SET value = excluded.value";

    PROJECT_ENSURE = "INSERT INTO projects (id, created_at) VALUES ($1, $2) ON CONFLICT (id) DO NOTHING";
    PROJECT_GET = "SELECT id FROM projects WHERE id = $1";

    KEY_INSERT = "INSERT INTO api_keys (id, project, name, role, prefix, secret_hash, created_at) \
                  VALUES ($1, $2, $3, $4, $5, $6, $7)";
    KEY_BY_PREFIX = concat!("SELECT ", key_columns!(), " FROM api_keys k WHERE k.prefix = $1");
    KEY_BY_ID = concat!("SELECT ", key_columns!(), " FROM api_keys k WHERE k.id = $1");
    KEY_LIST = concat!("SELECT ", key_columns!(), " FROM api_keys k WHERE k.project = $1 \
                        AND (k.created_at, k.id) > ($2, $3) ORDER BY k.created_at, k.id LIMIT $4");
    KEY_REVOKE = "UPDATE api_keys SET revoked_at = $2 WHERE id = $1 AND revoked_at IS NULL";
    KEY_COUNT = "SELECT COUNT(*) FROM api_keys WHERE revoked_at IS NULL";
    KEY_TOUCH = "UPDATE api_keys SET last_used_at = $2 WHERE id = $1 AND (last_used_at IS NULL OR last_used_at < $3)";

    /// Takes the idempotency key, also when its former use has expired. No row: it is held.
    IDEMPOTENCY_CLAIM = "INSERT INTO idempotency (project, operation, key, body_hash, machine_key, created_at, expires_at) \
                         VALUES ($1, $2, $3, $4, $5, $6, $7) \
                         ON CONFLICT (project, operation, key) DO UPDATE SET body_hash = excluded.body_hash, \
                         machine_key = excluded.machine_key, created_at = excluded.created_at, \
                         expires_at = excluded.expires_at WHERE idempotency.expires_at <= excluded.created_at";
    /// The machine made under a key that has not expired, and the hash of the body it was made from.
    IDEMPOTENCY_GET = concat!("SELECT ", machine_columns!(), ", i.body_hash FROM idempotency i \
                               JOIN machines m ON m.key = i.machine_key \
                               WHERE i.project = $1 AND i.operation = $2 AND i.key = $3 AND i.expires_at > $4");

    /// Moves the slot's high-water mark forward, holding its row until the end of the transaction.
    SLOT_ADVANCE = "INSERT INTO slots (project, id, high_water) VALUES ($1, $2, $3) \
                    ON CONFLICT (project, id) DO UPDATE SET high_water = \
                    CASE WHEN slots.high_water >= excluded.high_water THEN slots.high_water + 1 \
                    ELSE excluded.high_water END RETURNING high_water";
    SLOT_SET = "UPDATE slots SET high_water = $3 WHERE project = $1 AND id = $2";
    SLOT_LIVING = "SELECT m.created_at FROM machines m \
                   WHERE m.project = $1 AND m.id = $2 AND m.state NOT IN ('stopped', 'failed')";

    MACHINE_INSERT = "INSERT INTO machines (key, project, id, created_at, host, template, size, internet, ttl_ms, \
                      spec_idle_timeout_ms, metadata, env, state, hard_deadline, idle_timeout_ms, last_activity, egress, \
                      forked_from, restored_from, on_idle, auto_resume, revision) \
                      VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, 1)";
    METADATA_INSERT = "INSERT INTO machine_metadata (machine_key, project, name, value, created_at) \
                       VALUES ($1, $2, $3, $4, $5)";
    MACHINE_BY_KEY = concat!("SELECT ", machine_columns!(), " FROM machines m WHERE m.key = $1");
    MACHINE_BY_GENERATION = concat!("SELECT ", machine_columns!(), " FROM machines m \
                                     WHERE m.project = $1 AND m.id = $2 AND m.created_at = $3");
    MACHINE_NEWEST = concat!("SELECT ", machine_columns!(), " FROM machines m \
                              WHERE m.project = $1 AND m.id = $2 ORDER BY m.created_at DESC LIMIT 1");
    MACHINE_LIVING = concat!("SELECT ", machine_columns!(), " FROM machines m \
                              WHERE m.host = $1 AND m.state NOT IN ('stopped', 'failed') AND m.key > $2 \
                              ORDER BY m.key LIMIT $3");
    MACHINE_UPDATE = "UPDATE machines SET state = $3, ending_kind = $4, ending_message = $5, hard_deadline = $6, \
                      idle_timeout_ms = $7, last_activity = $8, running_at = $9, ended_at = $10, internet = $11, egress = $12, on_idle = $13, auto_resume = $14, revision = revision + 1 \
                      WHERE key = $1 AND revision = $2";

    LIST_ALL = concat!("SELECT ", machine_columns!(), " FROM machines m \
                        WHERE m.project = $1 AND (m.created_at, m.key) < ($2, $3) \
                        ORDER BY m.created_at DESC, m.key DESC LIMIT $4");
    LIST_STATE = concat!("SELECT ", machine_columns!(), " FROM machines m \
                          WHERE m.project = $1 AND m.state = $2 AND (m.created_at, m.key) < ($3, $4) \
                          ORDER BY m.created_at DESC, m.key DESC LIMIT $5");
    LIST_METADATA = concat!("SELECT ", machine_columns!(), " FROM machine_metadata d \
                             JOIN machines m ON m.key = d.machine_key \
                             WHERE d.project = $1 AND d.name = $2 AND d.value = $3 \
                             AND (d.created_at, d.machine_key) < ($4, $5) \
                             ORDER BY d.created_at DESC, d.machine_key DESC LIMIT $6");
    /// How many machines carry a label, counted no further than a limit.
    METADATA_COUNT = "SELECT COUNT(*) FROM (SELECT 1 AS one FROM machine_metadata \
                      WHERE project = $1 AND name = $2 AND value = $3 LIMIT $4) AS probe";

    /// Holds the row of a running machine until the end of the transaction.
    MACHINE_HOLD_RUNNING = "UPDATE machines SET revision = revision WHERE key = $1 AND state = 'running'";
    PREVIEW_FORGET = "DELETE FROM previews WHERE machine_key = $1 AND expires_at <= $2";
    PREVIEW_BY_KEY = concat!("SELECT ", preview_columns!(), ", p.body_hash FROM previews p \
                              WHERE p.machine_key = $1 AND p.idempotency_key = $2");
    PREVIEW_COUNT_ACTIVE = "SELECT COUNT(*) FROM previews WHERE machine_key = $1 AND expires_at > $2 \
                            AND revoked_at IS NULL";
    PREVIEW_COUNT = "SELECT COUNT(*) FROM previews WHERE machine_key = $1";
    PREVIEW_INSERT = "INSERT INTO previews (id, machine_key, port, token_hash, idempotency_key, body_hash, created_at, \
                      expires_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8)";
    PREVIEW_GET = concat!("SELECT ", preview_columns!(), " FROM previews p WHERE p.machine_key = $1 AND p.id = $2");
    PREVIEW_LIST = concat!("SELECT ", preview_columns!(), " FROM previews p WHERE p.machine_key = $1 \
                            AND p.expires_at > $2 AND p.revoked_at IS NULL ORDER BY p.expires_at, p.id LIMIT $3");
    PREVIEW_REVOKE = "UPDATE previews SET revoked_at = $3 WHERE machine_key = $1 AND id = $2 AND revoked_at IS NULL";
    PREVIEW_RENEW = "UPDATE previews SET expires_at = CASE WHEN expires_at > $3 THEN expires_at ELSE $3 END \
                     WHERE machine_key = $1 AND id = $2 AND revoked_at IS NULL AND expires_at > $4";

    SECRET_COUNT_OTHERS = "SELECT COUNT(*) FROM machine_secrets WHERE machine_key = $1 AND name <> $2";
    SECRET_PUT = "INSERT INTO machine_secrets (machine_key, name, host, port, header, username, sealed, created_at, on_fork) \
                  VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) ON CONFLICT (machine_key, name) DO UPDATE SET \
                  host = excluded.host, port = excluded.port, header = excluded.header, username = excluded.username, \
                  sealed = excluded.sealed, created_at = excluded.created_at, on_fork = excluded.on_fork";
    SECRET_LIST = "SELECT s.name, s.host, s.port, s.header, s.username, s.sealed, s.created_at, s.on_fork FROM machine_secrets s \
                   WHERE s.machine_key = $1 ORDER BY s.name";
    SECRET_REMOVE = "DELETE FROM machine_secrets WHERE machine_key = $1 AND name = $2";
    SECRETS_FORGET = "DELETE FROM machine_secrets WHERE machine_key = $1";
    AUTHORITY_KEEP = "INSERT INTO machine_authorities (machine_key, sealed) VALUES ($1, $2) \
                      ON CONFLICT (machine_key) DO NOTHING";
    AUTHORITY_GET = "SELECT sealed FROM machine_authorities WHERE machine_key = $1";
    AUTHORITY_FORGET_UNUSED = "DELETE FROM machine_authorities WHERE machine_key = $1 AND NOT EXISTS \
                               (SELECT 1 FROM machine_secrets s WHERE s.machine_key = $1)";

    /// Holds the row of a project until the end of the transaction.
    PROJECT_HOLD = "UPDATE projects SET created_at = created_at WHERE id = $1";
    /// Frees an idempotency key that was kept for long enough.
    SNAPSHOT_FREE_KEY = "UPDATE snapshots SET idempotency_key = NULL, body_hash = NULL \
                         WHERE project = $1 AND idempotency_key = $2 AND created_at <= $3";
    SNAPSHOT_BY_IDEMPOTENCY = concat!("SELECT ", snapshot_columns!(), ", s.deleted_at, s.body_hash FROM snapshots s \
                                       WHERE s.project = $1 AND s.idempotency_key = $2 AND s.created_at > $3");
    SNAPSHOT_COUNT = "SELECT COUNT(*) FROM snapshots WHERE project = $1 AND deleted_at IS NULL \
                      AND (expires_at IS NULL OR expires_at > $2)";
    SNAPSHOT_INSERT = "INSERT INTO snapshots (key, project, host, name, kind, saved, source, template, template_digest, \
                       size, egress, env, bytes, created_at, expires_at, archived, idempotency_key, body_hash) \
                       VALUES ($1, $2, $3, $4, $5, 0, $6, $7, $8, $9, $10, $11, 0, $12, $13, 0, $14, $15)";
    SNAPSHOT_FINISH = "UPDATE snapshots SET saved = 1, bytes = $2 WHERE key = $1 AND deleted_at IS NULL";
    SNAPSHOT_ABANDON = "DELETE FROM snapshots WHERE key = $1 AND saved = 0";
    SNAPSHOT_BY_KEY = concat!("SELECT ", snapshot_columns!(), " FROM snapshots s \
                               WHERE s.key = $1 AND s.deleted_at IS NULL");
    SNAPSHOT_GET = concat!("SELECT ", snapshot_columns!(), " FROM snapshots s WHERE s.key = $1 AND s.project = $2 \
                            AND s.saved = 1 AND s.deleted_at IS NULL AND (s.expires_at IS NULL OR s.expires_at > $3)");
    SNAPSHOT_LIST = concat!("SELECT ", snapshot_columns!(), " FROM snapshots s \
                             WHERE s.project = $1 AND (s.created_at, s.key) < ($2, $3) \
                             AND s.saved = 1 AND s.deleted_at IS NULL AND (s.expires_at IS NULL OR s.expires_at > $4) \
                             ORDER BY s.created_at DESC, s.key DESC LIMIT $5");
    SNAPSHOT_UPDATE = "UPDATE snapshots SET name = $3, archived = $4 WHERE key = $1 AND project = $2 \
                       AND saved = 1 AND deleted_at IS NULL";
    SNAPSHOT_DELETE = "UPDATE snapshots SET deleted_at = $3, env = '{}' WHERE key = $1 AND project = $2 \
                       AND saved = 1 AND deleted_at IS NULL";
    /// Holds the row of a snapshot that can be restored until the end of the transaction.
    SNAPSHOT_HOLD = "UPDATE snapshots SET saved = 1 WHERE key = $1 AND saved = 1 AND deleted_at IS NULL \
                     AND (expires_at IS NULL OR expires_at > $2)";
    SNAPSHOT_OF_HOST = concat!("SELECT ", snapshot_columns!(), " FROM snapshots s WHERE s.host = $1 AND s.key > $2 \
                                AND s.deleted_at IS NULL ORDER BY s.key LIMIT $3");
    SNAPSHOT_EXPIRE = "UPDATE snapshots SET deleted_at = $1, env = '{}' WHERE key IN (SELECT key FROM snapshots \
                       WHERE expires_at IS NOT NULL AND expires_at <= $1 AND saved = 1 AND deleted_at IS NULL LIMIT $2)";

    SWEEP_SNAPSHOTS = "DELETE FROM snapshots WHERE key IN (SELECT key FROM snapshots \
                       WHERE deleted_at IS NOT NULL AND created_at <= $1 LIMIT $2)";
    SWEEP_IDEMPOTENCY = "DELETE FROM idempotency WHERE (project, operation, key) IN \
                         (SELECT project, operation, key FROM idempotency WHERE expires_at <= $1 LIMIT $2)";
    SWEEP_MACHINES = "DELETE FROM machines WHERE key IN (SELECT m.key FROM machines m \
                      WHERE m.state IN ('stopped', 'failed') AND m.ended_at <= $1 \
                      AND NOT EXISTS (SELECT 1 FROM idempotency i WHERE i.machine_key = m.key) LIMIT $2)";
    /// Forgets slots without machines. The highest mark among them must become the floor of new slots.
    SWEEP_SLOTS = "DELETE FROM slots WHERE (project, id) IN (SELECT s.project, s.id FROM slots s \
                   WHERE s.high_water <= $1 AND NOT EXISTS \
                   (SELECT 1 FROM machines m WHERE m.project = s.project AND m.id = s.id) LIMIT $2) \
                   RETURNING high_water";
}

#[cfg(test)]
mod tests {
    use sqlx::{AssertSqlSafe, Connection as _, Executor as _, Row as _, SqlSafeStr as _};

    use super::*;
    use crate::backend::Backend;
    use crate::schema;

    async fn empty_sqlite(folder: &tempfile::TempDir) -> sqlx::SqlitePool {
        let db = Backend::open_sqlite(&folder.path().join("a database?.sqlite")).await.expect("opens");
        schema::migrate(&db).await.expect("migrates");
        match db {
            Backend::Sqlite { writer, .. } => writer,
            Backend::Postgres(_) => unreachable!("opened as SQLite"),
        }
    }

    #[tokio::test]
    async fn every_statement_is_one_for_sqlite_and_walks_an_index() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let pool = empty_sqlite(&folder).await;
        for (name, sql) in ALL {
            pool.prepare(sql.into_sql_str()).await.unwrap_or_else(|e| panic!("{name}: {e}"));
            let plan = sqlx::query(AssertSqlSafe(format!("EXPLAIN QUERY PLAN {sql}")))
                .fetch_all(&pool)
                .await
                .unwrap_or_else(|e| panic!("{name}: {e}"));
            for step in plan {
                let step: String = step.get("detail");
                let whole_table = step.starts_with("SCAN") && !step.starts_with("SCAN probe");
                assert!(!whole_table || *name == "KEY_COUNT", "{name} reads a whole table: {step}");
                assert!(!step.contains("TEMP B-TREE"), "{name} sorts: {step}");
            }
        }
        pool.close().await;
    }

    #[tokio::test]
    async fn every_statement_is_one_for_postgres() {
        // Without a server there is the other half: the texts are the same, and the one above prepared them all.
        let Ok(server) = std::env::var("MAINBRELLA_TEST_POSTGRES") else { return };
        let name = format!("mb_{}", uuid::Uuid::now_v7().simple());
        let mut admin = sqlx::PgConnection::connect(&server).await.expect("server answers");
        admin.execute(AssertSqlSafe(format!("CREATE DATABASE {name}"))).await.expect("made");
        let db = Backend::open(&server.replacen("/postgres?", &format!("/{name}?"), 1)).await.expect("opens");
        schema::migrate(&db).await.expect("migrates");
        let Backend::Postgres(pool) = &db else { unreachable!("opened as PostgreSQL") };
        for (name, sql) in ALL {
            pool.prepare(sql.into_sql_str()).await.unwrap_or_else(|e| panic!("{name}: {e}"));
        }
        db.close().await;
        admin.execute(AssertSqlSafe(format!("DROP DATABASE {name}"))).await.expect("removed");
    }
}
