//! The little of ELF that is needed: which machine it is for, one named section, whether it wants an
//! interpreter. 64-bit little-endian only; every offset is checked.

/// A view of an ELF file.
pub(super) struct Elf<'a>(&'a [u8]);

const PT_INTERP: u64 = 3;
const SHT_NOBITS: u64 = 8;
const EM_X86_64: u64 = 62;

fn number(bytes: &[u8], at: usize, len: usize) -> Option<u64> {
    let field = bytes.get(at..at.checked_add(len)?)?;
    Some(field.iter().rev().fold(0, |n, b| (n << 8) | u64::from(*b)))
}

fn size(bytes: &[u8], at: usize, len: usize) -> Option<usize> {
    usize::try_from(number(bytes, at, len)?).ok()
}

impl<'a> Elf<'a> {
    /// `None` unless `bytes` start as a 64-bit little-endian ELF file for x86-64.
    pub(super) fn parse(bytes: &'a [u8]) -> Option<Self> {
        let known = bytes.get(..6)? == b"\x7fELF\x02\x01" && number(bytes, 18, 2)? == EM_X86_64 && bytes.len() >= 64;
        known.then_some(Self(bytes))
    }

    /// Where the last segment or section header table it names ends; what is beyond is not part of it.
    pub(super) fn is_whole(&self) -> bool {
        let table = |offset, entry, count| {
            let (o, e, c) = (size(self.0, offset, 8)?, size(self.0, entry, 2)?, size(self.0, count, 2)?);
            o.checked_add(e.checked_mul(c)?)
        };
        let segments_end = self.segments().map(|h| size(h, 8, 8)?.checked_add(size(h, 32, 8)?));
        segments_end.chain([table(32, 54, 56), table(40, 58, 60)]).all(|end| end.is_some_and(|end| end <= self.0.len()))
    }

    fn table(
        &self,
        offset: usize,
        entry: usize,
        count: usize,
        least: usize,
    ) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let bytes = self.0;
        let at = size(bytes, offset, 8).unwrap_or(0);
        let step = size(bytes, entry, 2).unwrap_or(0);
        let count = if step < least { 0 } else { size(bytes, count, 2).unwrap_or(0) };
        (0..count).map_while(move |i| bytes.get(at.checked_add(i * step)?..)?.get(..step))
    }

    fn segments(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        self.table(32, 54, 56, 56)
    }

    fn sections(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        self.table(40, 58, 60, 64)
    }

    /// Whether it asks for a dynamic linker.
    pub(super) fn wants_interpreter(&self) -> bool {
        self.segments().any(|h| number(h, 0, 4) == Some(PT_INTERP))
    }

    /// The bytes of the section called `name`.
    pub(super) fn section(&self, name: &str) -> Option<&'a [u8]> {
        let content = |header: &[u8]| {
            let start = size(header, 24, 8)?;
            self.0.get(start..start.checked_add(size(header, 32, 8)?)?)
        };
        let names = content(self.sections().nth(size(self.0, 62, 2)?)?)?;
        let called = |header: &&[u8]| {
            let rest = size(header, 0, 4).and_then(|at| names.get(at..));
            rest.and_then(|r| r.split(|b| *b == 0).next()) == Some(name.as_bytes())
        };
        content(self.sections().filter(|h| number(h, 4, 4) != Some(SHT_NOBITS)).find(called)?)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A small whole ELF file with one section `.modinfo` that holds `info`, padded to at least `len`.
    pub(in super::super) fn sample(info: &[u8], len: usize) -> Vec<u8> {
        let names = b"\0.shstrtab\0.modinfo\0";
        let mut file = vec![0u8; 64];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        file[18] = 62;
        let names_at = file.len();
        file.extend_from_slice(names);
        let info_at = file.len();
        file.extend_from_slice(info);
        file.resize(file.len().max(len).next_multiple_of(8), 0xA5);
        let table_at = file.len();
        for (name, at, size) in [(0u32, 0, 0), (1, names_at, names.len()), (11, info_at, info.len())] {
            let mut header = [0u8; 64];
            header[..4].copy_from_slice(&name.to_le_bytes());
            header[4] = u8::from(name != 0);
            header[24..32].copy_from_slice(&(at as u64).to_le_bytes());
            header[32..40].copy_from_slice(&(size as u64).to_le_bytes());
            file.extend_from_slice(&header);
        }
        file[40..48].copy_from_slice(&(table_at as u64).to_le_bytes());
        file[58] = 64;
        file[60] = 3;
        file[62] = 1;
        file
    }

    #[test]
    fn a_section_is_found_and_a_cut_file_is_noticed() {
        let file = sample(b"depends=a,b\0", 100);
        let elf = Elf::parse(&file).expect("elf");
        assert_eq!(elf.section(".modinfo"), Some(&b"depends=a,b\0"[..]));
        assert_eq!(elf.section(".text"), None);
        assert!(elf.is_whole() && !elf.wants_interpreter());
        let cut = &file[..file.len() - 1];
        assert!(!Elf::parse(cut).expect("elf").is_whole());
    }

    #[test]
    fn hostile_offsets_are_refused_not_followed() {
        for at in [32, 40, 54, 56, 58, 60, 62] {
            let mut file = sample(b"x=y\0", 0);
            for b in &mut file[at..at + 2] {
                *b = 0xff;
            }
            if let Some(elf) = Elf::parse(&file) {
                let _ = (elf.section(".modinfo"), elf.is_whole(), elf.wants_interpreter());
            }
        }
        assert!(Elf::parse(b"\x7fELF\x02\x01").is_none());
        assert!(Elf::parse(b"#!/bin/sh").is_none());
    }

    #[test]
    fn this_test_binary_is_a_whole_elf_file() {
        let file = std::fs::read("/proc/self/exe").expect("read");
        let elf = Elf::parse(&file).expect("elf");
        assert!(elf.is_whole() && elf.section(".shstrtab").is_some());
    }
}
