//! A ground without machines: files in memory, commands of a few words, faults on demand.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Read};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use mainbrella_builder::{
    BaseKind, BaseTemplate, CachedStep, Ground, Machine, MachineOrder, NewVersion, Node, NodeKind, Output, RunEnd,
    RunOrder, Save, Version,
};
use mainbrella_engine::{Clock as _, EngineError, SystemClock};
use mainbrella_recipe::Settings;
use mainbrella_types::{ErrorCode, SizeClass, SnapshotKey, TemplateName};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// A file, or a folder, or a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Thing {
    pub data: Option<Vec<u8>>,
    pub link: Option<String>,
    pub owner: (u64, u64),
    pub mode: u32,
}

pub type Disk = BTreeMap<String, Thing>;

#[derive(Default)]
pub struct World {
    pub templates: HashMap<TemplateName, BaseTemplate>,
    pub versions: Vec<(Version, Arc<NewVersion>)>,
    pub steps: BTreeMap<String, CachedStep>,
    pub snapshots: HashMap<SnapshotKey, Disk>,
    pub machines: usize,
    pub most_machines: usize,
    pub orders: Vec<MachineOrder>,
    pub runs: Vec<RunOrder>,
    pub calls: Vec<&'static str>,
    pub stopped_for: Vec<String>,
    /// What is done at a call, by its name and how many calls were before it in all.
    pub at: Option<At>,
    pub clock: i64,
    /// Nothing gets ready any more.
    pub prepare_hangs: bool,
}

