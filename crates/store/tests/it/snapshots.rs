//! Snapshots: intents that are acknowledged or taken back, bounded in number, listed, changed, ended.

use crate::common::*;
use mainbrella_store::{
    BeginCreate, BeginSave, Idempotency, NewMachine, SnapshotChange, SnapshotQuery, Store, StoreError,
};
use mainbrella_types::limits::IDEMPOTENCY_RETENTION_MS;
use mainbrella_types::{MachineState, Millis, ProjectId, SizeClass, SnapshotKey, SnapshotKind, SnapshotRecord};

fn wish(name: &str, now: i64) -> SnapshotRecord {
    SnapshotRecord {
        key: SnapshotKey::new(uuid::Uuid::now_v7()),
        project: project(),
        host: HOST.to_owned(),
        name: name.to_owned(),
        kind: SnapshotKind::Workspace,
        saved: false,
        source: "trunk@2026-10-08T12:00:00.000Z".parse().expect("valid"),
        template: "python".parse().expect("valid"),
        template_digest: "sha256:abc".to_owned(),
        size: SizeClass::Small,
        egress: "allow-list a.example".parse().expect("valid"),
        env: labels(&[("LANG", "C.UTF-8")]),
        bytes: 0,
        created_at: Millis(now),
        expires_at: None,
        archived: false,
    }
}

fn under(key: &str, body: u8) -> Idempotency {
    Idempotency { key: key.to_owned(), body_hash: [body; 32] }
}

async fn saved(store: &Store, wish: &SnapshotRecord) -> SnapshotRecord {
    assert!(matches!(store.begin_save(wish, None, 1000).await.expect("answered"), BeginSave::Fresh(_)));
    store.finish_save(&wish.key, 4096).await.expect("written").expect("there")
}

fn query(now: i64) -> SnapshotQuery {
    SnapshotQuery {
        project: project(),
        kind: None,
        archived: None,
        name: None,
        before: None,
        limit: 1000,
        now: Millis(now),
    }
}

async fn names(store: &Store, query: &SnapshotQuery) -> Vec<String> {
    let page = store.list_snapshots(query).await.expect("listed");
    page.snapshots.into_iter().map(|s| s.name).collect()
}

#[tokio::test]
async fn nobody_sees_a_snapshot_before_it_is_acknowledged_and_nothing_takes_it_back_afterwards() {
    for db in Fresh::every_kind().await {
        let (store, wish) = (&db.store, wish("one", NOW));
        let begun = store.begin_save(&wish, None, 5).await.expect("answered");
        assert_eq!(begun, BeginSave::Fresh(wish.clone()));
        assert_eq!(store.snapshot(&project(), &wish.key, Millis(NOW)).await.expect("read"), None);
        assert!(names(store, &query(NOW)).await.is_empty());
        assert!(!store.delete_snapshot(&project(), &wish.key, Millis(NOW)).await.expect("answered"));
        let whole = store.finish_save(&wish.key, 4096).await.expect("written").expect("there");
        assert_eq!(whole, SnapshotRecord { saved: true, bytes: 4096, ..wish.clone() });
        assert!(!store.abandon_save(&wish.key).await.expect("answered"), "acknowledged");
        assert_eq!(store.snapshot(&project(), &wish.key, Millis(NOW)).await.expect("read"), Some(whole));
        let neighbour: ProjectId = "neighbour".parse().expect("valid");
        assert_eq!(store.snapshot(&neighbour, &wish.key, Millis(NOW)).await.expect("read"), None);
        assert!(!store.delete_snapshot(&neighbour, &wish.key, Millis(NOW)).await.expect("answered"));

        let other = self::wish("two", NOW);
        store.begin_save(&other, None, 5).await.expect("begun");
        assert!(store.abandon_save(&other.key).await.expect("taken back"));
        assert_eq!(store.finish_save(&other.key, 1).await.expect("answered"), None, "its intent is gone");
        let unknown = SnapshotRecord { project: neighbour, ..self::wish("three", NOW) };
        assert!(matches!(store.begin_save(&unknown, None, 5).await, Err(StoreError::UnknownProject)));
        db.remove().await;
    }
}

