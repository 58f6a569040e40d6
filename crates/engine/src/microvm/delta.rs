//! What a guest's memory holds beside its template: the file of a paused machine's own pages.
//!
//! ```text
//! 0    8   "MB-DELTA"
//! 8    4   version: 1
//! 12   4   bytes of a page: 4096
//! 16   8   pages of guest memory
//! 24   8   number of runs
//! 32   8   number of pages in the file
//! 40  32   SHA-256 of bytes 0..40 and of everything after this field
//! 72       runs: first page (4), pages (4); ascending, none touches the next
//! …        zeros up to a multiple of the page size
//! …        the pages, in the order of the runs
//! ```
//!
//! Numbers are little-endian. The length of the file follows from its head. Pages that are all zero are holes on disk.
//! A file is used only when all of this holds and its digest is right: one changed byte anywhere is found.

use std::fs::File;
use std::io;
use std::num::NonZero;
use std::os::unix::fs::FileExt;

use sha2::{Digest, Sha256};

use super::pagemap::{GuestMemory, PAGE, Run};
use super::sealed_memory::{CHUNK, runs as filled};

const MAGIC: &[u8; 8] = b"MB-DELTA";
const VERSION: u32 = 1;
const HEAD: usize = 72;
const DIGEST_AT: usize = 40;
/// Most threads that copy one guest's pages.
const COPIERS_MAX: usize = 4;
/// Most pages of a guest: what four bytes can count.
const PAGES_MAX: u64 = u32::MAX as u64;

