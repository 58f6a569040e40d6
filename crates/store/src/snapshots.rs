//! What was saved of machines: intent, acknowledgement, list, end.

use std::fmt;
use std::str::FromStr;

use mainbrella_types::limits::{IDEMPOTENCY_RETENTION_MS, LIST_LIMIT_MAX};
use mainbrella_types::{IdError, Millis, ProjectId, SnapshotKey, SnapshotKind, SnapshotRecord};

use crate::backend::{Arg, Row};
use crate::error::{Result, StoreError};
use crate::machines::Idempotency;
use crate::record::{egress, json, map, parsed, signed, unsigned};
use crate::{Store, sql};

/// How many columns `snapshot` reads; further ones may follow.
const COLUMNS: usize = 16;
/// Comes after every key of a snapshot.
const AFTER_ALL_KEYS: &str = "~";
/// Snapshots of one page when all of a host are read.
const HOST_PAGE: i64 = 500;
/// Snapshots that end in one call because their time is over.
const EXPIRE_MAX: i64 = 500;

/// What became of the intent to save.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BeginSave {
    /// It is durable now; the caller saves, then calls [`Store::finish_save`] or [`Store::abandon_save`].
    Fresh(SnapshotRecord),
    /// The same request was made before; its snapshot as it is now, whole only where `saved` says so.
    Replay(SnapshotRecord),
    /// The same request was made before, and its snapshot was ended since.
    Deleted(SnapshotKey),
    /// The key was used with another body.
    Conflict,
    /// The project has as many as it may.
    TooMany,
}

/// A change to what is said of a snapshot. Fields that are `None` stay as they are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SnapshotChange {
    /// Another name, already checked.
    pub name: Option<String>,
    /// Put aside, or taken up again.
    pub archived: Option<bool>,
}

/// A place in the list of a project's snapshots. Opaque to callers: text that is parsed back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotCursor {
    created_at: i64,
    key: SnapshotKey,
}

impl SnapshotCursor {
    fn of(record: &SnapshotRecord) -> Self {
        Self { created_at: record.created_at.0, key: record.key }
    }
}

impl fmt::Display for SnapshotCursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "n1{:016x}{}", self.created_at, self.key.0.simple())
    }
}

impl FromStr for SnapshotCursor {
    type Err = IdError;
    fn from_str(s: &str) -> std::result::Result<Self, IdError> {
        let parse = || {
            let digits = s.strip_prefix("n1").filter(|d| d.len() == 48 && d.bytes().all(|b| b.is_ascii_hexdigit()))?;
            let (at, key) = digits.split_at_checked(16)?;
            let created_at = u64::from_str_radix(at, 16).ok()?.cast_signed();
            Some(Self { created_at, key: format!("s-{key}").parse().ok()? })
        };
        parse().ok_or(IdError::new("cursor", "a nextCursor as it was returned"))
    }
}

/// Which snapshots to list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotQuery {
    /// Owner.
    pub project: ProjectId,
    /// Only of this kind.
    pub kind: Option<SnapshotKind>,
    /// Only those that were put aside, or only the others.
    pub archived: Option<bool>,
    /// Only of this name.
    pub name: Option<String>,
    /// Only those after this place; `None`: from the newest.
    pub before: Option<SnapshotCursor>,
    /// Most of a page; 1 to [`LIST_LIMIT_MAX`], what is outside is brought inside.
    pub limit: u32,
    /// The clock of the caller.
    pub now: Millis,
}

/// A page of snapshots, newest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotPage {
    /// The snapshots.
    pub snapshots: Vec<SnapshotRecord>,
    /// Where the next page starts; `None`: this was the last.
    pub next: Option<SnapshotCursor>,
}

impl SnapshotQuery {
    fn matches(&self, s: &SnapshotRecord) -> bool {
        self.kind.is_none_or(|kind| kind == s.kind)
            && self.archived.is_none_or(|archived| archived == s.archived)
            && self.name.as_ref().is_none_or(|name| *name == s.name)
    }
}

