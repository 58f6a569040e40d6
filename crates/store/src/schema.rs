//! The versions of the schema, and the walk from the one found to the newest.

use crate::backend::{Arg, Backend, Kind};
use crate::error::{Result, StoreError};
use crate::sql;

/// Every version in order; the first is version 1. A released text never changes: add another one.
///
/// One text serves both databases: `:text`, `:int`, `:blob` stand for their column types (text compares byte by
/// byte), `:strict` for what makes SQLite hold to the types.
const VERSIONS: &[&str] = &[
    include_str!("../migrations/0001_ground.sql"),
    include_str!("../migrations/0010_previews.sql"),
    include_str!("../migrations/0020_egress.sql"),
    include_str!("../migrations/0030_secrets.sql"),
    include_str!("../migrations/0040_forks.sql"),
    include_str!("../migrations/0050_snapshots.sql"),
    include_str!("../migrations/0060_idle.sql"),
    include_str!("../migrations/0070_secret_on_fork.sql"),
];

/// The newest version this binary knows.
pub(crate) const NEWEST: i64 = VERSIONS.len() as i64;

const META: &str = "CREATE TABLE IF NOT EXISTS meta (name :text PRIMARY KEY, value :text NOT NULL) :strict";

fn render(text: &str, kind: Kind) -> String {
    let (t, i, b, strict) = match kind {
        Kind::Sqlite => ("TEXT", "INTEGER", "BLOB", "STRICT"),
        Kind::Postgres => ("TEXT COLLATE \"C\"", "BIGINT", "BYTEA", ""),
    };
    text.replace(":text", t).replace(":int", i).replace(":blob", b).replace(":strict", strict)
}

/// Brings the database to the newest version, in one transaction.
pub(crate) async fn migrate(db: &Backend) -> Result<()> {
    let mut tx = db.begin().await?;
    tx.lock_schema().await?;
    tx.script(render(META, db.kind())).await?;
    let found = match tx.fetch_optional(sql::HEALTH, &[]).await? {
        Some(row) => parse_version(&row.text(0)?)?,
        None => 0,
    };
    if found > NEWEST {
        tx.rollback().await?;
        return Err(StoreError::SchemaTooNew { found, supported: NEWEST });
    }
    if found == NEWEST {
        return tx.rollback().await;
    }
    for version in found..NEWEST {
        // The range starts at zero or above and ends within the list.
        let text = usize::try_from(version).ok().and_then(|v| VERSIONS.get(v)).copied().unwrap_or_default();
        tx.script(render(text, db.kind())).await?;
    }
    tx.execute(sql::META_PUT, &[Arg::text("schema_version"), Arg::Text(NEWEST.to_string())]).await?;
    tx.commit().await?;
    tracing::info!(from = found, to = NEWEST, "database schema brought up to date");
    Ok(())
}

pub(crate) fn parse_version(text: &str) -> Result<i64> {
    match text.parse() {
        Ok(v) if v >= 1 => Ok(v),
        _ => Err(StoreError::corrupt("schema version is not a number")),
    }
}

#[cfg(test)]
mod tests {
    use mainbrella_types::{EgressPolicy, GenerationKey, MachineSpec, Millis, ProjectId, SizeClass};

    use crate::backend::Backend;
    use crate::{BeginCreate, NewMachine, Store};

    async fn sql(store: &Store, text: &'static str) {
        let Backend::Sqlite { writer, .. } = &store.db else { unreachable!("opened as SQLite") };
        sqlx::raw_sql(text).execute(writer).await.expect(text);
    }

    #[tokio::test]
    async fn records_from_before_there_were_egress_policies_are_understood() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("db");
        let store = Store::open_sqlite(&path, Millis(0)).await.expect("opens");
        let mut made = Vec::new();
        for egress in [EgressPolicy::Off, EgressPolicy::Open] {
            let new = NewMachine {
                key: GenerationKey::new(uuid::Uuid::now_v7()),
                project: ProjectId::default_project(),
                slot: None,
                host: "here".into(),
                spec: MachineSpec {
                    template: "python".parse().expect("valid"),
                    size: SizeClass::Small,
                    egress,
                    ttl_ms: 60_000,
                    idle_timeout_ms: None,
                    on_idle: Default::default(),
                    auto_resume: false,
                    metadata: Default::default(),
                    env: Default::default(),
                },
                forked_from: None,
                restored_from: None,
                unlisted: false,
                now: Millis(10),
            };
            let Ok(BeginCreate::Fresh(record)) = store.begin_create(new, None).await else { panic!("not fresh") };
            made.push(record);
        }
        // As version 2 left it.
        sql(
            &store,
            "DROP TABLE snapshots; DROP TABLE machine_secrets; DROP TABLE machine_authorities; ALTER TABLE machines DROP COLUMN restored_from; ALTER TABLE machines DROP COLUMN on_idle; ALTER TABLE machines DROP COLUMN auto_resume; ALTER TABLE machines DROP COLUMN forked_from; ALTER TABLE machines DROP COLUMN egress; UPDATE meta SET value = '2' WHERE name = 'schema_version'",
        )
        .await;
        store.close().await;
        let store = Store::open_sqlite(&path, Millis(0)).await.expect("opens");
        for record in &made {
            assert_eq!(store.machine_by_key(&record.key).await.expect("read").as_ref(), Some(record));
        }
        // What this version does not understand lets nothing through, and keeps nobody from reading the rest.
        sql(&store, "UPDATE machines SET egress = 'allow-list ~never a rule~'").await;
        for record in &made {
            let read = store.machine_by_key(&record.key).await.expect("read").expect("there");
            let nothing = EgressPolicy::AllowList(Default::default());
            let expected = if record.spec.egress == EgressPolicy::Off { EgressPolicy::Off } else { nothing };
            assert_eq!(read.spec.egress, expected);
        }
        assert_eq!(store.living("here").await.expect("read").len(), 2);
        store.close().await;
    }
}
