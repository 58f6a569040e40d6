//! The two databases behind one small set of verbs.

use std::path::{Path, PathBuf};
use std::str::FromStr as _;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgPoolOptions, PgRow};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteRow, SqliteSynchronous};
use sqlx::{AssertSqlSafe, Connection as _, PgPool, Postgres, Row as _, Sqlite, SqlitePool, Transaction};

use crate::error::{Result, StoreError};

/// Reading connections of a SQLite database.
const SQLITE_READERS: u32 = 4;
/// Connections to a PostgreSQL server.
const POSTGRES_CONNECTIONS: u32 = 16;
/// How long a call waits for a connection, or for another process's write lock.
const WAIT: Duration = Duration::from_secs(10);
/// The write-ahead log is cut back to this many bytes when it has been larger.
const WAL_LIMIT: u64 = 64 * 1024 * 1024;
/// Any number no other program is likely to use for its advisory lock: "mainbrel" in ASCII.
const SCHEMA_LOCK: i64 = 0x6d61_696e_6272_656c;

/// Which database it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Sqlite,
    Postgres,
}

/// An open database. SQLite has one writing connection, so writers queue here and not in SQLite's busy loop.
#[derive(Clone, Debug)]
pub(crate) enum Backend {
    Sqlite { readers: SqlitePool, writer: SqlitePool },
    Postgres(PgPool),
}

/// A value bound to a placeholder.
#[derive(Clone, Debug)]
pub(crate) enum Arg {
    Int(i64),
    MaybeInt(Option<i64>),
    Text(String),
    MaybeText(Option<String>),
    Bytes(Vec<u8>),
    MaybeBytes(Option<Vec<u8>>),
}

impl Arg {
    pub(crate) fn text(s: impl AsRef<str>) -> Self {
        Self::Text(s.as_ref().to_owned())
    }
}

macro_rules! bound {
    ($sql:expr, $args:expr) => {{
        let mut query = sqlx::query($sql);
        for arg in $args {
            query = match arg {
                Arg::Int(v) => query.bind(*v),
                Arg::MaybeInt(v) => query.bind(*v),
                Arg::Text(v) => query.bind(v.clone()),
                Arg::MaybeText(v) => query.bind(v.clone()),
                Arg::Bytes(v) => query.bind(v.clone()),
                Arg::MaybeBytes(v) => query.bind(v.clone()),
            };
        }
        query
    }};
}

/// A row of either database.
pub(crate) enum Row {
    Sqlite(SqliteRow),
    Postgres(PgRow),
}

macro_rules! getter {
    ($name:ident, $type:ty) => {
        pub(crate) fn $name(&self, column: usize) -> Result<$type> {
            match self {
                Self::Sqlite(row) => row.try_get(column),
                Self::Postgres(row) => row.try_get(column),
            }
            .map_err(StoreError::from_sqlx)
        }
    };
}

impl Row {
    getter!(int, i64);
    getter!(maybe_int, Option<i64>);
    getter!(text, String);
    getter!(maybe_text, Option<String>);
    getter!(bytes, Vec<u8>);
}

impl Backend {
    /// Opens `location`: `postgres://…`, `sqlite:PATH`, or a path.
    pub(crate) async fn open(location: &str) -> Result<Self> {
        if location.starts_with("postgres://") || location.starts_with("postgresql://") {
            return Self::open_postgres(location).await;
        }
        let path = location.strip_prefix("sqlite://").or_else(|| location.strip_prefix("sqlite:")).unwrap_or(location);
        Self::open_sqlite(Path::new(path)).await
    }

    pub(crate) async fn open_sqlite(path: &Path) -> Result<Self> {
        let owned = path.to_owned();
        match tokio::task::spawn_blocking(move || private_file(owned)).await {
            Ok(done) => done.map_err(|e| StoreError::Unusable(e.into()))?,
            Err(panicked) => return Err(StoreError::Internal(panicked.into())),
        }
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .foreign_keys(true)
            .busy_timeout(WAIT)
            .pragma("journal_size_limit", WAL_LIMIT.to_string())
            .pragma("trusted_schema", "OFF")
            .statement_cache_capacity(128);
        let writer = SqlitePoolOptions::new()
            .max_connections(1)
            .acquire_timeout(WAIT)
            .idle_timeout(None)
            .max_lifetime(None)
            .test_before_acquire(false)
            .after_release(|connection, _| {
                Box::pin(async move {
                    // A queued rollback runs before the ping is answered. A connection that still counts itself in a
                    // transaction lost it to an automatic rollback (full disk, I/O error): it is replaced.
                    connection.ping().await?;
                    Ok(!connection.is_in_transaction())
                })
            })
            .connect_with(options.clone())
            .await
            .map_err(StoreError::from_sqlx)?;
        let readers = SqlitePoolOptions::new()
            .max_connections(SQLITE_READERS)
            .acquire_timeout(WAIT)
            .idle_timeout(None)
            .max_lifetime(None)
            .test_before_acquire(false)
            .connect_with(options.pragma("query_only", "ON"))
            .await
            .map_err(StoreError::from_sqlx)?;
        Ok(Self::Sqlite { readers, writer })
    }

