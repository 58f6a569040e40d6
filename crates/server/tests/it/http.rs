//! The HTTP layer: one form of error, ids, rates, bounds, the log, the end.

use std::time::Duration;

use crate::common::{Service, send};
use bytes::Bytes;
use http::{Method, Request};
use mainbrella_engine::fake::FakeDriver;
use mainbrella_store::KeyRole;
use proptest::prelude::*;
use serde_json::json;

#[tokio::test]
async fn errors_of_the_router_and_of_extractors_have_our_form() {
    let s = Service::start().await;
    assert_eq!(s.get("/").await.code(), "not_found");
    assert_eq!(s.get("/v1/nothing/here").await.code(), "not_found");
    assert_eq!(s.get("/v1/machines/").await.code(), "not_found");
    let wrong_method = s.delete("/v1/machines").await;
    assert_eq!((wrong_method.status.as_u16(), wrong_method.code().as_str()), (405, "invalid_request"));
    assert!(wrong_method.headers["allow"].to_str().unwrap().contains("POST"));
    let typed =
        s.request(Method::POST, "/v1/machines").header("content-type", "text/plain").body(Bytes::from("{}")).unwrap();
    let typed = s.send(typed).await;
    assert_eq!((typed.status.as_u16(), typed.code().as_str()), (415, "invalid_request"));
    let untyped = s.request(Method::POST, "/v1/machines").body(Bytes::from("{}")).unwrap();
    assert_eq!(s.send(untyped).await.status, 415);
    for bad in ["/v1/machines/%ff", "/v1/machines/%2e%2e", "/v1/machines/a%2Fb", "/v1/machines/%00", "/v1/keys/%ff?x=1"]
    {
        assert!(!s.get(bad).await.error().code.is_empty(), "{bad}");
    }
}

#[tokio::test]
async fn a_request_id_is_taken_over_or_made() {
    let s = Service::start().await;
    let with =
        |id: &'static str| s.request(Method::GET, "/v1/nothing").header("x-request-id", id).body(Bytes::new()).unwrap();
    assert_eq!(s.send(with("abc-1.2_3")).await.error().request_id, "abc-1.2_3");
    let made = s.send(with("not sane \"")).await.error().request_id;
    assert_eq!(made.len(), 32);
    let ok = s.get("/healthz").await;
    assert_eq!(ok.headers["x-request-id"].len(), 32);
    assert_ne!(s.get("/healthz").await.headers["x-request-id"], ok.headers["x-request-id"]);
    assert_eq!(ok.headers["x-content-type-options"], "nosniff");
}

