//! Which pages of its guest's memory a VMM has for itself, and the way to them from outside.
//!
//! A machine maps the memory of its template privately. A page it never wrote is the template's own (the kernel calls it
//! file-backed); a page it wrote, be it with zeros, is anonymous. Those are found in `/proc/PID/pagemap`, and read and
//! written through `/proc/PID/mem`, whose descriptor stays with one address space whatever becomes of the process id.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use super::sealed_memory::MEMORY_NAME;

/// Size of a page.
pub const PAGE: u64 = 4096;
/// Regions taken from the kernel at a time.
const REGIONS: usize = 1024;
/// Entries of the page map read at a time.
const ENTRIES: usize = 64 * 1024;

/// Neighbouring pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first of them, counted from the start of guest memory.
    pub first: u64,
    /// How many.
    pub pages: u64,
}

/// The memory of a guest, by offset.
pub trait GuestMemory {
    /// Fills `into` from `at` on.
    ///
    /// # Errors
    /// When it cannot be read.
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()>;
    /// Writes `from` to `at`.
    ///
    /// # Errors
    /// When it cannot be written.
    fn write(&self, at: u64, from: &[u8]) -> io::Result<()>;
}

/// The memory of a guest as its VMM has it mapped.
#[derive(Debug)]
pub struct VmmMemory {
    mem: File,
    map: File,
    start: u64,
    bytes: u64,
}

impl VmmMemory {
    /// The memory of the VMM `pid`, whose guest has `bytes`. The caller makes sure, *afterwards*, that the process is still
    /// the one it means.
    ///
    /// # Errors
    /// When the process is gone, may not be looked into, or has not mapped a template's memory as a machine does.
    pub fn open(pid: i32, bytes: u64) -> io::Result<Self> {
        let mem = File::options().read(true).write(true).open(format!("/proc/{pid}/mem"))?;
        let map = File::open(format!("/proc/{pid}/pagemap"))?;
        let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
        let start = find(&maps, bytes).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, "the VMM has not mapped its guest's memory as expected")
        })?;
        Ok(Self { mem, map, start, bytes })
    }

    /// The pages that differ from the template's, or may: those that are the VMM's own.
    ///
    /// # Errors
    /// When the kernel does not tell.
    pub fn own_pages(&self) -> io::Result<Vec<Run>> {
        match scan(&self.map, self.start, self.bytes) {
            // Before Linux 6.7.
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL)) => {
                walk(&self.map, self.start, self.bytes)
            }
            other => other,
        }
    }

    fn address(&self, at: u64, bytes: usize) -> io::Result<u64> {
        let end = at.checked_add(bytes as u64).filter(|end| *end <= self.bytes);
        end.map(|_| self.start + at)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "beyond the guest's memory"))
    }
}

impl GuestMemory for VmmMemory {
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.mem.read_exact_at(into, self.address(at, into.len())?)
    }

    fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        self.mem.write_all_at(from, self.address(at, from.len())?)
    }
}

/// Where the `bytes` of a template's memory are mapped, privately and in one piece, from the text of `/proc/PID/maps`.
fn find(maps: &str, bytes: u64) -> Option<u64> {
    let name = format!("/memfd:{MEMORY_NAME} (deleted)");
    let hex = |s: &str| u64::from_str_radix(s, 16).ok();
    let mut whole: Option<(u64, u64)> = None;
    for line in maps.lines() {
        let Some(front) = line.strip_suffix(&name) else { continue };
        let mut words = front.split_ascii_whitespace();
        let (from, to) = words.next()?.split_once('-')?;
        let (from, to) = (hex(from)?, hex(to)?);
        let (rights, offset) = (words.next()?, hex(words.next()?)?);
        if !rights.starts_with("rw") || !rights.ends_with('p') {
            return None;
        }
        // The kernel may show one mapping as several neighbours.
        whole = match whole {
            None if offset == 0 => Some((from, to)),
            Some((start, end)) if end == from && offset == end - start => Some((start, to)),
            _ => return None,
        };
    }
    whole.filter(|(start, end)| end - start == bytes).map(|(start, _)| start)
}

/// Adds `pages` pages from `first` on to what was found, in ascending order.
fn push(runs: &mut Vec<Run>, first: u64, pages: u64) {
    match runs.last_mut() {
        Some(last) if last.first + last.pages == first => last.pages += pages,
        _ => runs.push(Run { first, pages }),
    }
}