impl Store {
    /// Makes the intent to save durable, or says what stands in its way; nothing is kept then. `most`: how many snapshots the
    /// project may have.
    ///
    /// # Errors
    /// [`StoreError::UnknownProject`]; else what befell the database. [`StoreError::Uncertain`]: it may have been kept.
    pub async fn begin_save(
        &self,
        new: &SnapshotRecord,
        idempotency: Option<&Idempotency>,
        most: u32,
    ) -> Result<BeginSave> {
        let project = Arg::text(new.project.as_str());
        let now = Arg::Int(new.created_at.0);
        let mut tx = self.db.begin().await?;
        // The row of the project is held from here on: its snapshots begin one after the other.
        if tx.execute(sql::PROJECT_HOLD, std::slice::from_ref(&project)).await? == 0 {
            tx.rollback().await?;
            return Err(StoreError::UnknownProject);
        }
        if let Some(id) = idempotency {
            let args = [project.clone(), Arg::text(&id.key), forgotten(new.created_at)];
            tx.execute(sql::SNAPSHOT_FREE_KEY, &args).await?;
            if let Some(row) = tx.fetch_optional(sql::SNAPSHOT_BY_IDEMPOTENCY, &args).await? {
                let begun = replay(&row, id)?;
                tx.rollback().await?;
                return Ok(begun);
            }
        }
        let count = tx.fetch_optional(sql::SNAPSHOT_COUNT, &[project.clone(), now.clone()]).await?;
        if count.ok_or(StoreError::corrupt("a count without a row"))?.int(0)? >= i64::from(most) {
            tx.rollback().await?;
            return Ok(BeginSave::TooMany);
        }
        let args = [
            key_arg(&new.key),
            project,
            Arg::text(&new.host),
            Arg::text(&new.name),
            Arg::text(new.kind.as_str()),
            Arg::Text(new.source.to_string()),
            Arg::text(new.template.as_str()),
            Arg::text(&new.template_digest),
            Arg::text(new.size.as_str()),
            Arg::Text(new.egress.to_string()),
            Arg::Text(json(&new.env)?),
            now,
            Arg::MaybeInt(new.expires_at.map(|m| m.0)),
            Arg::MaybeText(idempotency.map(|i| i.key.clone())),
            Arg::MaybeBytes(idempotency.map(|i| i.body_hash.to_vec())),
        ];
        tx.execute(sql::SNAPSHOT_INSERT, &args).await?;
        tx.commit().await?;
        Ok(BeginSave::Fresh(SnapshotRecord { saved: false, bytes: 0, archived: false, ..new.clone() }))
    }

    /// What an earlier save with this key became; `None` when the key is not in use.
    ///
    /// # Errors
    /// What befell the database.
    pub async fn find_save(&self, project: &ProjectId, id: &Idempotency, now: Millis) -> Result<Option<BeginSave>> {
        let args = [Arg::text(project.as_str()), Arg::text(&id.key), forgotten(now)];
        let row = self.db.fetch_optional(sql::SNAPSHOT_BY_IDEMPOTENCY, &args).await?;
        row.map(|row| replay(&row, id)).transpose()
    }

    /// Acknowledges a snapshot that is whole on its host: it is there from now on. `bytes`: what it alone has there. `None`:
    /// its intent is gone.
    ///
    /// # Errors
    /// What befell the database. [`StoreError::Uncertain`]: it may have been acknowledged.
    pub async fn finish_save(&self, key: &SnapshotKey, bytes: u64) -> Result<Option<SnapshotRecord>> {
        self.db.execute(sql::SNAPSHOT_FINISH, &[key_arg(key), Arg::Int(signed(bytes))]).await?;
        self.snapshot_by_key(key).await
    }

    /// Takes an intent back. One that was acknowledged stays. Says whether this call did.
    ///
    /// # Errors
    /// What befell the database.
    pub async fn abandon_save(&self, key: &SnapshotKey) -> Result<bool> {
        Ok(self.db.execute(sql::SNAPSHOT_ABANDON, &[key_arg(key)]).await? > 0)
    }