#[tokio::test]
async fn a_body_larger_than_the_bound_is_refused() {
    let s = Service::start().await;
    let mut body = br#"{"catalogId":"python","metadata":{"a":""#.to_vec();
    body.resize(4 * 1024 * 1024 + 1, b'x');
    let request =
        s.request(Method::POST, "/v1/machines").header("content-type", "application/json").body(body.into()).unwrap();
    let reply = s.send(request).await;
    assert_eq!((reply.status.as_u16(), reply.code().as_str()), (413, "payload_too_large"));
    // Announced too large: refused before it is sent.
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let mut stream = tokio::net::TcpStream::connect(s.address).await.unwrap();
    let head = format!(
        "POST /v1/machines HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {}\r\ncontent-type: application/json\r\n\
         content-length: 99999999999\r\n\r\n",
        s.admin
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut reply = vec![0; 4096];
    let n = tokio::time::timeout(Duration::from_secs(10), stream.read(&mut reply)).await.expect("at once").unwrap();
    assert!(reply[..n].starts_with(b"HTTP/1.1 413"), "{}", String::from_utf8_lossy(&reply[..n]));
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    let request =
        s.request(Method::POST, "/v1/machines").header("content-type", "application/json").body(deep.into()).unwrap();
    assert_eq!(s.send(request).await.code(), "invalid_request");
}

#[tokio::test]
async fn a_head_larger_than_the_bound_is_refused() {
    let s = Service::start().await;
    let request =
        s.request(Method::GET, "/healthz").header("x-long", "y".repeat(300 * 1024)).body(Bytes::new()).unwrap();
    assert_eq!(s.send(request).await.status, 431);
    let mut request = s.request(Method::GET, "/healthz");
    for i in 0..150 {
        request = request.header(format!("x-{i}"), "y");
    }
    assert_eq!(s.send(request.body(Bytes::new()).unwrap()).await.status, 431);
}

#[tokio::test]
async fn foreign_host_names_are_refused_on_loopback() {
    let s = Service::start().await;
    for (host, status) in
        [("localhost", 200), ("127.0.0.1:1", 200), ("[::1]", 200), ("evil.example", 403), ("evil.example:8787", 403)]
    {
        let request = Request::builder().uri("/healthz").header("host", host).body(Bytes::new()).unwrap();
        assert_eq!(s.send(request).await.status, status, "{host}");
    }
    let none = Request::builder().uri("/healthz").body(Bytes::new()).unwrap();
    assert_eq!(s.send(none).await.code(), "invalid_request");
}

#[tokio::test]
async fn each_key_has_its_own_rate() {
    let s = Service::with(FakeDriver::default(), |c| (c.rate_per_second, c.rate_burst) = (1, 5)).await;
    let user = s.key("default", KeyRole::User).await;
    let call = || {
        let request = Request::builder()
            .uri("/v1/machines")
            .header("host", "localhost")
            .header("authorization", format!("Bearer {}", user.expose()))
            .body(Bytes::new())
            .unwrap();
        s.send(request)
    };
    let mut limited = 0;
    for _ in 0..10 {
        let reply = call().await;
        if reply.status == 429 {
            assert_eq!(reply.code(), "rate_limited");
            assert!(reply.headers["retry-after"].to_str().unwrap().parse::<u64>().unwrap() >= 1);
            limited += 1;
        }
    }
    assert!((3..=5).contains(&limited), "{limited}");
    assert_eq!(s.get("/v1/machines").await.status, 200, "another key is not affected");
}

#[tokio::test]
async fn failed_authentications_are_limited_by_address_and_do_not_lock_out_valid_keys() {
    let s = Service::with(FakeDriver::default(), |c| c.auth_failures_per_minute = 3).await;
    let mut codes = Vec::new();
    for _ in 0..6 {
        let request = Request::builder().uri("/v1/machines").header("host", "localhost").body(Bytes::new()).unwrap();
        codes.push(s.send(request).await.status.as_u16());
    }
    assert_eq!(codes, [401, 401, 401, 429, 429, 429]);
    assert_eq!(s.get("/v1/machines").await.status, 200);
}

#[tokio::test]
async fn requests_beyond_the_bound_are_shed_at_once() {
    let s = Service::with(FakeDriver::default(), |c| c.max_requests = 4).await;
    let m = s.machine().await;
    let path = m.path("/commands/run");
    let running: Vec<_> = (0..4).map(|_| s.post(&path, json!({"command": "hang", "timeoutMs": 1500}))).collect();
    let shed = async {
        tokio::time::sleep(Duration::from_millis(400)).await;
        let reply = s.get("/healthz").await;
        assert_eq!((reply.status.as_u16(), reply.code().as_str()), (503, "overloaded"));
        assert!(reply.headers.contains_key("retry-after"));
    };
    let ((), done) = futures::join!(shed, futures::future::join_all(running));
    assert!(done.iter().all(|r| r.json()["timedOut"] == true));
    assert_eq!(s.get("/healthz").await.status, 200, "places come back");
}

#[tokio::test]
async fn a_panic_is_an_internal_error_without_its_text() {
    let s = Service::start().await;
    let app = axum::Router::new()
        .route(
            "/boom",
            axum::routing::get(|| async {
                if true {
                    panic!("hush")
                }
            }),
        )
        .layer(axum::middleware::from_fn_with_state(s.state.clone(), mainbrella_server::layers::outermost));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let ending = mainbrella_server::serve::Ending::default();
    tokio::spawn(mainbrella_server::serve::serve(listener, app, 10, Duration::ZERO, ending.clone()));
    for _ in 0..2 {
        let reply = send(address, s.request(Method::GET, "/boom").body(Bytes::new()).unwrap()).await;
        assert_eq!((reply.status.as_u16(), reply.code().as_str()), (500, "internal"));
        assert!(!String::from_utf8_lossy(&reply.body).contains("hush"));
    }
    ending.stop.cancel();
}

#[tokio::test]
async fn http_2_is_served_too() {
    let s = Service::start().await;
    let stream = tokio::net::TcpStream::connect(s.address).await.unwrap();
    let io = hyper_util::rt::TokioIo::new(stream);
    let executor = hyper_util::rt::TokioExecutor::new();
    let (mut sender, connection) = hyper::client::conn::http2::handshake(executor, io).await.unwrap();
    tokio::spawn(connection);
    let request = |host: &str| {
        Request::builder()
            .uri(format!("http://{host}/v1/machines"))
            .header("authorization", format!("Bearer {}", s.admin))
            .body(http_body_util::Empty::<Bytes>::new())
            .unwrap()
    };
    assert_eq!(sender.send_request(request(&s.address.to_string())).await.unwrap().status(), 200);
    assert_eq!(sender.send_request(request("evil.example")).await.unwrap().status(), 403);
}

#[tokio::test]
async fn a_request_in_progress_finishes_and_new_connections_are_refused() {
    let s = Service::start().await;
    let m = s.machine().await;
    let request = s
        .request(Method::POST, &m.path("/commands/run"))
        .header("content-type", "application/json")
        .body(Bytes::from(json!({"command": "sleep 600", "timeoutMs": 5000}).to_string()))
        .unwrap();
    let address = s.address;
    let call = tokio::spawn(async move { send(address, request).await });
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!call.is_finished());
    let ended = tokio::spawn(s.end());
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(tokio::net::TcpStream::connect(address).await.is_err(), "no longer accepted");
    assert_eq!(call.await.unwrap().ok()["exitCode"], 0);
    let (_, driver, finished) = ended.await.unwrap();
    assert!(finished);
    assert_eq!(driver.alive(), 1, "machines stay");
}

