//! What can go wrong with durable state, sorted by what the reader does next.

use mainbrella_types::IdError;

/// A failed call to the store. Its text is for the log of the service, never for an API caller.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The database did not answer in time or could not be reached. Nothing was changed.
    #[error("the database is not available now; nothing was changed")]
    Unavailable(#[source] Cause),
    /// The connection was lost while a commit was on its way: the write may or may not have happened.
    #[error("the outcome of a commit is not known; read the record again before repeating")]
    Uncertain(#[source] Cause),
    /// There is no room left on the disk of the database. Nothing was changed.
    #[error("the disk of the database is full; free space and repeat")]
    Full(#[source] Cause),
    /// The database does not hold what it must hold.
    #[error("the database is damaged or was changed by something else; restore a backup")]
    Corrupt(#[source] Cause),
    /// The database was written by a newer version of the service.
    #[error("the database has schema version {found}, this binary knows up to {supported}; start a newer binary")]
    SchemaTooNew {
        /// The version in the database.
        found: i64,
        /// The newest version this binary knows.
        supported: i64,
    },
    /// The database cannot be opened or written: a wrong path or URL, or missing permission.
    #[error("the database cannot be opened; check its path or URL and the permissions")]
    Unusable(#[source] Cause),
    /// The project that was named does not exist.
    #[error("the project does not exist; create it first")]
    UnknownProject,
    /// Another row already has this identity (an API key's id or prefix, a machine's key).
    #[error("a record with this identity exists already; make a new identity and repeat")]
    Duplicate,
    /// A value that cannot be stored.
    #[error("a value is out of bounds")]
    Invalid(#[from] IdError),
    /// The store was closed.
    #[error("the store is closed")]
    Closed,
    /// A fault of this crate: the database refused a statement.
    #[error("the database refused a statement; report this as a bug")]
    Internal(#[source] Cause),
}

/// What lies behind a [`StoreError`].
pub type Cause = Box<dyn std::error::Error + Send + Sync + 'static>;

/// The result of a call to the store.
pub type Result<T> = std::result::Result<T, StoreError>;

impl StoreError {
    /// Whether the very same call may simply be repeated after a pause.
    #[must_use]
    pub const fn retryable(&self) -> bool {
        match self {
            Self::Unavailable(_) => true,
            Self::Uncertain(_)
            | Self::Full(_)
            | Self::Corrupt(_)
            | Self::SchemaTooNew { .. }
            | Self::Unusable(_)
            | Self::UnknownProject
            | Self::Duplicate
            | Self::Invalid(_)
            | Self::Closed
            | Self::Internal(_) => false,
        }
    }

    /// A stored value that cannot be what this crate wrote.
    pub(crate) fn corrupt(what: impl Into<Cause>) -> Self {
        Self::Corrupt(what.into())
    }

    /// Sorts an error met before or beside a commit.
    pub(crate) fn from_sqlx(error: sqlx::Error) -> Self {
        use sqlx::Error as E;
        match &error {
            E::PoolTimedOut | E::WorkerCrashed => Self::Unavailable(error.into()),
            E::PoolClosed => Self::Closed,
            E::Io(io) => match io.kind() {
                std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => Self::Full(error.into()),
                _ => Self::Unavailable(error.into()),
            },
            E::Configuration(_) | E::InvalidArgument(_) | E::Tls(_) => Self::Unusable(error.into()),
            E::ColumnDecode { .. } | E::Decode(_) => Self::Corrupt(error.into()),
            E::Database(db) => {
                let kind = db.kind();
                let verdict = match db.try_downcast_ref::<sqlx::sqlite::SqliteError>() {
                    Some(sqlite) => sqlite_verdict(sqlite),
                    None => postgres_verdict(db.code().as_deref().unwrap_or_default()),
                };
                match (verdict, kind) {
                    (Verdict::Full, _) => Self::Full(error.into()),
                    (Verdict::Busy, _) => Self::Unavailable(error.into()),
                    (Verdict::Corrupt, _) => Self::Corrupt(error.into()),
                    (Verdict::Unusable, _) => Self::Unusable(error.into()),
                    (Verdict::Other, sqlx::error::ErrorKind::UniqueViolation) => Self::Duplicate,
                    (Verdict::Other, _) => Self::Internal(error.into()),
                }
            }
            _ => Self::Internal(error.into()),
        }
    }

    /// Sorts an error met while committing: what does not say clearly that nothing was written is uncertain.
    pub(crate) fn from_commit(error: sqlx::Error) -> Self {
        match Self::from_sqlx(error) {
            Self::Unavailable(cause) => Self::Uncertain(cause),
            other => other,
        }
    }
}

enum Verdict {
    Full,
    Busy,
    Corrupt,
    Unusable,
    Other,
}

fn sqlite_verdict(error: &sqlx::sqlite::SqliteError) -> Verdict {
    use sqlx::error::DatabaseError as _;
    let extended: i32 = error.code().and_then(|c| c.parse().ok()).unwrap_or(1);
    // SQLITE_IOERR_WRITE with a full disk is reported as SQLITE_FULL by SQLite itself.
    match extended & 0xff {
        13 => Verdict::Full,
        5 | 6 | 7 | 9 | 10 | 15 => Verdict::Busy,
        11 | 26 => Verdict::Corrupt,
        3 | 8 | 14 | 23 => Verdict::Unusable,
        _ => Verdict::Other,
    }
}

fn postgres_verdict(code: &str) -> Verdict {
    match code {
        "53100" => Verdict::Full,
        // Serialisation failure, deadlock, cancelled by a time-out, lock not available.
        "40001" | "40P01" | "57014" | "55P03" => Verdict::Busy,
        "XX001" | "XX002" => Verdict::Corrupt,
        // Authentication, unknown database, missing privilege, read-only server.
        "28000" | "28P01" | "3D000" | "42501" | "25006" => Verdict::Unusable,
        // Connection failures, out of resources, shutting down or starting up.
        c if c.starts_with("08") || c.starts_with("53") || c.starts_with("57P") || c.starts_with("58") => Verdict::Busy,
        _ => Verdict::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_changed_nothing_may_simply_be_repeated() {
        assert!(StoreError::from_sqlx(sqlx::Error::PoolTimedOut).retryable());
        assert!(!StoreError::from_commit(sqlx::Error::PoolTimedOut).retryable());
        assert!(matches!(StoreError::from_commit(sqlx::Error::WorkerCrashed), StoreError::Uncertain(_)));
        let full = std::io::Error::from(std::io::ErrorKind::StorageFull);
        assert!(matches!(StoreError::from_sqlx(sqlx::Error::Io(full)), StoreError::Full(_)));
        assert!(matches!(StoreError::from_sqlx(sqlx::Error::PoolClosed), StoreError::Closed));
    }

    #[test]
    fn postgres_codes_are_sorted_by_what_to_do() {
        assert!(matches!(postgres_verdict("53100"), Verdict::Full));
        assert!(matches!(postgres_verdict("40001"), Verdict::Busy));
        assert!(matches!(postgres_verdict("57P01"), Verdict::Busy));
        assert!(matches!(postgres_verdict("28P01"), Verdict::Unusable));
        assert!(matches!(postgres_verdict("XX001"), Verdict::Corrupt));
        assert!(matches!(postgres_verdict("42601"), Verdict::Other));
    }
}
