//! Transfers that stand still or break off.

use std::io::{self, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::{StreamExt as _, stream};
use mainbrella_client::{ApiKey, Client, ClientError, MachineRef, Upload, WriteOptions};

/// Serves one connection with `script`.
fn scripted(script: impl FnOnce(TcpStream) + Send + 'static) -> Client {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    std::thread::spawn(move || {
        let (stream, _) = listener.accept().expect("a connection");
        script(stream);
    });
    Client::new(&url, Some(ApiKey::new("mb_x_y").expect("valid")))
        .expect("a client")
        .with_answer_timeout(Duration::from_millis(300))
}

fn machine() -> MachineRef {
    MachineRef { id: "m-1".into(), created_at: "2026-10-08T12:00:00.000Z".into() }
}

#[tokio::test]
async fn a_download_may_be_slow_but_not_stand_still() {
    let client = scripted(|mut s| {
        let _ = s.read(&mut [0; 4096]);
        s.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\nx-mainbrella-mode: 0640\r\n\r\n").expect("sent");
        for _ in 0..5 {
            s.write_all(b"x").expect("sent");
            std::thread::sleep(Duration::from_millis(150));
        }
        std::thread::sleep(Duration::from_secs(2));
    });
    let mut download = client.read_file(&machine(), "/a", None, None).await.expect("opened");
    assert_eq!((download.mode, download.length), (Some(0o640), Some(100)));
    let mut got = 0;
    let begin = Instant::now();
    let end = loop {
        match download.chunk().await {
            Ok(Some(bytes)) => got += bytes.len(),
            other => break other,
        }
    };
    assert!(matches!(end, Err(ClientError::StoppedWaiting)), "{end:?}");
    assert_eq!(got, 5, "more than one waiting time passed before");
    assert!(begin.elapsed() < Duration::from_secs(2));
}

#[tokio::test]
async fn an_upload_whose_taker_stands_still_ends() {
    let (end, held) = mpsc::channel::<()>();
    let client = scripted(move |s| {
        let _ = held.recv_timeout(Duration::from_secs(10));
        drop(s);
    });
    let bytes = stream::repeat_with(|| Ok(Bytes::from_static(&[0; 65_536]))).take(100_000);
    let begin = Instant::now();
    let sent = client.write_file(&machine(), "/a", &WriteOptions::default(), Upload { bytes, length: None }).await;
    assert!(matches!(sent, Err(ClientError::StoppedWaiting)), "{sent:?}");
    assert!(begin.elapsed() < Duration::from_secs(5));
    let _ = end.send(());
}

#[tokio::test]
async fn a_source_that_fails_is_told_and_leaves_an_incomplete_body() {
    let (tell, told) = mpsc::channel();
    let client = scripted(move |mut s| {
        let mut all = Vec::new();
        let _ = s.read_to_end(&mut all);
        let _ = tell.send(all);
    });
    let pieces = [Ok(Bytes::from_static(b"some")), Err(io::Error::from_raw_os_error(5))];
    let upload = Upload { bytes: stream::iter(pieces), length: None };
    let sent = client.write_file(&machine(), "/a", &WriteOptions::default(), upload).await;
    assert!(matches!(&sent, Err(ClientError::Source(e)) if e.raw_os_error() == Some(5)), "{sent:?}");
    let body = tokio::task::spawn_blocking(move || told.recv_timeout(Duration::from_secs(5)))
        .await
        .expect("joined")
        .expect("closed");
    assert!(!body.ends_with(b"0\r\n\r\n"), "the taker can tell that it is not whole");
}

#[tokio::test]
async fn a_refusal_before_the_end_of_an_upload_is_heard() {
    let client = scripted(|mut s| {
        let _ = s.read(&mut [0; 4096]);
        let body = r#"{"code":"payload_too_large","message":"Too large.","hint":"Less.","requestId":"r"}"#;
        let answer = format!("HTTP/1.1 413 X\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len());
        s.write_all(answer.as_bytes()).expect("sent");
        std::thread::sleep(Duration::from_millis(200));
    });
    let bytes = stream::repeat_with(|| Ok(Bytes::from_static(&[0; 65_536]))).take(1000);
    let sent = client.write_file(&machine(), "/a", &WriteOptions::default(), Upload { bytes, length: None }).await;
    let code = sent.as_ref().err().and_then(ClientError::code);
    assert_eq!(code, Some(mainbrella_types::ErrorCode::PayloadTooLarge), "{sent:?}");
}
