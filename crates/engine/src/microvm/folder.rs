//! A machine's folder: what is in it, and how its sockets are reached.
//!
//! The folder belongs to the service; a VMM cannot reach it. `vmm.json` is written before the VMM becomes one, so
//! a process without a record cannot exist. It is not synced to disk: it has to survive this service, and no VMM
//! survives the host.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use mainbrella_types::{GenerationKey, SizeClass, SnapshotKey, TemplateName};
use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};

use super::process::Process;
use super::sealed_memory::save_sparse;

/// Socket of the agent port.
pub const AGENT_SOCKET: &str = "agent.sock";
/// Socket of the control channel.
pub const QMP_SOCKET: &str = "qmp.sock";
/// The overlay.
pub const OVERLAY: &str = "disk.qcow2";
/// The disk below its overlays, where that is not its template's own: of a machine that was started from a saved disk.
pub const BASE: &str = "base.raw";
/// Last words of the VMM.
pub const VMM_LOG: &str = "vmm.log";
/// Last lines of the guest's console.
pub const CONSOLE_LOG: &str = "console.log";
/// The record.
pub const RECORD: &str = "vmm.json";
const RECORD_BYTES_MAX: u64 = 64 * 1024;

/// What is remembered of a VMM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// Version of this form.
    pub version: u32,
    /// Name of its control group. The machine's own key, or the one it had while it waited.
    pub group: String,
    /// Its user id, when it has its own.
    pub uid: Option<u32>,
    /// Its process id.
    pub pid: i32,
    /// Its start time.
    pub start_time: u64,
    /// Key of the frozen template it starts from; empty while a template is being frozen.
    pub frozen: String,
    /// Which making of that template; empty in records of before there were pauses.
    #[serde(default)]
    pub making: String,
    /// The template.
    pub template: String,
    /// The size.
    pub size: String,
}

/// The current [`Record::version`].
pub const RECORD_VERSION: u32 = 1;

impl Record {
    /// A handle on its process, if it is still that one.
    ///
    /// # Errors
    /// `NotFound` when it is gone.
    pub fn process(&self) -> io::Result<Process> {
        Process::open(self.pid, self.start_time)
    }

    /// The size class, if the record names one.
    #[must_use]
    pub fn size(&self) -> Option<SizeClass> {
        self.size.parse().ok()
    }

    /// The template, if the record names one.
    #[must_use]
    pub fn template(&self) -> Option<TemplateName> {
        self.template.parse().ok()
    }
}

/// Writes the record, whole or not at all.
///
/// # Errors
/// When it cannot be written.
pub fn write_record(folder: &Path, record: &Record) -> io::Result<()> {
    let half = folder.join("vmm.json.new");
    fs::write(&half, serde_json::to_vec(record)?)?;
    fs::rename(half, folder.join(RECORD))
}

/// Reads the record. `None`: there is none, or none that can be understood.
///
/// # Errors
/// When it is there and cannot be read.
pub fn read_record(folder: &Path) -> io::Result<Option<Record>> {
    let path = folder.join(RECORD);
    match fs::metadata(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Ok(m) if m.len() > RECORD_BYTES_MAX => return Ok(None),
        Ok(_) => {}
        Err(e) => return Err(e),
    }
    Ok(serde_json::from_slice::<Record>(&fs::read(path)?).ok().filter(|r| r.version == RECORD_VERSION))
}

/// The folders a driver keeps.
#[derive(Clone, Debug)]
pub struct Places {
    /// One folder a machine.
    pub machines: PathBuf,
    /// One folder a waiting VMM.
    pub waiting: PathBuf,
    /// Frozen templates.
    pub frozen: PathBuf,
    /// Former overlays that machines share.
    pub disks: PathBuf,
    /// Snapshots, one folder each.
    pub snapshots: PathBuf,
    /// Half-made things.
    pub tmp: PathBuf,
    /// Always empty; every jail mounts its own root over it.
    pub scratch: PathBuf,
    /// Verdict on the accelerator.
    pub accelerator: PathBuf,
}

impl Places {
    /// Places below the data directory; makes the folders.
    ///
    /// # Errors
    /// When one cannot be made.
    pub fn open(data: &Path) -> io::Result<Self> {
        let p = Self {
            machines: data.join("machines"),
            waiting: data.join("waiting"),
            frozen: data.join("frozen"),
            disks: data.join("disks"),
            snapshots: data.join("snapshots"),
            tmp: data.join("tmp"),
            scratch: data.join("jail"),
            accelerator: data.join("accelerator.json"),
        };
        for dir in [&p.machines, &p.waiting, &p.frozen, &p.disks, &p.snapshots, &p.tmp, &p.scratch] {
            fs::create_dir_all(dir)?;
        }
        for dir in [&p.machines, &p.waiting, &p.frozen, &p.disks, &p.snapshots, &p.tmp] {
            fs::set_permissions(dir, std::os::unix::fs::PermissionsExt::from_mode(0o700))?;
        }
        Ok(p)
    }

