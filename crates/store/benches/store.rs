//! How long the store takes, with few and with many records. Set `MAINBRELLA_TEST_POSTGRES` to measure a server too.
#![allow(missing_docs, reason = "criterion makes public items of its own")]

#[path = "../tests/it/common/mod.rs"]
mod common;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use common::*;
use criterion::{Criterion, criterion_group, criterion_main};
use mainbrella_store::{ListQuery, MachineChange};
use mainbrella_types::{MachineState, Millis};

fn benches(c: &mut Criterion) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("runtime");
    for records in [10, 10_000] {
        for db in runtime.block_on(Fresh::every_kind()) {
            let kind = if db.location.starts_with("postgres") { "postgres" } else { "sqlite" };
            let name = |what: &str| format!("{kind}/{what}/{records}");
            let store = &db.store;
            let made = runtime.block_on(async {
                let mut last = None;
                for i in 0..records {
                    let mut intent = new(None, NOW + i);
                    intent.spec.metadata = labels(&[("team", "a"), ("n", &(i % 100).to_string())]);
                    let made = fresh(store.begin_create(intent, same(&i.to_string(), 1)).await.expect("created"));
                    if i % 10 != 9 {
                        updated(store, &made, ended(MachineState::Failed, NOW)).await;
                    }
                    last = Some(made);
                }
                last.expect("some")
            });
            let get = async || store.machine(&project(), &made.generation).await.expect("read").expect("there");
            c.bench_function(&name("get"), |b| b.to_async(&runtime).iter(get));
            c.bench_function(&name("get, 64 callers"), |b| {
                b.iter_custom(|n| {
                    runtime.block_on(async {
                        let start = Instant::now();
                        let mut tasks = tokio::task::JoinSet::new();
                        for caller in 0..64 {
                            let (store, generation) = (store.clone(), made.generation.clone());
                            let share = n / 64 + u64::from(caller < n % 64);
                            tasks.spawn(async move {
                                for _ in 0..share {
                                    store.machine(&project(), &generation).await.expect("read").expect("there");
                                }
                            });
                        }
                        tasks.join_all().await;
                        start.elapsed()
                    })
                });
            });
            let q =
                ListQuery { project: project(), states: vec![], metadata: BTreeMap::new(), before: None, limit: 100 };
            c.bench_function(&name("list page of 10"), |b| {
                b.to_async(&runtime)
                    .iter(async || store.list(&ListQuery { limit: 10, ..q.clone() }).await.expect("listed"));
            });
            let labelled = ListQuery { metadata: labels(&[("team", "a"), ("n", "9")]), limit: 10, ..q.clone() };
            c.bench_function(&name("list by two labels"), |b| {
                b.to_async(&runtime).iter(async || store.list(&labelled).await.expect("listed"));
            });
            let replayed = same(&(records - 1).to_string(), 1);
            c.bench_function(&name("idempotent replay"), |b| {
                b.to_async(&runtime)
                    .iter(async || store.begin_create(new(None, NOW), replayed.clone()).await.expect("answered"));
            });
            c.bench_function(&name("create"), |b| {
                b.to_async(&runtime).iter(async || store.begin_create(new(None, NOW), None).await.expect("created"));
            });
            let mut revision = made.revision;
            {
                c.bench_function(&name("apply"), |b| {
                    b.iter_custom(|n| {
                        let start = Instant::now();
                        for _ in 0..n {
                            let touch = MachineChange {
                                last_activity: Some(Millis(NOW + revision)),
                                ..MachineChange::default()
                            };
                            runtime.block_on(store.apply(&made.key, revision, &touch)).expect("applied");
                            revision += 1;
                        }
                        start.elapsed()
                    });
                });
            }
            runtime.block_on(db.remove());
        }
    }
}

criterion_group! {
    name = store;
    config = Criterion::default().sample_size(20).measurement_time(Duration::from_secs(2)).warm_up_time(Duration::from_millis(500));
    targets = benches
}
criterion_main!(store);