/// Why a delta cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DeltaError {
    /// It is not what was written.
    #[error("the memory delta {0}")]
    Damaged(&'static str),
    /// It cannot be read or written.
    #[error("memory delta")]
    Io(#[from] io::Error),
}

/// A delta in its file.
#[derive(Debug)]
pub struct Delta {
    file: File,
    runs: Vec<Run>,
    data_at: u64,
    pages: u64,
}

impl Delta {
    /// Copies `runs` of a guest's `guest_pages` pages from `memory` into `file`, which is empty. Until [`Self::seal`] the
    /// file cannot be opened again, but its pages can be used.
    ///
    /// # Errors
    /// When `runs` are not in order, memory cannot be read, or the file not written.
    pub fn copy(
        file: File,
        memory: &(impl GuestMemory + Sync),
        guest_pages: u64,
        runs: Vec<Run>,
    ) -> Result<Self, DeltaError> {
        let pages =
            count(&runs, guest_pages).ok_or(DeltaError::Damaged("would hold pages that are not the guest's"))?;
        let data_at = data_at(runs.len() as u64);
        let mut head = Vec::with_capacity(HEAD + runs.len() * 8);
        head.extend_from_slice(MAGIC);
        head.extend_from_slice(&VERSION.to_le_bytes());
        head.extend_from_slice(&u32::try_from(PAGE).unwrap_or(0).to_le_bytes());
        for number in [guest_pages, runs.len() as u64, pages] {
            head.extend_from_slice(&number.to_le_bytes());
        }
        head.extend_from_slice(&[0; 32]);
        for run in &runs {
            for number in [run.first, run.pages] {
                // `count` has seen that they fit.
                head.extend_from_slice(&u32::try_from(number).unwrap_or(0).to_le_bytes());
            }
        }
        file.write_all_at(&head, 0)?;
        file.set_len(data_at + pages * PAGE)?;
        let delta = Self { file, runs, data_at, pages };
        // Somebody stands still meanwhile: as many at a time as there are processors for it.
        let threads = std::thread::available_parallelism().map_or(1, NonZero::get).min(COPIERS_MAX);
        let threads = threads.min(usize::try_from(delta.bytes() / CHUNK as u64).unwrap_or(COPIERS_MAX)).max(1);
        let work = |nth| {
            delta.each_chunk((nth, threads), |at, in_file, chunk| {
                memory.read(at, chunk)?;
                for (offset, part) in filled(chunk) {
                    delta.file.write_all_at(part, in_file + offset as u64)?;
                }
                Ok(())
            })
        };
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|nth| scope.spawn(move || work(nth))).collect();
            let mut outcome = work(0);
            for other in others {
                let theirs = other.join().map_err(|_| DeltaError::Io(io::Error::other("a copying thread failed")));
                outcome = outcome.and(theirs.and_then(|done| done));
            }
            outcome
        })?;
        Ok(delta)
    }

    /// Writes the digest.
    ///
    /// # Errors
    /// When the file cannot be read or written.
    pub fn seal(&self) -> Result<[u8; 32], DeltaError> {
        let digest = self.digest()?;
        self.file.write_all_at(&digest, DIGEST_AT as u64)?;
        Ok(digest)
    }

    /// Reads the delta of a guest with `guest_pages` pages and checks all of it. Says its digest, too.
    ///
    /// # Errors
    /// `Damaged` when anything in it is not as it was written.
    pub fn open(file: File, guest_pages: u64) -> Result<(Self, [u8; 32]), DeltaError> {
        let damaged = |why| Err(DeltaError::Damaged(why));
        let length = file.metadata()?.len();
        let mut head = [0u8; HEAD];
        if length < HEAD as u64 {
            return damaged("is shorter than its head");
        }
        file.read_exact_at(&mut head, 0)?;
        if &head[..8] != MAGIC {
            return damaged("has another head");
        }
        if number(&head, 8, 4) != u64::from(VERSION) {
            return damaged("is of another version");
        }
        if number(&head, 12, 4) != PAGE || number(&head, 16, 8) != guest_pages {
            return damaged("is of a machine of another size");
        }
        let (count_runs, pages) = (number(&head, 24, 8), number(&head, 32, 8));
        // Bounds everything that is allocated below.
        if guest_pages > PAGES_MAX || count_runs > guest_pages || pages > guest_pages {
            return damaged("holds more pages than the guest has");
        }
        let data_at = data_at(count_runs);
        if length != data_at + pages * PAGE {
            return damaged("has not the length that its head says");
        }
        let mut table = vec![0u8; usize::try_from(count_runs).unwrap_or(0) * 8];
        file.read_exact_at(&mut table, HEAD as u64)?;
        let runs: Vec<Run> =
            table.chunks_exact(8).map(|r| Run { first: number(r, 0, 4), pages: number(r, 4, 4) }).collect();
        if count(&runs, guest_pages) != Some(pages) {
            return damaged("has runs out of order");
        }
        let delta = Self { file, runs, data_at, pages };
        let digest = delta.digest()?;
        if digest != head[DIGEST_AT..HEAD] {
            return damaged("has not the digest that its head says");
        }
        Ok((delta, digest))
    }

    /// Writes the pages into `memory`.
    ///
    /// # Errors
    /// When the file cannot be read, or memory not written.
    pub fn apply(&self, memory: &impl GuestMemory) -> Result<(), DeltaError> {
        self.each_chunk((0, 1), |at, in_file, chunk| {
            self.file.read_exact_at(chunk, in_file)?;
            memory.write(at, chunk)
        })
    }

    /// Bytes of guest memory in it.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.pages * PAGE
    }

    /// Its file.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Calls `work` with place in memory, place in the file, and room, for every `of`th piece from the `nth` on.
    fn each_chunk(
        &self,
        (nth, of): (usize, usize),
        mut work: impl FnMut(u64, u64, &mut [u8]) -> io::Result<()>,
    ) -> Result<(), DeltaError> {
        let mut buffer = vec![0u8; CHUNK];
        let mut in_file = self.data_at;
        for run in &self.runs {
            let (mut at, end) = (run.first * PAGE, (run.first + run.pages) * PAGE);
            while at < end {
                // Nobody's piece reaches into the next megabyte of the file, whose turn is another's.
                let room = CHUNK - usize::try_from(in_file % CHUNK as u64).unwrap_or(0);
                let n = usize::try_from(end - at).unwrap_or(room).min(room);
                if usize::try_from(in_file / CHUNK as u64).unwrap_or(0) % of == nth {
                    work(at, in_file, &mut buffer[..n])?;
                }
                at += n as u64;
                in_file += n as u64;
            }
        }
        Ok(())
    }

    fn digest(&self) -> io::Result<[u8; 32]> {
        let mut hash = Sha256::new();
        let mut buffer = vec![0u8; CHUNK];
        self.file.read_exact_at(&mut buffer[..DIGEST_AT], 0)?;
        hash.update(&buffer[..DIGEST_AT]);
        let (mut at, end) = (HEAD as u64, self.data_at + self.pages * PAGE);
        while at < end {
            let n = usize::try_from(end - at).unwrap_or(CHUNK).min(CHUNK);
            self.file.read_exact_at(&mut buffer[..n], at)?;
            hash.update(&buffer[..n]);
            at += n as u64;
        }
        Ok(hash.finalize().into())
    }
}

