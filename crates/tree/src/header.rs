//! The headers of tar: ustar, with PAX records for what does not fit.

use rustix::fs::FileType;

use crate::error::TreeError;

/// Size of a block.
pub(crate) const BLOCK: usize = 512;
/// Largest extended header that is read.
pub(crate) const META_MAX: u64 = 1024 * 1024;
/// Largest number that fits the octal field of a size.
const SIZE_OCTAL_MAX: u64 = 0o77_777_777_777;
const ID_OCTAL_MAX: u32 = 0o7_777_777;
const LEGACY_NAME: usize = 100;

/// What an entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    File,
    HardLink,
    Symlink,
    Directory,
    /// Device or FIFO: left out. It has no content.
    Device,
    /// What this program does not know: left out, with its content.
    Other,
    /// PAX records for the next entry.
    Pax,
    /// PAX records for all that follow.
    PaxGlobal,
    /// GNU: the next entry's name.
    LongName,
    /// GNU: the next entry's link target.
    LongLink,
    /// GNU: a file with holes in a form of its own.
    Sparse,
}

/// An entry as one header says, or is to say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    pub(crate) path: Vec<u8>,
    pub(crate) link: Vec<u8>,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) size: u64,
    pub(crate) mtime: i64,
}

/// The zeros that follow `size` bytes of content.
pub(crate) fn padding(size: u64) -> usize {
    (BLOCK - (size % BLOCK as u64) as usize) % BLOCK
}

fn put(block: &mut [u8; BLOCK], at: usize, width: usize, bytes: &[u8]) {
    let n = bytes.len().min(width);
    block[at..at + n].copy_from_slice(&bytes[..n]);
}

/// A number in octal that fills its field but for the final NUL.
fn octal(block: &mut [u8; BLOCK], at: usize, width: usize, value: u64) {
    let digits = width - 1;
    let text = format!("{value:0>digits$o}");
    put(block, at, width - 1, text.as_bytes());
}

fn block(header: &Header, flag: u8, size: u64) -> [u8; BLOCK] {
    let mut b = [0u8; BLOCK];
    put(&mut b, 0, LEGACY_NAME, &header.path);
    octal(&mut b, 100, 8, u64::from(header.mode & 0o7777));
    octal(&mut b, 108, 8, u64::from(header.uid.min(ID_OCTAL_MAX)));
    octal(&mut b, 116, 8, u64::from(header.gid.min(ID_OCTAL_MAX)));
    octal(&mut b, 124, 12, size.min(SIZE_OCTAL_MAX));
    octal(&mut b, 136, 12, u64::try_from(header.mtime).unwrap_or(0).min(SIZE_OCTAL_MAX));
    b[156] = flag;
    put(&mut b, 157, LEGACY_NAME, &header.link);
    put(&mut b, 257, 8, b"ustar\x0000");
    put(&mut b, 148, 8, b"        ");
    let sum: u64 = b.iter().map(|x| u64::from(*x)).sum();
    octal(&mut b, 148, 7, sum);
    put(&mut b, 154, 2, b"\0 ");
    b
}

/// `LENGTH KEY=VALUE\n`, where the length counts itself.
fn record(out: &mut Vec<u8>, key: &str, value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while rest + length.to_string().len() != length {
        length = rest + length.to_string().len();
    }
    out.extend_from_slice(format!("{length} {key}=").as_bytes());
    out.extend_from_slice(value);
    out.push(b'\n');
}

/// Appends the header blocks of an entry.
pub(crate) fn write(out: &mut Vec<u8>, header: &Header) {
    let mut records = Vec::new();
    let long = |text: &[u8]| text.len() > LEGACY_NAME;
    let texts = [("path", &header.path), ("linkpath", &header.link)];
    if texts.iter().any(|(_, t)| long(t) && std::str::from_utf8(t).is_err()) {
        record(&mut records, "hdrcharset", b"BINARY");
    }
    for (key, text) in texts {
        if long(text) {
            record(&mut records, key, text);
        }
    }
    if header.size > SIZE_OCTAL_MAX {
        record(&mut records, "size", header.size.to_string().as_bytes());
    }
    for (key, id) in [("uid", header.uid), ("gid", header.gid)] {
        if id > ID_OCTAL_MAX {
            record(&mut records, key, id.to_string().as_bytes());
        }
    }
    if !(0..=SIZE_OCTAL_MAX as i64).contains(&header.mtime) {
        record(&mut records, "mtime", header.mtime.to_string().as_bytes());
    }
    if !records.is_empty() {
        let own = Header { path: b"PaxHeaders/entry".to_vec(), link: Vec::new(), mode: 0o644, ..header.clone() };
        out.extend_from_slice(&block(&own, b'x', records.len() as u64));
        out.extend_from_slice(&records);
        out.resize(out.len() + padding(records.len() as u64), 0);
    }
    let flag = match header.kind {
        Kind::HardLink => b'1',
        Kind::Symlink => b'2',
        Kind::Directory => b'5',
        _ => b'0',
    };
    out.extend_from_slice(&block(header, flag, header.size));
}

