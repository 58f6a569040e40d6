//! One connection carried over a call: whole both ways, within its credit, ended by whatever breaks the rules.
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use connectrpc::ConnectError;
use futures::StreamExt;
use mainbrella_guest_protocol::dial::{CarryError, Frame, Side, carry, opening};
use mainbrella_guest_protocol::limits::{DIAL_MEMORY, DIAL_WINDOW, DIAL_WINDOW_FIRST};
use proptest::prelude::*;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::sync::{Semaphore, mpsc};

fn memory() -> Arc<Semaphore> {
    Arc::new(Semaphore::new(DIAL_MEMORY))
}

fn frames(from: mpsc::Receiver<Frame>) -> impl futures::Stream<Item = Result<Frame, ConnectError>> + Unpin {
    Box::pin(futures::stream::unfold(from, |mut from| async move { Some((Ok(from.recv().await?), from)) }))
}

/// Two sides joined frame by frame; their local ends.
fn pair(memory: &Arc<Semaphore>) -> (DuplexStream, DuplexStream) {
    let ((a_out, a_in), (b_out, b_in)) = (mpsc::channel(4), mpsc::channel(4));
    let ((near, a), (far, b)) = (tokio::io::duplex(10_000), tokio::io::duplex(10_000));
    let (m, n) = (Arc::clone(memory), Arc::clone(memory));
    tokio::spawn(async move { carry(Side::Caller, a, opening(), frames(b_in), a_out, &m).await.unwrap() });
    tokio::spawn(async move { carry(Side::Callee, b, opening(), frames(a_in), b_out, &n).await.unwrap() });
    (near, far)
}

async fn crossed(there: Vec<u8>, back: Vec<u8>, memory: Arc<Semaphore>) {
    let (near, far) = pair(&memory);
    let talk = |stream: DuplexStream, say: Vec<u8>| async move {
        let (mut reader, mut writer) = tokio::io::split(stream);
        let mut heard = Vec::new();
        let speak = async {
            writer.write_all(&say).await.unwrap();
            writer.shutdown().await.unwrap();
        };
        let (_, n) = tokio::join!(speak, reader.read_to_end(&mut heard));
        n.unwrap();
        heard
    };
    let both = async { tokio::join!(talk(near, there.clone()), talk(far, back.clone())) };
    let (a, b) = tokio::time::timeout(Duration::from_secs(20), both).await.expect("both directions end");
    assert!(a == back && b == there);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(24) })]
    #[test]
    fn every_byte_arrives_in_order_both_ways_whatever_the_windows_are(
        there in 0usize..2_000_000, back in 0usize..2_000_000, memory in prop_oneof![Just(0), Just(DIAL_MEMORY)],
    ) {
        let bytes = |n: usize| (0..n).map(|i| (i % 251) as u8).collect::<Vec<_>>();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(crossed(bytes(there), bytes(back), Arc::new(Semaphore::new(memory))));
    }
}

#[tokio::test]
async fn one_direction_may_end_long_before_the_other() {
    let (mut near, mut far) = pair(&memory());
    near.write_all(b"question").await.unwrap();
    near.shutdown().await.unwrap();
    let mut heard = Vec::new();
    far.read_to_end(&mut heard).await.unwrap();
    assert_eq!(heard, b"question");
    tokio::time::sleep(Duration::from_millis(50)).await;
    let answer = async {
        far.write_all(&[1; 500_000]).await.unwrap();
        far.shutdown().await.unwrap();
    };
    let mut heard = Vec::new();
    let (_, read) = tokio::join!(answer, near.read_to_end(&mut heard));
    assert_eq!((read.unwrap(), heard.len()), (500_000, 500_000));
}

#[tokio::test]
async fn a_reader_who_takes_nothing_is_sent_no_more_than_its_window() {
    let ((out, mut seen), (_ours, theirs)) = (mpsc::channel(100_000), tokio::io::duplex(64));
    let (mut feed, local) = tokio::io::duplex(1 << 20);
    drop(theirs);
    tokio::spawn(async move {
        let never = futures::stream::pending::<Result<Frame, ConnectError>>();
        carry(Side::Callee, local, opening(), never, out, &memory()).await
    });
    tokio::spawn(async move { while feed.write_all(&[0; 4096]).await.is_ok() {} });
    tokio::time::sleep(Duration::from_millis(300)).await;
    let mut sent = 0;
    while let Ok(frame) = seen.try_recv() {
        sent += frame.data.len();
    }
    assert_eq!(sent, DIAL_WINDOW_FIRST, "without credit nothing more leaves");
}

/// How a side ends that is sent these frames and whose local end takes nothing.
async fn told(side: Side, frames: Vec<Frame>) -> Result<(), CarryError> {
    let (_held, local) = tokio::io::duplex(16);
    let (out, mut taken) = mpsc::channel(4);
    tokio::spawn(async move { while taken.recv().await.is_some() {} });
    let incoming = futures::stream::iter(frames.into_iter().map(Ok)).chain(futures::stream::pending());
    let incoming = std::pin::pin!(incoming);
    tokio::time::timeout(Duration::from_secs(5), carry(side, local, opening(), incoming, out, &memory()))
        .await
        .expect("it ends")
}

#[tokio::test]
async fn whoever_goes_beyond_its_credit_ends_the_connection() {
    let data = |n: usize| Frame { data: Bytes::from(vec![0; n]), ..Frame::default() };
    let finish = Frame { finish: true, ..Frame::default() };
    let credit = |n: u32| Frame { credit: n, ..Frame::default() };
    for frames in [
        vec![data(DIAL_WINDOW_FIRST), data(1)],
        vec![data(1); DIAL_WINDOW_FIRST + 1],
        vec![credit(DIAL_WINDOW as u32)],
        vec![credit(u32::MAX), credit(u32::MAX)],
        vec![finish, data(1)],
    ] {
        for side in [Side::Caller, Side::Callee] {
            assert!(matches!(told(side, frames.clone()).await, Err(CarryError::Credit)));
        }
    }
}

#[tokio::test]
async fn a_call_that_ends_early_is_no_end_of_the_content() {
    for frames in [vec![], vec![Frame { data: Bytes::from_static(b"half"), ..Frame::default() }]] {
        let (_held, local) = tokio::io::duplex(1024);
        let (out, _taken) = mpsc::channel(4);
        let incoming = std::pin::pin!(futures::stream::iter(frames.into_iter().map(Ok)));
        let ended = carry(Side::Caller, local, opening(), incoming, out, &memory()).await;
        assert!(matches!(ended, Err(CarryError::Call(_))), "{ended:?}");
    }
}
