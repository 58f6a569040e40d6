//! Former overlays that several machines read below their own: `disks/ID/disk.qcow2`, never written again.
//!
//! A fork puts a new overlay on top of a machine's disk; what was its overlay until then goes here and is read by source
//! and children. Each machine names its layers in `layers.json` in its folder, written before its VMM has them open. A disk
//! is kept as long as a machine names it, and collected when the last of them is destroyed, or at the next start.

use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use mainbrella_types::GenerationKey;
use serde::{Deserialize, Serialize};

use super::command_line::LAYERS_MAX;
use super::folder::{self, OVERLAY};

/// The names of a machine's layers, in its folder.
const LAYERS: &str = "layers.json";
/// The same, for when the fork that is under way is done.
const NEXT: &str = "layers.next.json";
const VERSION: u32 = 1;
const BYTES_MAX: u64 = 16 * 1024;

#[derive(Serialize, Deserialize)]
struct Named {
    version: u32,
    layers: Vec<String>,
}

/// The layers that the machine in `place` names, the oldest first. One that names none has no such file.
///
/// # Errors
/// When the file is there and cannot be read or understood.
pub(super) fn read(place: &Path) -> io::Result<Vec<String>> {
    Ok(read_file(&place.join(LAYERS))?.unwrap_or_default())
}

/// The layers that it will name when a fork that is under way is done.
///
/// # Errors
/// As for [`read`].
pub(super) fn read_next(place: &Path) -> io::Result<Option<Vec<String>>> {
    read_file(&place.join(NEXT))
}

fn read_file(path: &Path) -> io::Result<Option<Vec<String>>> {
    let broken = || io::Error::new(io::ErrorKind::InvalidData, "the list of a disk's layers cannot be read");
    match fs::metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e),
        Ok(m) if m.len() > BYTES_MAX => return Err(broken()),
        Ok(_) => {}
    }
    let named: Named = serde_json::from_slice(&fs::read(path)?).map_err(|_| broken())?;
    let good = |id: &String| id.len() == 32 && id.bytes().all(|b| b.is_ascii_hexdigit());
    if named.version != VERSION || named.layers.len() > LAYERS_MAX || !named.layers.iter().all(good) {
        return Err(broken());
    }
    Ok(Some(named.layers))
}

/// Writes them, whole or not at all, and to disk.
///
/// # Errors
/// When it cannot be written.
pub(super) fn write(place: &Path, layers: &[String]) -> io::Result<()> {
    if layers.is_empty() { Ok(()) } else { write_file(place, LAYERS, layers) }
}

/// It names none any more, and that is on disk.
///
/// # Errors
/// When the file cannot be removed.
pub(super) fn clear(place: &Path) -> io::Result<()> {
    gone_is_fine(fs::remove_file(place.join(LAYERS)))?;
    File::open(place)?.sync_all()
}

/// Writes those that it will name when the fork is done.
///
/// # Errors
/// When it cannot be written.
pub(super) fn write_next(place: &Path, layers: &[String]) -> io::Result<()> {
    write_file(place, NEXT, layers)
}

fn write_file(place: &Path, name: &str, layers: &[String]) -> io::Result<()> {
    let half = place.join("layers.json.half");
    let text = serde_json::to_vec(&Named { version: VERSION, layers: layers.to_vec() })?;
    let written = fs::write(&half, text).and_then(|()| File::open(&half)?.sync_all());
    let named = written.and_then(|()| fs::rename(&half, place.join(name)));
    if named.is_err() {
        // What stays is replaced by the next attempt, or goes with the folder.
        let _ = fs::remove_file(&half);
    }
    named
}

/// The fork is done: what it will name is what it names, if that is not so already.
///
/// # Errors
/// When it cannot be renamed.
pub(super) fn adopt_next(place: &Path) -> io::Result<()> {
    gone_is_fine(fs::rename(place.join(NEXT), place.join(LAYERS)))
}

/// The fork is not done: it names what it named.
///
/// # Errors
/// When the file cannot be removed.
pub(super) fn drop_next(place: &Path) -> io::Result<()> {
    gone_is_fine(fs::remove_file(place.join(NEXT)))
}

