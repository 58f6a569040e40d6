//! Projects and API keys. Of a secret only its hash is ever here.

use mainbrella_types::limits::{KEY_NAME_MAX, LIST_LIMIT_MAX};
use mainbrella_types::{IdError, Millis, ProjectId};

use crate::backend::{Arg, Row};
use crate::error::{Result, StoreError};
use crate::{Store, sql};

/// `last_used_at` is exact to this many milliseconds, so that a busy key does not write for every request.
pub const LAST_USED_STEP_MS: u64 = 60_000;
/// Longest id or prefix of a key, bytes.
pub const KEY_ID_MAX: usize = 64;

/// What a key may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KeyRole {
    /// Everything, keys included.
    Admin,
    /// Everything with the machines of its project.
    User,
}

impl KeyRole {
    /// The wire name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Admin => "admin",
            Self::User => "user",
        }
    }
}

impl std::str::FromStr for KeyRole {
    type Err = IdError;
    fn from_str(s: &str) -> std::result::Result<Self, IdError> {
        [Self::Admin, Self::User].into_iter().find(|r| r.as_str() == s).ok_or(IdError::new("role", "admin or user"))
    }
}

/// A key to be kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewApiKey {
    /// Public id, 1 to [`KEY_ID_MAX`] bytes.
    pub id: String,
    /// Its project; must exist.
    pub project: ProjectId,
    /// A label for people.
    pub name: String,
    /// What it may do.
    pub role: KeyRole,
    /// The first, public part of the secret, by which it is found; 1 to [`KEY_ID_MAX`] bytes.
    pub prefix: String,
    /// SHA-256 of the whole secret.
    pub secret_hash: [u8; 32],
    /// The clock of the caller.
    pub now: Millis,
}

/// A key as it is kept.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKey {
    /// Public id.
    pub id: String,
    /// Its project.
    pub project: ProjectId,
    /// A label for people.
    pub name: String,
    /// What it may do.
    pub role: KeyRole,
    /// The public part of the secret.
    pub prefix: String,
    /// SHA-256 of the whole secret; to be compared in constant time.
    pub secret_hash: [u8; 32],
    /// When it was made.
    pub created_at: Millis,
    /// When it was last used, exact to [`LAST_USED_STEP_MS`].
    pub last_used_at: Option<Millis>,
    /// When it was revoked.
    pub revoked_at: Option<Millis>,
}

impl std::fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ApiKey")
            .field("id", &self.id)
            .field("project", &self.project)
            .field("name", &self.name)
            .field("role", &self.role)
            .field("created_at", &self.created_at)
            .field("last_used_at", &self.last_used_at)
            .field("revoked_at", &self.revoked_at)
            .finish_non_exhaustive()
    }
}

/// A page of keys, oldest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyPage {
    /// The keys.
    pub keys: Vec<ApiKey>,
    /// `after` of the next page; `None`: this was the last.
    pub next: Option<(Millis, String)>,
}

impl Store {
    /// Makes sure that a project exists.
    ///
    /// # Errors
    /// What befell the database.
    pub async fn ensure_project(&self, project: &ProjectId, now: Millis) -> Result<()> {
        let id = Arg::text(project.as_str());
        if self.db.fetch_optional(sql::PROJECT_GET, std::slice::from_ref(&id)).await?.is_none() {
            self.db.execute(sql::PROJECT_ENSURE, &[id, Arg::Int(now.0)]).await?;
        }
        Ok(())
    }

    /// Keeps a new key.
    ///
    /// # Errors
    /// [`StoreError::Duplicate`] when id or prefix are taken, [`StoreError::UnknownProject`],
    /// [`StoreError::Invalid`], or what befell the database.
    pub async fn insert_key(&self, new: &NewApiKey) -> Result<()> {
        if new.name.is_empty() || new.name.len() > KEY_NAME_MAX || new.name.contains('\0') {
            return Err(IdError::new("name", "1 to 64 bytes without a NUL").into());
        }
        for part in [&new.id, &new.prefix] {
            if part.is_empty() || part.len() > KEY_ID_MAX || !part.bytes().all(|b| b.is_ascii_graphic()) {
                return Err(IdError::new("key id", "1 to 64 printable ASCII characters").into());
            }
        }
        let project = Arg::text(new.project.as_str());
        let mut tx = self.db.begin().await?;
        if tx.fetch_optional(sql::PROJECT_GET, std::slice::from_ref(&project)).await?.is_none() {
            return Err(StoreError::UnknownProject);
        }
        let args = [
            Arg::text(&new.id),
            project,
            Arg::text(&new.name),
            Arg::text(new.role.as_str()),
            Arg::text(&new.prefix),
            Arg::Bytes(new.secret_hash.to_vec()),
            Arg::Int(new.now.0),
        ];
        tx.execute(sql::KEY_INSERT, &args).await?;
        tx.commit().await
    }

