//! Streams into gzip and out of it, piece by piece: never more than a bounded part is in memory.

use std::io::{self, Write as _};

use bytes::Bytes;
use flate2::Compression;
use flate2::write::{GzEncoder, MultiGzDecoder};
use futures::StreamExt as _;
use futures::stream::BoxStream;
use mainbrella_engine::EngineError;

/// What is unpacked at once, bytes: at most about a thousand times as much comes out of it.
const STEP: usize = 4096;
/// The beginning of every gzip stream.
const MAGIC: [u8; 2] = [0x1f, 0x8b];

/// Packs a stream. It has no end mark where the chunks broke off.
pub(super) fn packed(
    chunks: BoxStream<'static, Result<Bytes, EngineError>>,
) -> BoxStream<'static, Result<Bytes, EngineError>> {
    let begin = Some((chunks, GzEncoder::new(Vec::new(), Compression::fast())));
    let pieces = futures::stream::unfold(begin, |state| async move {
        let (mut chunks, encoder) = state?;
        let Some(chunk) = chunks.next().await else {
            let tail = tokio::task::spawn_blocking(move || encoder.finish()).await;
            return Some((tail.map_err(io::Error::other).flatten().map(Bytes::from).map_err(|e| failed(&e)), None));
        };
        let chunk = match chunk {
            Ok(chunk) => chunk,
            Err(e) => return Some((Err(e), None)),
        };
        // Off the threads that serve everybody.
        let work = move || {
            let mut encoder = encoder;
            encoder.write_all(&chunk)?;
            let out = Bytes::from(std::mem::take(encoder.get_mut()));
            io::Result::Ok((out, encoder))
        };
        match tokio::task::spawn_blocking(work).await.map_err(io::Error::other).flatten() {
            Ok((out, encoder)) => Some((Ok(out), Some((chunks, encoder)))),
            Err(e) => Some((Err(failed(&e)), None)),
        }
    });
    pieces.filter(|piece| std::future::ready(!matches!(piece, Ok(bytes) if bytes.is_empty()))).boxed()
}

fn failed(e: &io::Error) -> EngineError {
    EngineError::new(mainbrella_types::ErrorCode::Internal, "the archive could not be packed").because(e.to_string())
}

enum Form {
    /// Nothing is known yet; the bytes so far.
    Open(Vec<u8>),
    Plain,
    Packed(Box<MultiGzDecoder<Vec<u8>>>),
}

struct Unpacking<B> {
    body: BoxStream<'static, io::Result<Bytes>>,
    form: Form,
    rest: Bytes,
    blame: B,
}

/// The body as it is, or what is packed in it where it is a gzip stream. `blame` is told when that is damaged.
pub(super) fn plain(
    body: BoxStream<'static, io::Result<Bytes>>,
    blame: impl FnOnce(&'static str) + Send + 'static,
) -> BoxStream<'static, io::Result<Bytes>> {
    let begin = Some(Unpacking { body, form: Form::Open(Vec::new()), rest: Bytes::new(), blame });
    let pieces = futures::stream::unfold(begin, |state| async move {
        let mut at = state?;
        if at.rest.is_empty() {
            match at.body.next().await {
                Some(Ok(piece)) => at.rest = piece,
                Some(Err(e)) => return Some((Err(e), None)),
                None => return Some((at.end(), None)),
            }
        }
        match at.step() {
            Ok(out) => Some((Ok(out), Some(at))),
            Err(e) => {
                (at.blame)("The body is not a whole gzip stream.");
                Some((Err(e), None))
            }
        }
    });
    pieces.filter(|piece| std::future::ready(!matches!(piece, Ok(bytes) if bytes.is_empty()))).boxed()
}