#[tokio::test]
async fn a_request_that_does_not_finish_is_broken_off_after_the_grace() {
    let s = Service::with(FakeDriver::default(), |c| c.shutdown_grace = Duration::from_millis(200)).await;
    let m = s.machine().await;
    let request = s
        .request(Method::POST, &m.path("/commands/run"))
        .header("content-type", "application/json")
        .body(Bytes::from(json!({"command": "hang", "timeoutMs": 60_000}).to_string()))
        .unwrap();
    let address = s.address;
    let _call = tokio::spawn(async move { send(address, request).await });
    tokio::time::sleep(Duration::from_millis(200)).await;
    let (_, _, finished) = tokio::time::timeout(Duration::from_secs(10), s.end()).await.unwrap();
    assert!(!finished);
}

#[test]
fn any_body_on_any_operation_is_answered_in_our_form() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (s, m) = runtime.block_on(async {
        let s = Service::start().await;
        let m = s.machine().await;
        (s, m)
    });
    let paths = ["/v1/machines".to_owned(), m.path("/extend"), m.path("/commands/run"), "/v1/keys".to_owned()];
    let value = prop_oneof![
        any::<Vec<u8>>(),
        "\\PC{0,40}".prop_map(String::into_bytes),
        json_like().prop_map(|v: serde_json::Value| v.to_string().into_bytes()),
    ];
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 300,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    runner
        .run(&(0..paths.len(), value), |(which, body)| {
            runtime.block_on(async {
                let request = s
                    .request(Method::POST, &paths[which])
                    .header("content-type", "application/json")
                    .body(body.into())
                    .unwrap();
                let reply = s.send(request).await;
                if !reply.status.is_success() {
                    let e = reply.error();
                    assert!(reply.status != 500, "{e:?}");
                }
            });
            Ok(())
        })
        .unwrap();
}

/// Objects whose names are those of our requests and whose values are anything.
fn json_like() -> impl Strategy<Value = serde_json::Value> {
    let leaf = prop_oneof![
        Just(json!(null)),
        any::<bool>().prop_map(|b| json!(b)),
        any::<i64>().prop_map(|n| json!(n)),
        any::<f64>().prop_map(|n| json!(n)),
        "\\PC{0,20}".prop_map(|s| json!(s)),
        Just(json!("true")),
    ];
    let names = prop::sample::select(vec![
        "catalogId",
        "size",
        "slot",
        "ttlSeconds",
        "idleTimeoutSeconds",
        "internet",
        "persistent",
        "metadata",
        "env",
        "command",
        "cwd",
        "timeoutMs",
        "outputLimitBytes",
        "stdinBase64",
        "name",
        "role",
    ]);
    leaf.prop_recursive(3, 16, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(|v| json!(v)),
            prop::collection::vec((names.clone(), inner), 0..5).prop_map(|pairs| serde_json::Value::Object(
                pairs.into_iter().map(|(k, v)| (k.to_owned(), v)).collect()
            )),
        ]
    })
}
