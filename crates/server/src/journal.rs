//! The engine's journal, kept in the store.

use async_trait::async_trait;
use mainbrella_engine::{Change, Journal, JournalError, KeptSecrets};
use mainbrella_store::{Applied, MachineChange, Store, StoreError};
use mainbrella_types::{GenerationKey, MachineRecord};

use crate::error::{ApiError, chain};
use crate::vault::Vault;

/// Writes for one host.
pub struct StoreJournal {
    store: Store,
    host: String,
    vault: Vault,
}

impl StoreJournal {
    /// A journal for the machines of `host`, whose secrets `vault` opens.
    #[must_use]
    pub fn new(store: Store, host: impl Into<String>, vault: Vault) -> Self {
        Self { store, host: host.into(), vault }
    }
}

fn unavailable(e: &StoreError) -> JournalError {
    JournalError::Unavailable(chain(e))
}

#[async_trait]
impl Journal for StoreJournal {
    async fn apply(&self, key: &GenerationKey, revision: i64, change: Change) -> Result<MachineRecord, JournalError> {
        let change = MachineChange {
            state: change.state,
            ending: change.ending,
            hard_deadline: change.hard_deadline,
            idle_timeout_ms: change.idle_timeout_ms,
            last_activity: change.last_activity,
            running_at: change.running_at,
            ended_at: change.ended_at,
            egress: change.egress,
            on_idle: change.on_idle,
            auto_resume: change.auto_resume,
        };
        match self.store.apply(key, revision, &change).await {
            Ok(Applied::Updated(record)) => Ok(record),
            // A commit whose outcome was lost may have happened: then this very change is what is there now.
            Ok(Applied::Stale(now)) => {
                let ours = now.revision == revision + 1 && reflects(&now, &change);
                if ours { Ok(now) } else { Err(JournalError::Stale) }
            }
            Ok(Applied::Missing) => Err(JournalError::Stale),
            Ok(Applied::Refused(_, refusal)) => Err(JournalError::Unavailable(refusal.to_string())),
            Err(e) => Err(unavailable(&e)),
        }
    }

    async fn living(&self) -> Result<Vec<MachineRecord>, JournalError> {
        self.store.living(&self.host).await.map_err(|e| unavailable(&e))
    }

    async fn secrets(&self, key: &GenerationKey) -> Result<Option<KeptSecrets>, JournalError> {
        let told = |e: ApiError| JournalError::Unavailable(e.internal.unwrap_or_else(|| e.message.into_owned()));
        self.vault.kept(&self.store, key).await.map_err(told)
    }
}

/// Whether a record looks as it would after `change`.
fn reflects(record: &MachineRecord, change: &MachineChange) -> bool {
    change.state.is_none_or(|s| record.state == s)
        && change.ending.as_ref().is_none_or(|e| record.ending.as_ref() == Some(e))
        && change.hard_deadline.is_none_or(|d| record.lease.hard_deadline >= d)
        && change.idle_timeout_ms.is_none_or(|ms| record.lease.idle_timeout_ms == Some(ms))
        && change.last_activity.is_none_or(|at| record.lease.last_activity >= at)
        && change.running_at.is_none_or(|_| record.running_at.is_some())
        && change.ended_at.is_none_or(|at| record.ended_at == Some(at))
        && change.egress.as_ref().is_none_or(|e| record.spec.egress == *e)
        && change.on_idle.is_none_or(|o| record.spec.on_idle == o)
        && change.auto_resume.is_none_or(|a| record.spec.auto_resume == a)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mainbrella_store::{BeginCreate, NewMachine};
    use mainbrella_types::{Failure, FailureKind, MachineSpec, MachineState, Millis, ProjectId, SizeClass};

    #[tokio::test]
    async fn changes_are_written_guarded_and_a_repeat_of_a_lost_answer_succeeds() {
        let dir = tempfile::tempdir().expect("temp dir");
        let store = Store::open_sqlite(&dir.path().join("s.sqlite"), Millis(1)).await.expect("store");
        let new = NewMachine {
            key: GenerationKey(uuid::Uuid::now_v7()),
            project: ProjectId::default_project(),
            slot: None,
            host: "here".into(),
            spec: MachineSpec {
                template: "python".parse().expect("valid"),
                size: SizeClass::Small,
                egress: Default::default(),
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
        let journal = StoreJournal::new(store.clone(), "here", Vault::new(dir.path()));
        assert_eq!(journal.living().await.expect("read").len(), 1);
        let elsewhere = StoreJournal::new(store.clone(), "there", Vault::new(dir.path()));
        assert!(elsewhere.living().await.expect("read").is_empty());

        let run = Change { state: Some(MachineState::Running), running_at: Some(Millis(20)), ..Change::default() };
        let running = journal.apply(&record.key, record.revision, run.clone()).await.expect("written");
        assert_eq!(running.state, MachineState::Running);
        let again = journal.apply(&record.key, record.revision, run).await.expect("the same change, its answer lost");
        assert_eq!(again, running);
        let other = Change { last_activity: Some(Millis(99)), ..Change::default() };
        assert!(matches!(journal.apply(&record.key, record.revision, other).await, Err(JournalError::Stale)));
        let back = Change { state: Some(MachineState::Creating), ..Change::default() };
        assert!(matches!(journal.apply(&record.key, running.revision, back).await, Err(JournalError::Unavailable(_))));
        let end = Change {
            state: Some(MachineState::Failed),
            ending: Some(Failure { kind: FailureKind::VmmDied, message: "m".into() }),
            ended_at: Some(Millis(30)),
            ..Change::default()
        };
        journal.apply(&record.key, running.revision, end).await.expect("ended");
        assert!(journal.living().await.expect("read").is_empty());
    }
}