    /// Root images of templates; made by whoever builds them.
    #[must_use]
    pub fn templates(&self) -> PathBuf {
        self.tmp.with_file_name("templates")
    }

    /// The folder of a snapshot.
    #[must_use]
    pub fn snapshot(&self, key: &SnapshotKey) -> PathBuf {
        self.snapshots.join(key.to_string())
    }

    /// The folder of a machine.
    #[must_use]
    pub fn machine(&self, key: &GenerationKey) -> PathBuf {
        self.machines.join(key.to_string())
    }
}

/// A path to `name` in `folder` that is short enough for a socket address, however long the folder's own is.
fn short(folder: &Path, name: &str) -> io::Result<(OwnedFd, PathBuf)> {
    let fd = rustix::fs::open(folder, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let path = PathBuf::from(format!("/proc/self/fd/{}/{name}", fd.as_raw_fd()));
    Ok((fd, path))
}

/// A listening socket `name` in `folder`.
///
/// # Errors
/// When it cannot be made.
pub fn listen(folder: &Path, name: &str) -> io::Result<UnixListener> {
    let (_held, path) = short(folder, name)?;
    UnixListener::bind(path)
}

/// Connects to the socket `name` in `folder`. Does not wait: the socket listens before its VMM runs.
///
/// # Errors
/// When nobody listens.
pub fn connect(folder: &Path, name: &str) -> io::Result<UnixStream> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
    let (_held, path) = short(folder, name)?;
    // Not blocking from the start: with a client connected and another in line, a blocking connect would hang.
    let socket =
        socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

/// Keys of the folders in `parent` whose names are keys.
///
/// # Errors
/// When it cannot be read.
pub fn keys(parent: &Path) -> io::Result<Vec<GenerationKey>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(parent)? {
        if let Some(key) = entry?.file_name().to_str().and_then(|n| n.parse().ok()) {
            found.push(key);
        }
    }
    Ok(found)
}

/// The base disk of the machine or snapshot in `place`, where it is not its template's own.
#[must_use]
pub fn base(place: &Path) -> Option<PathBuf> {
    let path = place.join(BASE);
    path.exists().then_some(path)
}

/// Gives the base disk `from`, if there is one, a second name in the folder `into`; on another file system, a copy there.
///
/// # Errors
/// When it cannot.
pub fn link_base(from: Option<&Path>, into: &Path) -> io::Result<()> {
    let Some(from) = from else { return Ok(()) };
    let to = into.join(BASE);
    match fs::hard_link(from, &to) {
        Err(e) if e.kind() == io::ErrorKind::CrossesDevices => save_sparse(&fs::File::open(from)?, &to).map(drop),
        done => done,
    }
}

/// Keys of the folders in `parent` whose names are those of snapshots. None: it is not there.
///
/// # Errors
/// When it cannot be read.
pub fn snapshots(parent: &Path) -> io::Result<Vec<SnapshotKey>> {
    let entries = match fs::read_dir(parent) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut found = Vec::new();
    for entry in entries {
        found.extend(entry?.file_name().to_str().and_then(|n| n.parse::<SnapshotKey>().ok()));
    }
    Ok(found)
}

/// Removes a folder with all in it. One that is not there is success.
///
/// # Errors
/// When something in it cannot be removed.
pub fn remove(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_round_trips_and_a_broken_one_is_none() {
        let t = tempfile::tempdir().expect("temp dir");
        assert_eq!(read_record(t.path()).expect("absent"), None);
        let r = Record {
            version: RECORD_VERSION,
            group: "g".into(),
            uid: Some(7),
            pid: 1,
            start_time: 2,
            frozen: "f".into(),
            making: "m".into(),
            template: "python".into(),
            size: "micro".into(),
        };
        write_record(t.path(), &r).expect("write");
        assert_eq!(read_record(t.path()).expect("read"), Some(r));
        for broken in ["", "{", "{\"version\":1}", "null"] {
            fs::write(t.path().join(RECORD), broken).expect("write");
            assert_eq!(read_record(t.path()).expect("read"), None);
        }
    }

    #[test]
    fn sockets_work_in_folders_with_long_names() {
        let t = tempfile::tempdir().expect("temp dir");
        let deep = t.path().join("x".repeat(120)).join("y".repeat(120));
        fs::create_dir_all(&deep).expect("mkdir");
        let l = listen(&deep, AGENT_SOCKET).expect("listen");
        let _c = connect(&deep, AGENT_SOCKET).expect("connect");
        l.accept().expect("accept");
    }
}
