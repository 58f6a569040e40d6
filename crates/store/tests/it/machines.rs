//! Intent, identity and guarded change, on every database that is there.

use std::collections::HashSet;

use crate::common::*;
use mainbrella_store::{Applied, BeginCreate, MachineChange, Refusal, Store, StoreError};
use mainbrella_types::limits::{FINISHED_RETENTION_MS, IDEMPOTENCY_RETENTION_MS};
use mainbrella_types::{MachineRecord, MachineState, Millis, OnIdle};

const DAY: i64 = 24 * 3600 * 1000;

#[tokio::test]
async fn a_record_comes_back_as_it_went_in() {
    for db in Fresh::every_kind().await {
        let mut intent = new(Some("box"), NOW);
        intent.spec.metadata = labels(&[("team", "ä\"\\\n"), ("empty", "")]);
        intent.spec.egress = mainbrella_types::EgressPolicy::Open;
        let made = fresh(db.store.begin_create(intent.clone(), None).await.expect("created"));
        assert_eq!(made.spec, intent.spec);
        assert_eq!((made.state, made.revision), (MachineState::Creating, 1));
        assert_eq!(made.generation.created_at.0, Millis(NOW));
        assert_eq!(made.lease.hard_deadline, Millis(NOW + 3_600_000));
        let some = Some(made.clone());
        assert_eq!(db.store.machine(&project(), &made.generation).await.expect("read"), some);
        assert_eq!(db.store.machine_by_key(&made.key).await.expect("read"), some);
        assert_eq!(db.store.newest_in_slot(&project(), &made.generation.id).await.expect("read"), some);
        assert_eq!(db.store.living(HOST).await.expect("read"), std::slice::from_ref(&made));
        assert_eq!(db.store.living("elsewhere").await.expect("read"), []);

        let other: mainbrella_types::ProjectId = "other".parse().expect("valid");
        assert_eq!(
            db.store.machine(&other, &made.generation).await.expect("read"),
            None,
            "another project sees nothing"
        );
        db.remove().await;
    }
}

