//! What was acknowledged is there after a kill; what cannot be opened says why.

use std::collections::HashSet;
use std::io::BufRead as _;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};

use crate::common::*;
use mainbrella_store::{Applied, Store, StoreError};
use mainbrella_types::{GenerationKey, MachineState, Millis};
use sqlx::{Connection as _, Executor as _};

const CHILD: &str = "MAINBRELLA_STORE_CRASH_CHILD";

#[tokio::test]
async fn nothing_acknowledged_is_lost_when_the_process_is_killed() {
    if let Ok(location) = std::env::var(CHILD) {
        return write_until_killed(&location).await;
    }
    let folder = tempfile::tempdir().expect("temporary folder");
    let location = folder.path().join("mainbrella.sqlite");
    let mut acknowledged: Vec<(GenerationKey, MachineState)> = Vec::new();
    for round in 0..6 {
        let mut child = Command::new(std::env::current_exe().expect("has a path"))
            .args(["--exact", "durability::nothing_acknowledged_is_lost_when_the_process_is_killed", "--nocapture"])
            .env(CHILD, &location)
            .stdout(Stdio::piped())
            .spawn()
            .expect("starts");
        let mut lines = std::io::BufReader::new(child.stdout.take().expect("piped")).lines();
        // Killed after another number of lines each time, and what is in the pipe by then was acknowledged too.
        let (mut seen, until) = (0, 20 + round * 17);
        while let Some(Ok(line)) = lines.next() {
            if let Some((key, state)) = line.strip_prefix("ack ").and_then(|l| l.split_once(' ')) {
                acknowledged.push((key.parse().expect("a key"), state.parse().expect("a state")));
                seen += 1;
                if seen == until {
                    child.kill().expect("killed");
                }
            }
        }
        assert!(seen >= until && !child.wait().expect("waited").success());

        let store = Store::open_sqlite(&location, Millis(NOW)).await.expect("opens after the kill");
        let mut newest = HashSet::new();
        for (key, state) in acknowledged.iter().rev() {
            let record = store.machine_by_key(key).await.expect("read").expect("acknowledged, so there");
            if newest.insert(*key) {
                // The last acknowledged state of a machine, or the one that was being written at the kill.
                assert!(record.state == *state || state.may_become(record.state), "{state} then {}", record.state);
            }
        }
        store.close().await;
    }
    let mut db = sqlx::SqliteConnection::connect(location.to_str().expect("UTF-8")).await.expect("opens");
    let verdict: String = sqlx::query_scalar("PRAGMA integrity_check").fetch_one(&mut db).await.expect("checked");
    assert_eq!(verdict, "ok");
    db.close().await.expect("closed");
}

async fn write_until_killed(location: &str) {
    let store = Store::open(location, Millis(NOW)).await.expect("opens");
    loop {
        let made = make(&store, None, NOW).await;
        println!("ack {} {}", made.key, made.state);
        let running = updated(&store, &made, to(MachineState::Running)).await;
        println!("ack {} {}", running.key, running.state);
        if let Applied::Updated(over) =
            store.apply(&running.key, running.revision, &ended(MachineState::Failed, NOW)).await.expect("applied")
        {
            println!("ack {} {}", over.key, over.state);
        }
    }
}

#[tokio::test]
async fn the_files_are_for_their_owner_only() {
    let db = Fresh::sqlite().await;
    make(&db.store, None, NOW).await;
    let modes = |folder: &std::path::Path| -> Vec<(String, u32)> {
        std::fs::read_dir(folder)
            .expect("read")
            .map(|e| e.expect("entry"))
            .map(|e| {
                (e.file_name().into_string().expect("UTF-8"), e.metadata().expect("stat").permissions().mode() & 0o777)
            })
            .collect()
    };
    let found = modes(db.folder());
    assert!(found.len() >= 3, "file, log and index: {found:?}");
    assert!(found.iter().all(|(_, mode)| *mode == 0o600), "{found:?}");

    db.store.close().await;
    std::fs::set_permissions(&db.location, std::fs::Permissions::from_mode(0o644)).expect("set");
    let again = Store::open(&db.location, Millis(NOW)).await.expect("opens");
    assert!(modes(db.folder()).iter().all(|(_, mode)| *mode == 0o600), "tightened");
    again.close().await;
}

#[tokio::test]
async fn a_newer_database_is_left_alone() {
    for db in Fresh::every_kind().await {
        db.store.health().await.expect("healthy");
        let raise = "UPDATE meta SET value = '999' WHERE name = 'schema_version'";
        if db.location.starts_with("postgres") {
            let mut c = sqlx::PgConnection::connect(&db.location).await.expect("opens");
            c.execute(raise).await.expect("raised");
            c.close().await.expect("closed");
        } else {
            let mut c = sqlx::SqliteConnection::connect(&db.location).await.expect("opens");
            c.execute(raise).await.expect("raised");
            c.close().await.expect("closed");
        }
        for refused in [Store::open(&db.location, Millis(NOW)).await.map(drop), db.store.health().await] {
            assert!(matches!(refused, Err(StoreError::SchemaTooNew { found: 999, supported: _ })), "{refused:?}");
        }
        db.remove().await;
    }
}

#[tokio::test]
async fn what_is_no_database_of_ours_is_refused() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let junk = folder.path().join("junk");
    std::fs::write(&junk, "x".repeat(8192)).expect("written");
    let refused = Store::open_sqlite(&junk, Millis(NOW)).await.map(drop);
    assert!(matches!(refused, Err(StoreError::Corrupt(_))), "{refused:?}");
    assert_eq!(std::fs::read_to_string(&junk).expect("read"), "x".repeat(8192), "left as it was");

    let missing = folder.path().join("no/such/folder/db");
    let refused = Store::open_sqlite(&missing, Millis(NOW)).await.map(drop);
    assert!(matches!(refused, Err(StoreError::Unusable(_))), "{refused:?}");
    let refused = Store::open(folder.path().to_str().expect("UTF-8"), Millis(NOW)).await.map(drop);
    assert!(matches!(refused, Err(StoreError::Unusable(_))), "{refused:?}");
}

#[tokio::test]
async fn two_services_that_start_at_once_both_find_the_schema() {
    for db in Fresh::every_kind().await {
        let mut tasks = tokio::task::JoinSet::new();
        let elsewhere = tempfile::tempdir().expect("temporary folder");
        let path = elsewhere.path().join("new.sqlite").to_str().expect("UTF-8").to_owned();
        for _ in 0..6 {
            let location = if db.location.starts_with("postgres") { db.location.clone() } else { path.clone() };
            tasks.spawn(async move {
                let store = Store::open(&location, Millis(NOW)).await.expect("opens");
                store.health().await.expect("healthy");
                store.close().await;
            });
        }
        assert_eq!(tasks.join_all().await.len(), 6);
        db.remove().await;
    }
}
