//! The log, captured whole. Alone in its program: what is logged is decided per process.
#![allow(clippy::unwrap_used)]

#[path = "it/common/mod.rs"]
mod common;

use std::io::Write;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use common::Service;
use http::Request;
use serde_json::json;

#[derive(Clone, Default)]
struct Captured(Arc<Mutex<Vec<u8>>>);

impl Write for Captured {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Everything at every level of ours: keys, environment, input, query values and file contents must not be in it.
#[test]
fn the_log_has_ids_and_no_secrets() {
    let captured = Captured::default();
    let writer = captured.clone();
    let log = mainbrella_server::logging::subscriber(
        mainbrella_server::config::LogFormat::Json,
        "info,mainbrella_server=trace,mainbrella_engine=trace,mainbrella_store=trace",
        move || writer.clone(),
    );
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let secrets = tracing::subscriber::with_default(log, || {
        runtime.block_on(async {
            let s = Service::start().await;
            let body = json!({"catalogId": "python", "env": {"API_TOKEN": "hush-env"}, "metadata": {"m": "label"}});
            let m = common::Machine::of(&s.post("/v1/machines", body).await.ok());
            let run = json!({"command": "printenv hush-command", "env": {"X": "hush-run"}, "stdinBase64": "aHVzaA=="});
            s.post_with(&m.path("/commands/run"), run, &[("x-request-id", "trace-me-1")]).await;
            s.put(&format!("{}&path=/tmp/hush-path", m.path("/files/content")), "hush-content").await.ok();
            let url = json!({"path": "/tmp/hush-path", "method": "GET"});
            let url = s.post(&m.path("/files/urls"), url).await.ok()["url"].as_str().unwrap().to_owned();
            let token = url.rsplit('/').next().unwrap().to_owned();
            for token in [token.clone(), token[..token.len() - 3].to_owned()] {
                let signed = Request::builder().uri(format!("/v1/files/{token}")).header("host", "localhost");
                s.send(signed.body(Bytes::new()).unwrap()).await;
            }
            s.get(&format!("{}&path=/tmp/hush-none", m.path("/files/stat"))).await;
            s.post(&m.path("/files/remove"), json!({"path": "/tmp/hush-none"})).await;
            s.get("/v1/machines?cursor=hush-cursor").await;
            let made = s.post("/v1/keys", json!({"name": "ci", "role": "user"})).await.ok();
            s.delete(&format!("/v1/keys/{}", made["id"].as_str().unwrap())).await;
            let bad = Request::builder()
                .uri("/v1/machines")
                .header("host", "localhost")
                .header("authorization", "Bearer hush-garbage");
            s.send(bad.body(Bytes::new()).unwrap()).await;
            s.driver.host.launch.store(1, std::sync::atomic::Ordering::SeqCst);
            s.post("/v1/machines", json!({"catalogId": "python", "env": {"A": "hush-failed"}})).await;
            let seal = token.rsplit('.').next().unwrap().to_owned();
            [s.admin[12..].to_owned(), made["secret"].as_str().unwrap()[12..].to_owned(), token, seal]
        })
    });
    let log = String::from_utf8(captured.0.lock().unwrap().clone()).unwrap();
    for secret in secrets.iter().map(String::as_str).chain(["hush", "aHVzaA"]) {
        let line = log.lines().find(|l| l.contains(secret));
        assert_eq!(line, None, "{secret} is in the log");
    }
    let access: Vec<serde_json::Value> = log
        .lines()
        .map(|l| serde_json::from_str(l).expect("each line is JSON"))
        .filter(|l: &serde_json::Value| l["target"] == "mainbrella_server::access")
        .collect();
    let run = access.iter().find(|l| l["span"]["id"] == "trace-me-1").expect("the id of the request is in its line");
    assert_eq!(
        (&run["path"], &run["method"], &run["status"]),
        (&json!("/v1/machines/{id}/commands/run"), &json!("POST"), &json!(200))
    );
    assert!(run["ms"].is_u64() && run["key"].as_str().is_some_and(|k| k.len() == 8));
    assert!(access.iter().any(|l| l["status"] == 401 && l["code"] == "unauthenticated" && l.get("key").is_none()));
    assert_eq!(access.len(), 13, "one line a request");
}