pub type At = Arc<dyn Fn(&'static str, usize) -> Option<EngineError> + Send + Sync>;

#[derive(Clone, Default)]
pub struct Fake(pub Arc<Mutex<World>>);

pub fn thing(data: Option<&str>) -> Thing {
    Thing { data: data.map(|d| d.as_bytes().to_vec()), link: None, owner: (0, 0), mode: 0o755 }
}

pub fn name(text: &str) -> TemplateName {
    text.parse().expect("a name")
}

impl Fake {
    pub fn new() -> Self {
        let this = Self::default();
        let settings = Settings {
            env: [("PATH".to_owned(), "/usr/bin".to_owned())].into(),
            workdir: "/workspace".to_owned(),
            ..Settings::default()
        };
        let python = BaseTemplate {
            name: name("python"),
            kind: BaseKind::Image,
            digest: "sha256:python".to_owned(),
            settings,
            origin: name("python"),
            packages: Vec::new(),
        };
        this.0.lock().unwrap().templates.insert(name("python"), python);
        this
    }

    pub fn world<T>(&self, f: impl FnOnce(&mut World) -> T) -> T {
        f(&mut self.0.lock().unwrap())
    }

    fn call(&self, what: &'static str) -> Result<(), EngineError> {
        let (at, n) = self.world(|w| {
            w.calls.push(what);
            (w.at.clone(), w.calls.len() - 1)
        });
        at.and_then(|at| at(what, n)).map_or(Ok(()), Err)
    }

    /// No machine, and no snapshot that neither a step nor a version has.
    pub fn is_clean(&self) -> Result<(), String> {
        self.world(|w| {
            if w.machines != 0 {
                return Err(format!("{} machines are left", w.machines));
            }
            let mut kept: Vec<_> = w.steps.values().map(|s| s.snapshot).collect();
            kept.extend(w.versions.iter().map(|(_, made)| made.snapshot));
            match w.snapshots.keys().find(|key| !kept.contains(key)) {
                Some(key) => Err(format!("snapshot {key} is nobody's")),
                None => Ok(()),
            }
        })
    }

    pub fn fails(&self, when: &'static str) {
        let fault = move |call: &'static str, _| (call == when).then(|| failure("asked for"));
        self.world(|w| w.at = Some(Arc::new(fault)));
    }
}

fn failure(text: &str) -> EngineError {
    EngineError::new(ErrorCode::CreateFailed, text)
}

#[async_trait]
impl Ground for Fake {
    async fn template(&self, name: &TemplateName) -> Result<Option<BaseTemplate>, EngineError> {
        self.call("template")?;
        Ok(self.world(|w| {
            if let Some(found) = w.templates.get(name) {
                return Some(found.clone());
            }
            let (version, made) = w.versions.iter().find(|(v, _)| v.name == *name || v.tags.contains(name))?;
            let kind = BaseKind::Built { snapshot: made.snapshot, size: made.size };
            let (origin, digest) = (made.origin.clone(), format!("sha256:{}", made.key));
            let settings = made.settings.clone();
            Some(BaseTemplate { name: version.name.clone(), kind, digest, settings, origin, packages: Vec::new() })
        }))
    }

    async fn import(
        &self,
        name: &TemplateName,
        reference: &str,
        tell: mpsc::Sender<String>,
        _cancelled: CancellationToken,
    ) -> Result<(), EngineError> {
        self.call("import")?;
        tell.send(format!("layer of {reference}")).await.expect("somebody listens");
        self.world(|w| {
            let python: TemplateName = "python".parse().expect("a name");
            let mut made = w.templates[&python].clone();
            made.digest = format!("sha256:{reference}");
            (made.name, made.origin) = (name.clone(), name.clone());
            w.templates.insert(name.clone(), made);
        });
        Ok(())
    }

    async fn versions(&self, family: &TemplateName) -> Result<Vec<Version>, EngineError> {
        self.call("versions")?;
        let of = |v: &Version| v.name.family() == family.family();
        Ok(self.world(|w| w.versions.iter().map(|(v, _)| v.clone()).filter(of).collect()))
    }

    async fn publish(&self, family: &TemplateName, made: NewVersion) -> Result<TemplateName, EngineError> {
        self.call("publish")?;
        Ok(self.world(|w| {
            let numbers = w.versions.iter().filter(|(v, _)| v.name.family() == family.family());
            let next = numbers.filter_map(|(v, _)| v.name.version()).max().unwrap_or(0) + 1;
            let name = family.with_label(&format!("v{next}")).expect("a label");
            let (key, size) = (made.key.clone(), made.size);
            let created_ms = SystemClock.now().0;
            let version = Version { name: name.clone(), key, size, tags: Vec::new(), created_ms, of_recipe: true };
            w.versions.push((version, Arc::new(made)));
            name
        }))
    }

    async fn prepare(&self, _version: &TemplateName, _size: SizeClass) -> Result<(), EngineError> {
        self.call("prepare")?;
        if self.world(|w| w.prepare_hangs) {
            std::future::pending::<()>().await;
        }
        Ok(())
    }

    async fn tag(&self, version: &TemplateName, tag: &TemplateName) -> Result<(), EngineError> {
        self.call("tag")?;
        self.world(|w| {
            for (v, _) in &mut w.versions {
                v.tags.retain(|t| t != tag);
                if v.name == *version {
                    v.tags.push(tag.clone());
                }
            }
        });
        Ok(())
    }

    async fn remove(&self, version: &TemplateName) -> Result<(), EngineError> {
        self.world(|w| {
            let at = w.versions.iter().position(|(v, _)| v.name == *version).expect("a version");
            assert!(w.versions[at].0.tags.is_empty());
            let (_, made) = w.versions.remove(at);
            w.snapshots.remove(&made.snapshot);
        });
        Ok(())
    }

    async fn step(&self, key: &str) -> Result<Option<CachedStep>, EngineError> {
        self.call("step")?;
        Ok(self.world(|w| {
            w.clock += 1;
            let clock = w.clock;
            w.steps.get_mut(key).map(|s| {
                s.used_ms = clock;
                s.clone()
            })
        }))
    }

    async fn keep_step(&self, key: &str, step: &CachedStep) -> Result<(), EngineError> {
        self.call("keep_step")?;
        self.world(|w| {
            w.clock += 1;
            let used_ms = w.clock;
            w.steps.insert(key.to_owned(), CachedStep { used_ms, ..step.clone() });
        });
        Ok(())
    }

    async fn forget_step(&self, key: &str) -> Result<(), EngineError> {
        self.world(|w| w.steps.remove(key));
        Ok(())
    }

    async fn steps(&self) -> Result<Vec<(String, CachedStep)>, EngineError> {
        Ok(self.world(|w| w.steps.iter().map(|(k, s)| (k.clone(), s.clone())).collect()))
    }

    fn begin_save(&self) -> Save {
        Save::new(SnapshotKey::new(uuid::Uuid::now_v7()), ())
    }

    async fn forget_snapshot(&self, snapshot: SnapshotKey) {
        self.world(|w| w.snapshots.remove(&snapshot));
    }

    async fn machine(&self, order: MachineOrder) -> Result<Arc<dyn Machine>, EngineError> {
        self.call("machine")?;
        let gone = || EngineError::new(ErrorCode::SnapshotDamaged, "it is not whole");
        self.world(|w| {
            let mut disk = Disk::new();
            for folder in ["/", "/etc", "/etc/profile.d", "/var", "/workspace"] {
                disk.insert(folder.to_owned(), thing(None));
            }
            disk.insert("/etc/passwd".to_owned(), thing(Some("root:x:0:0::/:/bin/sh\napp:x:1000:50::/:/bin/sh\n")));
            disk.insert("/etc/group".to_owned(), thing(Some("root:x:0:\nstaff:x:77:\n")));
            if let Some(snapshot) = order.snapshot {
                disk = w.snapshots.get(&snapshot).ok_or_else(gone)?.clone();
            }
            w.orders.push(order);
            w.machines += 1;
            w.most_machines = w.most_machines.max(w.machines);
            let machine = FakeMachine { fake: self.clone(), disk: Mutex::new(disk), alive: Mutex::new(true) };
            Ok(Arc::new(machine) as Arc<dyn Machine>)
        })
    }

    async fn stop_machines(&self, build: &str) -> Result<(), EngineError> {
        self.world(|w| {
            w.stopped_for.push(build.to_owned());
            w.machines = 0;
        });
        Ok(())
    }
}

struct FakeMachine {
    fake: Fake,
    disk: Mutex<Disk>,
    alive: Mutex<bool>,
}

fn join(root: &str, path: &str) -> String {
    format!("{}/{}", root.trim_end_matches('/'), path.trim_end_matches('/'))
}

#[async_trait]
impl Machine for FakeMachine {
    async fn run(&self, order: RunOrder, output: mpsc::Sender<(Output, Bytes)>) -> Result<RunEnd, EngineError> {
        self.fake.call("run")?;
        self.fake.world(|w| w.runs.push(order.clone()));
        let line = order.argv.last().cloned().unwrap_or_default();
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["say", rest @ ..] => {
                let text = Bytes::from(rest.join(" "));
                output.send((Output::Stdout, text)).await.expect("taken");
                output.send((Output::Stderr, Bytes::from_static(b"warn\n"))).await.expect("taken");
            }
            ["flood"] => {
                for _ in 0..2000 {
                    output.send((Output::Stdout, Bytes::from(vec![b'x'; 64 * 1024]))).await.expect("taken");
                }
                output.send((Output::Stdout, Bytes::from("line\n".repeat(1_000_000)))).await.expect("taken");
            }
            ["write", path, text] => {
                self.disk.lock().unwrap().insert((*path).to_owned(), thing(Some(text)));
            }
            ["fail", code] => return Ok(RunEnd::Exited(code.parse().expect("a number"))),
            ["killed"] => return Ok(RunEnd::Signalled(9)),
            ["hang"] => std::future::pending().await,
            other => panic!("{other:?}"),
        }
        Ok(RunEnd::Exited(0))
    }

    async fn look(&self, path: &str) -> Result<Option<Node>, EngineError> {
        let disk = self.disk.lock().unwrap();
        let kind = |t: &Thing| if t.data.is_none() { NodeKind::Directory } else { NodeKind::Other };
        Ok(disk.get(path).map(|t| Node { kind: kind(t) }))
    }

    async fn read(&self, path: &str, most: u64) -> Result<Option<Vec<u8>>, EngineError> {
        let disk = self.disk.lock().unwrap();
        let data = disk.get(path).and_then(|t| t.data.clone());
        Ok(data.map(|mut d| {
            d.truncate(most as usize);
            d
        }))
    }

    async fn unpack(&self, path: &str, mut tar: BoxStream<'static, io::Result<Bytes>>) -> Result<(), EngineError> {
        self.fake.call("unpack")?;
        let mut bytes = Vec::new();
        while let Some(piece) = tar.next().await {
            bytes.extend(piece.map_err(|e| EngineError::new(ErrorCode::InvalidRequest, e.to_string()))?);
        }
        let mut disk = self.disk.lock().unwrap();
        assert!(disk.get(path).is_some_and(|t| t.data.is_none()), "{path} is no folder");
        for entry in tar::Archive::new(bytes.as_slice()).entries().expect("an archive") {
            let mut entry = entry.expect("an entry");
            let header = entry.header().clone();
            let at = join(path, &entry.path().expect("a path").to_string_lossy());
            let above = at.rsplit_once('/').map_or("/", |(above, _)| if above.is_empty() { "/" } else { above });
            assert!(disk.contains_key(above), "{at} comes before its folder");
            let mut data = Vec::new();
            entry.read_to_end(&mut data).expect("content");
            let link = entry.link_name().expect("a name").map(|l| l.to_string_lossy().into_owned());
            let is_dir = header.entry_type().is_dir();
            let owner = (header.uid().expect("a number"), header.gid().expect("a number"));
            let mode = header.mode().expect("a mode");
            disk.insert(at, Thing { data: (!is_dir).then_some(data), link, owner, mode });
        }
        Ok(())
    }

    async fn remove(&self, path: &str) -> Result<(), EngineError> {
        self.disk.lock().unwrap().remove(path);
        Ok(())
    }

    async fn save(&self, snapshot: SnapshotKey) -> Result<u64, EngineError> {
        self.fake.call("save")?;
        let disk = self.disk.lock().unwrap().clone();
        self.fake.world(|w| w.snapshots.insert(snapshot, disk));
        Ok(4096)
    }

    async fn stop(&self) -> Result<(), EngineError> {
        if std::mem::replace(&mut *self.alive.lock().unwrap(), false) {
            self.fake.world(|w| w.machines -= 1);
        }
        Ok(())
    }
}