/// That a file was not there is as good as that it was removed.
pub(super) fn gone_is_fine(outcome: io::Result<()>) -> io::Result<()> {
    match outcome {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// The disks of a data directory, and who names each: machines, and snapshots under a key made of theirs.
#[derive(Debug)]
pub(super) struct Disks {
    root: PathBuf,
    users: Mutex<HashMap<String, BTreeSet<GenerationKey>>>,
}

impl Disks {
    /// The disks in `root`, with what the `machines` and `snapshots` name. Removes those that nobody names, unless a list cannot
    /// be read.
    ///
    /// # Errors
    /// When a folder cannot be read.
    pub(super) fn open(root: &Path, machines: &Path, snapshots: &Path) -> io::Result<Self> {
        let disks = Self { root: root.to_owned(), users: Mutex::default() };
        let mut known = true;
        let machines = folder::keys(machines)?.into_iter().map(|key| (key, machines.join(key.to_string())));
        let snapshots: Vec<_> = folder::snapshots(snapshots)?
            .into_iter()
            .map(|key| (super::save::holder(&key), snapshots.join(key.to_string())))
            .collect();
        for (key, place) in machines.chain(snapshots) {
            match read(&place).and_then(|now| Ok((now, read_next(&place)?.unwrap_or_default()))) {
                Ok((now, next)) => {
                    disks.hold(key, &now);
                    disks.hold(key, &next);
                }
                Err(error) => {
                    tracing::warn!(machine = %key, %error, "unused disks are kept, because it is not known what this machine uses");
                    known = false;
                }
            }
        }
        if known {
            for entry in fs::read_dir(root)? {
                let name = entry?.file_name().to_string_lossy().into_owned();
                if !disks.users().contains_key(&name) {
                    disks.collect(&name);
                }
            }
        }
        Ok(disks)
    }

    fn users(&self) -> MutexGuard<'_, HashMap<String, BTreeSet<GenerationKey>>> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file of a disk.
    pub(super) fn path(&self, id: &str) -> PathBuf {
        self.root.join(id).join(OVERLAY)
    }

    /// Bytes that a disk takes.
    pub(super) fn bytes(&self, id: &str) -> u64 {
        fs::metadata(self.path(id)).map_or(0, |m| std::os::unix::fs::MetadataExt::blocks(&m) * 512)
    }

    /// Opens the layers of a machine for its VMM.
    ///
    /// # Errors
    /// When one is missing.
    pub(super) fn open_all(&self, layers: &[String]) -> io::Result<Vec<File>> {
        layers.iter().map(|id| File::open(self.path(id))).collect()
    }

    /// Says that `key` uses `layers`.
    pub(super) fn hold(&self, key: GenerationKey, layers: &[String]) {
        let mut users = self.users();
        for id in layers {
            users.entry(id.clone()).or_default().insert(key);
        }
    }

    /// Says that `key` uses none any more; removes what is left without a user.
    pub(super) fn release(&self, key: &GenerationKey) {
        self.keep_only(key, &[]);
    }

    /// Says that `key` uses no other than `layers`; removes what is left without a user.
    pub(super) fn keep_only(&self, key: &GenerationKey, layers: &[String]) {
        let unused: Vec<String> = {
            let mut users = self.users();
            for (id, keys) in users.iter_mut() {
                if !layers.contains(id) {
                    keys.remove(key);
                }
            }
            let unused: Vec<String> = users.iter().filter(|(_, k)| k.is_empty()).map(|(id, _)| id.clone()).collect();
            for id in &unused {
                users.remove(id);
            }
            unused
        };
        for id in unused {
            self.collect(&id);
        }
    }

    fn collect(&self, id: &str) {
        if let Err(error) = folder::remove(&self.root.join(id)) {
            tracing::warn!(disk = id, %error, "an unused disk is left and will be removed at the next start");
        }
    }

    /// Gives the overlay at `from` a place here, beside the one it has.
    ///
    /// # Errors
    /// When it cannot.
    pub(super) fn add(&self, id: &str, from: &Path) -> io::Result<()> {
        let folder = self.root.join(id);
        fs::create_dir(&folder)?;
        fs::hard_link(from, folder.join(OVERLAY))?;
        File::open(&folder)?.sync_all()?;
        File::open(&self.root)?.sync_all()
    }

    /// Takes a disk away that nobody came to use.
    pub(super) fn withdraw(&self, id: &str) {
        self.users().remove(id);
        self.collect(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u8) -> String {
        format!("{n:032x}")
    }

    fn key() -> GenerationKey {
        GenerationKey::new(uuid::Uuid::now_v7())
    }

    /// A data directory with two disks; the first is named by both machines, the second by the second alone.
    fn ground() -> (tempfile::TempDir, PathBuf, PathBuf, [GenerationKey; 2]) {
        let t = tempfile::tempdir().expect("temp dir");
        let (disks, machines) = (t.path().join("disks"), t.path().join("machines"));
        for n in 1..=3 {
            fs::create_dir_all(disks.join(id(n))).expect("mkdir");
            fs::write(disks.join(id(n)).join(OVERLAY), [n]).expect("write");
        }
        let keys = [key(), key()];
        for (key, layers) in keys.iter().zip([vec![id(1)], vec![id(1), id(2)]]) {
            let place = machines.join(key.to_string());
            fs::create_dir_all(&place).expect("mkdir");
            write(&place, &layers).expect("write");
            assert_eq!(read(&place).expect("read"), layers);
        }
        (t, disks, machines, keys)
    }

    #[test]
    fn a_disk_is_kept_as_long_as_somebody_names_it() {
        let (_t, root, machines, [one, two]) = ground();
        let disks = Disks::open(&root, &machines, &root.join("no snapshots")).expect("open");
        let there = |n: u8| root.join(id(n)).exists();
        assert!(there(1) && there(2) && !there(3), "what nobody names is collected at the start");
        disks.release(&two);
        assert!(there(1) && !there(2));
        disks.hold(two, &[id(1), id(4)]);
        disks.keep_only(&two, &[id(1)]);
        disks.release(&one);
        assert!(there(1));
        disks.release(&two);
        disks.release(&two);
        assert!(!there(1));
    }

    #[test]
    fn what_a_fork_under_way_names_counts_and_is_taken_over_or_dropped() {
        let (_t, root, machines, [one, _]) = ground();
        let place = machines.join(one.to_string());
        write_next(&place, &[id(1), id(3)]).expect("write");
        Disks::open(&root, &machines, &root.join("no snapshots")).expect("open");
        assert!(root.join(id(3)).exists());
        adopt_next(&place).and_then(|()| adopt_next(&place)).expect("once or more");
        assert_eq!((read(&place).expect("read"), read_next(&place).expect("read")), (vec![id(1), id(3)], None));
        write_next(&place, &[id(1), id(3), id(2)]).expect("write");
        drop_next(&place).and_then(|()| drop_next(&place)).expect("once or more");
        assert_eq!(read(&place).expect("read"), [id(1), id(3)]);
    }

    #[test]
    fn nothing_is_collected_while_a_list_cannot_be_read() {
        let (_t, root, machines, [one, _]) = ground();
        fs::write(machines.join(one.to_string()).join(LAYERS), "{").expect("write");
        let disks = Disks::open(&root, &machines, &root.join("no snapshots")).expect("open");
        assert!((1..=3).all(|n| root.join(id(n)).exists()));
        assert_eq!(disks.open_all(&[id(1), id(2)]).expect("open").len(), 2);
        assert!(disks.open_all(&[id(9)]).is_err());
    }

    #[test]
    fn a_list_that_names_anything_but_disks_is_refused() {
        let t = tempfile::tempdir().expect("temp dir");
        assert!(read(t.path()).expect("none").is_empty());
        let many = vec![id(1); LAYERS_MAX + 1];
        for layers in [vec!["../../etc".to_owned()], vec![String::new()], many] {
            let text = serde_json::to_vec(&Named { version: VERSION, layers }).expect("json");
            fs::write(t.path().join(LAYERS), text).expect("write");
            assert!(read(t.path()).is_err());
        }
    }

    #[test]
    fn an_overlay_that_goes_here_keeps_its_other_name() {
        let (t, root, machines, _) = ground();
        let disks = Disks::open(&root, &machines, &root.join("no snapshots")).expect("open");
        let own = t.path().join("own");
        fs::write(&own, "overlay").expect("write");
        disks.add(&id(7), &own).expect("add");
        assert_eq!(fs::read(disks.path(&id(7))).expect("read"), b"overlay");
        assert!(disks.add(&id(7), &own).is_err(), "an id is used once");
        disks.withdraw(&id(7));
        assert!(own.exists() && !disks.path(&id(7)).exists());
    }
}