#[tokio::test]
async fn many_wishes_at_once_do_not_get_past_the_bound_and_what_ended_does_not_count() {
    for db in Fresh::every_kind().await {
        let wishes = (0..20).map(|n| {
            let (store, wish) = (db.store.clone(), wish(&format!("w{n}"), NOW));
            async move { store.begin_save(&wish, None, 5).await.expect("answered") }
        });
        let begun = futures::future::join_all(wishes).await;
        let fresh: Vec<_> =
            begun.iter().filter_map(|b| if let BeginSave::Fresh(r) = b { Some(r.key) } else { None }).collect();
        assert_eq!(fresh.len(), 5);
        assert_eq!(begun.iter().filter(|b| **b == BeginSave::TooMany).count(), 15);
        db.store.abandon_save(&fresh[0]).await.expect("taken back");
        db.store.finish_save(&fresh[1], 1).await.expect("written");
        let archived = SnapshotChange { archived: Some(true), ..SnapshotChange::default() };
        db.store
            .update_snapshot(&project(), &fresh[1], &archived, Millis(NOW))
            .await
            .expect("put aside")
            .expect("there");
        let short = SnapshotRecord { expires_at: Some(Millis(NOW + 10)), ..wish("short", NOW) };
        saved(&db.store, &short).await;
        assert_eq!(db.store.begin_save(&wish("x", NOW), None, 5).await.expect("answered"), BeginSave::TooMany);
        let later = db.store.begin_save(&wish("x", NOW + 10), None, 5).await.expect("answered");
        assert!(matches!(later, BeginSave::Fresh(_)), "an expired one is not counted");
        assert_eq!(db.store.begin_save(&wish("y", NOW + 10), None, 5).await.expect("answered"), BeginSave::TooMany);
        assert!(db.store.delete_snapshot(&project(), &fresh[1], Millis(NOW + 11)).await.expect("deleted"));
        let freed = db.store.begin_save(&wish("y", NOW + 11), None, 5).await.expect("answered");
        assert!(matches!(freed, BeginSave::Fresh(_)));
        db.remove().await;
    }
}

#[tokio::test]
async fn a_key_stands_for_one_snapshot_for_a_day_even_when_that_is_deleted() {
    for db in Fresh::every_kind().await {
        let (store, first) = (&db.store, wish("one", NOW));
        store.begin_save(&first, Some(&under("k", 1)), 5).await.expect("begun");
        let begin = async |body: u8, now: i64| {
            store.begin_save(&wish("again", now), Some(&under("k", body)), 5).await.expect("answered")
        };
        assert!(matches!(begin(1, NOW + 1).await, BeginSave::Replay(r) if r.key == first.key && !r.saved));
        assert_eq!(begin(2, NOW + 1).await, BeginSave::Conflict);
        store.finish_save(&first.key, 7).await.expect("written");
        assert!(matches!(begin(1, NOW + 2).await, BeginSave::Replay(r) if r.saved && r.bytes == 7));
        let found = store.find_save(&project(), &under("k", 1), Millis(NOW + 2)).await.expect("read");
        assert!(matches!(found, Some(BeginSave::Replay(r)) if r.key == first.key));
        assert_eq!(store.find_save(&project(), &under("l", 1), Millis(NOW)).await.expect("read"), None);
        assert!(store.delete_snapshot(&project(), &first.key, Millis(NOW + 3)).await.expect("deleted"));
        assert!(!store.delete_snapshot(&project(), &first.key, Millis(NOW + 4)).await.expect("answered"));
        assert_eq!(begin(1, NOW + 5).await, BeginSave::Deleted(first.key));
        assert_eq!(begin(2, NOW + 5).await, BeginSave::Conflict);
        assert_eq!(store.sweep(Millis(NOW + 6)).await.expect("swept").snapshots, 0, "its key is still kept");
        let day = NOW + IDEMPOTENCY_RETENTION_MS as i64;
        assert!(matches!(begin(3, day).await, BeginSave::Fresh(_)));
        assert_eq!(store.sweep(Millis(day)).await.expect("swept").snapshots, 1);
        // A save that failed has left its key free.
        let failed = wish("failed", NOW);
        store.begin_save(&failed, Some(&under("f", 1)), 5).await.expect("begun");
        store.abandon_save(&failed.key).await.expect("taken back");
        let again = store.begin_save(&wish("failed", NOW), Some(&under("f", 1)), 5).await.expect("answered");
        assert!(matches!(again, BeginSave::Fresh(r) if r.key != failed.key));
        db.remove().await;
    }
}

