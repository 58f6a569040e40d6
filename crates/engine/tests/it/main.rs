//! Tests of the engine against the fake driver: real actors, real guest protocol, faults on demand.

mod contexts;
mod egress;
mod files;
mod fork;
mod idle;
mod jobs;
mod journal;
mod lifecycle;
mod pause;
mod ports;
mod readers;
mod recovery;
mod save;
mod snapshots;
mod usage;

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use mainbrella_engine::clock::TokioClock;
use mainbrella_engine::fake::FakeDriver;
use mainbrella_engine::machine::jobs::{JobCommand, JobOrder};
use mainbrella_engine::{CommandOrder, Engine, EngineConfig};
use mainbrella_types::{
    CreatedAt, Generation, GenerationKey, Lease, MachineId, MachineRecord, MachineSpec, MachineState, Millis, OnIdle,
    ProjectId, SizeClass,
};

use journal::MemoryJournal;

pub(crate) const START: Millis = Millis(1_790_000_000_000);

pub(crate) struct Bench {
    pub(crate) driver: FakeDriver,
    pub(crate) journal: Arc<MemoryJournal>,
    pub(crate) clock: Arc<TokioClock>,
    pub(crate) engine: Engine,
    pub(crate) dir: Arc<tempfile::TempDir>,
}

impl Bench {
    pub(crate) fn new() -> Self {
        Self::with(FakeDriver::default())
    }

    pub(crate) fn with(driver: FakeDriver) -> Self {
        let dir = Arc::new(tempfile::tempdir().expect("temp dir"));
        Self::over(driver, Arc::default(), Arc::new(TokioClock::starting_at(START)), dir)
    }

    pub(crate) fn over(
        driver: FakeDriver,
        journal: Arc<MemoryJournal>,
        clock: Arc<TokioClock>,
        dir: Arc<tempfile::TempDir>,
    ) -> Self {
        let config = EngineConfig { jobs_dir: Some(dir.path().join("jobs")), ..EngineConfig::default() };
        let engine = Engine::new(Arc::new(driver.clone()), journal.clone(), clock.clone(), config);
        Self { driver, journal, clock, engine, dir }
    }

    /// The service is started again over what is left of the host and the store.
    pub(crate) fn restart(self) -> Self {
        Self::over(self.driver, self.journal, self.clock, self.dir)
    }

    /// A durable intent.
    pub(crate) fn intent(&self, slot: &str, ttl_ms: u64, idle_timeout_ms: Option<u64>) -> MachineRecord {
        use mainbrella_engine::Clock;
        let now = self.clock.now();
        let record = MachineRecord {
            key: GenerationKey::new(uuid::Uuid::now_v7()),
            generation: Generation { id: slot.parse::<MachineId>().expect("valid"), created_at: CreatedAt(now) },
            project: ProjectId::default_project(),
            host: "here".into(),
            spec: MachineSpec {
                template: "python".parse().expect("valid"),
                size: SizeClass::Small,
                egress: Default::default(),
                ttl_ms,
                idle_timeout_ms,
                on_idle: OnIdle::Stop,
                auto_resume: false,
                metadata: BTreeMap::new(),
                env: BTreeMap::from([("GREETING".into(), "hello".into())]),
            },
            state: MachineState::Creating,
            ending: None,
            lease: Lease { hard_deadline: now.plus(ttl_ms), idle_timeout_ms, last_activity: now },
            forked_from: None,
            restored_from: None,
            running_at: None,
            ended_at: None,
            revision: 1,
        };
        self.journal.put(record.clone());
        record
    }
}

/// A command of the fake guest.
pub(crate) fn order(text: &str) -> CommandOrder {
    CommandOrder {
        argv: text.split_whitespace().map(str::to_owned).collect(),
        timeout_ms: 10_000,
        output_limit: 1024 * 1024,
        ..CommandOrder::default()
    }
}

/// A job for the scripted guest, its words as they stand.
pub(crate) fn job(text: &str) -> JobOrder {
    let argv = text.split_whitespace().map(str::to_owned).collect();
    JobOrder {
        command: JobCommand::Argv(argv),
        cwd: None,
        user: None,
        env: BTreeMap::new(),
        timeout_ms: 600_000,
        stdin: Bytes::new(),
        stdin_open: false,
        pty: None,
    }
}
