//! The versions of the schema, and the walk from the one found to the newest.

use crate::backend::{Arg, Backend, Kind};
use crate::error::{Result, StoreError};
use crate::sql;

/// Every version in order; the first is version 1. A released text never changes: add another one.
///
/// One text serves both databases: `:text`, `:int`, `:blob` stand for their column types (text compares byte by
/// byte), `:strict` for what makes SQLite hold to the types.
const VERSIONS: &[&str] =
    &[include_str!("../migrations/0001_ground.sql"), include_str!("../migrations/0010_previews.sql")];

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
