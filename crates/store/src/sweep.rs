//! Forgetting what need not be kept any longer, in bounded steps.

use mainbrella_types::Millis;
use mainbrella_types::limits::{FINISHED_RETENTION_MS, IDEMPOTENCY_RETENTION_MS};

use crate::backend::Arg;
use crate::error::Result;
use crate::machines::{SLOT_FLOOR, slot_floor};
use crate::record::signed;
use crate::{Store, sql};

/// Rows removed in one transaction.
const BATCH: i64 = 500;
/// Transactions of each kind in one call.
const BATCHES: usize = 20;

/// What a sweep removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Idempotency keys that had expired.
    pub idempotency: u64,
    /// Records of machines that ended long ago.
    pub machines: u64,
    /// Snapshots that were deleted and whose idempotency keys had expired.
    pub snapshots: u64,
    /// Slots without machines.
    pub slots: u64,
    /// The bound of one call was reached; another call goes on.
    pub more: bool,
}

impl Store {
    /// Removes expired idempotency keys, machines that ended more than [`FINISHED_RETENTION_MS`] ago, deleted snapshots, and slots that
    /// hold none and are as old. Safe to call at any time, and by several services at once.
    ///
    /// # Errors
    /// What befell the database; batches already done stay done.
    pub async fn sweep(&self, now: Millis) -> Result<Swept> {
        let cutoff = now.0.saturating_sub(signed(FINISHED_RETENTION_MS));
        let keys = now.0.saturating_sub(signed(IDEMPOTENCY_RETENTION_MS));
        let mut swept = Swept::default();
        for (sql, at, count) in [
            (sql::SWEEP_IDEMPOTENCY, now.0, &mut swept.idempotency),
            (sql::SWEEP_MACHINES, cutoff, &mut swept.machines),
            (sql::SWEEP_SNAPSHOTS, keys, &mut swept.snapshots),
        ] {
            for batch in 1..=BATCHES {
                let removed = self.db.execute(sql, &[Arg::Int(at), Arg::Int(BATCH)]).await?;
                *count += removed;
                if removed < BATCH.unsigned_abs() {
                    break;
                }
                swept.more |= batch == BATCHES;
            }
        }
        for batch in 1..=BATCHES {
            let removed = self.sweep_slots(cutoff).await?;
            swept.slots += removed;
            if removed < BATCH.unsigned_abs() {
                break;
            }
            swept.more |= batch == BATCHES;
        }
        Ok(swept)
    }

    /// Forgets slots, and keeps the highest of their marks: a slot of the same name must start above it.
    async fn sweep_slots(&self, cutoff: i64) -> Result<u64> {
        let mut tx = self.db.begin().await?;
        let rows = tx.fetch_all(sql::SWEEP_SLOTS, &[Arg::Int(cutoff), Arg::Int(BATCH)]).await?;
        let mut highest = i64::MIN;
        for row in &rows {
            highest = highest.max(row.int(0)?);
        }
        if rows.is_empty() {
            tx.rollback().await?;
            return Ok(0);
        }
        if highest > slot_floor(&mut tx).await? {
            tx.execute(sql::META_PUT, &[Arg::text(SLOT_FLOOR), Arg::Text(highest.to_string())]).await?;
        }
        tx.commit().await?;
        Ok(rows.len() as u64)
    }
}
