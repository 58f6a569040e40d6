//! Bodies that are refused before they are read: whoever only sends, and then looks, finds the answer and no reset.

use std::io::{BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::common::Service;
use serde_json::{Value, json};

const SIZE: usize = 64 << 20;

/// How a body is sent.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Sent {
    Announced,
    Chunked,
}

struct Answer {
    status: u16,
    close: bool,
    body: Value,
}

fn read_answer(reader: &mut impl std::io::BufRead) -> Answer {
    let mut line = String::new();
    reader.read_line(&mut line).expect("an answer and no reset");
    let status = line.split(' ').nth(1).unwrap_or_else(|| panic!("{line:?}")).parse().unwrap();
    let (mut length, mut close) = (0, false);
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).unwrap();
        match header.trim_end().to_lowercase().split_once(": ") {
            Some(("content-length", n)) => length = n.parse().unwrap(),
            Some(("connection", value)) => close = value == "close",
            Some(_) => {}
            None => break,
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).expect("the whole answer");
    Answer { status, close, body: serde_json::from_slice(&body).unwrap() }
}

/// Sends all of a body before it reads anything.
fn stubborn(address: std::net::SocketAddr, head: &str, sent: Sent) -> Answer {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(30))).unwrap();
    let framing = match sent {
        Sent::Announced => format!("content-length: {SIZE}"),
        Sent::Chunked => "transfer-encoding: chunked".to_owned(),
    };
    stream.write_all(format!("{head}\r\nhost: {address}\r\n{framing}\r\n\r\n").as_bytes()).unwrap();
    let piece = vec![b'x'; 1 << 20];
    for _ in 0..SIZE / piece.len() {
        if sent == Sent::Chunked {
            stream.write_all(format!("{:x}\r\n", piece.len()).as_bytes()).expect("taken");
        }
        stream.write_all(&piece).expect("taken");
        if sent == Sent::Chunked {
            stream.write_all(b"\r\n").expect("taken");
        }
    }
    if sent == Sent::Chunked {
        stream.write_all(b"0\r\n\r\n").expect("taken");
    }
    let mut reader = BufReader::new(stream);
    let answer = read_answer(&mut reader);
    assert_eq!(reader.read(&mut [0]).expect("a proper end"), 0, "the connection ends");
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_upload_is_answered_even_to_those_who_only_send() {
    let s = Service::start().await;
    let m = s.machine().await;
    let job = s.job(&m, json!({"command": ["cat"], "stdin": true})).await;
    let key = format!("authorization: Bearer {}", s.admin);
    let put = |path: &str, key: &str| format!("PUT {path} HTTP/1.1\r\n{key}");
    let post = |path: &str, kind: &str| format!("POST {path} HTTP/1.1\r\n{key}\r\ncontent-type: {kind}");
    let file = format!("{}&path=/f", m.path("/files/content"));
    let gone = m.path("/files/content").replace(&m.id, "no-such-machine");
    let stdin = m.path(&format!("/jobs/{}/stdin", job["id"].as_str().unwrap()));
    let cases = [
        (put(&file, "x-no: key"), 401, "unauthenticated"),
        (put(&file, "authorization: Bearer mb_00000000_wrong"), 401, "unauthenticated"),
        (put(&format!("{gone}&path=/f"), &key), 404, "not_found"),
        (put(&format!("{file}&odd=1"), &key), 400, "invalid_request"),
        (put(&m.path("/files/content"), &key), 400, "invalid_request"),
        (put(&format!("{}&path=relative", m.path("/files/tree")), &key), 400, "invalid_request"),
        (put("/v1/files/not-a-token", "x-no: key"), 401, "unauthenticated"),
        (put("/v1/no/such/path", &key), 404, "not_found"),
        (put(&m.path("/jobs"), &key), 405, "invalid_request"),
        (post(&m.path("/jobs"), "application/json"), 413, "payload_too_large"),
        (post(&m.path("/jobs"), "text/plain"), 415, "invalid_request"),
        (post(&stdin, "application/octet-stream"), 413, "payload_too_large"),
    ];
    let address = s.address;
    for (head, status, code) in cases {
        for sent in [Sent::Announced, Sent::Chunked] {
            let request = head.clone();
            let answer = tokio::task::spawn_blocking(move || stubborn(address, &request, sent)).await.unwrap();
            let line = head.lines().next().unwrap();
            assert_eq!((answer.status, answer.body["code"].as_str()), (status, Some(code)), "{line} {sent:?}");
            assert!(answer.close, "{line} {sent:?}: it is said that the connection ends");
        }
    }
    assert_eq!(s.get(&m.path("")).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_small_body_that_is_refused_does_not_cost_its_connection() {
    let s = Service::start().await;
    let address = s.address;
    let answers = tokio::task::spawn_blocking(move || {
        let mut stream = TcpStream::connect(address).unwrap();
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let body = "x".repeat(10_000);
        let head = format!("POST /v1/machines HTTP/1.1\r\nhost: {address}\r\ncontent-length: {}\r\n\r\n", body.len());
        [(); 3].map(|()| {
            stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes())).unwrap();
            read_answer(&mut reader)
        })
    });
    for answer in answers.await.unwrap() {
        assert_eq!((answer.status, answer.close), (401, false));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_announces_much_and_sends_nothing_is_answered_at_once_and_holds_nobody_up() {
    let s = Service::start().await;
    let address = s.address;
    let held = tokio::task::spawn_blocking(move || {
        let mut stream = TcpStream::connect(address).unwrap();
        let head = format!("PUT /v1/files/no HTTP/1.1\r\nhost: {address}\r\ncontent-length: {SIZE}\r\n\r\n");
        let begin = Instant::now();
        stream.write_all(head.as_bytes()).unwrap();
        let answer = read_answer(&mut BufReader::new(stream.try_clone().unwrap()));
        assert!(answer.status == 401 && answer.close && begin.elapsed() < Duration::from_secs(3));
        stream
    });
    let stream = held.await.unwrap();
    let begin = Instant::now();
    let (_dir, _driver, finished) = s.end().await;
    assert!(finished && begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
    drop(stream);
}