    /// A snapshot that is not deleted, whole or not, of any project.
    ///
    /// # Errors
    /// What befell the database.
    pub async fn snapshot_by_key(&self, key: &SnapshotKey) -> Result<Option<SnapshotRecord>> {
        let row = self.db.fetch_optional(sql::SNAPSHOT_BY_KEY, &[key_arg(key)]).await?;
        row.map(|row| snapshot(&row)).transpose()
    }

    /// A whole snapshot of a project whose time is not over.
    ///
    /// # Errors
    /// What befell the database.
    pub async fn snapshot(
        &self,
        project: &ProjectId,
        key: &SnapshotKey,
        now: Millis,
    ) -> Result<Option<SnapshotRecord>> {
        let args = [key_arg(key), Arg::text(project.as_str()), Arg::Int(now.0)];
        self.db.fetch_optional(sql::SNAPSHOT_GET, &args).await?.map(|row| snapshot(&row)).transpose()
    }

    /// One page of the whole snapshots of a project whose time is not over.
    ///
    /// # Errors
    /// What befell the database.
    pub async fn list_snapshots(&self, query: &SnapshotQuery) -> Result<SnapshotPage> {
        let limit = query.limit.clamp(1, LIST_LIMIT_MAX) as usize;
        // One more than asked for tells whether there is a next page.
        let wanted = limit + 1;
        let mut found: Vec<SnapshotRecord> = Vec::new();
        let mut place = query.before;
        'read: loop {
            let (at, key) = place.map_or((i64::MAX, AFTER_ALL_KEYS.to_owned()), |c| (c.created_at, c.key.to_string()));
            let args = [
                Arg::text(query.project.as_str()),
                Arg::Int(at),
                Arg::Text(key),
                Arg::Int(query.now.0),
                Arg::Int(i64::try_from(wanted).unwrap_or(i64::MAX)),
            ];
            let rows = self.db.fetch_all(sql::SNAPSHOT_LIST, &args).await?;
            for row in &rows {
                let record = snapshot(row)?;
                place = Some(SnapshotCursor::of(&record));
                if query.matches(&record) {
                    found.push(record);
                    if found.len() == wanted {
                        break 'read;
                    }
                }
            }
            if rows.len() < wanted {
                break;
            }
        }
        let more = found.len() > limit;
        found.truncate(limit);
        let next = if more { found.last().map(SnapshotCursor::of) } else { None };
        Ok(SnapshotPage { snapshots: found, next })
    }

    /// Changes what is said of a snapshot; `None`: it is not there.
    ///
    /// # Errors
    /// What befell the database.
    pub async fn update_snapshot(
        &self,
        project: &ProjectId,
        key: &SnapshotKey,
        change: &SnapshotChange,
        now: Millis,
    ) -> Result<Option<SnapshotRecord>> {
        let owner = Arg::text(project.as_str());
        let mut tx = self.db.begin().await?;
        // Changes of one project's snapshots follow each other, so that none undoes another one's.
        tx.execute(sql::PROJECT_HOLD, std::slice::from_ref(&owner)).await?;
        let args = [key_arg(key), owner.clone(), Arg::Int(now.0)];
        let Some(row) = tx.fetch_optional(sql::SNAPSHOT_GET, &args).await? else {
            tx.rollback().await?;
            return Ok(None);
        };
        let mut record = snapshot(&row)?;
        record.name = change.name.clone().unwrap_or(record.name);
        record.archived = change.archived.unwrap_or(record.archived);
        let args = [key_arg(key), owner, Arg::text(&record.name), Arg::Int(record.archived.into())];
        let done = tx.execute(sql::SNAPSHOT_UPDATE, &args).await? > 0;
        tx.commit().await?;
        Ok(done.then_some(record))
    }

    /// Ends a snapshot: nothing starts from it any more. Says whether this call did. What is on the host is the caller's to
    /// remove.
    ///
    /// # Errors
    /// What befell the database.
    pub async fn delete_snapshot(&self, project: &ProjectId, key: &SnapshotKey, now: Millis) -> Result<bool> {
        let args = [key_arg(key), Arg::text(project.as_str()), Arg::Int(now.0)];
        Ok(self.db.execute(sql::SNAPSHOT_DELETE, &args).await? > 0)
    }

    /// Ends snapshots whose time is over, a bounded number in a call; says how many.
    ///
    /// # Errors
    /// What befell the database.
    pub async fn expire_snapshots(&self, now: Millis) -> Result<u64> {
        self.db.execute(sql::SNAPSHOT_EXPIRE, &[Arg::Int(now.0), Arg::Int(EXPIRE_MAX)]).await
    }

    /// Every snapshot of a host that is not deleted, whole or not, by key.
    ///
    /// # Errors
    /// What befell the database.
    pub async fn snapshots_of_host(&self, host: &str) -> Result<Vec<SnapshotRecord>> {
        let mut found: Vec<SnapshotRecord> = Vec::new();
        loop {
            let after = found.last().map(|r| r.key.to_string()).unwrap_or_default();
            let args = [Arg::text(host), Arg::Text(after), Arg::Int(HOST_PAGE)];
            let rows = self.db.fetch_all(sql::SNAPSHOT_OF_HOST, &args).await?;
            let full = rows.len() >= usize::try_from(HOST_PAGE).unwrap_or(usize::MAX);
            for row in &rows {
                found.push(snapshot(row)?);
            }
            if !full {
                return Ok(found);
            }
        }
    }
}