    /// The key with this public prefix, revoked or not. The caller compares the hash, and `revoked_at`.
    ///
    /// # Errors
    /// What befell the database.
    pub async fn key_by_prefix(&self, prefix: &str) -> Result<Option<ApiKey>> {
        self.db.fetch_optional(sql::KEY_BY_PREFIX, &[Arg::text(prefix)]).await?.map(|r| key(&r)).transpose()
    }

    /// The key with this id, revoked or not.
    ///
    /// # Errors
    /// What befell the database.
    pub async fn key_by_id(&self, id: &str) -> Result<Option<ApiKey>> {
        self.db.fetch_optional(sql::KEY_BY_ID, &[Arg::text(id)]).await?.map(|r| key(&r)).transpose()
    }

    /// A page of the keys of a project, oldest first, revoked ones included. `limit`: 1 to [`LIST_LIMIT_MAX`].
    ///
    /// # Errors
    /// What befell the database.
    pub async fn list_keys(&self, project: &ProjectId, after: Option<(Millis, String)>, limit: u32) -> Result<KeyPage> {
        let limit = limit.clamp(1, LIST_LIMIT_MAX) as usize;
        let (at, id) = after.map_or((i64::MIN, String::new()), |(at, id)| (at.0, id));
        let wanted = i64::try_from(limit + 1).unwrap_or(i64::MAX);
        let args = [Arg::text(project.as_str()), Arg::Int(at), Arg::Text(id), Arg::Int(wanted)];
        let rows = self.db.fetch_all(sql::KEY_LIST, &args).await?;
        let more = rows.len() > limit;
        let keys = rows.iter().take(limit).map(key).collect::<Result<Vec<_>>>()?;
        let next = if more { keys.last().map(|k| (k.created_at, k.id.clone())) } else { None };
        Ok(KeyPage { keys, next })
    }

    /// Revokes a key; `false` when there is none with this id that was not revoked before.
    ///
    /// # Errors
    /// What befell the database.
    pub async fn revoke_key(&self, id: &str, now: Millis) -> Result<bool> {
        Ok(self.db.execute(sql::KEY_REVOKE, &[Arg::text(id), Arg::Int(now.0)]).await? == 1)
    }

    /// How many keys are not revoked, in all projects.
    ///
    /// # Errors
    /// What befell the database.
    pub async fn count_keys(&self) -> Result<u64> {
        match self.db.fetch_optional(sql::KEY_COUNT, &[]).await? {
            Some(row) => u64::try_from(row.int(0)?).map_err(StoreError::corrupt),
            None => Ok(0),
        }
    }

    /// Notes that a key was used. Writes only when the note that `key` carries is older than [`LAST_USED_STEP_MS`].
    ///
    /// # Errors
    /// What befell the database.
    pub async fn touch_key(&self, key: &ApiKey, now: Millis) -> Result<()> {
        let limit = now.0.saturating_sub(crate::record::signed(LAST_USED_STEP_MS));
        if key.last_used_at.is_some_and(|at| at.0 >= limit) {
            return Ok(());
        }
        let args = [Arg::text(&key.id), Arg::Int(now.0), Arg::Int(limit)];
        self.db.execute(sql::KEY_TOUCH, &args).await.map(drop)
    }
}

fn key(row: &Row) -> Result<ApiKey> {
    Ok(ApiKey {
        id: row.text(0)?,
        project: row.text(1)?.parse().map_err(|e: IdError| StoreError::corrupt(e))?,
        name: row.text(2)?,
        role: row.text(3)?.parse().map_err(|e: IdError| StoreError::corrupt(e))?,
        prefix: row.text(4)?,
        secret_hash: row.bytes(5)?.try_into().map_err(|_| StoreError::corrupt("a hash of another length"))?,
        created_at: Millis(row.int(6)?),
        last_used_at: row.maybe_int(7)?.map(Millis),
        revoked_at: row.maybe_int(8)?.map(Millis),
    })
}
