//! Lists: order, pages, filters.

use std::collections::BTreeMap;

use crate::common::*;
use mainbrella_store::{ListQuery, Store};
use mainbrella_types::{GenerationKey, MachineRecord, MachineState};

fn query() -> ListQuery {
    ListQuery { project: project(), states: Vec::new(), metadata: BTreeMap::new(), before: None, limit: 100 }
}

/// All pages of a query, one after another.
async fn walk(store: &Store, mut query: ListQuery) -> Vec<MachineRecord> {
    let mut all = Vec::new();
    loop {
        let page = store.list(&query).await.expect("listed");
        assert!(page.machines.len() <= query.limit as usize);
        all.extend(page.machines);
        match page.next {
            Some(next) => query.before = Some(next.to_string().parse().expect("round trips")),
            None => return all,
        }
    }
}

#[tokio::test]
async fn pages_hold_every_machine_once_newest_first_under_every_filter() {
    for db in Fresh::every_kind().await {
        let mut all = Vec::new();
        for i in 0..60_i64 {
            // Three machines share each instant, so the key must break the tie.
            let mut intent = new(None, NOW + i / 3);
            intent.spec.metadata = labels(&[("all", "yes"), ("third", &(i % 3).to_string())]);
            if i % 10 == 0 {
                intent.spec.metadata.insert("rare".to_owned(), "ä'; --".to_owned());
            }
            let mut made = fresh(db.store.begin_create(intent, None).await.expect("created"));
            if i % 4 == 0 {
                made = updated(&db.store, &made, ended(MachineState::Failed, NOW)).await;
            } else if i % 4 == 1 {
                made = updated(&db.store, &made, to(MachineState::Running)).await;
            }
            all.push(made);
        }
        all.sort_by_key(|r| std::cmp::Reverse((r.generation.created_at, r.key)));

        let states = [vec![], vec![MachineState::Running], vec![MachineState::Failed, MachineState::Creating]];
        let filters = [
            labels(&[]),
            labels(&[("all", "yes")]),
            labels(&[("all", "yes"), ("third", "1")]),
            labels(&[("all", "yes"), ("rare", "ä'; --"), ("third", "0")]),
            labels(&[("all", "no")]),
            labels(&[("ALL", "yes")]),
        ];
        for states in &states {
            for metadata in &filters {
                let expected: Vec<GenerationKey> = all
                    .iter()
                    .filter(|r| states.is_empty() || states.contains(&r.state))
                    .filter(|r| metadata.iter().all(|(k, v)| r.spec.metadata.get(k) == Some(v)))
                    .map(|r| r.key)
                    .collect();
                for limit in [1, 7, 60, 1000] {
                    let q = ListQuery { states: states.clone(), metadata: metadata.clone(), limit, ..query() };
                    let found: Vec<_> = walk(&db.store, q).await.into_iter().map(|r| r.key).collect();
                    assert_eq!(found, expected, "{states:?} {metadata:?} limit {limit}");
                }
            }
        }
        let none = ListQuery { limit: 0, ..query() };
        assert_eq!(db.store.list(&none).await.expect("listed").machines.len(), 1, "a limit of nothing is one");
        let other = ListQuery { project: "other".parse().expect("valid"), ..query() };
        assert_eq!(walk(&db.store, other).await, []);
        db.remove().await;
    }
}

#[tokio::test]
async fn machines_made_while_paging_do_not_shift_the_pages() {
    for db in Fresh::every_kind().await {
        let mut expected = Vec::new();
        for i in 0..10 {
            expected.insert(0, make(&db.store, None, NOW + i).await);
        }
        let first = db.store.list(&ListQuery { limit: 4, ..query() }).await.expect("listed");
        make(&db.store, None, NOW + 100).await;
        let rest = walk(&db.store, ListQuery { limit: 4, before: first.next, ..query() }).await;
        assert_eq!([first.machines, rest].concat(), expected);
        db.remove().await;
    }
}
