//! Random histories against a model in memory.

use std::collections::{BTreeMap, HashMap};

use crate::common::*;
use mainbrella_store::{Applied, BeginCreate, ListQuery, MachineChange};
use mainbrella_types::limits::{FINISHED_RETENTION_MS, IDEMPOTENCY_RETENTION_MS};
use mainbrella_types::{GenerationKey, MachineRecord, MachineState, Millis};
use proptest::prelude::*;

const RETENTION: i64 = FINISHED_RETENTION_MS as i64;
const KEY_RETENTION: i64 = IDEMPOTENCY_RETENTION_MS as i64;

#[derive(Clone, Debug)]
enum Step {
    /// The clock moves, also back.
    Clock(i64),
    Create {
        slot: Option<u8>,
        key: Option<(u8, u8)>,
    },
    Apply {
        which: prop::sample::Index,
        state: Option<usize>,
        ending: bool,
        at: i64,
        behind: bool,
    },
    Sweep,
    Reopen,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        2 => prop_oneof![-1000..1000_i64, Just(RETENTION / 2), Just(RETENTION), Just(-KEY_RETENTION), Just(KEY_RETENTION)]
            .prop_map(Step::Clock),
        6 => (prop::option::of(0..3u8), prop::option::of((0..3u8, 0..2u8))).prop_map(|(slot, key)| Step::Create { slot, key }),
        8 => (any::<prop::sample::Index>(), prop::option::weighted(0.9, 0..8usize), any::<bool>(), -500..500_i64, prop::bool::weighted(0.1))
            .prop_map(|(which, state, ending, at, behind)| Step::Apply { which, state, ending, at, behind }),
        2 => Just(Step::Sweep),
        1 => Just(Step::Reopen),
    ];
    prop::collection::vec(step, 1..60)
}

/// What the store promises, in the plainest form.
#[derive(Default)]
struct Model {
    machines: BTreeMap<GenerationKey, MachineRecord>,
    /// key → (body, machine, expiry)
    keys: HashMap<u8, (u8, GenerationKey, i64)>,
    /// The last instant of each slot, for ever.
    marks: HashMap<String, i64>,
}

impl Model {
    fn living_in(&self, slot: &str) -> Option<&MachineRecord> {
        self.machines.values().find(|r| r.generation.id.as_str() == slot && !r.state.is_final())
    }

    fn sweep(&mut self, now: i64) {
        self.keys.retain(|_, (_, _, expiry)| *expiry > now);
        let held: Vec<GenerationKey> = self.keys.values().map(|(_, key, _)| *key).collect();
        self.machines.retain(|key, r| {
            let old = r.state.is_final() && r.ended_at.is_some_and(|at| at.0 <= now - RETENTION);
            !old || held.contains(key)
        });
    }
}

async fn run(steps: &[Step], db: &mut Fresh) {
    let mut model = Model::default();
    let mut now = NOW;
    for step in steps {
        match step {
            Step::Clock(by) => now += by,
            Step::Create { slot, key } => {
                let slot_name = slot.map(|s| format!("s{s}"));
                let intent = new(slot_name.as_deref(), now);
                let idempotency = key.and_then(|(k, body)| same(&format!("k{k}"), body));
                let answer = db.store.begin_create(intent.clone(), idempotency).await.expect("answered");
                let held = key.and_then(|(k, body)| {
                    model
                        .keys
                        .get(&k)
                        .filter(|(_, _, expiry)| *expiry > now)
                        .map(|(b, machine, _)| (*b == body, *machine))
                });
                let holder = slot_name.as_deref().and_then(|s| model.living_in(s)).map(|r| r.generation.clone());
                match (held, holder) {
                    (Some((true, machine)), _) => {
                        assert_eq!(answer, BeginCreate::Replay(model.machines[&machine].clone()));
                    }
                    (Some((false, _)), _) => assert_eq!(answer, BeginCreate::KeyConflict),
                    (None, Some(holder)) => assert_eq!(answer, BeginCreate::SlotInUse(holder)),
                    (None, None) => {
                        let made = fresh(answer);
                        assert_eq!((made.key, &made.spec), (intent.key, &intent.spec));
                        let at = made.generation.created_at.0.0;
                        let name = made.generation.id.as_str().to_owned();
                        assert!(at >= now, "never before the clock");
                        assert!(model.marks.get(&name).is_none_or(|mark| at > *mark), "{name} at {at} again");
                        model.marks.insert(name, at);
                        if let Some((k, body)) = key {
                            model.keys.insert(*k, (*body, made.key, now + KEY_RETENTION));
                        }
                        model.machines.insert(made.key, made);
                    }
                }
            }
            Step::Apply { which, state, ending, at, behind } => {
                if model.machines.is_empty() {
                    continue;
                }
                let current = which.get(&model.machines.values().collect::<Vec<_>>()).to_owned().clone();
                let state = state.map(|s| MachineState::ALL[s]);
                let mut change = if *ending {
                    ended(MachineState::Failed, now)
                } else {
                    MachineChange { hard_deadline: Some(Millis(now + at)), ..MachineChange::default() }
                };
                change.state = state;
                change.last_activity = Some(Millis(now + at));
                let revision = current.revision - i64::from(*behind);
                let answer = db.store.apply(&current.key, revision, &change).await.expect("answered");
                let allowed = !current.state.is_final()
                    && state.is_none_or(|s| current.state.may_become(s))
                    && (state.is_none_or(|s| !s.is_final()) || *ending || current.ending.is_some());
                match answer {
                    Applied::Stale(record) => assert!(*behind && record == current),
                    Applied::Refused(record, _) => assert!(!behind && !allowed && record == current),
                    Applied::Updated(next) => {
                        assert!(!behind && allowed);
                        assert_eq!(next.revision, current.revision + 1);
                        assert_eq!(next.state, state.unwrap_or(current.state));
                        assert!(next.lease.hard_deadline >= current.lease.hard_deadline);
                        assert_eq!(next.lease.last_activity, current.lease.last_activity.max(Millis(now + at)));
                        assert_eq!(
                            (&next.key, &next.generation, &next.spec),
                            (&current.key, &current.generation, &current.spec)
                        );
                        model.machines.insert(next.key, next);
                    }
                    Applied::Missing => panic!("lost {current:?}"),
                }
            }
            Step::Sweep => {
                db.store.sweep(Millis(now)).await.expect("swept");
                model.sweep(now);
            }
            Step::Reopen => {
                db.store.close().await;
                db.store = mainbrella_store::Store::open(&db.location, Millis(now)).await.expect("opens");
            }
        }
    }
    let mut expected: Vec<_> = model.machines.values().cloned().collect();
    expected.sort_by_key(|r| std::cmp::Reverse((r.generation.created_at, r.key)));
    let all = ListQuery { project: project(), states: vec![], metadata: BTreeMap::new(), before: None, limit: 1000 };
    assert_eq!(db.store.list(&all).await.expect("listed").machines, expected);
    let living: Vec<_> = model.machines.values().filter(|r| !r.state.is_final()).cloned().collect();
    assert_eq!(db.store.living(HOST).await.expect("read"), living);
    for (slot, group) in expected.iter().map(|r| (&r.generation.id, r)).rev().collect::<BTreeMap<_, _>>() {
        assert_eq!(db.store.newest_in_slot(&project(), slot).await.expect("read").as_ref(), Some(group));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn the_store_does_what_the_model_says(steps in steps()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
        runtime.block_on(async {
            for mut db in Fresh::every_kind().await {
                run(&steps, &mut db).await;
                db.remove().await;
            }
        });
    }
}