impl<B: FnOnce(&'static str)> Unpacking<B> {
    fn step(&mut self) -> io::Result<Bytes> {
        if let Form::Open(seen) = &mut self.form {
            seen.extend_from_slice(&self.rest.split_to(self.rest.len().min(MAGIC.len())));
            if seen.len() < MAGIC.len() {
                return Ok(Bytes::new());
            }
            let seen = std::mem::take(seen);
            if !seen.starts_with(&MAGIC) {
                self.form = Form::Plain;
                return Ok(seen.into());
            }
            let mut decoder = MultiGzDecoder::new(Vec::new());
            decoder.write_all(&seen)?;
            self.form = Form::Packed(Box::new(decoder));
            return Ok(Bytes::new());
        }
        match &mut self.form {
            Form::Packed(decoder) => {
                decoder.write_all(&self.rest.split_to(self.rest.len().min(STEP)))?;
                Ok(Bytes::from(std::mem::take(decoder.get_mut())))
            }
            _ => Ok(std::mem::take(&mut self.rest)),
        }
    }

    fn end(self) -> io::Result<Bytes> {
        match self.form {
            Form::Open(seen) => Ok(seen.into()),
            Form::Plain => Ok(Bytes::new()),
            Form::Packed(mut decoder) => match decoder.try_finish() {
                Ok(()) => Ok(Bytes::from(std::mem::take(decoder.get_mut()))),
                Err(e) => {
                    (self.blame)("The body is not a whole gzip stream.");
                    Err(e)
                }
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use mainbrella_types::ErrorCode;

    use super::*;

    fn pieces(bytes: &[u8], size: usize) -> Vec<Bytes> {
        bytes.chunks(size).map(Bytes::copy_from_slice).collect()
    }

    async fn pack(bytes: &[u8], size: usize) -> Vec<u8> {
        let chunks = futures::stream::iter(pieces(bytes, size).into_iter().map(Ok)).boxed();
        let all: Vec<_> = packed(chunks).map(|piece| piece.expect("packed")).collect().await;
        all.concat()
    }

    /// What comes out, whether it was whole, and whether somebody was blamed.
    async fn unpack(bytes: &[u8], size: usize) -> (Vec<u8>, bool, bool) {
        let blamed = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&blamed);
        let body = futures::stream::iter(pieces(bytes, size).into_iter().map(Ok)).boxed();
        let mut stream = plain(body, move |_| told.store(true, Ordering::SeqCst));
        let (mut out, mut whole) = (Vec::new(), true);
        while let Some(piece) = stream.next().await {
            match piece {
                Ok(piece) => out.extend_from_slice(&piece),
                Err(_) => whole = false,
            }
        }
        (out, whole, blamed.load(Ordering::SeqCst))
    }

    #[tokio::test]
    async fn what_is_packed_comes_out_as_it_was_in_pieces_of_any_size() {
        let text: Vec<u8> = (0..300_000u32).flat_map(|n| n.to_le_bytes()).collect();
        for content in [&b""[..], b"x", &text] {
            for size in [1 << 20, 70_000] {
                let archive = pack(content, size).await;
                assert!(archive.starts_with(&MAGIC));
                for size in [1 << 20, 1000] {
                    assert_eq!(unpack(&archive, size).await, (content.to_vec(), true, false));
                }
            }
        }
        let small = pack(b"small", 2).await;
        assert_eq!(unpack(&small, 1).await, (b"small".to_vec(), true, false));
        let twice = [small.clone(), small.clone()].concat();
        assert_eq!(unpack(&twice, 7).await, (b"smallsmall".to_vec(), true, false), "several members");
        for plain in [&b""[..], b"\x1f", b"ustar and so on"] {
            assert_eq!(unpack(plain, 1).await, (plain.to_vec(), true, false));
        }
        for cut in [2, 5, 12, small.len() - 1] {
            let (_, whole, blamed) = unpack(&small[..cut], 3).await;
            assert!(!whole && blamed, "{cut}");
        }
        let mut damaged = small;
        damaged[15] ^= 1;
        let (_, whole, blamed) = unpack(&damaged, 100).await;
        assert!(!whole && blamed);
    }

    #[tokio::test]
    async fn a_little_that_is_much_comes_out_in_bounded_pieces() {
        let archive = pack(&vec![0; 64 << 20], 1 << 20).await;
        let body = futures::stream::iter([Ok(Bytes::from(archive))]).boxed();
        let (mut total, mut largest) = (0, 0);
        let mut stream = plain(body, |_| {});
        while let Some(piece) = stream.next().await {
            let piece = piece.expect("whole");
            (total, largest) = (total + piece.len(), largest.max(piece.len()));
        }
        assert_eq!(total, 64 << 20);
        assert!(largest <= 8 << 20, "{largest}");
    }

    #[tokio::test]
    async fn what_broke_off_is_not_packed_to_an_end() {
        let broken = [Ok(Bytes::from_static(b"a")), Err(EngineError::new(ErrorCode::GuestUnavailable, "gone"))];
        let all: Vec<_> = packed(futures::stream::iter(broken).boxed()).collect().await;
        assert!(all.last().expect("an item").is_err());
        let got: Vec<u8> = all.into_iter().flatten().flatten().collect();
        assert!(!unpack(&got, 100).await.1);
    }
}