/// Whether an entry of the page map is of a page that is the process's own: present or swapped out, and not of a file.
fn own(entry: u64) -> bool {
    const PRESENT: u64 = 1 << 63;
    const SWAPPED: u64 = 1 << 62;
    const FILE: u64 = 1 << 61;
    entry & (PRESENT | SWAPPED) != 0 && entry & FILE == 0
}

/// Adds what `entries` say of the pages from `first` on.
fn take_entries(runs: &mut Vec<Run>, first: u64, entries: &[u8]) {
    for (n, entry) in entries.chunks_exact(8).enumerate() {
        if own(entry.try_into().map_or(0, u64::from_ne_bytes)) {
            push(runs, first + n as u64, 1);
        }
    }
}

/// Looks at every page.
fn walk(map: &File, start: u64, bytes: u64) -> io::Result<Vec<Run>> {
    let mut runs = Vec::new();
    let mut buffer = vec![0u8; ENTRIES * 8];
    let pages = bytes / PAGE;
    let mut first = 0;
    while first < pages {
        let n = (pages - first).min(ENTRIES as u64);
        let part = &mut buffer[..usize::try_from(n).unwrap_or(ENTRIES) * 8];
        map.read_exact_at(part, (start / PAGE + first) * 8)?;
        take_entries(&mut runs, first, part);
        first += n;
    }
    Ok(runs)
}

