//! How the two ends find each other on a byte stream that may still carry bytes of an earlier connection.
//!
//! After a restore neither end knows what the other holds: the guest may be in the middle of a frame of a
//! connection that no longer exists, and the pipe may hold what an earlier host never read. So every attach
//! begins with four records of 32 bytes:
//!
//! ```text
//! host  HELLO(nonce)   ->          guest discards everything until a HELLO
//!       <- WELCOME(nonce)          host discards everything until its own nonce
//! host  GO(nonce)      ->
//!       <- READY(nonce)            from here on both sides speak HTTP/2
//! ```
//!
//! A record carries a check sum, so a record that was cut and is followed by a new one is not taken for
//! one. A host that hears nothing repeats HELLO with a new nonce, behind [`FILLER`]: enough bytes to end
//! any frame the guest's old HTTP/2 connection may still wait for, and no valid frame themselves, so that
//! this connection ends and the guest listens again. The last two records make repetitions harmless: all
//! HELLOs come before GO, all WELCOMEs before READY.

use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::Instant;

use crate::limits::{FRAME_BYTES, GUEST_DISCARD_MAX, HOST_DISCARD_MAX, LINK_RETRY_FIRST, LINK_RETRY_MAX};
use crate::prefixed::Prefixed;

/// Length of every record, bytes.
pub const RECORD_LEN: usize = 32;
/// Length of a nonce, bytes.
pub const NONCE_LEN: usize = 16;
/// What precedes a repeated HELLO, bytes of 0xFF: longer than a frame with its head.
pub const FILLER: usize = FRAME_BYTES as usize + 64;
/// Version of the preamble itself; what the service can do is told by `Hello`.
const LINK_VERSION: u8 = 1;
/// The first byte makes the record, taken for an HTTP/2 frame, longer than any frame may be.
const MAGIC: [u8; 8] = [0xF1, b'm', b'b', b'l', b'i', b'n', b'k', 0x1A];

/// A fresh number that names one attempt to attach.
pub type Nonce = [u8; NONCE_LEN];

/// What a record says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Host: are you there?
    Hello = 1,
    /// Guest: I am, and I heard this nonce.
    Welcome = 2,
    /// Host: the next byte is HTTP/2.
    Go = 3,
    /// Guest: so is mine.
    Ready = 4,
}

/// One record of the preamble.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// What it says.
    pub kind: Kind,
    /// Whose attempt it belongs to.
    pub nonce: Nonce,
}

impl Record {
    /// The record as it stands on the wire.
    pub fn encode(&self) -> [u8; RECORD_LEN] {
        let mut out = [0u8; RECORD_LEN];
        out[..8].copy_from_slice(&MAGIC);
        out[8] = LINK_VERSION;
        out[9] = self.kind as u8;
        out[12..28].copy_from_slice(&self.nonce);
        let sum = check_sum(&out[..28]);
        out[28..].copy_from_slice(&sum.to_be_bytes());
        out
    }

    fn decode(bytes: &[u8; RECORD_LEN]) -> Option<Self> {
        if bytes[..8] != MAGIC || bytes[8] != LINK_VERSION || bytes[10..12] != [0, 0] {
            return None;
        }
        if bytes[28..] != check_sum(&bytes[..28]).to_be_bytes() {
            return None;
        }
        let kind = match bytes[9] {
            1 => Kind::Hello,
            2 => Kind::Welcome,
            3 => Kind::Go,
            4 => Kind::Ready,
            _ => return None,
        };
        let mut nonce = [0u8; NONCE_LEN];
        nonce.copy_from_slice(&bytes[12..28]);
        Some(Self { kind, nonce })
    }
}