fn text(field: &[u8]) -> Vec<u8> {
    field.iter().copied().take_while(|b| *b != 0).collect()
}

/// A number in octal, or in GNU's binary form for large and negative ones.
fn number(field: &[u8]) -> Option<i128> {
    let first = *field.first()?;
    if first & 0x80 != 0 {
        let negative = first & 0x40 != 0;
        let start = if negative { -1 } else { i128::from(first & 0x3f) };
        // Twelve bytes at most: 95 bits.
        return Some(field[1..].iter().fold(start, |n, b| (n << 8) | i128::from(*b)));
    }
    let digits: Vec<u8> =
        field.iter().copied().skip_while(|b| *b == b' ').take_while(|b| !matches!(b, 0 | b' ')).collect();
    if digits.is_empty() {
        return Some(0);
    }
    i128::from_str_radix(std::str::from_utf8(&digits).ok().filter(|d| !d.starts_with(['+', '-']))?, 8).ok()
}

fn bad(what: &str) -> TreeError {
    TreeError::rule("archive", format!("the archive is not a tar archive: {what}"))
}

/// Reads a header block; `None` for a block of zeros, which ends an archive.
pub(crate) fn read(b: &[u8; BLOCK]) -> Result<Option<Header>, TreeError> {
    if b.iter().all(|x| *x == 0) {
        return Ok(None);
    }
    let sum = number(&b[148..156]).ok_or_else(|| bad("a checksum is no number"))?;
    let plain = |i: usize, x: u8| if (148..156).contains(&i) { b' ' } else { x };
    let unsigned: i128 = b.iter().enumerate().map(|(i, x)| i128::from(plain(i, *x))).sum();
    #[allow(clippy::cast_possible_wrap)]
    let signed: i128 = b.iter().enumerate().map(|(i, x)| i128::from(plain(i, *x) as i8)).sum();
    if sum != unsigned && sum != signed {
        return Err(bad("a checksum is wrong"));
    }
    let field = |range: std::ops::Range<usize>| number(&b[range]).ok_or_else(|| bad("a field is no number"));
    let kind = match b[156] {
        0 | b'0' | b'7' if b[..LEGACY_NAME].iter().rev().find(|x| **x != 0) == Some(&b'/') && b[156] == 0 => {
            Kind::Directory
        }
        0 | b'0' | b'7' => Kind::File,
        b'1' => Kind::HardLink,
        b'2' => Kind::Symlink,
        b'3' | b'4' | b'6' => Kind::Device,
        b'5' | b'D' => Kind::Directory,
        b'x' | b'X' => Kind::Pax,
        b'g' => Kind::PaxGlobal,
        b'L' => Kind::LongName,
        b'K' => Kind::LongLink,
        b'S' => Kind::Sparse,
        _ => Kind::Other,
    };
    let mut path = text(&b[..LEGACY_NAME]);
    // POSIX has a prefix there; GNU's own form something else.
    if &b[257..263] == b"ustar\0" && b[345] != 0 {
        path = [text(&b[345..500]).as_slice(), b"/", &path].concat();
    }
    Ok(Some(Header {
        kind,
        path,
        link: text(&b[157..257]),
        mode: u32::try_from(field(100..108)?).unwrap_or(0o644) & 0o7777,
        uid: u32::try_from(field(108..116)?).unwrap_or(0),
        gid: u32::try_from(field(116..124)?).unwrap_or(0),
        size: u64::try_from(field(124..136)?).map_err(|_| bad("a size is out of range"))?,
        mtime: i64::try_from(field(136..148)?).map_err(|_| bad("a time is out of range"))?,
    }))
}

/// A key and its value.
pub(crate) type Pair<'a> = (&'a [u8], &'a [u8]);

/// PAX records: keys and values.
fn records(records: &[u8]) -> Result<Vec<Pair<'_>>, TreeError> {
    let mut rest = records;
    let mut found = Vec::new();
    while !rest.is_empty() {
        let space = rest.iter().take(20).position(|b| *b == b' ').ok_or_else(malformed)?;
        let length: usize =
            std::str::from_utf8(&rest[..space]).ok().and_then(|t| t.parse().ok()).ok_or_else(malformed)?;
        if length > rest.len() || length < space + 3 {
            return Err(malformed());
        }
        let (one, tail) = rest.split_at(length);
        rest = tail;
        let body = one[space + 1..].strip_suffix(b"\n").ok_or_else(malformed)?;
        let equals = body.iter().position(|b| *b == b'=').ok_or_else(malformed)?;
        found.push((&body[..equals], &body[equals + 1..]));
    }
    Ok(found)
}