/// `struct pm_scan_arg`.
#[repr(C)]
#[derive(Default)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// Lets the kernel find them (`PAGEMAP_SCAN`).
fn scan(map: &File, start: u64, bytes: u64) -> io::Result<Vec<Run>> {
    const FILE: u64 = 1 << 2;
    const PRESENT: u64 = 1 << 3;
    const SWAPPED: u64 = 1 << 4;
    // _IOWR('f', 16, struct pm_scan_arg)
    const REQUEST: libc::c_ulong =
        (3 << 30) | ((size_of::<ScanArgument>() as libc::c_ulong) << 16) | ((b'f' as libc::c_ulong) << 8) | 16;
    let end = start + bytes;
    let mut regions = vec![Region::default(); REGIONS];
    let mut runs = Vec::new();
    let mut at = start;
    while at < end {
        let mut argument = ScanArgument {
            size: size_of::<ScanArgument>() as u64,
            start: at,
            end,
            vec: regions.as_mut_ptr() as u64,
            vec_len: regions.len() as u64,
            category_inverted: FILE,
            category_mask: FILE,
            category_anyof_mask: PRESENT | SWAPPED,
            ..ScanArgument::default()
        };
        // SAFETY: the kernel reads and writes `argument`, whose size it is told, and at most `vec_len` entries at `vec`,
        // which are all of `regions`.
        let found = unsafe { libc::ioctl(map.as_raw_fd(), REQUEST as _, &raw mut argument) };
        let Ok(found) = usize::try_from(found) else { return Err(io::Error::last_os_error()) };
        for region in regions.iter().take(found) {
            if region.start < at || region.end > end || region.start >= region.end {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "the kernel tells of other pages"));
            }
            push(&mut runs, (region.start - start) / PAGE, (region.end - region.start) / PAGE);
        }
        // Where it says it stopped is not to be trusted: kernels tell of more than 512 regions and name the place of the 512th.
        // It goes on by itself until the room it was given is full.
        match regions.get(found.wrapping_sub(1)) {
            Some(last) if found == regions.len() && last.end > at => at = last.end,
            _ => break,
        }
    }
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::microvm::sealed_memory::anonymous;
    use proptest::prelude::*;
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

    #[test]
    fn the_mapping_is_found_also_in_pieces_and_only_when_it_is_private_and_whole() {
        let line = |from: u64, to: u64, rights: &str, offset: u64| {
            format!(
                "{from:x}-{to:x} {rights} {offset:08x} 00:01 1077                       /memfd:{MEMORY_NAME} (deleted)\n"
            )
        };
        let other =
            "7f0000000000-7f0000001000 rw-p 00000000 00:00 0 \n00400000-00452000 r-xp 00000000 08:02 17 /usr/bin/x\n";
        let whole = format!("{other}{}", line(0x7000_0000, 0x7000_8000, "rw-p", 0));
        assert_eq!(find(&whole, 0x8000), Some(0x7000_0000));
        assert_eq!(find(&whole, 0x9000), None, "of another size");
        let pieces = line(0x7000_0000, 0x7000_2000, "rw-p", 0) + &line(0x7000_2000, 0x7000_8000, "rw-p", 0x2000);
        assert_eq!(find(&pieces, 0x8000), Some(0x7000_0000));
        let gap = line(0x7000_0000, 0x7000_2000, "rw-p", 0) + &line(0x7000_3000, 0x7000_9000, "rw-p", 0x2000);
        assert_eq!(find(&gap, 0x8000), None);
        assert_eq!(find(&line(0x7000_0000, 0x7000_8000, "rw-s", 0), 0x8000), None, "shared");
        assert_eq!(find(&line(0x7000_0000, 0x7000_8000, "rw-p", 0x1000), 0x8000), None, "not from its start");
        assert_eq!(find(other, 0x8000), None);
        assert_eq!(find("", 0), None);
    }

    proptest! {
        #[test]
        fn entries_become_ascending_runs_that_do_not_touch(entries in proptest::collection::vec(any::<u64>(), 0..200), cut in 0usize..200) {
            let bytes: Vec<u8> = entries.iter().flat_map(|e| e.to_ne_bytes()).collect();
            let cut = cut.min(entries.len());
            let mut runs = Vec::new();
            take_entries(&mut runs, 0, &bytes[..cut * 8]);
            take_entries(&mut runs, cut as u64, &bytes[cut * 8..]);
            let listed: Vec<u64> = runs.iter().flat_map(|r| r.first..r.first + r.pages).collect();
            let expected: Vec<u64> = (0..entries.len() as u64).filter(|n| own(entries[usize::try_from(*n).expect("small")])).collect();
            prop_assert_eq!(listed, expected);
            prop_assert!(runs.windows(2).all(|w| w[0].first + w[0].pages < w[1].first));
        }

        #[test]
        fn no_text_makes_the_search_fail(text in ".{0,300}") {
            let _ = find(&text, 4096);
        }
    }

    #[test]
    fn an_entry_is_judged_by_its_flags() {
        for (entry, expected) in [
            (0, false),
            (1 << 63, true),
            (1 << 62, true),
            (1 << 63 | 1 << 61, false),
            (1 << 62 | 1 << 61, false),
            (u64::MAX >> 3, false),
        ] {
            assert_eq!(own(entry), expected, "{entry:x}");
        }
    }

    #[test]
    fn pages_written_here_are_found_zeroed_ones_too_and_read_ones_are_not() {
        // More runs than are taken at a time.
        const PAGES: usize = 12_000;
        let bytes = PAGES * 4096;
        let file = anonymous(MEMORY_NAME, bytes as u64).expect("memfd");
        file.write_all_at(&vec![1; bytes], 0).expect("fill");
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { mmap(std::ptr::null_mut(), bytes, prot, flags, &file, 0) }.expect("mmap").cast::<u8>();
        let mut expected = Vec::new();
        for page in (0..PAGES).filter(|p| p % 3 == 1 || (500..600).contains(p)) {
            // SAFETY: within the mapping, which nothing else knows.
            unsafe { at.add(page * 4096).write_volatile(u8::from(page % 2 == 0)) };
            push(&mut expected, page as u64, 1);
        }
        // SAFETY: as above.
        let read: u64 = (0..PAGES).map(|p| u64::from(unsafe { at.add(p * 4096 + 9).read_volatile() })).sum();
        assert_eq!(read, PAGES as u64);
        let pid = i32::try_from(std::process::id()).expect("pid");
        let memory = VmmMemory::open(pid, bytes as u64).expect("found");
        assert_eq!(memory.start, at as u64);
        assert_eq!(walk(&memory.map, memory.start, memory.bytes).expect("walk"), expected);
        assert_eq!(memory.own_pages().expect("own"), expected);
        match scan(&memory.map, memory.start, memory.bytes) {
            Ok(runs) => assert_eq!(runs, expected),
            Err(e) => assert_eq!(e.raw_os_error(), Some(libc::ENOTTY), "only where the kernel has it not: {e}"),
        }
        memory.write(5000, b"from outside").expect("write");
        let mut back = [0u8; 12];
        memory.read(5000, &mut back).expect("read");
        assert_eq!(&back, b"from outside");
        file.read_exact_at(&mut back, 5000).expect("read");
        assert_eq!(back, [1; 12], "the file is not touched");
        assert!(memory.read(bytes as u64 - 1, &mut back).is_err() && memory.write(u64::MAX, &back).is_err());
        // SAFETY: the mapping made above; nobody uses it any more.
        unsafe { munmap(at.cast(), bytes) }.expect("munmap");
    }
}