    async fn open_postgres(url: &str) -> Result<Self> {
        let options = PgConnectOptions::from_str(url)
            .map_err(StoreError::from_sqlx)?
            .application_name("mainbrella")
            .statement_cache_capacity(128)
            .options([
                ("statement_timeout", "30000"),
                ("lock_timeout", "10000"),
                ("idle_in_transaction_session_timeout", "30000"),
                ("synchronous_commit", "on"),
                ("default_transaction_isolation", "read committed"),
            ]);
        let pool = PgPoolOptions::new()
            .max_connections(POSTGRES_CONNECTIONS)
            .acquire_timeout(WAIT)
            .connect_with(options)
            .await
            .map_err(StoreError::from_sqlx)?;
        Ok(Self::Postgres(pool))
    }

    pub(crate) fn kind(&self) -> Kind {
        match self {
            Self::Sqlite { .. } => Kind::Sqlite,
            Self::Postgres(_) => Kind::Postgres,
        }
    }

    pub(crate) async fn close(&self) {
        match self {
            Self::Sqlite { readers, writer } => {
                // The writer last: it folds the write-ahead log into the file.
                readers.close().await;
                writer.close().await;
            }
            Self::Postgres(pool) => pool.close().await,
        }
    }

    /// Starts a writing transaction. Dropped without commit, it is rolled back.
    pub(crate) async fn begin(&self) -> Result<Tx> {
        match self {
            Self::Sqlite { writer, .. } => writer.begin_with("BEGIN IMMEDIATE").await.map(Tx::Sqlite),
            Self::Postgres(pool) => pool.begin().await.map(Tx::Postgres),
        }
        .map_err(StoreError::from_sqlx)
    }

    /// Reads at most one row, outside any transaction.
    pub(crate) async fn fetch_optional(&self, sql: &'static str, args: &[Arg]) -> Result<Option<Row>> {
        match self {
            Self::Sqlite { readers, .. } => bound!(sql, args).fetch_optional(readers).await.map(|r| r.map(Row::Sqlite)),
            Self::Postgres(pool) => bound!(sql, args).fetch_optional(pool).await.map(|r| r.map(Row::Postgres)),
        }
        .map_err(StoreError::from_sqlx)
    }

    /// Reads all rows, outside any transaction. The statement bounds their number.
    pub(crate) async fn fetch_all(&self, sql: &'static str, args: &[Arg]) -> Result<Vec<Row>> {
        match self {
            Self::Sqlite { readers, .. } => {
                bound!(sql, args).fetch_all(readers).await.map(|r| r.into_iter().map(Row::Sqlite).collect())
            }
            Self::Postgres(pool) => {
                bound!(sql, args).fetch_all(pool).await.map(|r| r.into_iter().map(Row::Postgres).collect())
            }
        }
        .map_err(StoreError::from_sqlx)
    }

    /// Runs one writing statement as its own transaction; the number of rows it touched.
    pub(crate) async fn execute(&self, sql: &'static str, args: &[Arg]) -> Result<u64> {
        let mut tx = self.begin().await?;
        match tx.execute(sql, args).await {
            Ok(0) => tx.rollback().await.map(|()| 0),
            Ok(rows) => tx.commit().await.map(|()| rows),
            Err(e) => Err(e),
        }
    }
}

