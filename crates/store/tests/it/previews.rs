//! Previews: bounded in number, made once a key, listed, renewed, revoked, gone with their machine.

use crate::common::*;
use mainbrella_store::{BeginPreview, Idempotency, PreviewRecord, Store};
use mainbrella_types::limits::{FINISHED_RETENTION_MS, IDEMPOTENCY_RETENTION_MS};
use mainbrella_types::{GenerationKey, MachineRecord, MachineState, Millis};

fn wish(machine: &GenerationKey, n: u8, now: i64) -> PreviewRecord {
    PreviewRecord {
        id: format!("pv-{n}"),
        machine: *machine,
        port: 3000 + u16::from(n),
        token_hash: [n; 32],
        created_at: Millis(now),
        expires_at: Millis(now + 60_000),
        revoked_at: None,
    }
}

fn under(key: &str, body: u8) -> Idempotency {
    Idempotency { key: key.to_owned(), body_hash: [body; 32] }
}

async fn running(store: &Store) -> MachineRecord {
    let record = make(store, None, NOW).await;
    updated(store, &record, to(MachineState::Running)).await
}

#[tokio::test]
async fn eight_at_once_and_one_more_when_one_has_ended() {
    for db in Fresh::every_kind().await {
        let machine = running(&db.store).await.key;
        for n in 0..8 {
            let begun = db.store.begin_preview(&wish(&machine, n, NOW), None).await.expect("answered");
            assert_eq!(begun, BeginPreview::Fresh(wish(&machine, n, NOW)));
        }
        let ninth = wish(&machine, 8, NOW);
        assert_eq!(db.store.begin_preview(&ninth, None).await.expect("answered"), BeginPreview::TooMany);
        assert_eq!(db.store.preview(&machine, "pv-8").await.expect("read"), None, "nothing was kept");
        assert!(db.store.revoke_preview(&machine, "pv-3", Millis(NOW + 1)).await.expect("revoked"));
        assert!(!db.store.revoke_preview(&machine, "pv-3", Millis(NOW + 2)).await.expect("answered"));
        let listed = db.store.active_previews(&machine, Millis(NOW + 2)).await.expect("listed");
        assert_eq!(listed.len(), 7);
        assert!(listed.iter().all(|p| p.id != "pv-3"));
        assert!(matches!(db.store.begin_preview(&ninth, None).await.expect("answered"), BeginPreview::Fresh(_)));
        // All of them end by themselves.
        assert!(db.store.active_previews(&machine, Millis(NOW + 60_000)).await.expect("listed").is_empty());
        let later = wish(&machine, 9, NOW + 60_000);
        assert!(matches!(db.store.begin_preview(&later, None).await.expect("answered"), BeginPreview::Fresh(_)));
        assert!(!format!("{later:?}").contains("9, 9"), "the hash is not in logs");
        db.remove().await;
    }
}

#[tokio::test]
async fn many_wishes_at_once_do_not_get_past_the_bound() {
    for db in Fresh::every_kind().await {
        let machine = running(&db.store).await.key;
        let wishes = (0..30).map(|n| {
            let (store, wish) = (db.store.clone(), wish(&machine, n, NOW));
            async move { store.begin_preview(&wish, None).await.expect("answered") }
        });
        let begun = futures::future::join_all(wishes).await;
        assert_eq!(begun.iter().filter(|b| matches!(b, BeginPreview::Fresh(_))).count(), 8);
        assert_eq!(begun.iter().filter(|b| **b == BeginPreview::TooMany).count(), 22);
        db.remove().await;
    }
}

#[tokio::test]
async fn a_key_stands_for_one_preview_of_its_generation() {
    for db in Fresh::every_kind().await {
        let (machine, other) = (running(&db.store).await.key, running(&db.store).await.key);
        let first = wish(&machine, 1, NOW);
        let begun = db.store.begin_preview(&first, Some(&under("k", 1))).await.expect("answered");
        assert_eq!(begun, BeginPreview::Fresh(first.clone()));
        let again = db.store.begin_preview(&wish(&machine, 2, NOW + 5), Some(&under("k", 1))).await.expect("answered");
        assert_eq!(again, BeginPreview::Replay(first.clone()));
        let conflict = db.store.begin_preview(&wish(&machine, 3, NOW), Some(&under("k", 2))).await.expect("answered");
        assert_eq!(conflict, BeginPreview::Conflict);
        let elsewhere = db.store.begin_preview(&wish(&other, 4, NOW), Some(&under("k", 2))).await.expect("answered");
        assert!(matches!(elsewhere, BeginPreview::Fresh(_)));
        // Ended, it is still the one; a day later the key is free.
        db.store.revoke_preview(&machine, "pv-1", Millis(NOW + 9)).await.expect("revoked");
        let ended = db.store.begin_preview(&wish(&machine, 5, NOW + 10), Some(&under("k", 1))).await.expect("answered");
        assert!(matches!(ended, BeginPreview::Replay(p) if p.revoked_at == Some(Millis(NOW + 9))));
        let day = NOW + 60_000 + IDEMPOTENCY_RETENTION_MS as i64;
        let free = db.store.begin_preview(&wish(&machine, 6, day), Some(&under("k", 7))).await.expect("answered");
        assert!(matches!(free, BeginPreview::Fresh(_)));
        db.remove().await;
    }
}

#[tokio::test]
async fn renewing_never_shortens_and_does_not_wake_what_has_ended() {
    for db in Fresh::every_kind().await {
        let machine = running(&db.store).await.key;
        for n in 0..2 {
            db.store.begin_preview(&wish(&machine, n, NOW), None).await.expect("answered");
        }
        let renew = async |id: &str, to: i64, now: i64| {
            let renewed = db.store.renew_preview(&machine, id, Millis(to), Millis(now)).await.expect("answered");
            renewed.map(|p| p.expires_at.0)
        };
        assert_eq!(renew("pv-0", NOW + 90_000, NOW + 1).await, Some(NOW + 90_000));
        assert_eq!(renew("pv-0", NOW + 70_000, NOW + 2).await, Some(NOW + 90_000));
        assert_eq!(renew("pv-1", NOW + 90_000, NOW + 60_000).await, None, "ended");
        assert_eq!(renew("pv-9", NOW + 90_000, NOW).await, None, "never was");
        db.store.revoke_preview(&machine, "pv-0", Millis(NOW + 3)).await.expect("revoked");
        assert_eq!(renew("pv-0", NOW + 99_000, NOW + 4).await, None, "revoked");
        db.remove().await;
    }
}

#[tokio::test]
async fn a_machine_that_does_not_run_gets_none_and_takes_its_own_along() {
    for db in Fresh::every_kind().await {
        let young = make(&db.store, None, NOW).await;
        let begun = db.store.begin_preview(&wish(&young.key, 1, NOW), None).await.expect("answered");
        assert_eq!(begun, BeginPreview::NotRunning);
        let running = updated(&db.store, &young, to(MachineState::Running)).await;
        db.store.begin_preview(&wish(&running.key, 1, NOW), None).await.expect("answered");
        updated(&db.store, &running, ended(MachineState::Failed, NOW + 1000)).await;
        let begun = db.store.begin_preview(&wish(&running.key, 2, NOW), None).await.expect("answered");
        assert_eq!(begun, BeginPreview::NotRunning);
        db.store.sweep(Millis(NOW + 1001 + FINISHED_RETENTION_MS as i64)).await.expect("swept");
        assert_eq!(db.store.preview(&running.key, "pv-1").await.expect("read"), None);
        db.remove().await;
    }
}