fn malformed() -> TreeError {
    bad("an extended header is malformed")
}

/// Applies PAX records to the header of the entry they belong to.
pub(crate) fn apply(text: &[u8], header: &mut Header) -> Result<(), TreeError> {
    for (key, value) in records(text)? {
        let whole = || {
            let text = std::str::from_utf8(value).ok()?;
            // Fractions of a second are not kept.
            text.split('.').next()?.parse::<i128>().ok()
        };
        match key {
            b"path" => header.path = value.to_vec(),
            b"linkpath" => header.link = value.to_vec(),
            b"size" => header.size = whole().and_then(|n| u64::try_from(n).ok()).ok_or_else(malformed)?,
            b"mtime" => header.mtime = whole().and_then(|n| i64::try_from(n).ok()).ok_or_else(malformed)?,
            b"uid" => header.uid = whole().and_then(|n| u32::try_from(n).ok()).unwrap_or(0),
            b"gid" => header.gid = whole().and_then(|n| u32::try_from(n).ok()).unwrap_or(0),
            _ if key.starts_with(b"GNU.sparse.") => header.kind = Kind::Sparse,
            _ => {}
        }
    }
    Ok(())
}

/// Names and values of extended attributes in PAX records.
pub(crate) fn attributes(text: &[u8]) -> Result<Vec<Pair<'_>>, TreeError> {
    let all = records(text)?;
    Ok(all.into_iter().filter_map(|(key, value)| Some((key.strip_prefix(b"SCHILY.xattr.")?, value))).collect())
}

/// What a header block of [`Kind::Device`] stands for, with its major and minor number.
pub(crate) fn device(b: &[u8; BLOCK]) -> Option<(FileType, u32, u32)> {
    let field = |range: std::ops::Range<usize>| number(&b[range]).and_then(|n| u32::try_from(n).ok());
    match b[156] {
        b'3' => Some((FileType::CharacterDevice, field(329..337)?, field(337..345)?)),
        b'4' => Some((FileType::BlockDevice, field(329..337)?, field(337..345)?)),
        b'6' => Some((FileType::Fifo, 0, 0)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn round(header: &Header) -> Header {
        let mut out = Vec::new();
        write(&mut out, header);
        let block = |at: usize| -> [u8; BLOCK] { out[at..at + BLOCK].try_into().expect("a block") };
        let first = read(&block(0)).expect("valid").expect("not the end");
        if first.kind != Kind::Pax {
            return first;
        }
        let size = first.size as usize;
        let at = BLOCK + size + padding(first.size);
        let mut second = read(&block(at)).expect("valid").expect("not the end");
        apply(&out[BLOCK..BLOCK + size], &mut second).expect("records");
        second
    }

    proptest! {
        #[test]
        fn headers_come_back_as_they_were(path in proptest::collection::vec(1u8..=255, 1..600),
            link in proptest::collection::vec(1u8..=255, 0..600), mode in 0u32..0o10000, uid in any::<u32>(),
            gid in any::<u32>(), size in any::<u64>(), mtime in any::<i64>(), kind in 0usize..4) {
            let kind = [Kind::File, Kind::Symlink, Kind::HardLink, Kind::Directory][kind];
            let header = Header { kind, path, link, mode, uid, gid, size, mtime };
            prop_assert_eq!(round(&header), header);
        }

        #[test]
        fn no_block_and_no_records_make_it_panic(mut bytes in proptest::collection::vec(any::<u8>(), BLOCK..2000), fix in any::<bool>()) {
            let mut block: [u8; BLOCK] = bytes[..BLOCK].try_into().expect("a block");
            if fix {
                block[148..156].copy_from_slice(b"        ");
                let sum: u64 = block.iter().map(|x| u64::from(*x)).sum();
                octal(&mut block, 148, 7, sum);
                block[155] = b' ';
            }
            let mut header = read(&block).ok().flatten().unwrap_or(Header {
                kind: Kind::File, path: vec![], link: vec![], mode: 0, uid: 0, gid: 0, size: 0, mtime: 0 });
            let _ = apply(&bytes, &mut header);
            bytes.splice(0..0, b"30 size=".iter().copied());
            let _ = apply(&bytes, &mut header);
            let _ = attributes(&bytes);
            let _ = device(&block);
        }
    }

    #[test]
    fn lengths_of_records_count_themselves() {
        for n in 0..2000 {
            let mut out = Vec::new();
            record(&mut out, "path", &vec![b'x'; n]);
            let length: usize =
                String::from_utf8_lossy(&out).split(' ').next().and_then(|t| t.parse().ok()).expect("a number");
            assert_eq!(length, out.len());
        }
    }
}
