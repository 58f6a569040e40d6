//! A machine of this service, to build in.

use std::io;

use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use mainbrella_builder::{Machine, Node, NodeKind, Output, RunEnd, RunOrder};
use mainbrella_engine::driver::SaveOrder;
use mainbrella_engine::machine::FileKind;
use mainbrella_engine::machine::jobs::{Cause, Entry, Exit, JobCommand, JobOrder, Stream};
use mainbrella_engine::{EngineError, MachineHandle, StopOutcome};
use mainbrella_types::{ErrorCode, SnapshotKey, SnapshotKind};
use tokio::sync::mpsc;

/// Bytes of output, and events, in one reading of a log.
const READ_BYTES: usize = 256 * 1024;
const READ_EVENTS: usize = 256;
/// Root, where a machine's own user is another one.
const ROOT: &str = "0:0";

pub(super) struct BuildMachine(pub(super) MachineHandle);

fn lost() -> EngineError {
    EngineError::new(ErrorCode::CreateFailed, "the machine ended while a command ran in it")
}

fn end(exit: Exit) -> Result<RunEnd, EngineError> {
    match (exit.cause, exit.code, exit.signal) {
        (Cause::Exited, Some(code), _) => Ok(RunEnd::Exited(code)),
        (Cause::Signalled, _, Some(signal)) => Ok(RunEnd::Signalled(signal)),
        (Cause::TimedOut, _, _) => Ok(RunEnd::TimedOut),
        _ => Err(lost()),
    }
}

#[async_trait]
impl Machine for BuildMachine {
    async fn run(&self, order: RunOrder, output: mpsc::Sender<(Output, Bytes)>) -> Result<RunEnd, EngineError> {
        let job = JobOrder {
            command: JobCommand::Argv(order.argv),
            cwd: Some(order.workdir),
            user: Some(order.user.unwrap_or_else(|| ROOT.to_owned())),
            env: order.env,
            timeout_ms: order.timeout_ms,
            stdin: Bytes::new(),
            stdin_open: false,
            pty: None,
        };
        let id = self.0.start_job(job, None).await?.job.id;
        let mut follower = self.0.jobs().follow(&id, 0)?;
        loop {
            let events = follower.next(READ_BYTES, READ_EVENTS).await?;
            if events.is_empty() {
                return Err(lost());
            }
            for event in events {
                let (stream, data) = match event.entry {
                    Entry::Started { .. } => continue,
                    Entry::Output { stream, data, .. } => (stream, data),
                    Entry::Gap { stream, length, .. } => {
                        (stream, Bytes::from(format!("\n[{length} bytes were written too fast to be kept]\n")))
                    }
                    Entry::Exit(exit) => return end(exit),
                };
                let stream = match stream {
                    Stream::Stdout => Output::Stdout,
                    Stream::Stderr => Output::Stderr,
                };
                output.send((stream, data)).await.map_err(|_| lost())?;
            }
        }
    }

    async fn look(&self, path: &str) -> Result<Option<Node>, EngineError> {
        match self.0.stat_path(path.as_bytes(), true).await {
            Ok(stat) => {
                let kind = if stat.kind == FileKind::Directory { NodeKind::Directory } else { NodeKind::Other };
                Ok(Some(Node { kind }))
            }
            // Below something that is no directory there is nothing, either.
            Err(e) if matches!(e.code(), ErrorCode::FileNotFound | ErrorCode::FileError) => Ok(None),
            Err(e) => Err(e),
        }
    }

    async fn read(&self, path: &str, most: u64) -> Result<Option<Vec<u8>>, EngineError> {
        let mut reader = match self.0.read_file(path.as_bytes(), 0, Some(most)).await {
            Ok(reader) => reader,
            Err(e) if matches!(e.code(), ErrorCode::FileNotFound | ErrorCode::FileError) => return Ok(None),
            Err(e) => return Err(e),
        };
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        let mut bytes = Vec::new();
        while let Some(chunk) = reader.chunks.next().await {
            let chunk = chunk?;
            bytes.extend_from_slice(&chunk[..chunk.len().min(most - bytes.len())]);
        }
        Ok(Some(bytes))
    }

    async fn unpack(&self, path: &str, tar: BoxStream<'static, io::Result<Bytes>>) -> Result<(), EngineError> {
        self.0.unpack_tree(path.as_bytes(), tar, true).await.map(drop)
    }

    async fn remove(&self, path: &str) -> Result<(), EngineError> {
        match self.0.remove(path.as_bytes(), false).await {
            Err(e) if e.code() != ErrorCode::FileNotFound => Err(e),
            _ => Ok(()),
        }
    }

    async fn save(&self, snapshot: SnapshotKey) -> Result<u64, EngineError> {
        let receipt = self.0.save(SaveOrder { snapshot, kind: SnapshotKind::Workspace }).await?;
        Ok(receipt.memory_bytes.saturating_add(receipt.disk_bytes))
    }

    async fn stop(&self) -> Result<(), EngineError> {
        match self.0.stop().await? {
            StopOutcome::Stopped(_) => Ok(()),
            StopOutcome::Uncertain(_) => {
                Err(EngineError::new(ErrorCode::Overloaded, "the machine is still being removed"))
            }
        }
    }
}