#[tokio::test]
async fn two_hundred_creates_of_one_slot_make_one_machine() {
    for db in Fresh::every_kind().await {
        let answers = at_once(&db.store, 200, |_| (Some("busy"), None)).await;
        let made: Vec<_> = answers.iter().filter_map(as_fresh).collect();
        assert_eq!(made.len(), 1);
        for answer in &answers {
            match answer {
                BeginCreate::Fresh(_) => {}
                BeginCreate::SlotInUse(holder) => assert_eq!(*holder, made[0].generation),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(db.store.living(HOST).await.expect("read").len(), 1);
        db.remove().await;
    }
}

#[tokio::test]
async fn one_idempotency_key_two_hundred_times_makes_one_machine() {
    for db in Fresh::every_kind().await {
        let answers = at_once(&db.store, 200, |_| (None, same("k", 1))).await;
        let made: Vec<_> = answers.iter().filter_map(as_fresh).collect();
        assert_eq!(made.len(), 1);
        let replayed = answers.iter().filter(|a| matches!(a, BeginCreate::Replay(r) if r.key == made[0].key)).count();
        assert_eq!(replayed, 199);

        let again = db.store.begin_create(new(None, NOW), same("k", 2)).await.expect("answered");
        assert_eq!(again, BeginCreate::KeyConflict);
        assert_eq!(db.store.living(HOST).await.expect("read").len(), 1);
        db.remove().await;
    }
}

#[tokio::test]
async fn many_keys_and_slots_at_once_do_not_stand_in_each_others_way() {
    for db in Fresh::every_kind().await {
        let keys: Vec<String> = (0..10).map(|i| format!("k{i}")).collect();
        let slots: Vec<String> = (0..5).map(|i| format!("s{i}")).collect();
        // Key and slot meet in every combination, so a lock order that differs would deadlock.
        let answers = at_once(&db.store, 200, |i| (Some(&slots[i % 5]), same(&keys[(i / 5) % 10], 1))).await;
        assert_eq!(answers.iter().filter_map(as_fresh).count(), 5);
        assert_eq!(db.store.living(HOST).await.expect("read").len(), 5);
        db.remove().await;
    }
}

#[tokio::test]
async fn an_idempotency_key_outlives_a_restart_and_ends_with_its_retention() {
    for db in Fresh::every_kind().await {
        let made = fresh(db.store.begin_create(new(None, NOW), same("k", 1)).await.expect("created"));
        db.store.close().await;
        assert!(matches!(db.store.machine_by_key(&made.key).await, Err(StoreError::Closed)));

        let again = Store::open(&db.location, Millis(NOW)).await.expect("opens again");
        let last = NOW + i64::try_from(IDEMPOTENCY_RETENTION_MS).expect("small") - 1;
        let answer = again.begin_create(new(None, last), same("k", 1)).await.expect("answered");
        assert_eq!(answer, BeginCreate::Replay(made.clone()));
        let next = fresh(again.begin_create(new(None, last + 1), same("k", 2)).await.expect("created"));
        assert_ne!(next.key, made.key);
        again.close().await;
        db.remove().await;
    }
}

#[tokio::test]
async fn a_refused_create_leaves_nothing_behind() {
    for db in Fresh::every_kind().await {
        let first = make(&db.store, Some("s"), NOW).await;
        let refused = db.store.begin_create(new(Some("s"), NOW), same("k", 1)).await.expect("answered");
        assert_eq!(refused, BeginCreate::SlotInUse(first.generation.clone()));
        let done = updated(&db.store, &first, ended(MachineState::Failed, NOW)).await;
        assert!(done.state.is_final());
        // The key is free for the very same request, and the mark of the slot was not moved by the refused one.
        let second = fresh(db.store.begin_create(new(Some("s"), NOW), same("k", 1)).await.expect("created"));
        assert_eq!(second.generation.created_at.0, Millis(NOW + 1));

        let mut stranger = new(None, NOW);
        stranger.project = "nobody".parse().expect("valid");
        assert!(matches!(db.store.begin_create(stranger, None).await, Err(StoreError::UnknownProject)));
        let mut twin = new(None, NOW);
        twin.key = second.key;
        assert!(matches!(db.store.begin_create(twin, same("k2", 1)).await, Err(StoreError::Duplicate)));
        fresh(db.store.begin_create(new(None, NOW), same("k2", 1)).await.expect("created"));
        db.remove().await;
    }
}

#[tokio::test]
async fn a_clock_that_stands_still_or_goes_back_never_repeats_a_generation() {
    for db in Fresh::every_kind().await {
        let mut seen = HashSet::new();
        let mut last = i64::MIN;
        for now in [NOW, NOW, NOW - DAY, NOW - 100 * DAY, NOW + 5, NOW + 5, 0] {
            let made = make(&db.store, Some("s"), now).await;
            let at = made.generation.created_at.0.0;
            assert!(at > last && seen.insert(made.generation.clone()), "{at} after {last}");
            assert_eq!(made.lease.hard_deadline, Millis(now + 3_600_000), "the lease counts from the caller's clock");
            last = at;
            updated(&db.store, &made, ended(MachineState::Failed, now)).await;
        }

        // Everything of the slot is swept; then the clock goes back.
        let late = NOW + 30 * DAY;
        let swept = db.store.sweep(Millis(late)).await.expect("swept");
        assert_eq!((swept.machines, swept.slots, swept.more), (7, 1, false));
        assert_eq!(db.store.newest_in_slot(&project(), &"s".parse().expect("valid")).await.expect("read"), None);
        for slot in ["s", "never-used"] {
            let made = make(&db.store, Some(slot), NOW - DAY).await;
            assert!(made.generation.created_at.0.0 > last, "{slot}");
        }
        db.remove().await;
    }
}

#[tokio::test]
async fn every_move_is_held_to_the_transition_table() {
    for db in Fresh::every_kind().await {
        for target in MachineState::ALL {
            let made = make(&db.store, None, NOW).await;
            let change = if target.is_final() { ended(target, NOW) } else { to(target) };
            let answer = db.store.apply(&made.key, 1, &change).await.expect("answered");
            if MachineState::Creating.may_become(target) {
                assert!(matches!(answer, Applied::Updated(r) if r.state == target && r.revision == 2));
            } else {
                let refusal = Refusal::NoSuchMove { from: MachineState::Creating, to: target };
                assert_eq!(answer, Applied::Refused(made.clone(), refusal));
                assert_eq!(db.store.machine_by_key(&made.key).await.expect("read"), Some(made));
            }
        }
        let made = make(&db.store, None, NOW).await;
        let bare = db.store.apply(&made.key, 1, &to(MachineState::Failed)).await.expect("answered");
        assert_eq!(bare, Applied::Refused(made.clone(), Refusal::EndingMissing));
        let over = updated(&db.store, &made, ended(MachineState::Failed, NOW)).await;
        let touch = MachineChange { last_activity: Some(Millis(NOW + 1)), ..MachineChange::default() };
        assert_eq!(
            db.store.apply(&over.key, 2, &touch).await.expect("answered"),
            Applied::Refused(over, Refusal::Ended)
        );
        let unknown = new(None, NOW).key;
        assert_eq!(db.store.apply(&unknown, 1, &touch).await.expect("answered"), Applied::Missing);
        db.remove().await;
    }
}

#[tokio::test]
async fn of_many_writers_at_one_revision_one_wins_and_the_others_see_its_record() {
    for db in Fresh::every_kind().await {
        let made = make(&db.store, None, NOW).await;
        let mut tasks = tokio::task::JoinSet::new();
        for i in 0..50 {
            let (store, key) = (db.store.clone(), made.key);
            tasks.spawn(async move {
                let change = MachineChange { last_activity: Some(Millis(NOW + 1 + i)), ..MachineChange::default() };
                store.apply(&key, 1, &change).await.expect("answered")
            });
        }
        let answers = tasks.join_all().await;
        let winners: Vec<_> = answers.iter().filter(|a| matches!(a, Applied::Updated(_))).collect();
        assert_eq!(winners.len(), 1);
        let now = db.store.machine_by_key(&made.key).await.expect("read").expect("there");
        assert_eq!(now.revision, 2);
        assert_eq!(*winners[0], Applied::Updated(now.clone()));
        assert_eq!(answers.iter().filter(|a| **a == Applied::Stale(now.clone())).count(), 49);
        db.remove().await;
    }
}

#[tokio::test]
async fn a_lease_is_never_shortened() {
    for db in Fresh::every_kind().await {
        let made = make(&db.store, None, NOW).await;
        let back = MachineChange {
            hard_deadline: Some(Millis(1)),
            last_activity: Some(Millis(1)),
            running_at: Some(Millis(NOW + 9)),
            ..to(MachineState::Running)
        };
        let running = updated(&db.store, &made, back).await;
        assert_eq!(running.lease, made.lease);
        let on = MachineChange {
            hard_deadline: Some(Millis(NOW + 9_000_000)),
            last_activity: Some(Millis(NOW + 10)),
            idle_timeout_ms: Some(7_000),
            on_idle: Some(OnIdle::Pause),
            auto_resume: Some(true),
            running_at: Some(Millis(NOW + 99)),
            ..MachineChange::default()
        };
        let extended = updated(&db.store, &running, on).await;
        assert_eq!(extended.lease.hard_deadline, Millis(NOW + 9_000_000));
        assert_eq!(extended.lease.last_activity, Millis(NOW + 10));
        assert_eq!(extended.lease.idle_timeout_ms, Some(7_000));
        assert_eq!((extended.spec.on_idle, extended.spec.auto_resume), (OnIdle::Pause, true));
        assert_eq!(extended.running_at, Some(Millis(NOW + 9)), "the first answer stays the first");
        assert_eq!(db.store.machine_by_key(&made.key).await.expect("read"), Some(extended));
        db.remove().await;
    }
}

#[tokio::test]
async fn a_sweep_takes_what_is_over_and_nothing_else() {
    for db in Fresh::every_kind().await {
        let old = make(&db.store, Some("old"), NOW).await;
        updated(&db.store, &old, ended(MachineState::Failed, NOW)).await;
        let living = make(&db.store, Some("living"), NOW).await;
        let keyed = fresh(db.store.begin_create(new(Some("keyed"), NOW), same("k", 1)).await.expect("created"));
        updated(&db.store, &keyed, ended(MachineState::Failed, NOW)).await;
        let edge = NOW + i64::try_from(FINISHED_RETENTION_MS).expect("small");

        let early = db.store.sweep(Millis(edge - 1)).await.expect("swept");
        assert_eq!((early.idempotency, early.machines, early.slots), (1, 0, 0));
        let late = db.store.sweep(Millis(edge)).await.expect("swept");
        assert_eq!((late.idempotency, late.machines, late.slots), (0, 2, 2));
        assert_eq!(db.store.living(HOST).await.expect("read"), [living]);
        assert_eq!(db.store.machine_by_key(&old.key).await.expect("read"), None);
        assert_eq!(db.store.sweep(Millis(edge)).await.expect("swept"), mainbrella_store::Swept::default());
        db.remove().await;
    }
}

#[tokio::test]
async fn a_create_that_is_dropped_half_way_is_done_or_undone_and_blocks_nobody() {
    for db in Fresh::every_kind().await {
        for i in 0..60u64 {
            let slot = format!("s{i}");
            let create = db.store.begin_create(new(Some(&slot), NOW), same(&slot, 1));
            let _ = tokio::time::timeout(std::time::Duration::from_micros(i * 40), create).await;
        }
        for i in 0..60 {
            let slot = format!("s{i}");
            match db.store.begin_create(new(Some(&slot), NOW), same(&slot, 1)).await.expect("answered") {
                BeginCreate::Fresh(r) | BeginCreate::Replay(r) => assert_eq!(r.generation.id.as_str(), slot),
                other => panic!("{slot}: {other:?}"),
            }
        }
        assert_eq!(db.store.living(HOST).await.expect("read").len(), 60);
        db.remove().await;
    }
}

fn as_fresh(answer: &BeginCreate) -> Option<&MachineRecord> {
    match answer {
        BeginCreate::Fresh(record) => Some(record),
        _ => None,
    }
}

async fn at_once<'a>(
    store: &Store,
    count: usize,
    of: impl Fn(usize) -> (Option<&'a str>, Option<mainbrella_store::Idempotency>),
) -> Vec<BeginCreate> {
    let mut tasks = tokio::task::JoinSet::new();
    for i in 0..count {
        let (slot, idempotency) = of(i);
        let (store, intent) = (store.clone(), new(slot, NOW));
        tasks.spawn(async move { store.begin_create(intent, idempotency).await.expect("answered") });
    }
    tasks.join_all().await
}

#[tokio::test]
async fn an_egress_policy_is_kept_changed_and_never_loosened_from_off() {
    for db in Fresh::every_kind().await {
        for text in
            ["off", "open", "allow-list", "allow-list dry-run *.example.org:8443 [2606:2800::]/32 93.184.216.0/24:22"]
        {
            let mut intent = new(None, NOW);
            intent.spec.egress = text.parse().expect("a policy");
            let made = fresh(db.store.begin_create(intent.clone(), None).await.expect("created"));
            let read = db.store.machine_by_key(&made.key).await.expect("read").expect("there");
            assert_eq!(read.spec.egress.to_string(), text);
            for next in ["allow-list a.example", "open", "off", "open"] {
                let now = db.store.machine_by_key(&made.key).await.expect("read").expect("there");
                let change =
                    MachineChange { egress: Some(next.parse().expect("a policy")), ..MachineChange::default() };
                let answer = db.store.apply(&made.key, now.revision, &change).await.expect("applied");
                if now.spec.egress.to_string() == "off" && next != "off" {
                    assert_eq!(answer, Applied::Refused(now, Refusal::Locked));
                } else {
                    let Applied::Updated(changed) = answer else { panic!("{answer:?}") };
                    assert_eq!(changed.spec.egress.to_string(), next);
                    assert_eq!(db.store.machine_by_key(&made.key).await.expect("read"), Some(changed));
                }
            }
        }
        db.remove().await;
    }
}