/// Before this instant, idempotency keys are forgotten.
fn forgotten(now: Millis) -> Arg {
    Arg::Int(now.0.saturating_sub(signed(IDEMPOTENCY_RETENTION_MS)))
}

fn key_arg(key: &SnapshotKey) -> Arg {
    Arg::Text(key.to_string())
}

fn replay(row: &Row, id: &Idempotency) -> Result<BeginSave> {
    if row.bytes(COLUMNS + 1)? != id.body_hash {
        return Ok(BeginSave::Conflict);
    }
    let record = snapshot(row)?;
    let deleted = row.maybe_int(COLUMNS)?.is_some();
    Ok(if deleted { BeginSave::Deleted(record.key) } else { BeginSave::Replay(record) })
}

/// Reads a snapshot from the columns named by `snapshot_columns!`.
fn snapshot(row: &Row) -> Result<SnapshotRecord> {
    Ok(SnapshotRecord {
        key: parsed(&row.text(0)?)?,
        project: parsed(&row.text(1)?)?,
        host: row.text(2)?,
        name: row.text(3)?,
        kind: parsed(&row.text(4)?)?,
        saved: row.int(5)? != 0,
        source: parsed(&row.text(6)?)?,
        template: parsed(&row.text(7)?)?,
        template_digest: row.text(8)?,
        size: parsed(&row.text(9)?)?,
        egress: egress(true, Some(row.text(10)?)),
        env: map(&row.text(11)?)?,
        bytes: unsigned(row.int(12)?)?,
        created_at: Millis(row.int(13)?),
        expires_at: row.maybe_int(14)?.map(Millis),
        archived: row.int(15)? != 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_round_trips_and_refuses_everything_else() {
        let key = SnapshotKey::new(uuid::Uuid::from_u128(0xfeed));
        for created_at in [0, 1, -1, i64::MAX, i64::MIN, 1_790_000_000_000] {
            let c = SnapshotCursor { created_at, key };
            assert_eq!(c.to_string().parse::<SnapshotCursor>(), Ok(c));
        }
        let good = SnapshotCursor { created_at: 5, key }.to_string();
        for bad in ["", "n1", &good[1..], &format!("{good}0"), &good.replace("n1", "m1"), &good.replace('0', "é")] {
            assert_eq!(bad.parse::<SnapshotCursor>().map_err(|e| e.field), Err("cursor"), "{bad}");
        }
    }
}
