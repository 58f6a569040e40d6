//! A disk with all its layers, written as one raw file.
//!
//! The layers were written by VMMs, which their guests may have taken over: nothing in them is believed. What QEMU as we start it
//! does not write is refused: encryption, compression, snapshots inside, data in another file, a name of another file below. Every
//! place a table names is looked up within the file, and each cluster of the disk is taken at most once a layer, so the work is
//! bounded by the size of the disk whatever the tables say.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::flatten::BASE;
use super::pagemap::PAGE;
use super::sealed_memory::{CHUNK, extents, runs};

/// Bits of a cluster's size; the only size that is written here.
const CLUSTER_BITS: u32 = 16;
const CLUSTER: u64 = 1 << CLUSTER_BITS;
/// Entries of a table of clusters.
const TABLE: usize = (CLUSTER / 8) as usize;
const HEADER: usize = 104;
const MAGIC: u32 = 0x5146_49fb;
/// The file was not closed, which says something of reference counts only.
const DIRTY: u64 = 1;
/// Where in an entry the place is.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const COMPRESSED: u64 = 1 << 62;
/// The cluster reads as zero.
const ZERO: u64 = 1;

fn broken(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("a layer of the disk: {why}"))
}

/// What is above the base: one qcow2 file.
struct Layer<'a> {
    file: &'a File,
    bytes: u64,
    /// Places of the tables of clusters; 0: there is none.
    tables: Vec<u64>,
}

fn be32(from: &[u8], at: usize) -> u32 {
    let mut four = [0; 4];
    four.copy_from_slice(&from[at..at + 4]);
    u32::from_be_bytes(four)
}

fn be64(from: &[u8], at: usize) -> u64 {
    let mut eight = [0; 8];
    eight.copy_from_slice(&from[at..at + 8]);
    u64::from_be_bytes(eight)
}

impl<'a> Layer<'a> {
    /// Reads the head of a layer of a disk of `disk_bytes`.
    fn open(file: &'a File, disk_bytes: u64) -> io::Result<Self> {
        let mut head = [0; HEADER];
        file.read_exact_at(&mut head, 0)?;
        let short = |why| Err(broken(why));
        if be32(&head, 0) != MAGIC || be32(&head, 4) != 3 {
            return short("it is no qcow2 file of version 3");
        }
        // One that was flattened names what it was put on; what is below it is known here all the same.
        if be64(&head, 8) != 0 || be32(&head, 16) != 0 {
            let mut name = [0; BASE.len()];
            let fits = be32(&head, 16) as usize == BASE.len();
            if !fits || file.read_exact_at(&mut name, be64(&head, 8)).is_err() || name != *BASE.as_bytes() {
                return short("it names a file below itself");
            }
        }
        if be32(&head, 20) != CLUSTER_BITS || be64(&head, 24) != disk_bytes {
            return short("it is of another disk");
        }
        if be32(&head, 32) != 0 || be32(&head, 60) != 0 || be64(&head, 72) & !DIRTY != 0 {
            return short("it uses what no machine here writes");
        }
        let entries = disk_bytes.div_ceil(CLUSTER * TABLE as u64);
        if u64::from(be32(&head, 36)) < entries {
            return short("its table is too short");
        }
        let bytes = file.metadata()?.len();
        let at = be64(&head, 40);
        let room = entries * 8;
        if !at.is_multiple_of(CLUSTER) || at.checked_add(room).is_none_or(|end| end > bytes) {
            return short("its table is not in it");
        }
        let mut table = vec![0; usize::try_from(room).map_err(|_| broken("it is too large"))?];
        file.read_exact_at(&mut table, at)?;
        let tables = table.chunks_exact(8).map(|entry| be64(entry, 0) & OFFSET).collect();
        Ok(Self { file, bytes, tables })
    }

    /// A place that begins a cluster of the file.
    fn within(&self, at: u64) -> io::Result<u64> {
        if at.is_multiple_of(CLUSTER) && at >= CLUSTER && at < self.bytes {
            Ok(at)
        } else {
            Err(broken("a cluster is not in it"))
        }
    }

    /// Reads a cluster; what is behind the end of the file is zero.
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let there = usize::try_from(self.bytes - at).unwrap_or(into.len()).min(into.len());
        self.file.read_exact_at(&mut into[..there], at)?;
        into[there..].fill(0);
        Ok(())
    }

    /// Writes what this layer has over what is in `to`.
    fn apply(&self, to: &File, disk_bytes: u64) -> io::Result<()> {
        let (mut table, mut data) = (vec![0; CLUSTER as usize], vec![0; CLUSTER as usize]);
        for (first, place) in (0..).step_by(TABLE).zip(&self.tables) {
            if *place == 0 {
                continue;
            }
            self.read(self.within(*place)?, &mut table)?;
            for (n, entry) in table.chunks_exact(8).enumerate() {
                let (entry, at) = (be64(entry, 0), (first + n as u64) * CLUSTER);
                if entry & COMPRESSED != 0 {
                    return Err(broken("it is compressed"));
                }
                if entry & (OFFSET | ZERO) == 0 || at >= disk_bytes {
                    continue;
                }
                let bytes = CLUSTER.min(disk_bytes - at);
                if entry & ZERO != 0 {
                    punch(to, at, bytes)?;
                    continue;
                }
                self.read(self.within(entry & OFFSET)?, &mut data)?;
                put(to, &data[..usize::try_from(bytes).unwrap_or(0)], at)?;
            }
        }
        Ok(())
    }
}

