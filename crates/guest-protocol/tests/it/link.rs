//! Both ends find each other, whatever came before.

use std::time::Duration;

use mainbrella_guest_protocol::LinkError;
use mainbrella_guest_protocol::link::{
    FILLER, Kind, NONCE_LEN, RECORD_LEN, Record, Scanner, attach_guest, attach_host,
};
use proptest::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

fn record() -> impl Strategy<Value = Record> {
    let kind = prop_oneof![Just(Kind::Hello), Just(Kind::Welcome), Just(Kind::Go), Just(Kind::Ready)];
    (kind, any::<[u8; NONCE_LEN]>()).prop_map(|(kind, nonce)| Record { kind, nonce })
}

/// Bytes that look like much: noise, cut records, records with an error, filler.
fn garbage() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..200),
        (record(), 0..RECORD_LEN).prop_map(|(record, cut)| record.encode()[..cut].to_vec()),
        (record(), 0..RECORD_LEN, 1u8..).prop_map(|(record, at, change)| {
            let mut bytes = record.encode();
            bytes[at] ^= change;
            bytes.to_vec()
        }),
        Just(vec![0xFF; 100]),
        Just(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec()),
    ];
    prop::collection::vec(piece, 0..8).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn a_record_is_found_behind_anything_in_any_pieces(
        before in garbage(), record in record(), after in garbage(), cuts in prop::collection::vec(1usize..50, 1..40),
    ) {
        let bytes = [&before[..], &record.encode(), &after].concat();
        let end = before.len() + RECORD_LEN;
        let mut scanner = Scanner::new();
        let (mut at, mut cut) = (0, 0);
        let found = loop {
            let n = cuts[cut % cuts.len()].min(bytes.len() - at);
            cut += 1;
            let mut input = &bytes[at..at + n];
            if let Some(found) = scanner.advance(&mut input) {
                break Some((found, at + n - input.len()));
            }
            at += n;
            if at == bytes.len() {
                break None;
            }
        };
        prop_assert_eq!(found, Some((record, end)), "the first whole record, and not a byte further");
        prop_assert_eq!(scanner.discarded(), before.len() as u64);
    }

    #[test]
    fn ends_meet_behind_what_an_earlier_connection_left(
        to_guest in garbage(), to_host in garbage(), room in 1usize..3000,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (mut host, mut guest) = tokio::io::duplex(100_000);
            host.write_all(&to_guest).await.unwrap();
            guest.write_all(&to_host).await.unwrap();
            // Everything goes through pipes of any size.
            let (mut host_far, host_near) = tokio::io::duplex(room);
            let (mut guest_far, guest_near) = tokio::io::duplex(room);
            tokio::spawn(async move { tokio::io::copy_bidirectional(&mut host_far, &mut host).await });
            tokio::spawn(async move { tokio::io::copy_bidirectional(&mut guest_far, &mut guest).await });
            let (host, guest) = tokio::join!(attach_host(host_near, Duration::from_secs(60)), attach_guest(guest_near));
            let (mut host, mut guest) = (host.unwrap(), guest.unwrap());
            host.write_all(b"from host").await.unwrap();
            guest.write_all(b"from guest").await.unwrap();
            let (mut a, mut b) = ([0; 9], [0; 10]);
            guest.read_exact(&mut a).await.unwrap();
            host.read_exact(&mut b).await.unwrap();
            assert_eq!((&a, &b), (b"from host", b"from guest"));
        });
    }
}

#[tokio::test]
async fn a_guest_in_the_middle_of_a_dead_frame_is_freed() {
    let (host, mut guest) = tokio::io::duplex(1 << 20);
    let attach = tokio::spawn(attach_host(host, Duration::from_secs(30)));
    // The guest still waits for the rest of a frame of 16 KiB, and only then sees that what follows is no frame.
    let mut swallowed = vec![0u8; 16 * 1024];
    guest.read_exact(&mut swallowed).await.unwrap();
    assert!(swallowed.len() < FILLER + RECORD_LEN);
    attach_guest(&mut guest).await.unwrap();
    attach.await.unwrap().unwrap();
}

#[tokio::test]
async fn silence_ends_at_the_deadline() {
    let (host, _guest) = tokio::io::duplex(1 << 20);
    let error = attach_host(host, Duration::from_millis(400)).await.unwrap_err();
    assert!(matches!(error, LinkError::Timeout(_)), "{error}");
    // Nor does a pipe nobody empties hold it.
    let (host, _guest) = tokio::io::duplex(10);
    assert!(matches!(attach_host(host, Duration::from_millis(400)).await, Err(LinkError::Timeout(_))));
}

#[tokio::test]
async fn a_babbling_guest_is_given_up() {
    let (host, mut guest) = tokio::io::duplex(1 << 20);
    tokio::spawn(async move { while guest.write_all(&[0xF1; 4096]).await.is_ok() {} });
    let error = attach_host(host, Duration::from_secs(60)).await.unwrap_err();
    assert!(matches!(error, LinkError::Flooded(_)), "{error}");
}

#[tokio::test]
async fn somebody_elses_answer_is_none() {
    let (host, mut guest) = tokio::io::duplex(1 << 20);
    for kind in [Kind::Welcome, Kind::Ready] {
        guest.write_all(&Record { kind, nonce: [7; NONCE_LEN] }.encode()).await.unwrap();
    }
    let error = attach_host(host, Duration::from_millis(300)).await.unwrap_err();
    assert!(matches!(error, LinkError::Timeout(_)), "{error}");
}
