//! A guest spoken to directly: the same protocol on the machine's agent socket, with no service in between.

use std::error::Error;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use mainbrella_engine::driver::Instance;
use mainbrella_guest_protocol::{GuestClient, LinkOptions, PROTOCOL_VERSION, connect, pb};
use mainbrella_types::GenerationKey;
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::Fault;

/// Longest wait for a guest.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of a file in one message, as the service sends them.
const CHUNK: usize = mainbrella_guest_protocol::limits::CHUNK_BYTES;
/// Messages under way, as in the service.
const IN_FLIGHT: usize = 4;

fn options() -> LinkOptions {
    LinkOptions { deadline: PATIENCE, call_timeout: PATIENCE }
}

fn fault(e: impl Error) -> Fault {
    format!("the guest: {e}").into()
}

async fn hello(client: GuestClient) -> Result<GuestClient, Fault> {
    let request = pb::HelloRequest { protocol_version: PROTOCOL_VERSION, ..Default::default() };
    client.rpc().hello(request).await.map_err(fault)?;
    Ok(client)
}

/// Attaches to a machine and waits for its first answer.
pub async fn attach(machine: &dyn Instance) -> Result<GuestClient, Fault> {
    hello(connect(machine.dial().await?, options()).await?).await
}

/// The same over a socket that is open already.
pub async fn attach_stream(stream: UnixStream) -> Result<GuestClient, Fault> {
    hello(connect(stream, options()).await?).await
}

/// Puts the guest right after a restore, as the service does.
pub async fn configure(client: &GuestClient, key: &GenerationKey) -> Result<(), Fault> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
    let mut entropy = vec![0u8; 64];
    getrandom::fill(&mut entropy)?;
    let request = pb::ConfigureRequest {
        generation: key.to_string(),
        clock_realtime_ns: i64::try_from(now.as_nanos())?,
        entropy,
        hostname: "machine".to_owned(),
        machine_id: key.to_string(),
        ..Default::default()
    };
    client.rpc().configure(request).await.map_err(fault)?;
    Ok(())
}

/// Runs a command, which must end with 0.
pub async fn run(client: &GuestClient, argv: &[&str]) -> Result<(), Fault> {
    let request = pb::StartJobRequest {
        job_id: uuid::Uuid::now_v7().to_string(),
        argv: argv.iter().map(|a| a.as_bytes().to_vec()).collect(),
        timeout_ms: 60_000,
        output_limit: 1024 * 1024,
        forget_when_followed: true,
        ..Default::default()
    };
    let mut stream = client.streams().run_job(request).await.map_err(fault)?;
    let mut code = None;
    while let Some(event) = stream.message().await.map_err(fault)? {
        if let Some(pb::job_event::Event::Exit(exit)) = event.to_owned_message().event {
            code = Some(exit.code);
        }
    }
    if code == Some(0) { Ok(()) } else { Err(format!("{argv:?} ended with {code:?} in the guest").into()) }
}

/// Writes a file of `length` bytes.
pub async fn write(client: &GuestClient, path: &str, length: u64, piece: &[u8]) -> Result<(), Fault> {
    let (messages, requests) = mpsc::channel(IN_FLIGHT);
    let start = pb::WriteFileStart { path: path.as_bytes().to_vec(), ..Default::default() };
    let feed = async move {
        // Nobody takes messages any more when the guest has answered already: its answer counts then.
        let send = async |m: pb::WriteFileRequest| messages.send(m).await.is_ok();
        if !send(pb::WriteFileRequest { start: buffa::MessageField::some(start), ..Default::default() }).await {
            return;
        }
        let mut left = length;
        while left > 0 {
            let n = usize::try_from(left).unwrap_or(usize::MAX).min(piece.len()).min(CHUNK);
            if !send(pb::WriteFileRequest { data: piece[..n].to_vec(), ..Default::default() }).await {
                return;
            }
            left -= n as u64;
        }
        send(pb::WriteFileRequest { finish: true, ..Default::default() }).await;
    };
    let call = client.streams().write_file(ReceiverStream::new(requests));
    let ((), answer) = tokio::join!(feed, call);
    let size = answer.map_err(fault)?.into_owned().size;
    if size == length { Ok(()) } else { Err(format!("{size} of {length} bytes were written").into()) }
}

/// Reads a file; how many bytes it had.
pub async fn read(client: &GuestClient, path: &str) -> Result<u64, Fault> {
    let request = pb::ReadFileRequest { path: path.as_bytes().to_vec(), ..Default::default() };
    let mut stream = client.streams().read_file(request).await.map_err(fault)?;
    let mut size = 0;
    while let Some(chunk) = stream.message().await.map_err(fault)? {
        size += chunk.view().data.len() as u64;
    }
    Ok(size)
}
