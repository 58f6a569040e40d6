//! Writing a file: whole or not at all.

use bytes::Bytes;
use futures::stream::BoxStream;
use mainbrella_guest_protocol::pb;
use mainbrella_types::limits;

use super::upload::{Form, upload};
use super::{Hold, file_failed};
use crate::error::EngineError;
use crate::machine::link::{Link, silent};

/// How a file is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteOptions {
    /// Permission bits; `None`: 0644, or those of the file that is replaced.
    pub mode: Option<u32>,
    /// Make missing directories above it.
    pub create_parents: bool,
    /// Fail when it exists.
    pub exclusive: bool,
}

pub(crate) async fn write(
    link: &Link,
    _hold: Hold,
    path: &[u8],
    options: WriteOptions,
    body: BoxStream<'static, std::io::Result<Bytes>>,
) -> Result<u64, EngineError> {
    let client = link.client().await?;
    let start = pb::WriteFileStart {
        path: path.to_vec(),
        mode: options.mode.unwrap_or(0),
        create_parents: options.create_parents,
        exclusive: options.exclusive,
        ..Default::default()
    };
    let form = Form {
        start: pb::WriteFileRequest { start: start.into(), ..Default::default() },
        data: |data| pb::WriteFileRequest { data, ..Default::default() },
        finish: pb::WriteFileRequest { finish: true, ..Default::default() },
        most: limits::FILE_BYTES_MAX,
        too_large: "a file may have at most 5 GiB",
        outcome: "nothing was written",
        refused: file_failed,
    };
    let (answer, sent) = upload(form, body, async |messages| client.streams().write_file(messages).await).await?;
    let size = answer.view().size;
    if sent == Some(size) { Ok(size) } else { Err(silent("a write of another size was confirmed")) }
}
