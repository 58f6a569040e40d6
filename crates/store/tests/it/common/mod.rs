//! What the tests of the store share: a fresh database of each kind, and machines to put into it.
#![allow(dead_code, reason = "the benchmark uses a part of it")]

use std::collections::BTreeMap;

use mainbrella_store::{BeginCreate, Idempotency, MachineChange, NewMachine, Store};
use mainbrella_types::{
    Failure, FailureKind, GenerationKey, MachineRecord, MachineSpec, MachineState, Millis, ProjectId, SizeClass,
};
use sqlx::{Connection as _, Executor as _};

pub const NOW: i64 = 1_790_000_000_000;
pub const HOST: &str = "host-1";

/// A database that is removed when dropped or, on a server, by [`Fresh::remove`].
pub struct Fresh {
    pub store: Store,
    pub location: String,
    folder: Option<tempfile::TempDir>,
    server: Option<(String, String)>,
}

impl Fresh {
    pub async fn sqlite() -> Self {
        let folder = tempfile::tempdir().expect("temporary folder");
        let location = folder.path().join("mainbrella.sqlite").to_str().expect("UTF-8").to_owned();
        let store = Store::open(&location, Millis(NOW)).await.expect("opens");
        Self { store, location, folder: Some(folder), server: None }
    }

    /// A database of its own on the server that `MAINBRELLA_TEST_POSTGRES` names.
    pub async fn postgres() -> Option<Self> {
        let server = std::env::var("MAINBRELLA_TEST_POSTGRES").ok()?;
        let name = format!("mb_{}", uuid::Uuid::now_v7().simple());
        let mut admin = sqlx::PgConnection::connect(&server).await.expect("server answers");
        admin.execute(sqlx::AssertSqlSafe(format!("CREATE DATABASE {name}"))).await.expect("database made");
        let location = server.replacen("/postgres?", &format!("/{name}?"), 1);
        assert_ne!(location, server, "the URL must end in /postgres?…");
        let store = Store::open(&location, Millis(NOW)).await.expect("opens");
        Some(Self { store, location, folder: None, server: Some((server, name)) })
    }

    pub async fn every_kind() -> Vec<Self> {
        let mut all = vec![Self::sqlite().await];
        all.extend(Self::postgres().await);
        all
    }

    pub fn folder(&self) -> &std::path::Path {
        self.folder.as_ref().expect("a SQLite database").path()
    }

    pub async fn remove(self) {
        self.store.close().await;
        if let Some((server, name)) = self.server {
            let mut admin = sqlx::PgConnection::connect(&server).await.expect("server answers");
            admin.execute(sqlx::AssertSqlSafe(format!("DROP DATABASE {name}"))).await.expect("database removed");
        }
    }
}

pub fn project() -> ProjectId {
    ProjectId::default_project()
}

pub fn spec() -> MachineSpec {
    MachineSpec {
        template: "python".parse().expect("valid"),
        size: SizeClass::Small,
        egress: Default::default(),
        ttl_ms: 3_600_000,
        idle_timeout_ms: Some(60_000),
        on_idle: Default::default(),
        auto_resume: false,
        metadata: BTreeMap::new(),
        env: BTreeMap::from([("LANG".to_owned(), "C.UTF-8".to_owned())]),
    }
}

pub fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

pub fn new(slot: Option<&str>, now: i64) -> NewMachine {
    NewMachine {
        key: GenerationKey::new(uuid::Uuid::now_v7()),
        project: project(),
        slot: slot.map(|s| s.parse().expect("valid")),
        host: HOST.to_owned(),
        spec: spec(),
        forked_from: None,
        restored_from: None,
        unlisted: false,
        now: Millis(now),
    }
}

pub fn same(key: &str, body: u8) -> Option<Idempotency> {
    Some(Idempotency { key: key.to_owned(), body_hash: [body; 32] })
}

pub fn fresh(answer: BeginCreate) -> MachineRecord {
    match answer {
        BeginCreate::Fresh(record) => record,
        other => panic!("not fresh: {other:?}"),
    }
}

pub async fn make(store: &Store, slot: Option<&str>, now: i64) -> MachineRecord {
    fresh(store.begin_create(new(slot, now), None).await.expect("created"))
}

pub fn to(state: MachineState) -> MachineChange {
    MachineChange { state: Some(state), ..MachineChange::default() }
}

pub fn ended(state: MachineState, at: i64) -> MachineChange {
    let kind = if state == MachineState::Stopped { FailureKind::StopRequested } else { FailureKind::Lost };
    MachineChange {
        state: Some(state),
        ending: Some(Failure { kind, message: "It ended.".to_owned() }),
        ended_at: Some(Millis(at)),
        ..MachineChange::default()
    }
}

pub async fn updated(store: &Store, record: &MachineRecord, change: MachineChange) -> MachineRecord {
    match store.apply(&record.key, record.revision, &change).await.expect("applied") {
        mainbrella_store::Applied::Updated(next) => next,
        other => panic!("not updated: {other:?}"),
    }
}
