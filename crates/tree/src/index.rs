//! Where the files of an archive lie in it.

use std::io::{Read, Seek, SeekFrom};

use crate::error::TreeError;
use crate::header::{self, BLOCK, Kind, META_MAX, padding};
use crate::name::safe_parts;

/// A file of an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Its path, without empty parts and `.`.
    pub path: String,
    /// Where its content begins, bytes from the start of the archive.
    pub offset: u64,
    /// Size of its content, bytes.
    pub bytes: u64,
    /// For a symbolic or hard link: what it says. It has no content.
    pub link: Option<String>,
}

fn failed(e: &std::io::Error) -> TreeError {
    TreeError { stage: "read", errno: e.raw_os_error().map(rustix::io::Errno::from_raw_os_error), text: e.to_string() }
}

/// Lists the files and links of a tar archive, at most `most`. Entries of other kinds, and those whose names are not UTF-8 or
/// lead out of the archive, are passed over.
///
/// # Errors
/// When it is no tar archive, ends within an entry, or holds more.
pub fn index(archive: &mut (impl Read + Seek), most: usize) -> Result<Vec<Member>, TreeError> {
    let end = archive.seek(SeekFrom::End(0)).map_err(|e| failed(&e))?;
    let mut found = Vec::new();
    let (mut at, mut local, mut long_name, mut long_link) = (0u64, Vec::new(), None, None);
    let text = |body: Vec<u8>| body.into_iter().take_while(|b| *b != 0).collect::<Vec<u8>>();
    while at < end {
        let mut block = [0u8; BLOCK];
        archive.seek(SeekFrom::Start(at)).map_err(|e| failed(&e))?;
        archive.read_exact(&mut block).map_err(|e| failed(&e))?;
        let Some(mut header) = header::read(&block)? else { break };
        let meta = matches!(header.kind, Kind::Pax | Kind::PaxGlobal | Kind::LongName | Kind::LongLink);
        if !meta {
            header::apply(&std::mem::take(&mut local), &mut header)?;
            header.path = long_name.take().unwrap_or(header.path);
            header.link = long_link.take().unwrap_or(header.link);
        }
        let has_content = !matches!(header.kind, Kind::HardLink | Kind::Symlink | Kind::Directory | Kind::Device);
        let size = if has_content { header.size } else { 0 };
        let offset = at + BLOCK as u64;
        let next = offset.checked_add(size).and_then(|n| n.checked_add(padding(size) as u64));
        // The padding of the last entry may be cut off.
        let next = next
            .filter(|_| size <= end - offset)
            .ok_or_else(|| TreeError::rule("archive", "the archive ends within an entry"))?;
        if meta {
            if size > META_MAX {
                return Err(TreeError::rule("archive", "an extended header of the archive is too large"));
            }
            let mut body = vec![0; usize::try_from(size).unwrap_or(0)];
            archive.read_exact(&mut body).map_err(|e| failed(&e))?;
            match header.kind {
                Kind::Pax => local = body,
                Kind::LongName => long_name = Some(text(body)),
                Kind::LongLink => long_link = Some(text(body)),
                _ => {}
            }
        } else if matches!(header.kind, Kind::File | Kind::HardLink | Kind::Symlink)
            && let Ok(parts) = safe_parts(&header.path)
            && let Ok(path) = String::from_utf8(parts.join(&b'/'))
        {
            if found.len() == most {
                return Err(TreeError::rule("many", "the archive has too many entries"));
            }
            let link = (header.kind != Kind::File).then(|| String::from_utf8_lossy(&header.link).into_owned());
            found.push(Member { path, offset, bytes: size, link });
        }
        at = next;
    }
    Ok(found)
}
