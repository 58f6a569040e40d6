//! A range of user ids for the VMMs of one service, that no other service on the host has.
//!
//! Two services must not give two machines the same user id, whatever they know of each other. Each range is one of many
//! slots above all that is customarily used; which one follows from the data directory and is remembered there, because
//! machines outlive their service. A lock for the whole host settles the rare case that two want the same.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use sha2::{Digest, Sha256};

/// First id of the first slot. systemd gives ids below it to containers.
const FIRST: u32 = 1_880_000_000;
/// An id in no slot, for a look at what this host allows.
pub const SPARE: u32 = FIRST - 1;
/// Ids in a slot; also the most machines at once, waiting ones included.
pub const COUNT: u32 = 4096;
/// Slots; the last one ends below 2^31, above which some tools read ids as negative.
const SLOTS: u32 = 16_384;
/// Name of the file in the data directory that holds the number of the slot.
const REMEMBERED: &str = "uid-slot";
/// Where the locks are.
const LOCKS: &str = "/run/mainbrella/uids";

/// A range that is held, until this is dropped.
#[derive(Debug)]
pub struct UidRange {
    /// The first id of it.
    pub base: u32,
    _lock: Option<File>,
}

impl UidRange {
    /// Takes the range of `data_dir` on this host.
    ///
    /// # Errors
    /// When the data directory cannot be written, or every slot is taken.
    pub fn take(data_dir: &Path) -> io::Result<Self> {
        Self::take_in(data_dir, Path::new(LOCKS))
    }

    fn take_in(data_dir: &Path, locks: &Path) -> io::Result<Self> {
        let remembered = data_dir.join(REMEMBERED);
        let known = fs::read_to_string(&remembered).ok().and_then(|t| t.trim().parse::<u32>().ok());
        let first = known.filter(|n| *n < SLOTS).unwrap_or_else(|| wanted(data_dir));
        for n in 0..SLOTS {
            let slot = (first + n) % SLOTS;
            let lock = match lock(locks, slot) {
                Ok(Some(lock)) => Some(lock),
                Ok(None) => continue,
                Err(error) => {
                    tracing::warn!(
                        %error, folder = %locks.display(),
                        "other services on this host cannot be asked which user ids they use; a collision is unlikely"
                    );
                    None
                }
            };
            if known != Some(slot) {
                let half = remembered.with_extension("new");
                fs::write(&half, format!("{slot}\n"))?;
                fs::rename(half, &remembered)?;
            }
            return Ok(Self { base: FIRST + slot * COUNT, _lock: lock });
        }
        Err(io::Error::other("every range of user ids on this host is taken by another service"))
    }
}

/// The slot a data directory asks for first.
fn wanted(data_dir: &Path) -> u32 {
    let path: PathBuf = std::path::absolute(data_dir).unwrap_or_else(|_| data_dir.to_owned());
    let digest = Sha256::digest(path.as_os_str().as_encoded_bytes());
    u32::from_le_bytes([digest[0], digest[1], digest[2], digest[3]]) % SLOTS
}

/// Locks number `slot` of `locks` on this host. `None`: somebody else has it.
pub(super) fn lock(locks: &Path, slot: u32) -> io::Result<Option<File>> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(locks)?;
    let file = File::options().create(true).truncate(false).write(true).open(locks.join(slot.to_string()))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(Errno::WOULDBLOCK) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

const _: () = assert!(FIRST > 0x6FFF_FFFF && (FIRST as u64) + (SLOTS as u64) * (COUNT as u64) < 1 << 31);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_have_ranges_of_their_own_and_keep_them_over_a_restart() {
        let t = tempfile::tempdir().expect("temp dir");
        let locks = t.path().join("locks");
        let data = |name: &str| {
            let dir = t.path().join(name);
            fs::create_dir_all(&dir).expect("mkdir");
            dir
        };
        let one = UidRange::take_in(&data("one"), &locks).expect("taken");
        // Another that would have the very same one, as by chance or because its directory was copied.
        fs::copy(data("one").join(REMEMBERED), data("two").join(REMEMBERED)).expect("copy");
        let two = UidRange::take_in(&data("two"), &locks).expect("taken");
        assert!(one.base.abs_diff(two.base) >= COUNT, "{} and {}", one.base, two.base);
        let (first, second) = (one.base, two.base);
        drop((one, two));
        // Whoever starts first now: each finds the ids its machines have.
        let two = UidRange::take_in(&data("two"), &locks).expect("again");
        let one = UidRange::take_in(&data("one"), &locks).expect("again");
        assert_eq!((one.base, two.base), (first, second));
    }

    #[test]
    fn what_is_remembered_is_checked() {
        let t = tempfile::tempdir().expect("temp dir");
        fs::write(t.path().join(REMEMBERED), "99999999").expect("write");
        let range = UidRange::take_in(t.path(), &t.path().join("locks")).expect("taken");
        assert!((FIRST..FIRST + SLOTS * COUNT).contains(&range.base));
    }

    #[test]
    fn without_locks_a_range_is_taken_all_the_same() {
        let t = tempfile::tempdir().expect("temp dir");
        let blocked = t.path().join("file");
        fs::write(&blocked, "").expect("write");
        let range = UidRange::take_in(t.path(), &blocked.join("locks")).expect("taken");
        assert_eq!(range.base, FIRST + wanted(t.path()) * COUNT);
    }
}
