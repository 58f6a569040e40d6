//! Takes compressed things apart: the kernel inside `vmlinuz`, and kernel modules.

use std::io::Read;

use super::elf::Elf;
use super::error::ImageError;

/// Largest thing unpacked, bytes: bounds what a damaged stream can make us hold.
const UNPACKED_MAX: usize = 256 * 1024 * 1024;
/// Block size of the LZ4 legacy frame.
const LZ4_BLOCK: usize = 8 * 1024 * 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Gzip,
    Xz,
    Zstd,
    Lz4Legacy,
}

const MAGIC: [(Format, &[u8]); 4] = [
    (Format::Gzip, &[0x1f, 0x8b, 0x08]),
    (Format::Xz, &[0xfd, b'7', b'z', b'X', b'Z', 0]),
    (Format::Zstd, &[0x28, 0xb5, 0x2f, 0xfd]),
    (Format::Lz4Legacy, &[0x02, 0x21, 0x4c, 0x18]),
];

/// The uncompressed kernel ELF inside the boot image `vmlinuz`, whichever way it was compressed.
///
/// Finds every place that looks like the start of a stream and tries it; bytes after the stream do
/// not matter, what comes out must be a whole x86-64 ELF file.
pub(super) fn vmlinux(vmlinuz: &[u8]) -> Result<Vec<u8>, ImageError> {
    for at in 0..vmlinuz.len() {
        let rest = &vmlinuz[at..];
        for (format, magic) in MAGIC {
            if rest.starts_with(magic)
                && let Some(out) = unpack(format, rest)
                && Elf::parse(&out).is_some_and(|elf| elf.is_whole())
            {
                return Ok(out);
            }
        }
    }
    Err(ImageError::malformed("the kernel package holds no kernel in a known form (gzip, xz, zstd or lz4)"))
}

/// A kernel module as the kernel wants it: an ELF file, out of `.ko`, `.ko.gz`, `.ko.xz` or `.ko.zst` bytes.
pub(super) fn module(name: &str, bytes: Vec<u8>) -> Result<Vec<u8>, ImageError> {
    let format = MAGIC.iter().find(|(_, magic)| bytes.starts_with(magic)).map(|(format, _)| *format);
    let plain = match format {
        Some(format) => unpack(format, &bytes),
        None => Some(bytes),
    };
    plain
        .filter(|p| Elf::parse(p).is_some_and(|elf| elf.is_whole()))
        .ok_or_else(|| ImageError::malformed(format!("kernel module {name} is damaged")))
}

fn unpack(format: Format, bytes: &[u8]) -> Option<Vec<u8>> {
    match format {
        Format::Gzip => read_all(flate2::read::GzDecoder::new(bytes)),
        Format::Xz => read_all(liblzma::read::XzDecoder::new(bytes)),
        Format::Zstd => read_all(zstd::Decoder::new(bytes).ok()?.single_frame()),
        Format::Lz4Legacy => lz4_legacy(bytes.get(4..)?),
    }
}

fn read_all(reader: impl Read) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    reader.take(UNPACKED_MAX as u64 + 1).read_to_end(&mut out).ok()?;
    (out.len() <= UNPACKED_MAX).then_some(out)
}

/// Blocks of a four-byte length and LZ4 data, each 8 MiB when unpacked except the last. There is no end
/// mark: the kernel puts the unpacked size there, which is no sensible block, so a short block ends it too.
fn lz4_legacy(mut bytes: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    let mut block = vec![0; LZ4_BLOCK];
    while let Some((head, rest)) = bytes.split_first_chunk::<4>() {
        let length = usize::try_from(u32::from_le_bytes(*head)).ok()?;
        let Some(data) = rest.get(..length).filter(|d| !d.is_empty()) else { break };
        let Ok(n) = lz4_flex::block::decompress_into(data, &mut block) else { break };
        out.extend_from_slice(&block[..n]);
        if n < LZ4_BLOCK || out.len() > UNPACKED_MAX {
            break;
        }
        bytes = &rest[length..];
    }
    (!out.is_empty() && out.len() <= UNPACKED_MAX).then_some(out)
}

#[cfg(test)]
mod tests {
    use super::super::elf::tests::sample;
    use super::*;
    use std::io::Write;

    fn pack(format: Format, plain: &[u8]) -> Vec<u8> {
        match format {
            Format::Gzip => {
                let mut w = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
                w.write_all(plain).expect("gzip");
                w.finish().expect("gzip")
            }
            Format::Xz => {
                let mut w = liblzma::write::XzEncoder::new(Vec::new(), 1);
                w.write_all(plain).expect("xz");
                w.finish().expect("xz")
            }
            Format::Zstd => zstd::encode_all(plain, 1).expect("zstd"),
            Format::Lz4Legacy => {
                let mut out = vec![0x02, 0x21, 0x4c, 0x18];
                for block in plain.chunks(LZ4_BLOCK) {
                    let data = lz4_flex::block::compress(block);
                    out.extend_from_slice(&u32::try_from(data.len()).expect("small").to_le_bytes());
                    out.extend_from_slice(&data);
                }
                out
            }
        }
    }

    /// What a boot image looks like from here: code, false starts, the stream, its size, more code.
    fn boot_image(format: Format, plain: &[u8]) -> Vec<u8> {
        let mut image = vec![0x90; 5000];
        for (_, magic) in MAGIC {
            image.extend_from_slice(magic);
            image.extend_from_slice(b"not really a stream");
        }
        image.extend_from_slice(&pack(format, plain));
        image.extend_from_slice(&u32::try_from(plain.len()).expect("small").to_le_bytes());
        image.extend_from_slice(&[0xcc; 3000]);
        image
    }

    #[test]
    fn the_kernel_is_found_in_every_known_format() {
        let kernel = sample(b"", 200_000);
        for (format, _) in MAGIC {
            let out = vmlinux(&boot_image(format, &kernel)).unwrap_or_else(|e| panic!("{format:?}: {e}"));
            assert!(out == kernel, "{format:?}");
        }
    }

    #[test]
    fn an_lz4_kernel_of_several_blocks_is_put_together() {
        let kernel = sample(b"", LZ4_BLOCK * 2 + 12345);
        assert!(vmlinux(&boot_image(Format::Lz4Legacy, &kernel)).expect("found") == kernel);
    }

    #[test]
    fn a_cut_kernel_is_not_accepted() {
        let kernel = sample(b"", 200_000);
        for (format, _) in MAGIC {
            let mut packed = pack(format, &kernel);
            packed.truncate(packed.len() / 2);
            assert!(vmlinux(&packed).is_err(), "{format:?}");
        }
        assert!(vmlinux(&[]).is_err());
    }

    #[test]
    fn modules_come_plain_or_packed() {
        let plain = sample(b"depends=\0", 3000);
        for bytes in [plain.clone(), pack(Format::Xz, &plain), pack(Format::Zstd, &plain), pack(Format::Gzip, &plain)] {
            assert!(module("m", bytes).expect("unpacks") == plain);
        }
        assert!(module("m", b"junk".to_vec()).expect_err("damaged").to_string().contains("module m"));
    }
}