/// FNV-1a: it tells a cut record from a whole one, nothing more.
fn check_sum(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |sum, byte| (sum ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

/// Finds records in a stream of arbitrary bytes, given in arbitrary pieces. Holds at most one record.
#[derive(Debug, Default)]
pub struct Scanner {
    held: Vec<u8>,
    discarded: u64,
}

impl Scanner {
    /// A scanner that has seen nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Bytes seen that belonged to no record.
    pub fn discarded(&self) -> u64 {
        self.discarded
    }

    /// Takes bytes from `input` up to the end of the first record in it, and gives that record.
    /// `None`: all of `input` was taken and there is no whole record yet.
    pub fn advance(&mut self, input: &mut &[u8]) -> Option<Record> {
        while let Some((first, rest)) = input.split_first() {
            *input = rest;
            self.held.push(*first);
            self.resync();
            if self.held.len() == RECORD_LEN {
                let whole: [u8; RECORD_LEN] = self.held.as_slice().try_into().ok()?;
                if let Some(record) = Record::decode(&whole) {
                    self.held.clear();
                    return Some(record);
                }
                // Not a record: it begins at the next place inside where the magic begins, if there is one.
                self.drop_first();
                self.resync();
            }
        }
        None
    }

    fn drop_first(&mut self) {
        self.held.remove(0);
        self.discarded += 1;
    }

    /// Drops bytes until what is held could be the beginning of a record.
    fn resync(&mut self) {
        while !self.held.is_empty() {
            let n = self.held.len().min(MAGIC.len());
            if self.held[..n] == MAGIC[..n] {
                return;
            }
            self.drop_first();
        }
    }
}

/// Why two ends did not find each other.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The stream broke or ended.
    #[error("the byte stream failed: {0}")]
    Io(#[from] std::io::Error),
    /// The other side gave no answer in time. It may be booting, stopped or dead; dial again.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// The other side sent more than it may before it answered.
    #[error("discarded {0} bytes and found no answer in them")]
    Flooded(u64),
    /// HTTP/2 did not start on the stream.
    #[error("HTTP/2 did not start: {0}")]
    Http2(#[from] hyper::Error),
    /// The system gave no random bytes for a nonce.
    #[error("no random bytes: {0}")]
    Random(String),
}

/// The host's part: attaches to the guest within `deadline` and gives the stream on which HTTP/2 begins.
///
/// # Errors
/// [`LinkError::Timeout`] when the guest gave no answer, [`LinkError::Flooded`] when it sends other things
/// without end, [`LinkError::Io`] when the stream breaks.
pub async fn attach_host<S>(mut stream: S, deadline: Duration) -> Result<Prefixed<S>, LinkError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let attempt = async {
        let mut scanner = Scanner::new();
        let mut buffer = vec![0u8; 16 * 1024];
        let mut pause = LINK_RETRY_FIRST;
        let mut output = Vec::new();
        loop {
            let nonce = fresh_nonce()?;
            output.extend_from_slice(&Record { kind: Kind::Hello, nonce }.encode());
            let repeat_at = Instant::now() + pause;
            match host_attempt(&mut stream, &mut scanner, &mut buffer, &mut output, nonce, repeat_at).await? {
                Some(leftover) => return Ok(Prefixed::new(leftover, stream)),
                None => {
                    pause = (pause * 2).min(LINK_RETRY_MAX);
                    // What an attempt left unwritten still stands in `output`: a cut record must not be followed
                    // by the next one as if it were whole, and bounded it is, by this condition.
                    if output.len() < FILLER {
                        output.resize(output.len() + FILLER, 0xFF);
                    }
                }
            }
        }
    };
    match tokio::time::timeout(deadline, attempt).await {
        Ok(result) => result,
        Err(_) => Err(LinkError::Timeout(deadline)),
    }
}

/// One HELLO until its READY; `None` when it is time to repeat.
async fn host_attempt<S>(
    stream: &mut S,
    scanner: &mut Scanner,
    buffer: &mut [u8],
    output: &mut Vec<u8>,
    nonce: Nonce,
    repeat_at: Instant,
) -> Result<Option<Vec<u8>>, LinkError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (mut reader, mut writer) = tokio::io::split(stream);
    let mut welcomed = false;
    loop {
        tokio::select! {
            // Reading and writing side by side: a guest that still sends must not keep us from asking.
            written = writer.write(output), if !output.is_empty() => {
                let written = written?;
                if written == 0 {
                    return Err(LinkError::Io(std::io::ErrorKind::WriteZero.into()));
                }
                output.drain(..written);
                if output.is_empty() {
                    writer.flush().await?;
                }
            }
            read = reader.read(buffer) => {
                let read = read?;
                if read == 0 {
                    return Err(LinkError::Io(std::io::ErrorKind::UnexpectedEof.into()));
                }
                let mut input = &buffer[..read];
                while let Some(record) = scanner.advance(&mut input) {
                    if record.nonce != nonce {
                        continue;
                    }
                    match record.kind {
                        Kind::Welcome if !welcomed => {
                            welcomed = true;
                            output.extend_from_slice(&Record { kind: Kind::Go, nonce }.encode());
                        }
                        Kind::Ready if welcomed => return Ok(Some(input.to_vec())),
                        _ => {}
                    }
                }
                if scanner.discarded() > HOST_DISCARD_MAX {
                    return Err(LinkError::Flooded(scanner.discarded()));
                }
            }
            () = tokio::time::sleep_until(repeat_at) => return Ok(None),
        }
    }
}

/// The guest's part: waits, for as long as it takes, until a host attaches.
///
/// # Errors
/// [`LinkError::Io`] when the stream breaks or ends, [`LinkError::Flooded`] when an attempt carried too much
/// that is no record; the caller starts anew on the same stream.
pub async fn attach_guest<S>(mut stream: S) -> Result<Prefixed<S>, LinkError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut scanner = Scanner::new();
    let mut buffer = vec![0u8; 4 * 1024];
    let mut welcomed: Option<Nonce> = None;
    loop {
        let read = stream.read(&mut buffer).await?;
        if read == 0 {
            return Err(LinkError::Io(std::io::ErrorKind::UnexpectedEof.into()));
        }
        let mut input = &buffer[..read];
        while let Some(record) = scanner.advance(&mut input) {
            match record.kind {
                Kind::Hello => {
                    welcomed = Some(record.nonce);
                    stream.write_all(&Record { kind: Kind::Welcome, nonce: record.nonce }.encode()).await?;
                    stream.flush().await?;
                }
                Kind::Go if welcomed == Some(record.nonce) => {
                    stream.write_all(&Record { kind: Kind::Ready, nonce: record.nonce }.encode()).await?;
                    stream.flush().await?;
                    return Ok(Prefixed::new(input.to_vec(), stream));
                }
                _ => {}
            }
        }
        if scanner.discarded() > GUEST_DISCARD_MAX {
            return Err(LinkError::Flooded(scanner.discarded()));
        }
    }
}

fn fresh_nonce() -> Result<Nonce, LinkError> {
    let mut nonce = [0u8; NONCE_LEN];
    getrandom::fill(&mut nonce).map_err(|error| LinkError::Random(error.to_string()))?;
    Ok(nonce)
}