#[tokio::test]
async fn lists_are_paged_newest_first_and_filtered() {
    for db in Fresh::every_kind().await {
        let store = &db.store;
        let mut all = Vec::new();
        for n in 0..7 {
            let kind = if n % 2 == 0 { SnapshotKind::Workspace } else { SnapshotKind::Full };
            // Pairs of one instant.
            let wish = SnapshotRecord { kind, ..wish(&format!("n{}", n % 3), NOW + n / 2) };
            all.push(saved(store, &wish).await);
        }
        all.sort_by_key(|s| std::cmp::Reverse((s.created_at, s.key)));
        let mut seen = Vec::new();
        let mut page = SnapshotQuery { limit: 2, ..query(NOW + 100) };
        loop {
            let found = store.list_snapshots(&page).await.expect("listed");
            assert!(found.snapshots.len() == 2 || found.next.is_none());
            seen.extend(found.snapshots);
            match found.next {
                Some(next) => page.before = Some(next),
                None => break,
            }
        }
        assert_eq!(seen, all);
        let full = SnapshotQuery { kind: Some(SnapshotKind::Full), ..query(NOW + 100) };
        assert_eq!(names(store, &full).await.len(), 3);
        let named = SnapshotQuery { name: Some("n0".into()), limit: 2, ..query(NOW + 100) };
        let first = store.list_snapshots(&named).await.expect("listed");
        assert_eq!((first.snapshots.len(), first.next.is_some()), (2, true));
        let change = SnapshotChange { name: Some("renamed é".into()), archived: Some(true) };
        let changed = store.update_snapshot(&project(), &all[3].key, &change, Millis(NOW)).await.expect("written");
        assert_eq!(changed.map(|s| (s.name, s.archived)), Some(("renamed é".to_owned(), true)));
        let aside = SnapshotQuery { archived: Some(true), ..query(NOW + 100) };
        assert_eq!(names(store, &aside).await, ["renamed é"]);
        assert_eq!(names(store, &SnapshotQuery { archived: Some(false), ..query(NOW + 100) }).await.len(), 6);
        let nobody = SnapshotQuery { project: "neighbour".parse().expect("valid"), ..query(NOW + 100) };
        assert!(names(store, &nobody).await.is_empty());
        db.remove().await;
    }
}

#[tokio::test]
async fn time_ends_them_and_a_host_names_its_own() {
    for db in Fresh::every_kind().await {
        let store = &db.store;
        let kept = saved(store, &wish("kept", NOW)).await;
        let short = saved(store, &SnapshotRecord { expires_at: Some(Millis(NOW + 10)), ..wish("short", NOW) }).await;
        let half = SnapshotRecord { expires_at: Some(Millis(NOW + 10)), ..wish("half", NOW) };
        store.begin_save(&half, None, 9).await.expect("begun");
        saved(store, &SnapshotRecord { host: "elsewhere".into(), ..wish("far", NOW) }).await;
        let here = async || {
            let all = store.snapshots_of_host(HOST).await.expect("read");
            all.into_iter().map(|s| (s.name, s.saved)).collect::<Vec<_>>()
        };
        assert_eq!(here().await, [("kept".into(), true), ("short".into(), true), ("half".into(), false)]);
        assert!(store.snapshot(&project(), &short.key, Millis(NOW + 9)).await.expect("read").is_some());
        assert_eq!(store.snapshot(&project(), &short.key, Millis(NOW + 10)).await.expect("read"), None);
        assert_eq!(names(store, &query(NOW + 10)).await.len(), 2);
        assert_eq!(store.expire_snapshots(Millis(NOW + 9)).await.expect("answered"), 0);
        assert_eq!(store.expire_snapshots(Millis(NOW + 10)).await.expect("ended"), 1, "an intent is not its to end");
        assert_eq!(here().await, [("kept".to_owned(), true), ("half".into(), false)]);
        assert!(store.snapshot_by_key(&kept.key).await.expect("read").is_some());
        db.remove().await;
    }
}

#[tokio::test]
async fn a_machine_starts_only_from_a_snapshot_that_is_there_and_under_keys_of_its_own() {
    for db in Fresh::every_kind().await {
        let store = &db.store;
        let whole = saved(store, &SnapshotRecord { expires_at: Some(Millis(NOW + 100)), ..wish("w", NOW) }).await;
        let restore = |now: i64| NewMachine { restored_from: Some(whole.key), ..new(None, now) };
        let made = fresh(store.begin_create(restore(NOW), same("k", 1)).await.expect("begun"));
        assert_eq!((made.restored_from, made.state), (Some(whole.key), MachineState::Creating));
        assert_eq!(
            store.machine_by_key(&made.key).await.expect("read").map(|m| m.restored_from),
            Some(Some(whole.key))
        );
        // The key of a create is another one.
        assert!(matches!(store.begin_create(new(None, NOW), same("k", 2)).await, Ok(BeginCreate::Fresh(_))));
        let found = store.find_restore(&project(), &same("k", 1).expect("a key"), Millis(NOW)).await.expect("read");
        assert!(matches!(found, Some(BeginCreate::Replay(r)) if r.key == made.key));
        assert_eq!(store.begin_create(restore(NOW + 100), None).await.expect("answered"), BeginCreate::SnapshotGone);
        store.delete_snapshot(&project(), &whole.key, Millis(NOW + 1)).await.expect("deleted");
        let gone = store.begin_create(restore(NOW + 2), same("l", 1)).await.expect("answered");
        assert_eq!(gone, BeginCreate::SnapshotGone);
        let again = store.begin_create(restore(NOW + 2), same("k", 1)).await.expect("answered");
        assert!(matches!(again, BeginCreate::Replay(r) if r.key == made.key), "what was made stays the answer");
        let free = store.find_restore(&project(), &same("l", 1).expect("a key"), Millis(NOW)).await.expect("read");
        assert_eq!(free, None, "a refusal keeps no key");
        db.remove().await;
    }
}
