//! Rights to reach ports of machines. Of the secret in a URL only its hash is ever here.

use mainbrella_types::limits::{IDEMPOTENCY_RETENTION_MS, PREVIEWS_ACTIVE_MAX, PREVIEWS_REMEMBERED_MAX};
use mainbrella_types::{GenerationKey, IdError, Millis};

use crate::backend::{Arg, Row, Tx};
use crate::error::{Result, StoreError};
use crate::machines::Idempotency;
use crate::record::signed;
use crate::{Store, sql};

/// A preview as it is kept.
#[derive(Clone, PartialEq, Eq)]
pub struct PreviewRecord {
    /// Public id.
    pub id: String,
    /// The generation it leads to.
    pub machine: GenerationKey,
    /// The port there.
    pub port: u16,
    /// SHA-256 of the token; to be compared in constant time.
    pub token_hash: [u8; 32],
    /// When it was made.
    pub created_at: Millis,
    /// When it ends by itself.
    pub expires_at: Millis,
    /// When it was revoked.
    pub revoked_at: Option<Millis>,
}

impl PreviewRecord {
    /// Whether it still leads anywhere at `now`.
    #[must_use]
    pub fn is_active(&self, now: Millis) -> bool {
        self.revoked_at.is_none() && self.expires_at > now
    }
}

impl std::fmt::Debug for PreviewRecord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PreviewRecord")
            .field("id", &self.id)
            .field("machine", &self.machine)
            .field("port", &self.port)
            .field("created_at", &self.created_at)
            .field("expires_at", &self.expires_at)
            .field("revoked_at", &self.revoked_at)
            .finish_non_exhaustive()
    }
}

/// What became of the wish for a preview.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BeginPreview {
    /// It is kept.
    Fresh(PreviewRecord),
    /// It was made earlier under the same key from the same body; it may have ended meanwhile.
    Replay(PreviewRecord),
    /// The key was used with another body.
    Conflict,
    /// The generation has as many active ones as it may.
    TooMany,
    /// The generation does not run, or is not remembered.
    NotRunning,
}

impl Store {
    /// Keeps a new preview, or says what stands in its way. Nothing is kept then.
    ///
    /// # Errors
    /// What befell the database. [`StoreError::Uncertain`]: it may have been kept.
    pub async fn begin_preview(&self, new: &PreviewRecord, idempotency: Option<&Idempotency>) -> Result<BeginPreview> {
        let machine = Arg::Text(new.machine.to_string());
        let now = Arg::Int(new.created_at.0);
        let mut tx = self.db.begin().await?;
        // The row of the machine is held from here on: previews of one generation are made one after the other.
        if tx.execute(sql::MACHINE_HOLD_RUNNING, std::slice::from_ref(&machine)).await? == 0 {
            tx.rollback().await?;
            return Ok(BeginPreview::NotRunning);
        }
        let forgotten = new.created_at.0.saturating_sub(signed(IDEMPOTENCY_RETENTION_MS));
        tx.execute(sql::PREVIEW_FORGET, &[machine.clone(), Arg::Int(forgotten)]).await?;
        if let Some(Idempotency { key, body_hash }) = idempotency
            && let Some(row) = tx.fetch_optional(sql::PREVIEW_BY_KEY, &[machine.clone(), Arg::text(key)]).await?
        {
            let begun = if row.bytes(COLUMNS)? == body_hash {
                BeginPreview::Replay(preview(&row)?)
            } else {
                BeginPreview::Conflict
            };
            tx.commit().await?;
            return Ok(begun);
        }
        let active = count(&mut tx, sql::PREVIEW_COUNT_ACTIVE, &[machine.clone(), now]).await?;
        let all = count(&mut tx, sql::PREVIEW_COUNT, std::slice::from_ref(&machine)).await?;
        if active >= PREVIEWS_ACTIVE_MAX as i64 || all >= PREVIEWS_REMEMBERED_MAX as i64 {
            tx.commit().await?;
            return Ok(BeginPreview::TooMany);
        }
        let args = [
            Arg::text(&new.id),
            machine,
            Arg::Int(new.port.into()),
            Arg::Bytes(new.token_hash.to_vec()),
            Arg::MaybeText(idempotency.map(|i| i.key.clone())),
            Arg::MaybeBytes(idempotency.map(|i| i.body_hash.to_vec())),
            Arg::Int(new.created_at.0),
            Arg::Int(new.expires_at.0),
        ];
        tx.execute(sql::PREVIEW_INSERT, &args).await?;
        tx.commit().await?;
        Ok(BeginPreview::Fresh(new.clone()))
    }

    /// A preview of a generation, ended or not, as long as it is remembered.
    ///
    /// # Errors
    /// What befell the database.
    pub async fn preview(&self, machine: &GenerationKey, id: &str) -> Result<Option<PreviewRecord>> {
        let args = [Arg::Text(machine.to_string()), Arg::text(id)];
        self.db.fetch_optional(sql::PREVIEW_GET, &args).await?.map(|row| preview(&row)).transpose()
    }

    /// The active previews of a generation; the one that ends first comes first.
    ///
    /// # Errors
    /// What befell the database.
    pub async fn active_previews(&self, machine: &GenerationKey, now: Millis) -> Result<Vec<PreviewRecord>> {
        let args = [Arg::Text(machine.to_string()), Arg::Int(now.0), Arg::Int(PREVIEWS_ACTIVE_MAX as i64)];
        self.db.fetch_all(sql::PREVIEW_LIST, &args).await?.iter().map(preview).collect()
    }

    /// Ends a preview. Says whether this call did.
    ///
    /// # Errors
    /// What befell the database.
    pub async fn revoke_preview(&self, machine: &GenerationKey, id: &str, now: Millis) -> Result<bool> {
        let args = [Arg::Text(machine.to_string()), Arg::text(id), Arg::Int(now.0)];
        Ok(self.db.execute(sql::PREVIEW_REVOKE, &args).await? > 0)
    }

    /// Moves the end of an active preview to `expires_at` where that is later. `None`: it has ended, or is not known.
    ///
    /// # Errors
    /// What befell the database.
    pub async fn renew_preview(
        &self,
        machine: &GenerationKey,
        id: &str,
        expires_at: Millis,
        now: Millis,
    ) -> Result<Option<PreviewRecord>> {
        let args = [Arg::Text(machine.to_string()), Arg::text(id), Arg::Int(expires_at.0), Arg::Int(now.0)];
        if self.db.execute(sql::PREVIEW_RENEW, &args).await? == 0 {
            return Ok(None);
        }
        self.preview(machine, id).await
    }
}

async fn count(tx: &mut Tx, sql: &'static str, args: &[Arg]) -> Result<i64> {
    tx.fetch_optional(sql, args).await?.ok_or(StoreError::corrupt("a count without a row"))?.int(0)
}

/// How many columns `preview` reads; further ones may follow.
const COLUMNS: usize = 7;

/// Reads a preview from the columns named by `preview_columns!`.
fn preview(row: &Row) -> Result<PreviewRecord> {
    Ok(PreviewRecord {
        id: row.text(0)?,
        machine: row.text(1)?.parse().map_err(|e: IdError| StoreError::corrupt(e))?,
        port: u16::try_from(row.int(2)?).map_err(StoreError::corrupt)?,
        token_hash: row.bytes(3)?.try_into().map_err(|_| StoreError::corrupt("a hash of another length"))?,
        created_at: Millis(row.int(4)?),
        expires_at: Millis(row.int(5)?),
        revoked_at: row.maybe_int(6)?.map(Millis),
    })
}
