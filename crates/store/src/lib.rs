//! Durable state: machines, idempotency, keys. SQLite and PostgreSQL behind one set of statements.
//!
//! A call that returned has been written to the disk. Every write is one transaction; a future dropped before its end
//! leaves the transaction undone or done, never half. The crate has no clock: instants enter as arguments.

mod backend;
mod error;
mod keys;
mod list;
mod machines;
mod previews;
mod record;
mod schema;
mod secrets;
mod snapshots;
mod sql;
mod sweep;

use std::path::Path;
use std::time::Duration;

use mainbrella_types::{Millis, ProjectId};

pub use error::{Cause, Result, StoreError};
pub use keys::{ApiKey, KEY_ID_MAX, KeyPage, KeyRole, LAST_USED_STEP_MS, NewApiKey};
pub use list::{Cursor, ListQuery, Page};
pub use machines::{Applied, BeginCreate, BeginFork, Idempotency, MachineChange, NewMachine, Refusal};
pub use previews::{BeginPreview, PreviewRecord};
pub use secrets::{NewSecrets, PutSecret, SecretRecord};
pub use snapshots::{BeginSave, SnapshotChange, SnapshotCursor, SnapshotPage, SnapshotQuery};
pub use sweep::Swept;

use backend::Backend;

/// How long a health check waits for the database.
const HEALTH_WAIT: Duration = Duration::from_secs(2);

/// The durable state of a service. Clones share the connections.
#[derive(Clone, Debug)]
pub struct Store {
    db: Backend,
}

impl Store {
    /// Opens the database at `location` and brings its schema up to date. `postgres://…` is a PostgreSQL server;
    /// `sqlite:PATH` or a plain path is a SQLite file, made (mode 0600) when it is missing.
    ///
    /// # Errors
    /// [`StoreError::Unusable`], [`StoreError::SchemaTooNew`], [`StoreError::Corrupt`], or what befell the database.
    pub async fn open(location: &str, now: Millis) -> Result<Self> {
        Self::ready(Backend::open(location).await?, now).await
    }

    /// Opens the SQLite file `path`, which may have any name; as [`Self::open`] otherwise.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn open_sqlite(path: &Path, now: Millis) -> Result<Self> {
        Self::ready(Backend::open_sqlite(path).await?, now).await
    }

    async fn ready(db: Backend, now: Millis) -> Result<Self> {
        schema::migrate(&db).await?;
        let store = Self { db };
        store.ensure_project(&ProjectId::default_project(), now).await?;
        Ok(store)
    }

    /// Whether the database answers within two seconds, with the schema this binary brought it to.
    ///
    /// # Errors
    /// What is wrong with it.
    pub async fn health(&self) -> Result<()> {
        let row = match tokio::time::timeout(HEALTH_WAIT, self.db.fetch_optional(sql::HEALTH, &[])).await {
            Ok(row) => row?,
            Err(late) => return Err(StoreError::Unavailable(late.into())),
        };
        let found = schema::parse_version(&row.ok_or(StoreError::corrupt("no schema version"))?.text(0)?)?;
        if found > schema::NEWEST {
            return Err(StoreError::SchemaTooNew { found, supported: schema::NEWEST });
        }
        Ok(())
    }

    /// Waits for calls under way and closes the connections of all clones. Later calls fail with
    /// [`StoreError::Closed`].
    pub async fn close(&self) {
        self.db.close().await;
    }
}
