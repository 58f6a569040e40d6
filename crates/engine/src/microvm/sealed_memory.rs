//! Guest memory of a frozen template as a sealed memfd, and the way back to a sparse file.
//!
//! Why sealed: docs/decisions/001. A machine's VMM opens it for writing (QEMU before 8.2 does), the kernel refuses
//! every write, and a private mapping is copied page by page as the guest writes.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{MemfdFlags, SealFlags, SeekFrom, fcntl_add_seals, memfd_create, seek};
use rustix::io::Errno;

/// Name of a template's memory in the list of a process's mappings.
pub const MEMORY_NAME: &str = "template-memory";
pub(super) const CHUNK: usize = 1024 * 1024;
const PAGE: usize = 4096;

/// An anonymous memory file of `bytes`, all zero, that may be sealed later.
///
/// # Errors
/// When the kernel does not make it.
pub fn anonymous(name: &str, bytes: u64) -> io::Result<File> {
    let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let file = File::from(fd);
    file.set_len(bytes)?;
    Ok(file)
}

/// An anonymous file that holds the content of `path` and can never be changed.
///
/// # Errors
/// When it cannot be read, or memory is short.
pub fn sealed_copy(name: &str, path: &Path) -> io::Result<File> {
    let from = File::open(path)?;
    let bytes = from.metadata()?.len();
    let to = anonymous(name, bytes)?;
    copy_data(&from, &to, bytes)?;
    seal(&to)?;
    Ok(to)
}

fn seal(file: &File) -> io::Result<()> {
    Ok(fcntl_add_seals(file, SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?)
}

/// A log of at most `bytes`: what does not fit is refused to the writer, so nobody has to read it.
///
/// # Errors
/// When the kernel does not make it.
pub fn bounded_log(bytes: u64) -> io::Result<File> {
    let file = anonymous("vmm-log", bytes)?;
    fcntl_add_seals(&file, SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
    Ok(file)
}

/// The sealed memory of one template size.
#[derive(Debug)]
pub struct SealedMemory {
    file: File,
}

impl SealedMemory {
    /// Loads `path`, which must have exactly `bytes`.
    ///
    /// # Errors
    /// When it cannot be read, has another size, or memory is short.
    pub fn load(path: &Path, bytes: u64) -> io::Result<Self> {
        if std::fs::metadata(path)?.len() != bytes {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the memory file has another size than its template",
            ));
        }
        Ok(Self { file: sealed_copy(MEMORY_NAME, path)? })
    }
}

impl AsFd for SealedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Copies the parts of `from` that are not holes.
fn copy_data(from: &File, to: &File, bytes: u64) -> io::Result<()> {
    let mut buffer = vec![0u8; CHUNK];
    extents(from, bytes, |mut at, end| {
        while at < end {
            let n = CHUNK.min(usize::try_from(end - at).unwrap_or(CHUNK));
            from.read_exact_at(&mut buffer[..n], at)?;
            to.write_all_at(&buffer[..n], at)?;
            at += n as u64;
        }
        Ok(())
    })
}

/// Writes the pages of `memory` that are not all zero into `path`, a new sparse file. Returns how many bytes those are.
///
/// # Errors
/// When it cannot be written.
pub fn save_sparse(memory: &File, path: &Path) -> io::Result<u64> {
    let bytes = memory.metadata()?.len();
    let to = File::options().write(true).create_new(true).open(path)?;
    to.set_len(bytes)?;
    let mut buffer = vec![0u8; CHUNK];
    let mut kept = 0;
    extents(memory, bytes, |mut at, end| {
        while at < end {
            let n = CHUNK.min(usize::try_from(end - at).unwrap_or(CHUNK));
            let chunk = &mut buffer[..n];
            memory.read_exact_at(chunk, at)?;
            for (i, run) in runs(chunk) {
                to.write_all_at(run, at + i as u64)?;
                kept += run.len() as u64;
            }
            at += n as u64;
        }
        Ok(())
    })?;
    to.sync_all()?;
    Ok(kept)
}

/// Runs of neighbouring pages that are not all zero, with their offsets.
pub(super) fn runs(chunk: &[u8]) -> Vec<(usize, &[u8])> {
    const ZEROS: [u8; PAGE] = [0; PAGE];
    let mut found = Vec::new();
    let mut start = None;
    for at in (0..chunk.len()).step_by(PAGE) {
        let page = &chunk[at..chunk.len().min(at + PAGE)];
        let zero = page == &ZEROS[..page.len()];
        match (zero, start) {
            (false, None) => start = Some(at),
            (true, Some(s)) => {
                found.push((s, &chunk[s..at]));
                start = None;
            }
            _ => {}
        }
    }
    if let Some(s) = start {
        found.push((s, &chunk[s..]));
    }
    found
}

/// Calls `each` with begin and end of every part of `file` that is not a hole.
pub(super) fn extents(file: &File, bytes: u64, mut each: impl FnMut(u64, u64) -> io::Result<()>) -> io::Result<()> {
    let mut at = 0;
    while at < bytes {
        let start = match seek(file, SeekFrom::Data(at)) {
            Ok(n) => n,
            // No data after this point.
            Err(Errno::NXIO) => return Ok(()),
            Err(e) => return Err(e.into()),
        };
        let end = seek(file, SeekFrom::Hole(start))?.min(bytes);
        each(start, end)?;
        at = end.max(start + 1);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn memory_goes_to_a_sparse_file_and_back_and_cannot_be_changed() {
        let t = tempfile::tempdir().expect("temp dir");
        let bytes = 16 * CHUNK as u64;
        let memory = anonymous("m", bytes).expect("memfd");
        memory.write_all_at(b"first", 0).expect("write");
        memory.write_all_at(&[0u8; 3 * PAGE], 2 * CHUNK as u64).expect("zeros take no room");
        memory.write_all_at(b"last", bytes - 4).expect("write");
        let path = t.path().join("memory");
        assert_eq!(save_sparse(&memory, &path).expect("save"), 2 * PAGE as u64);
        assert!(std::fs::metadata(&path).expect("stat").blocks() * 512 < 64 * 1024, "sparse");

        let sealed = SealedMemory::load(&path, bytes).expect("load");
        let mut tail = [0u8; 4];
        sealed.file.read_exact_at(&mut tail, bytes - 4).expect("read");
        assert_eq!(&tail, b"last");
        assert!(sealed.file.write_at(b"x", 0).is_err(), "a write is refused");
        assert!(sealed.file.set_len(1).is_err(), "so is shrinking");
        let again = File::options()
            .read(true)
            .write(true)
            .open(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&sealed.file)))
            .expect("opening for writing is allowed");
        assert!(again.write_at(b"x", 0).is_err(), "and does not help");
        assert!(SealedMemory::load(&path, bytes + 1).is_err(), "another size is refused");
    }

    #[test]
    fn a_log_takes_what_fits_and_refuses_the_rest() {
        use std::io::Write;
        let log = bounded_log(8).expect("log");
        let mut w = &log;
        w.write_all(b"12345678").expect("fits");
        assert!(w.write(b"9").is_err());
    }
}
