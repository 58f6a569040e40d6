//! Writes a cpio archive in the `newc` form the kernel unpacks as its initramfs.

use std::io::{self, Write};

/// An archive being written. Entries get increasing inode numbers, owner 0:0 and time 0, so that the same
/// entries always make the same bytes.
pub(super) struct Archive<W> {
    out: W,
    inode: u32,
    written: u64,
}

impl<W: Write> Archive<W> {
    /// An empty archive that goes to `out`.
    pub(super) fn new(out: W) -> Self {
        Self { out, inode: 0, written: 0 }
    }

    /// A directory with these permission bits.
    pub(super) fn directory(&mut self, path: &str, mode: u32) -> io::Result<()> {
        self.entry(path, 0o040_000 | mode, (0, 0), &[])
    }

    /// A regular file.
    pub(super) fn file(&mut self, path: &str, mode: u32, content: &[u8]) -> io::Result<()> {
        self.entry(path, 0o100_000 | mode, (0, 0), content)
    }

    /// A character device.
    pub(super) fn device(&mut self, path: &str, mode: u32, major: u32, minor: u32) -> io::Result<()> {
        self.entry(path, 0o020_000 | mode, (major, minor), &[])
    }

    /// Ends the archive.
    pub(super) fn finish(mut self) -> io::Result<W> {
        self.inode = u32::MAX;
        self.entry("TRAILER!!!", 0, (0, 0), &[])?;
        self.pad(512)?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), content: &[u8]) -> io::Result<()> {
        let path = path.trim_start_matches('/');
        let too_large = || io::Error::new(io::ErrorKind::FileTooLarge, "too large for a cpio archive");
        let length = u32::try_from(content.len()).map_err(|_| too_large())?;
        let name_length = u32::try_from(path.len() + 1).map_err(|_| too_large())?;
        self.inode = self.inode.wrapping_add(1);
        let links = if mode & 0o170_000 == 0o040_000 { 2 } else { 1 };
        let mut header = String::with_capacity(112);
        header.push_str("070701");
        // inode, mode, uid, gid, links, mtime, size, device of the file (2), device it is (2), name length, checksum
        let fields = [self.inode, mode, 0, 0, links, 0, length, 0, 0, device.0, device.1, name_length, 0];
        for field in fields {
            header.push_str(&format!("{field:08X}"));
        }
        header.push_str(path);
        header.push('\0');
        self.put(header.as_bytes())?;
        self.pad(4)?;
        self.put(content)?;
        self.pad(4)
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len() as u64;
        self.out.write_all(bytes)
    }

    fn pad(&mut self, to: u64) -> io::Result<()> {
        let missing = self.written.next_multiple_of(to) - self.written;
        let zeros = [0; 512];
        let zeros = usize::try_from(missing).ok().and_then(|n| zeros.get(..n)).unwrap_or_default();
        self.put(zeros)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    fn sample() -> Vec<u8> {
        let mut archive = Archive::new(Vec::new());
        archive.directory("/dev", 0o755).expect("dir");
        archive.device("/dev/console", 0o600, 5, 1).expect("node");
        archive.file("/init", 0o755, b"#!/bin/true\n").expect("file");
        archive.file("/empty", 0o644, b"").expect("file");
        archive.file("/odd", 0o600, &[7; 1021]).expect("file");
        archive.finish().expect("ends")
    }

    /// What the real cpio says of `archive`.
    fn list(archive: &[u8]) -> String {
        let mut child = Command::new("cpio")
            .args(["--quiet", "-itvn"])
            .env("LC_ALL", "C")
            .env("TZ", "UTC")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("cpio is installed");
        child.stdin.take().expect("stdin").write_all(archive).expect("write");
        let out = child.wait_with_output().expect("ends");
        assert!(out.status.success() && out.stderr.is_empty(), "{}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).expect("text")
    }

    #[test]
    fn the_real_cpio_reads_it() {
        let listing = list(&sample());
        let lines: Vec<Vec<&str>> = listing.lines().map(|l| l.split_whitespace().collect()).collect();
        let column = |i: usize| lines.iter().map(|l| l[i]).collect::<Vec<_>>();
        assert_eq!(column(0), ["drwxr-xr-x", "crw-------", "-rwxr-xr-x", "-rw-r--r--", "-rw-------"], "{listing}");
        let names: Vec<_> = lines.iter().map(|l| *l.last().expect("name")).collect();
        assert_eq!(names, ["dev", "dev/console", "init", "empty", "odd"]);
        assert!(lines.iter().all(|l| l[2] == "0" && l[3] == "0"), "owner: {listing}");
        assert_eq!((lines[1][4], lines[1][5], lines[4][4]), ("5,", "1", "1021"), "{listing}");
    }

    #[test]
    fn the_same_entries_make_the_same_bytes_in_whole_blocks() {
        assert_eq!(sample(), sample());
        assert_eq!(sample().len() % 512, 0);
    }
}