/// Where the pages begin.
fn data_at(runs: u64) -> u64 {
    (HEAD as u64 + runs * 8).next_multiple_of(PAGE)
}

/// How many pages `runs` have together, if they are as they must be for a guest of `guest_pages`.
fn count(runs: &[Run], guest_pages: u64) -> Option<u64> {
    let (mut pages, mut next) = (0, 0);
    for (n, run) in runs.iter().enumerate() {
        let end = run.first.checked_add(run.pages)?;
        if run.pages == 0 || end > guest_pages.min(PAGES_MAX) || (n > 0 && run.first <= next) {
            return None;
        }
        next = end;
        pages += run.pages;
    }
    Some(pages)
}

fn number(from: &[u8], at: usize, bytes: usize) -> u64 {
    let mut eight = [0u8; 8];
    eight[..bytes].copy_from_slice(&from[at..at + bytes]);
    u64::from_le_bytes(eight)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::RwLock;

    /// A guest's memory that is only a vector.
    struct Plain(RwLock<Vec<u8>>);

    impl Plain {
        fn new(pages: u64, byte: u8) -> Self {
            Self(RwLock::new(vec![byte; usize::try_from(pages * PAGE).expect("small")]))
        }
    }

    impl GuestMemory for Plain {
        fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
            let at = usize::try_from(at).expect("small");
            into.copy_from_slice(&self.0.read().expect("lock")[at..at + into.len()]);
            Ok(())
        }

        fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
            let at = usize::try_from(at).expect("small");
            self.0.write().expect("lock")[at..at + from.len()].copy_from_slice(from);
            Ok(())
        }
    }

    /// Runs from the pages that are `true`.
    fn runs_of(pages: &[bool]) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for (n, _) in pages.iter().enumerate().filter(|(_, own)| **own) {
            match runs.last_mut() {
                Some(last) if last.first + last.pages == n as u64 => last.pages += 1,
                _ => runs.push(Run { first: n as u64, pages: 1 }),
            }
        }
        runs
    }

    fn file() -> File {
        tempfile::tempfile().expect("temp file")
    }

    /// A delta of three runs among twelve pages, as the bytes of its file.
    fn sample() -> Vec<u8> {
        let memory = Plain::new(12, 5);
        let runs = runs_of(&[true, false, true, true, false, false, false, false, false, false, false, true]);
        let delta = Delta::copy(file(), &memory, 12, runs).expect("copy");
        delta.seal().expect("seal");
        let mut bytes = vec![0; usize::try_from(delta.file.metadata().expect("stat").len()).expect("small")];
        delta.file.read_exact_at(&mut bytes, 0).expect("read");
        bytes
    }

    fn opened(bytes: &[u8]) -> Result<Delta, DeltaError> {
        let f = file();
        f.write_all_at(bytes, 0).expect("write");
        Delta::open(f, 12).map(|(delta, _)| delta)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn pages_come_back_as_they_were_and_no_other_is_touched(
            own in proptest::collection::vec(any::<bool>(), 0..700),
            seed in any::<u64>(),
        ) {
            let pages = own.len() as u64;
            let memory = Plain::new(pages, 0);
            let mut state = seed | 1;
            for (n, page) in memory.0.write().expect("lock").chunks_exact_mut(4096).enumerate() {
                // Every fourth stays all zero.
                if n % 4 != 0 {
                    for word in page.chunks_exact_mut(512) {
                        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        word[..8].copy_from_slice(&state.to_le_bytes());
                    }
                }
            }
            let f = file();
            let kept = Delta::copy(f.try_clone().expect("clone"), &memory, pages, runs_of(&own)).expect("copy");
            kept.seal().expect("seal");
            prop_assert_eq!(kept.bytes(), own.iter().filter(|o| **o).count() as u64 * PAGE);
            let other = Plain::new(pages, 0xEE);
            Delta::open(f, pages).expect("whole").0.apply(&other).expect("apply");
            for (n, own) in own.iter().enumerate() {
                let range = n * 4096..(n + 1) * 4096;
                let there = other.0.read().expect("lock")[range.clone()].to_vec();
                if *own {
                    prop_assert_eq!(&there, &memory.0.read().expect("lock")[range], "page {}", n);
                } else {
                    prop_assert!(there.iter().all(|b| *b == 0xEE), "page {} is not of the delta", n);
                }
            }
        }

        #[test]
        fn what_is_no_delta_is_refused_without_harm(bytes in proptest::collection::vec(any::<u8>(), 0..300), headed in any::<bool>()) {
            let mut bytes = bytes;
            if headed {
                let head = sample();
                let n = bytes.len().min(24);
                bytes[..n].copy_from_slice(&head[..n]);
            }
            prop_assert!(matches!(opened(&bytes), Err(DeltaError::Damaged(_))));
        }
    }

    #[test]
    fn every_damaged_byte_is_found() {
        let good = sample();
        opened(&good).expect("whole");
        let f = file();
        f.write_all_at(&good, 0).expect("write");
        for (at, byte) in good.iter().enumerate() {
            f.write_all_at(&[byte ^ (1 << (at % 8))], at as u64).expect("write");
            let bad = Delta::open(f.try_clone().expect("clone"), 12);
            assert!(matches!(bad, Err(DeltaError::Damaged(_))), "byte {at}");
            f.write_all_at(&[*byte], at as u64).expect("write");
        }
        for length in [0, 7, 71, 72, 4096, good.len() - 4096, good.len() - 1] {
            assert!(matches!(opened(&good[..length]), Err(DeltaError::Damaged(_))), "cut to {length}");
        }
        let mut long = good.clone();
        long.push(0);
        assert!(matches!(opened(&long), Err(DeltaError::Damaged(_))), "longer");
    }

    #[test]
    fn one_that_was_not_finished_or_is_of_another_machine_is_refused() {
        let f = file();
        let memory = Plain::new(4, 9);
        let runs = runs_of(&[true, true, false, true]);
        let delta = Delta::copy(f.try_clone().expect("clone"), &memory, 4, runs).expect("copy");
        let again = || f.try_clone().expect("clone");
        assert!(matches!(Delta::open(again(), 4), Err(DeltaError::Damaged(_))), "no digest yet");
        delta.seal().expect("seal");
        Delta::open(again(), 4).expect("whole");
        assert!(matches!(Delta::open(again(), 5), Err(DeltaError::Damaged(_))), "another size");
    }

    #[test]
    fn runs_that_are_not_the_guests_are_not_written() {
        let memory = Plain::new(4, 9);
        for runs in [
            vec![Run { first: 3, pages: 2 }],
            vec![Run { first: 0, pages: 0 }],
            vec![Run { first: 2, pages: 1 }, Run { first: 1, pages: 1 }],
            vec![Run { first: 0, pages: 1 }, Run { first: 1, pages: 1 }],
            vec![Run { first: u64::MAX, pages: 2 }],
        ] {
            assert!(matches!(Delta::copy(file(), &memory, 4, runs), Err(DeltaError::Damaged(_))));
        }
    }
}
