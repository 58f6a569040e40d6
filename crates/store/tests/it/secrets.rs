//! Secrets: sealed, bounded in number, replaced by name, gone with their machine.

use crate::common::*;
use mainbrella_store::{MachineChange, PutSecret, SecretRecord, Store};
use mainbrella_types::limits::SECRETS_MAX;
use mainbrella_types::secret::OnFork;
use mainbrella_types::{Failure, FailureKind, GenerationKey, MachineState, Millis, Placement, SecretSpec};

fn secret(name: &str, placement: Placement, sealed: u8) -> SecretRecord {
    let (name, host) = (name.parse().expect("a name"), "api.example".parse().expect("a host"));
    let spec = SecretSpec { name, host, port: 443, placement };
    SecretRecord { spec, sealed: vec![sealed; 40], created_at: Millis(NOW), on_fork: OnFork::Inherit }
}

fn header() -> Placement {
    Placement::header("Authorization").expect("a header")
}

async fn running(store: &Store) -> GenerationKey {
    let record = make(store, None, NOW).await;
    updated(store, &record, to(MachineState::Running)).await.key
}

#[tokio::test]
async fn they_are_read_as_they_were_put_and_the_first_authority_stays() {
    for db in Fresh::every_kind().await {
        let machine = running(&db.store).await;
        let (a, b) = (secret("b", header(), 1), secret("a", Placement::basic("me").expect("a user"), 2));
        for (one, authority) in [(&a, b"first"), (&b, b"other")] {
            let put = db.store.put_secret(&machine, one, authority).await.expect("answered");
            assert_eq!(put, PutSecret::Kept);
        }
        assert_eq!(db.store.secrets(&machine).await.expect("read"), [b.clone(), a]);
        assert_eq!(db.store.authority(&machine).await.expect("read").as_deref(), Some(&b"first"[..]));
        let again = SecretRecord { sealed: vec![9; 3], ..secret("b", Placement::basic("x").expect("a user"), 0) };
        db.store.put_secret(&machine, &again, b"other").await.expect("answered");
        assert_eq!(db.store.secrets(&machine).await.expect("read"), [b, again]);
        assert!(db.store.remove_secret(&machine, "a").await.expect("removed"));
        assert!(!db.store.remove_secret(&machine, "a").await.expect("answered"));
        assert!(db.store.authority(&machine).await.expect("read").is_some(), "one is left that needs it");
        assert!(db.store.remove_secret(&machine, "b").await.expect("removed"));
        assert_eq!(db.store.authority(&machine).await.expect("read"), None);
        db.remove().await;
    }
}

#[tokio::test]
async fn sixteen_at_most_also_when_many_come_at_once_and_none_of_a_machine_that_ends() {
    for db in Fresh::every_kind().await {
        let machine = running(&db.store).await;
        let puts = (0..30).map(|n| {
            let store = db.store.clone();
            async move { store.put_secret(&machine, &secret(&format!("s{n}"), header(), 1), b"k").await }
        });
        let answers = futures::future::join_all(puts).await;
        assert!(answers.iter().all(|a| matches!(a, Ok(PutSecret::Kept | PutSecret::TooMany))), "{answers:?}");
        assert_eq!(db.store.secrets(&machine).await.expect("read").len(), SECRETS_MAX);
        let other = running(&db.store).await;
        db.store.put_secret(&other, &secret("mine", header(), 1), b"k").await.expect("answered");

        let record = db.store.machine_by_key(&machine).await.expect("read").expect("there");
        let end = MachineChange {
            state: Some(MachineState::Failed),
            ending: Some(Failure { kind: FailureKind::VmmDied, message: "m".into() }),
            ended_at: Some(Millis(NOW + 5)),
            ..MachineChange::default()
        };
        db.store.apply(&machine, record.revision, &end).await.expect("ended");
        assert!(db.store.secrets(&machine).await.expect("read").is_empty());
        assert_eq!(db.store.authority(&machine).await.expect("read"), None);
        let late = db.store.put_secret(&machine, &secret("late", header(), 1), b"k").await.expect("answered");
        assert_eq!(late, PutSecret::NotRunning);
        assert_eq!(db.store.secrets(&other).await.expect("read").len(), 1, "another machine keeps its own");
        db.remove().await;
    }
}
