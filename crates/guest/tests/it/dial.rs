//! Connections to ports, through an agent in process to real listeners on this machine's loopback.
use std::time::Duration;

use crate::support::in_process;
use mainbrella_guest_protocol::{GuestError, pb};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// A listener on `address`, and what it does with each connection.
async fn listen<F>(address: &str, serve: fn(TcpStream) -> F) -> u16
where
    F: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind(address).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream));
        }
    });
    port
}

async fn echo(mut stream: TcpStream) {
    let (mut reader, mut writer) = stream.split();
    let _ = tokio::io::copy(&mut reader, &mut writer).await;
    let _ = writer.shutdown().await;
}

#[tokio::test]
async fn megabytes_go_both_ways_and_each_direction_ends_by_itself() {
    let client = in_process().await;
    let port = listen("127.0.0.1:0", echo).await;
    let (mut reader, mut writer) = tokio::io::split(client.dial(port).await.unwrap());
    let sent: Vec<u8> = (0..8_000_000u32).map(|n| (n % 253) as u8).collect();
    let expected = sent.clone();
    tokio::spawn(async move {
        writer.write_all(&sent).await.unwrap();
        writer.shutdown().await.unwrap();
    });
    let mut heard = Vec::new();
    tokio::time::timeout(Duration::from_secs(30), reader.read_to_end(&mut heard)).await.unwrap().unwrap();
    assert!(heard == expected);
}

#[tokio::test]
async fn whatever_address_of_the_machine_is_listened_on_is_found() {
    let client = in_process().await;
    let mut addresses = vec!["127.0.0.1:0", "127.0.0.7:0", "0.0.0.0:0"];
    if TcpListener::bind("[::1]:0").await.is_ok() {
        addresses.extend(["[::1]:0", "[::]:0"]);
    }
    for address in addresses {
        let port = listen(address, echo).await;
        let mut stream = client.dial(port).await.unwrap_or_else(|e| panic!("{address}: {e}"));
        stream.write_all(b"hello").await.unwrap();
        let mut heard = [0; 5];
        stream.read_exact(&mut heard).await.unwrap();
        assert_eq!(&heard, b"hello", "{address}");
    }
}

#[tokio::test]
async fn nothing_listening_is_told_as_that() {
    let client = in_process().await;
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let fault = GuestError::from_connect(&client.dial(free).await.unwrap_err());
    assert_eq!((fault.stage.as_str(), fault.errno), ("connect", libc::ECONNREFUSED));
    let fault = GuestError::from_connect(&client.dial(0).await.unwrap_err());
    assert_eq!((fault.stage.as_str(), fault.errno), ("dial", 0));
}

#[tokio::test]
async fn readers_who_take_nothing_hold_up_nobody_else() {
    let client = in_process().await;
    let flood =
        listen("127.0.0.1:0", |mut stream| async move { while stream.write_all(&[7; 65536]).await.is_ok() {} }).await;
    let port = listen("127.0.0.1:0", echo).await;
    let mut idle = Vec::new();
    for _ in 0..60 {
        idle.push(client.dial(flood).await.unwrap());
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    let others = async {
        client.rpc().hello(pb::HelloRequest::default()).await.unwrap();
        let mut stream = client.dial(port).await.unwrap();
        for _ in 0..100 {
            stream.write_all(&[1; 10_000]).await.unwrap();
            stream.read_exact(&mut [0; 10_000]).await.unwrap();
        }
    };
    tokio::time::timeout(Duration::from_secs(10), others).await.expect("others go on");
    // And they have lost nothing themselves.
    let mut late = vec![0; 3_000_000];
    idle.pop().unwrap().read_exact(&mut late).await.unwrap();
    assert!(late.iter().all(|b| *b == 7));
}

#[tokio::test]
async fn whoever_drops_a_connection_ends_it_on_the_other_side() {
    let client = in_process().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let stream = client.dial(listener.local_addr().unwrap().port()).await.unwrap();
    let (mut accepted, _) = listener.accept().await.unwrap();
    drop(stream);
    let ended = tokio::time::timeout(Duration::from_secs(2), accepted.read(&mut [0; 10])).await.expect("in time");
    assert!(matches!(ended, Ok(0) | Err(_)));
}

#[tokio::test]
async fn a_connection_that_breaks_on_the_other_side_does_not_look_ended() {
    let client = in_process().await;
    let port = listen("127.0.0.1:0", |mut stream| async move {
        let _ = stream.write_all(b"half").await;
        let _ = stream.read(&mut [0; 1]).await;
        // Closed with unread input: a reset.
        stream.set_zero_linger().unwrap();
    })
    .await;
    let mut stream = client.dial(port).await.unwrap();
    let mut heard = [0; 4];
    stream.read_exact(&mut heard).await.unwrap();
    stream.write_all(b"anything").await.unwrap();
    let error = stream.read_to_end(&mut Vec::new()).await.expect_err("broken");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
}
