//! The whole ingress on loopback, in front of scripted applications.
#![allow(clippy::unwrap_used)]

mod support;

use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::{SinkExt as _, StreamExt as _};
use http::{Request, StatusCode, Version};
use http_body_util::{BodyExt as _, Empty, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use support::{App, Site, request};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::Message;

#[tokio::test]
async fn a_request_arrives_as_its_application_expects_and_the_reply_as_its_caller_does() {
    let site = Site::start(App::Echo).await;
    let host = site.host();
    let asked = Request::post("/a/b?c=d")
        .header("host", &host)
        .header("authorization", "Bearer mb_0123_secret")
        .header("origin", "http://elsewhere")
        .header("x-forwarded-for", "6.6.6.6")
        .header("cookie", "own=1")
        .body(Full::from("hello"))
        .unwrap();
    let reply = site.send(asked).await;
    assert_eq!(reply.status, StatusCode::OK);
    let told = reply.text();
    assert!(told.starts_with("POST /a/b?c=d HTTP/1.1\n"), "{told}");
    for line in [
        format!("host: {host}"),
        format!("x-forwarded-host: {host}"),
        "x-forwarded-for: 127.0.0.1".into(),
        "x-forwarded-proto: http".into(),
        "origin: http://elsewhere".into(),
        "cookie: own=1".into(),
    ] {
        assert!(told.lines().any(|l| l == line), "{line} in {told}");
    }
    assert!(!told.contains("mb_0123") && told.ends_with("\nhello"));
    assert_eq!(reply.headers["referrer-policy"], "same-origin");
    let cookies: Vec<_> = reply.headers.get_all("set-cookie").iter().collect();
    assert_eq!(cookies, ["sid=1; Path=/"], "the attribute that would share it with other previews is gone");
}

#[tokio::test]
async fn the_path_form_leads_to_the_same_place() {
    let site = Site::start(App::Echo).await;
    let path = format!("/p/{}", site.token.expose());
    let reply = site.send(request("GET", &site.address.to_string(), &format!("{path}/x?y"))).await;
    let told = reply.text();
    assert!(told.starts_with("GET /x?y HTTP/1.1\n"), "{told}");
    assert!(told.contains(&format!("x-forwarded-prefix: {path}")) && told.contains(&format!("host: {}", site.address)));
    assert!(reply.headers["content-security-policy"].to_str().unwrap().contains("sandbox"));
}

#[tokio::test]
async fn tokens_that_lead_nowhere_say_so_and_nothing_else() {
    let site = Site::start(App::Echo).await;
    let wrong = format!("{}.localhost", "b".repeat(32));
    for (host, status, reason) in [
        (wrong.as_str(), 404, "unknown"),
        ("localhost", 404, "no_preview"),
        ("127.0.0.1:8787", 404, "no_preview"),
        ("a@b", 400, "malformed"),
    ] {
        let reply = site.send(request("GET", host, "/")).await;
        assert_eq!(
            (reply.status.as_u16(), reply.headers["x-mainbrella-preview"].to_str().unwrap()),
            (status, reason),
            "{host}"
        );
        assert!(!reply.text().contains(site.token.expose()));
    }
    site.cut();
    let reply = site.send(request("GET", &site.host(), "/")).await;
    assert_eq!((reply.status.as_u16(), reply.headers["x-mainbrella-preview"].to_str().unwrap()), (410, "ended"));
}

#[tokio::test]
async fn the_address_a_caller_writes_into_its_request_is_never_connected_to() {
    let site = Site::start(App::Echo).await;
    let other = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = other.local_addr().unwrap();
    let mut stream = TcpStream::connect(site.address).await.unwrap();
    let text = format!(
        "GET http://{address}/v1/machines HTTP/1.1\r\nhost: {address}\r\n\r\nCONNECT {address} HTTP/1.1\r\nhost: {address}\r\n\r\n"
    );
    stream.write_all(text.as_bytes()).await.unwrap();
    let mut answer = vec![0; 4096];
    let n = stream.read(&mut answer).await.unwrap();
    assert!(answer[..n].starts_with(b"HTTP/1.1 404"), "{}", String::from_utf8_lossy(&answer[..n]));
    let reached = tokio::time::timeout(Duration::from_millis(300), other.accept()).await;
    assert!(reached.is_err(), "nobody came");
    assert_eq!(site.dials(), 0);
}

#[tokio::test]
async fn http_2_comes_in_by_prior_knowledge_with_many_requests_at_once() {
    let site = Site::start(App::Echo).await;
    let stream = TcpStream::connect(site.address).await.unwrap();
    let (sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let asks = (0..50).map(|n| {
        let mut sender = sender.clone();
        let uri = format!("http://{}/n/{n}", site.host());
        async move {
            let request = Request::get(uri).version(Version::HTTP_2).body(Empty::<Bytes>::new()).unwrap();
            let response = sender.send_request(request).await.unwrap();
            let body = response.into_body().collect().await.unwrap().to_bytes();
            assert!(body.starts_with(format!("GET /n/{n} HTTP/1.1").as_bytes()));
        }
    });
    futures::future::join_all(asks).await;
    // One route is cut: its streams end, the connection need not.
    site.cut();
    let mut sender = sender;
    let request = Request::get(format!("http://{}/", site.host())).body(Empty::<Bytes>::new()).unwrap();
    assert_eq!(sender.send_request(request).await.unwrap().status(), 410);
}

#[tokio::test]
async fn connections_to_the_application_are_used_again_and_a_closed_one_is_noticed() {
    let site = Site::start(App::Echo).await;
    for _ in 0..20 {
        assert_eq!(site.send(request("GET", &site.host(), "/")).await.status, 200);
    }
    assert_eq!(site.dials(), 1);
    // An application that closes after each reply, without having said so.
    let site = Site::start(App::ClosesSilently).await;
    for _ in 0..20 {
        assert_eq!(site.send(request("GET", &site.host(), "/")).await.text(), "once");
    }
}

#[tokio::test]
async fn a_reply_is_passed_on_as_it_comes() {
    let site = Site::start(App::Ticks).await;
    let mut body = site.open(request("GET", &site.host(), "/")).await.into_body();
    let begin = Instant::now();
    let mut seen = Vec::new();
    while seen.len() < 5 {
        let frame = body.frame().await.unwrap().unwrap().into_data().unwrap();
        seen.push(begin.elapsed());
        assert!(frame.starts_with(b"data: "));
    }
    assert!(seen[4] - seen[0] >= Duration::from_millis(300), "one after the other: {seen:?}");
    assert!(seen[0] < Duration::from_millis(600));
}

#[tokio::test]
async fn cutting_a_route_ends_what_goes_over_it_within_a_second() {
    let site = Site::start(App::Ticks).await;
    let mut body = site.open(request("GET", &site.host(), "/")).await.into_body();
    body.frame().await.unwrap().unwrap();
    let (mut socket, _) = site.socket(&format!("ws://{}/ws", site.host())).await;
    socket.send(Message::text("hello")).await.unwrap();
    assert_eq!(socket.next().await.unwrap().unwrap().into_text().unwrap().as_str(), "hello");
    // And one whose application never answers.
    let waiting = tokio::spawn(site.sender(request("GET", &site.host(), "/never")));
    tokio::time::sleep(Duration::from_millis(100)).await;
    let begin = Instant::now();
    site.cut();
    let ended = async { while let Some(Ok(_)) = body.frame().await {} };
    tokio::time::timeout(Duration::from_secs(1), ended).await.expect("the stream ends");
    let closed = async { while let Some(Ok(_)) = socket.next().await {} };
    tokio::time::timeout(Duration::from_secs(1), closed).await.expect("the tunnel ends");
    tokio::time::timeout(Duration::from_secs(1), waiting).await.expect("the request ends").unwrap().ok();
    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
    site.settles().await;
}

#[tokio::test]
async fn a_caller_who_reads_nothing_loses_its_connection_with_its_route() {
    let site = Site::start(App::Endless).await;
    let mut stream = TcpStream::connect(site.address).await.unwrap();
    stream.write_all(format!("GET / HTTP/1.1\r\nhost: {}\r\n\r\n", site.host()).as_bytes()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    site.cut();
    tokio::time::sleep(Duration::from_millis(200)).await;
    let read = async {
        let mut buffer = vec![0; 1 << 20];
        while let Ok(n) = stream.read(&mut buffer).await
            && n > 0
        {}
    };
    tokio::time::timeout(Duration::from_secs(1), read).await.expect("what was under way, and then the end");
}

#[tokio::test]
async fn websockets_through_both_forms_carry_text_and_close() {
    let site = Site::start(App::Echo).await;
    for url in [format!("ws://{}/ws", site.host()), format!("ws://{}/p/{}/ws", site.address, site.token.expose())] {
        let (mut socket, response) = site.socket(&url).await;
        assert_eq!(response.status(), 101);
        for n in 0..100 {
            let text = format!("message {n}: {}", "x".repeat(n * 100));
            socket.send(Message::text(text.clone())).await.unwrap();
            assert_eq!(socket.next().await.unwrap().unwrap().into_text().unwrap().as_str(), text);
        }
        socket.close(None).await.unwrap();
        while let Some(Ok(_)) = socket.next().await {}
    }
    site.settles().await;
}

#[tokio::test]
async fn a_thousand_idle_sockets_are_carried_and_the_next_is_turned_away() {
    let site = Site::start(App::Echo).await;
    let mut sockets = Vec::new();
    for _ in 0..1024 {
        sockets.push(site.socket(&format!("ws://{}/ws", site.host())).await.0);
    }
    let reply = site.send(request("GET", &site.host(), "/")).await;
    assert_eq!((reply.status.as_u16(), reply.headers["x-mainbrella-preview"].to_str().unwrap()), (503, "busy"));
    let last = sockets.last_mut().unwrap();
    last.send(Message::text("still there")).await.unwrap();
    assert_eq!(last.next().await.unwrap().unwrap().into_text().unwrap().as_str(), "still there");
    let begin = Instant::now();
    site.cut();
    let all = sockets.into_iter().map(|mut s| async move { while let Some(Ok(_)) = s.next().await {} });
    tokio::time::timeout(Duration::from_secs(1), futures::future::join_all(all)).await.expect("all end");
    assert!(begin.elapsed() < Duration::from_secs(1));
    site.settles().await;
}

#[tokio::test]
async fn nothing_listening_is_a_page_that_looks_again() {
    let site = Site::start(App::None).await;
    let asked =
        Request::get("/").header("host", site.host()).header("accept", "text/html").body(Full::default()).unwrap();
    let reply = site.send(asked).await;
    assert_eq!(
        (reply.status.as_u16(), reply.headers["x-mainbrella-preview"].to_str().unwrap()),
        (502, "nothing_listens")
    );
    assert!(reply.text().contains("http-equiv=\"refresh\"") && reply.text().contains("port 3000"));
}

#[tokio::test]
async fn floods_of_headers_and_slow_heads_are_turned_away() {
    let site = Site::start(App::Echo).await;
    let many: String = (0..500).map(|n| format!("x-{n}: 1\r\n")).collect();
    let large = format!("x-large: {}\r\n", "x".repeat(100 * 1024));
    for headers in [many, large] {
        let mut stream = TcpStream::connect(site.address).await.unwrap();
        let text = format!("GET / HTTP/1.1\r\nhost: {}\r\n{headers}\r\n", site.host());
        // It may be closed before all of it was sent.
        let _ = stream.write_all(text.as_bytes()).await;
        let mut answer = [0; 12];
        if stream.read_exact(&mut answer).await.is_ok() {
            assert_eq!(&answer, b"HTTP/1.1 431");
        }
    }
    assert_eq!(site.dials(), 0, "none of it reached the machine");
}

#[tokio::test]
async fn an_application_that_breaks_off_is_told_and_a_half_reply_never_looks_whole() {
    let site = Site::start(App::HangsUp).await;
    let reply = site.send(request("GET", &site.host(), "/")).await;
    assert_eq!((reply.status.as_u16(), reply.headers["x-mainbrella-preview"].to_str().unwrap()), (502, "broken_off"));
    let site = Site::start(App::Half).await;
    let body = site.open(request("GET", &site.host(), "/")).await.into_body();
    assert!(body.collect().await.is_err());
}

#[tokio::test]
async fn tls_speaks_both_versions() {
    let site = Site::start_tls(App::Echo).await;
    for alpn in ["http/1.1", "h2"] {
        let stream = site.tls(alpn).await;
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(alpn.as_bytes()));
        let uri = format!("https://{}/x", site.host());
        let request = Request::get(if alpn == "h2" { uri.as_str() } else { "/x" }).header("host", site.host());
        let request = request.body(Empty::<Bytes>::new()).unwrap();
        let response = if alpn == "h2" {
            let (mut sender, connection) =
                hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
            tokio::spawn(connection);
            sender.send_request(request).await.unwrap()
        } else {
            let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
            tokio::spawn(connection);
            sender.send_request(request).await.unwrap()
        };
        let told = response.into_body().collect().await.unwrap().to_bytes();
        let told = String::from_utf8_lossy(&told);
        assert!(told.starts_with("GET /x HTTP/1.1") && told.contains("x-forwarded-proto: https"), "{told}");
    }
}
