//! A guest that means harm: whatever it sends, the host holds little and ends in time. It speaks HTTP/2 by hand.

use std::time::Duration;

use connectrpc::ErrorCode;
use mainbrella_guest_protocol::link::attach_guest;
use mainbrella_guest_protocol::{GuestClient, LinkOptions, connect, pb};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

/// Most a host may grow by, whatever comes.
const GROWTH_MAX: usize = 96 << 20;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut frame = (payload.len() as u32).to_be_bytes()[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// `:status 200`, `content-type: application/grpc+proto`, in HPACK without compression.
fn answer_head() -> Vec<u8> {
    let mut block = vec![0x88, 0x0f, 0x10];
    let value = b"application/grpc+proto";
    block.push(value.len() as u8);
    block.extend(value);
    block
}

fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

/// Attaches to a guest that, once the first call's header has surely come, sends `head` and then `again` for ever.
async fn hostile(head: Vec<u8>, again: Vec<u8>) -> GuestClient {
    let (host, guest) = tokio::io::duplex(1 << 20);
    tokio::spawn(act(guest, head, again));
    let options = LinkOptions { call_timeout: Duration::from_secs(5), ..LinkOptions::default() };
    connect(host, options).await.unwrap()
}

async fn act(guest: DuplexStream, head: Vec<u8>, again: Vec<u8>) {
    let mut guest = attach_guest(guest).await.unwrap();
    guest.write_all(&frame(4, 0, 0, &[])).await.unwrap();
    let mut seen = 0;
    let mut buffer = [0u8; 4096];
    // Preface, settings, window, then the call.
    while seen < 150 {
        seen += guest.read(&mut buffer).await.unwrap();
    }
    guest.write_all(&frame(4, 1, 0, &[])).await.unwrap();
    guest.write_all(&head).await.unwrap();
    let many = again.repeat((64 * 1024 / again.len().max(1)).max(1));
    let (mut reader, mut writer) = tokio::io::split(guest);
    let drain = async move { while reader.read(&mut buffer).await.is_ok_and(|n| n > 0) {} };
    let flood = async move { while !many.is_empty() && writer.write_all(&many).await.is_ok() {} };
    tokio::join!(drain, flood);
}

/// Floods while a call is open that nobody reads; gives how it ended.
async fn flooded(head: Vec<u8>, again: Vec<u8>, ends: bool) {
    let client = hostile(head, again).await;
    let before = resident();
    let request = pb::ReadFileRequest { path: b"/x".to_vec(), ..Default::default() };
    let call = client.streams().read_file(request);
    let stream = tokio::time::timeout(Duration::from_secs(10), call).await.expect("answers or fails");
    let closed = tokio::time::timeout(Duration::from_secs(3), client.closed()).await;
    let grown = resident().saturating_sub(before);
    assert!(grown < GROWTH_MAX, "grew by {} MiB", grown >> 20);
    assert_eq!(closed.is_ok(), ends, "{closed:?}");
    drop(stream);
}

#[tokio::test]
async fn empty_frames() {
    flooded(frame(1, 4, 1, &answer_head()), frame(0, 0, 1, &[]), true).await;
}

#[tokio::test]
async fn frames_of_one_byte() {
    flooded(frame(1, 4, 1, &answer_head()), frame(0, 0, 1, &[0]), true).await;
}

#[tokio::test]
async fn content_past_the_window() {
    // That is an error of the stream alone: the call ends, the connection need not.
    let client = hostile(frame(1, 4, 1, &answer_head()), frame(0, 0, 1, &[0; 16384])).await;
    let before = resident();
    let request = pb::ReadFileRequest { path: b"/x".to_vec(), ..Default::default() };
    let mut stream = client.streams().read_file(request).await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let grown = resident().saturating_sub(before);
    assert!(grown < 32 << 20, "grew by {} MiB", grown >> 20);
    let ends = async { while stream.message().await.is_ok() {} };
    tokio::time::timeout(Duration::from_secs(10), ends).await.expect("the call ends");
}

#[tokio::test]
async fn informational_answers() {
    // `:status 103`, literal.
    flooded(Vec::new(), frame(1, 4, 1, &[0x08, 3, b'1', b'0', b'3']), true).await;
}

#[tokio::test]
async fn header_blocks_without_end() {
    let begin = frame(1, 0, 1, &answer_head());
    flooded(begin, frame(9, 0, 1, &[&[0x00, 1, b'a', 127, 0x80, 0x7f][..], &[b'v'; 16000]].concat()), true).await;
}

#[tokio::test]
async fn pings_and_settings() {
    let again = [frame(6, 0, 0, &[1; 8]), frame(4, 0, 0, &[0, 3, 0, 0, 0, 100])].concat();
    flooded(frame(1, 4, 1, &answer_head()), again, false).await;
}

#[tokio::test]
async fn a_message_that_says_it_is_huge() {
    let head = [frame(1, 4, 1, &answer_head()), frame(0, 0, 1, &[0, 0xff, 0xff, 0xff, 0xff])].concat();
    let client = hostile(head, frame(0, 0, 1, &[0; 1000])).await;
    let before = resident();
    let request = pb::ReadFileRequest { path: b"/x".to_vec(), ..Default::default() };
    let mut stream = client.streams().read_file(request).await.unwrap();
    let error = tokio::time::timeout(Duration::from_secs(5), stream.message()).await.unwrap().unwrap_err();
    assert_eq!(error.code, ErrorCode::ResourceExhausted);
    assert!(resident().saturating_sub(before) < 16 << 20);
}

#[tokio::test]
async fn a_guest_that_never_answers_costs_a_deadline() {
    let client = hostile(Vec::new(), Vec::new()).await;
    let options = connectrpc::client::CallOptions::default().with_timeout(Duration::from_millis(200));
    let error = client.rpc().hello_with_options(pb::HelloRequest::default(), options).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::DeadlineExceeded);
}

#[tokio::test]
async fn the_end_of_the_stream_ends_the_calls() {
    let (host, guest) = tokio::io::duplex(1 << 20);
    let attached = tokio::spawn(async move {
        let mut guest = attach_guest(guest).await.unwrap();
        let _ = guest.read(&mut [0; 100]).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
    });
    let client = connect(host, LinkOptions::default()).await.unwrap();
    let call = client.rpc().hello(pb::HelloRequest::default());
    let error = tokio::time::timeout(Duration::from_secs(2), call).await.unwrap().unwrap_err();
    assert!(mainbrella_guest_protocol::GuestError::from_connect(&error).is_link_failure(), "{error:?}");
    tokio::time::timeout(Duration::from_secs(2), client.closed()).await.unwrap();
    assert!(client.is_closed());
    attached.await.unwrap();
}
