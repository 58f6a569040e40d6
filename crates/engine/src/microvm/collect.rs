//! What takes room in the data directory, and the frozen templates that nobody needs any more.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use mainbrella_types::{Accelerator, SizeClass};

use super::command_line::GuestDisk;
use super::folder::{self, Places};
use super::{Inner, paused, saved};
use crate::driver::{DiskPart, DiskUse};

/// Keys of frozen templates that machines and snapshots name. An error: not all of them are known.
fn named(places: &Places) -> io::Result<HashSet<String>> {
    let unknown = |e: crate::error::DriverError| io::Error::other(e.to_string());
    let mut named = HashSet::new();
    for key in folder::keys(&places.machines)? {
        let place = places.machine(&key);
        named.extend(folder::read_record(&place)?.map(|record| record.frozen));
        if paused::is_paused(&place) {
            named.insert(paused::read_manifest(&place).map_err(unknown)?.frozen);
        }
    }
    for key in folder::snapshots(&places.snapshots)? {
        named.insert(saved::read_manifest(&places.snapshot(&key)).map_err(unknown)?.frozen);
    }
    Ok(named)
}

impl Inner {
    /// Keys of the frozen templates that a create or a restore would look for now.
    fn wanted(&self, accelerator: Accelerator) -> Result<HashSet<String>, crate::error::DriverError> {
        let mut wanted = HashSet::new();
        for (template, _, _) in self.images.list()? {
            let files = self.files_of(&template)?;
            for size in SizeClass::ALL {
                for disk in [GuestDisk::AtBoot, GuestDisk::Later] {
                    wanted.insert(self.key_inputs(accelerator, &template, (size, disk), &files).key());
                }
            }
        }
        Ok(wanted)
    }

    /// Removes frozen templates that are neither of a template as it is now nor below a machine or a full snapshot. Where
    /// anything is not known, all are kept. Before any machine is made; blocks.
    pub(super) fn collect_frozen(&self, accelerator: Accelerator) {
        let wanted = match self.wanted(accelerator) {
            // Nothing is built: there may be nothing to go by yet.
            Ok(wanted) if wanted.is_empty() => return,
            Ok(wanted) => wanted,
            Err(error) => {
                tracing::debug!(%error, "unused frozen templates are kept, because it is not known which are used");
                return;
            }
        };
        let named = match named(&self.places) {
            Ok(named) => named,
            Err(error) => {
                tracing::warn!(%error, "unused frozen templates are kept, because it is not known which are used");
                return;
            }
        };
        let Ok(entries) = fs::read_dir(&self.places.frozen) else { return };
        for entry in entries.flatten() {
            let Ok(key) = entry.file_name().into_string() else { continue };
            let is_key = key.len() == 32 && key.bytes().all(|b| b.is_ascii_hexdigit());
            if !is_key || wanted.contains(&key) || named.contains(&key) {
                continue;
            }
            match folder::remove(&entry.path()) {
                Ok(()) => tracing::info!(key, "a frozen template of another release or image was removed"),
                Err(error) => tracing::warn!(key, %error, "a frozen template that nobody needs could not be removed"),
            }
        }
    }
}

/// What each part of the data directory takes. A file with several names counts where it is met first. Blocks.
pub(super) fn disk_use(places: &Places, templates: &Path) -> io::Result<Vec<DiskUse>> {
    let mut seen = HashSet::new();
    let parts = [
        (DiskPart::Templates, templates),
        (DiskPart::Frozen, &*places.frozen),
        (DiskPart::Disks, &*places.disks),
        (DiskPart::Snapshots, &*places.snapshots),
        (DiskPart::Machines, &*places.machines),
        (DiskPart::Waiting, &*places.waiting),
        (DiskPart::Temporary, &*places.tmp),
    ];
    parts
        .into_iter()
        .map(|(part, at)| {
            let items = match fs::read_dir(at) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => 0,
                entries => entries?.count() as u64,
            };
            Ok(DiskUse { part, items, bytes: tree_bytes(at, &mut seen)? })
        })
        .collect()
}

/// Bytes on disk of everything below `at` that was not seen before. What goes away meanwhile takes nothing.
pub(crate) fn tree_bytes(at: &Path, seen: &mut HashSet<(u64, u64)>) -> io::Result<u64> {
    let gone = |e: &io::Error| e.kind() == io::ErrorKind::NotFound;
    let mut bytes = 0;
    let mut folders = vec![at.to_owned()];
    while let Some(folder) = folders.pop() {
        let entries = match fs::read_dir(&folder) {
            Err(e) if gone(&e) => continue,
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            let meta = match entry.metadata() {
                Err(e) if gone(&e) => continue,
                meta => meta?,
            };
            if meta.is_dir() {
                folders.push(entry.path());
            }
            if meta.is_dir() || seen.insert((meta.dev(), meta.ino())) {
                bytes += meta.blocks() * 512;
            }
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_two_names_counts_once_where_it_is_met_first() {
        let t = tempfile::tempdir().expect("temp dir");
        let places = Places::open(t.path()).expect("places");
        let templates = t.path().join("templates");
        let (one, two) = (places.disks.join("a"), places.snapshots.join("b"));
        fs::create_dir(&one).and_then(|()| fs::create_dir(&two)).expect("folders");
        fs::write(one.join("disk"), vec![1; 1 << 20]).expect("write");
        fs::hard_link(one.join("disk"), two.join("base")).expect("link");
        let parts = disk_use(&places, &templates).expect("read");
        let of = |part| parts.iter().find(|p| p.part == part).copied().expect("named");
        assert!(of(DiskPart::Disks).bytes >= 1 << 20 && of(DiskPart::Disks).items == 1);
        assert!(of(DiskPart::Snapshots).bytes < 1 << 20 && of(DiskPart::Snapshots).items == 1);
        assert_eq!(of(DiskPart::Templates), DiskUse { part: DiskPart::Templates, items: 0, bytes: 0 });
    }
}