/// A writing transaction.
pub(crate) enum Tx {
    Sqlite(Transaction<'static, Sqlite>),
    Postgres(Transaction<'static, Postgres>),
}

impl Tx {
    pub(crate) async fn fetch_optional(&mut self, sql: &'static str, args: &[Arg]) -> Result<Option<Row>> {
        match self {
            Self::Sqlite(tx) => bound!(sql, args).fetch_optional(&mut **tx).await.map(|r| r.map(Row::Sqlite)),
            Self::Postgres(tx) => bound!(sql, args).fetch_optional(&mut **tx).await.map(|r| r.map(Row::Postgres)),
        }
        .map_err(StoreError::from_sqlx)
    }

    pub(crate) async fn fetch_all(&mut self, sql: &'static str, args: &[Arg]) -> Result<Vec<Row>> {
        match self {
            Self::Sqlite(tx) => {
                bound!(sql, args).fetch_all(&mut **tx).await.map(|r| r.into_iter().map(Row::Sqlite).collect())
            }
            Self::Postgres(tx) => {
                bound!(sql, args).fetch_all(&mut **tx).await.map(|r| r.into_iter().map(Row::Postgres).collect())
            }
        }
        .map_err(StoreError::from_sqlx)
    }

    pub(crate) async fn execute(&mut self, sql: &'static str, args: &[Arg]) -> Result<u64> {
        match self {
            Self::Sqlite(tx) => bound!(sql, args).execute(&mut **tx).await.map(|r| r.rows_affected()),
            Self::Postgres(tx) => bound!(sql, args).execute(&mut **tx).await.map(|r| r.rows_affected()),
        }
        .map_err(StoreError::from_sqlx)
    }

    /// Runs several statements of the schema, which are part of this binary.
    pub(crate) async fn script(&mut self, text: String) -> Result<()> {
        let script = sqlx::raw_sql(AssertSqlSafe(text));
        match self {
            Self::Sqlite(tx) => script.execute(&mut **tx).await.map(drop),
            Self::Postgres(tx) => script.execute(&mut **tx).await.map(drop),
        }
        .map_err(StoreError::from_sqlx)
    }

    /// Lets one process at a time look at and change the schema; held until the end of the transaction.
    pub(crate) async fn lock_schema(&mut self) -> Result<()> {
        match self {
            Self::Sqlite(_) => Ok(()),
            Self::Postgres(tx) => sqlx::query("SELECT pg_advisory_xact_lock($1)")
                .bind(SCHEMA_LOCK)
                .execute(&mut **tx)
                .await
                .map(drop)
                .map_err(StoreError::from_sqlx),
        }
    }

    pub(crate) async fn commit(self) -> Result<()> {
        match self {
            Self::Sqlite(tx) => tx.commit().await,
            Self::Postgres(tx) => tx.commit().await,
        }
        .map_err(StoreError::from_commit)
    }

    pub(crate) async fn rollback(self) -> Result<()> {
        match self {
            Self::Sqlite(tx) => tx.rollback().await,
            Self::Postgres(tx) => tx.rollback().await,
        }
        .map_err(StoreError::from_sqlx)
    }
}

/// Makes the database file readable by its owner only, before anything is written to it. SQLite gives its log and
/// index files the same mode.
fn private_file(path: PathBuf) -> std::io::Result<()> {
    use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
    let file = std::fs::OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(&path)?;
    let mode = file.metadata()?.permissions().mode();
    if mode & 0o077 != 0 {
        file.set_permissions(std::fs::Permissions::from_mode(0o600))?;
    }
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::File::open(parent)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Store, StoreError};
    use mainbrella_types::{Millis, ProjectId};

    #[tokio::test]
    async fn a_full_disk_is_said_and_changes_nothing_and_writing_goes_on_when_there_is_room() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let store = Store::open_sqlite(&folder.path().join("db"), Millis(0)).await.expect("opens");
        let Backend::Sqlite { writer, .. } = &store.db else { unreachable!("opened as SQLite") };
        let project = |n: usize| -> ProjectId { format!("{n:063}").parse().expect("valid") };
        for round in 0..3 {
            // SQLite answers a write that needs more pages than this as it answers a disk without room.
            sqlx::query("PRAGMA max_page_count = 1").execute(writer).await.expect("set");
            let mut kept = 0;
            let error = loop {
                match store.ensure_project(&project(round * 100_000 + kept), Millis(0)).await {
                    Ok(()) => kept += 1,
                    Err(error) => break error,
                }
                assert!(kept < 10_000, "never full");
            };
            assert!(matches!(error, StoreError::Full(_)) && !error.retryable(), "{error:?}");
            store.health().await.expect("reads go on");
            sqlx::query("PRAGMA max_page_count = 1000000").execute(writer).await.expect("set");
            store.ensure_project(&project(round * 100_000 + kept), Millis(0)).await.expect("writes go on");
        }
        store.close().await;
    }
}