/// Makes a hole.
fn punch(to: &File, at: u64, bytes: u64) -> io::Result<()> {
    use rustix::fs::{FallocateFlags, fallocate};
    Ok(fallocate(to, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, bytes)?)
}

/// Writes a cluster; pages that are zero become holes.
fn put(to: &File, data: &[u8], at: u64) -> io::Result<()> {
    let found = runs(data);
    let kept: usize = found.iter().map(|(_, run)| run.len()).sum();
    if kept < data.len() {
        punch(to, at, data.len() as u64)?;
    }
    found.into_iter().try_for_each(|(offset, run)| to.write_all_at(run, at + offset as u64))
}

/// Writes the disk of `base`, a raw file, with `layers`, the uppermost last, into `to`, an empty file, and makes it `bytes` long:
/// as long as the base or longer. Blocks.
///
/// # Errors
/// `InvalidData` when a layer is not one of this disk, or the disk is longer than `bytes`.
pub(super) fn merge(base: &File, layers: &[File], to: &File, bytes: u64) -> io::Result<()> {
    let disk_bytes = base.metadata()?.len();
    if disk_bytes > bytes || !disk_bytes.is_multiple_of(PAGE) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the disk is too large"));
    }
    let opened = layers.iter().map(|file| Layer::open(file, disk_bytes)).collect::<io::Result<Vec<_>>>()?;
    to.set_len(bytes)?;
    let mut buffer = vec![0u8; CHUNK];
    extents(base, disk_bytes, |mut at, end| {
        at -= at % PAGE;
        while at < end {
            let n = usize::try_from(end - at).unwrap_or(CHUNK).min(CHUNK);
            base.read_exact_at(&mut buffer[..n], at)?;
            for (offset, run) in runs(&buffer[..n]) {
                to.write_all_at(run, at + offset as u64)?;
            }
            at += n as u64;
        }
        Ok(())
    })?;
    opened.iter().try_for_each(|layer| layer.apply(to, disk_bytes))
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;

    use super::super::qcow2::write_empty;
    use super::*;

    const DISK: u64 = 64 << 20;

    fn file(at: &Path) -> File {
        File::options().read(true).write(true).create_new(true).open(at).expect("new file")
    }

    /// QEMU's own tool writes into a layer: what it says is what our reader must see.
    fn qemu_io(image: &Path, below: Option<&Path>, commands: &[String]) {
        let mut options = format!("driver=qcow2,file.driver=file,file.filename={}", image.display());
        if let Some(below) = below {
            options.push_str(&format!(",backing.driver=raw,backing.file.filename={}", below.display()));
        }
        let mut tool = Command::new("qemu-io");
        tool.args(["-d", "unmap", "--image-opts", &options]);
        for command in commands {
            tool.args(["-c", command]);
        }
        let out = tool.output().expect("qemu-io");
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    }

    fn read_all(file: &File, bytes: u64) -> Vec<u8> {
        let mut all = vec![0; usize::try_from(bytes).expect("fits")];
        file.read_exact_at(&mut all, 0).expect("read");
        all
    }

    #[test]
    fn layers_written_by_qemu_read_as_qemu_reads_them() {
        let t = tempfile::tempdir().expect("temp dir");
        let base = file(&t.path().join("base"));
        base.set_len(DISK).expect("length");
        base.write_all_at(&[1; 300_000], 70_000).expect("write");
        base.write_all_at(&[2; 4096], DISK - 4096).expect("write");
        let mut expected = read_all(&base, DISK);
        let mut layers = Vec::new();
        let mut below = t.path().join("base");
        for (n, work) in [
            vec![("write -P 3", 100_000, 5000), ("write -z", 131_072, 65_536), ("write -P 4", 20 << 20, 3 << 20)],
            vec![("write -P 5", 21 << 20, 70_000), ("discard", 22 << 20, 1 << 20), ("write -P 6", DISK - 512, 512)],
        ]
        .into_iter()
        .enumerate()
        {
            let path = t.path().join(format!("layer{n}"));
            write_empty(&file(&path), DISK).expect("empty layer");
            let commands: Vec<_> = work.iter().map(|(verb, at, bytes)| format!("{verb} {at} {bytes}")).collect();
            qemu_io(&path, Some(&below), &commands);
            for (verb, at, bytes) in work {
                let byte = verb.rsplit(' ').next().and_then(|b| b.parse().ok()).unwrap_or(0);
                let at = usize::try_from(at).expect("fits");
                expected[at..at + usize::try_from(bytes).expect("fits")].fill(byte);
            }
            layers.push(File::open(&path).expect("open"));
            // What is below the next one, as one file.
            below = t.path().join(format!("below{n}"));
            let to = file(&below);
            merge(&base, &layers, &to, DISK).expect("merged");
            assert!(read_all(&to, DISK) == expected, "layer {n}");
        }
        let longer = file(&t.path().join("longer"));
        merge(&base, &layers, &longer, DISK * 2).expect("merged");
        let all = read_all(&longer, DISK * 2);
        assert!(all[..expected.len()] == expected && all[expected.len()..].iter().all(|b| *b == 0));
        use std::os::unix::fs::MetadataExt;
        assert!(longer.metadata().expect("stat").blocks() * 512 < 8 << 20, "what is zero takes no room");
        assert!(merge(&base, &layers, &file(&t.path().join("short")), DISK / 2).is_err());
    }

    #[test]
    fn a_layer_that_was_flattened_names_what_it_is_on() {
        let t = tempfile::tempdir().expect("temp dir");
        let path = t.path().join("layer");
        write_empty(&file(&path), DISK).expect("empty layer");
        for (name, taken) in [("base", true), ("evil", false), ("bas", false)] {
            let layer = File::options().read(true).write(true).open(&path).expect("open");
            layer.write_all_at(name.as_bytes(), 1024).expect("write");
            layer.write_all_at(&1024u64.to_be_bytes(), 8).expect("write");
            layer.write_all_at(&u32::try_from(name.len()).expect("short").to_be_bytes(), 16).expect("write");
            assert_eq!(Layer::open(&layer, DISK).is_ok(), taken, "{name}");
        }
    }

    #[test]
    fn what_no_machine_writes_is_refused() {
        let t = tempfile::tempdir().expect("temp dir");
        let base = file(&t.path().join("base"));
        base.set_len(DISK).expect("length");
        let good = t.path().join("good");
        write_empty(&file(&good), DISK).expect("empty layer");
        qemu_io(&good, Some(&t.path().join("base")), &["write -P 3 0 65536".to_owned()]);
        let good = std::fs::read(&good).expect("read");
        let table =
            usize::try_from(be64(&good, usize::try_from(be64(&good, 40)).expect("fits")) & OFFSET).expect("fits");
        let long = (good.len() as u64).next_multiple_of(CLUSTER);
        let changes: Vec<(&str, usize, Vec<u8>)> = vec![
            ("magic", 0, vec![0]),
            ("version", 4, 2u32.to_be_bytes().to_vec()),
            ("backing file", 8, 200u64.to_be_bytes().to_vec()),
            ("cluster size", 20, 9u32.to_be_bytes().to_vec()),
            ("size", 24, (DISK * 2).to_be_bytes().to_vec()),
            ("encryption", 32, 1u32.to_be_bytes().to_vec()),
            ("table too short", 36, 0u32.to_be_bytes().to_vec()),
            ("table outside", 40, long.to_be_bytes().to_vec()),
            ("table far outside", 40, (u64::MAX - CLUSTER + 1).to_be_bytes().to_vec()),
            ("table not at a cluster", 40, 100u64.to_be_bytes().to_vec()),
            ("snapshots", 60, 1u32.to_be_bytes().to_vec()),
            ("external data", 72, 4u64.to_be_bytes().to_vec()),
            ("other entries", 72, 16u64.to_be_bytes().to_vec()),
            ("compressed cluster", table, (COMPRESSED | CLUSTER).to_be_bytes().to_vec()),
            ("cluster outside", table, long.to_be_bytes().to_vec()),
            ("cluster not at a cluster", table, (CLUSTER + 512).to_be_bytes().to_vec()),
        ];
        for (what, at, with) in changes {
            let path = t.path().join(what);
            let mut bytes = good.clone();
            bytes[at..at + with.len()].copy_from_slice(&with);
            std::fs::write(&path, bytes).expect("write");
            let layer = [File::open(&path).expect("open")];
            let to = file(&t.path().join(format!("{what} merged")));
            assert!(merge(&base, &layer, &to, DISK).is_err(), "{what}");
        }
        std::fs::write(t.path().join("cut"), &good[..50]).expect("write");
        let cut = [File::open(t.path().join("cut")).expect("open")];
        assert!(merge(&base, &cut, &file(&t.path().join("merged")), DISK).is_err());
    }
}
