//! A store with records in it, as if machines had come and gone.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use mainbrella_store::{Applied, BeginCreate, MachineChange, NewMachine, Store};
use mainbrella_types::{Failure, FailureKind, GenerationKey, MachineSpec, MachineState, Millis, ProjectId};

use crate::Fault;
use crate::world::{SIZE, template};

/// The slot of the last of them.
pub const LAST_SLOT: &str = "bench-last";
/// Name of the database in a data directory.
const DATABASE: &str = "mainbrella.sqlite";
/// The name a service gives its host when it is told none.
const HOST: &str = "local";

/// Puts `count` records of ended machines into a new database in `data`.
pub async fn fill(data: &Path, count: usize) -> Result<(), Fault> {
    // Written where that costs little, then moved: every one of them would be waited for on the disk.
    let place = memory_folder()?;
    let path = place.path().join(DATABASE);
    let now = Millis(i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis())?);
    let store = Store::open_sqlite(&path, now).await?;
    for n in 0..count {
        let last = n + 1 == count;
        let new = NewMachine {
            key: GenerationKey::new(uuid::Uuid::now_v7()),
            project: ProjectId::default_project(),
            slot: if last { Some(LAST_SLOT.parse()?) } else { None },
            host: HOST.to_owned(),
            spec: MachineSpec {
                template: template(),
                size: SIZE,
                egress: Default::default(),
                ttl_ms: 3_600_000,
                idle_timeout_ms: None,
                on_idle: Default::default(),
                auto_resume: false,
                metadata: BTreeMap::from([("team".to_owned(), format!("team-{}", n % 50))]),
                env: BTreeMap::new(),
            },
            forked_from: None,
            restored_from: None,
            unlisted: false,
            now,
        };
        let record = match store.begin_create(new, None).await? {
            BeginCreate::Fresh(record) => record,
            other => return Err(format!("a record was not made: {other:?}").into()),
        };
        let end = MachineChange {
            state: Some(MachineState::Failed),
            ending: Some(Failure { kind: FailureKind::Lost, message: "It ended.".to_owned() }),
            ended_at: Some(now),
            ..MachineChange::default()
        };
        match store.apply(&record.key, record.revision, &end).await? {
            Applied::Updated(_) => {}
            other => return Err(format!("a record was not ended: {other:?}").into()),
        }
    }
    store.close().await;
    for entry in std::fs::read_dir(place.path())? {
        let entry = entry?;
        std::fs::copy(entry.path(), data.join(entry.file_name()))?;
    }
    Ok(())
}

fn memory_folder() -> std::io::Result<tempfile::TempDir> {
    let make = || tempfile::Builder::new().prefix("mb-bench-records-").tempdir_in("/dev/shm");
    make().or_else(|_| tempfile::Builder::new().prefix("mb-bench-records-").tempdir())
}
