//! Code contexts through HTTP, against the scripted bridge of the fake driver.

use std::time::Duration;

use crate::common::{Machine, Reply, Service};
use bytes::Bytes;
use http::{Method, Request};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;

async fn context(s: &Service, machine: &Machine) -> String {
    let reply = s.post(&machine.path("/contexts"), json!({"language": "python"})).await;
    assert_eq!(reply.status, 201, "{:?}", reply.body);
    let made = reply.json();
    assert_eq!((made["language"].as_str(), made["state"].as_str()), (Some("python"), Some("idle")));
    assert!(made["createdAt"].as_str().unwrap().ends_with('Z'), "{made}");
    made["id"].as_str().unwrap().to_owned()
}

async fn run(s: &Service, machine: &Machine, id: &str, code: &str) -> Reply {
    s.post(&machine.path(&format!("/contexts/{id}/run")), json!({"code": code.replace("; ", "\n")})).await
}

async fn state(s: &Service, machine: &Machine, id: &str) -> Value {
    s.get(&machine.path(&format!("/contexts/{id}"))).await.ok()["state"].clone()
}

async fn until_idle(s: &Service, machine: &Machine, id: &str) {
    for _ in 0..400 {
        if state(s, machine, id).await == "idle" {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("it is still busy");
}

/// A request whose answer is read by hand.
fn asks(s: &Service, machine: &Machine, id: &str, code: &str, accept: &str) -> Request<Full<Bytes>> {
    s.request(Method::POST, &machine.path(&format!("/contexts/{id}/run")))
        .header("content-type", "application/json")
        .header("accept", accept)
        .body(Full::new(json!({"code": code.replace("; ", "\n")}).to_string().into()))
        .unwrap()
}

#[tokio::test]
async fn one_reply_holds_all_a_run_did() {
    let s = Service::start().await;
    let machine = s.machine().await;
    let id = context(&s, &machine).await;
    let r = run(&s, &machine, &id, "set x 1; print out; err bad; value 7; picture 20").await.ok();
    assert_eq!((r["status"].as_str(), r["executionCount"].as_u64()), (Some("ok"), Some(1)));
    assert_eq!((r["stdout"].as_str(), r["stderr"].as_str()), (Some("out\n"), Some("bad\n")));
    assert_eq!(r["results"][0], json!({"type": "result", "data": {"text/plain": "7"}}));
    assert_eq!(r["results"][1]["type"], "display");
    assert_eq!(r["results"][1]["data"]["image/png"], "A".repeat(20));
    assert_eq!((&r["error"], &r["truncated"], &r["stdoutOmitted"]), (&Value::Null, &json!(false), &Value::Null));
    assert!(r["durationMs"].is_u64());
    let r = run(&s, &machine, &id, "raise ValueError").await.ok();
    assert_eq!(r["status"], "error");
    assert_eq!(r["error"], json!({"name": "ValueError", "value": "as asked", "traceback": ["ValueError"]}));
    let list = s.get(&machine.path("/contexts")).await.ok();
    assert_eq!(list["contexts"].as_array().unwrap().len(), 1);
    assert_eq!(s.post(&machine.path(&format!("/contexts/{id}/restart")), json!({})).await.ok()["state"], "idle");
    assert_eq!(run(&s, &machine, &id, "get x").await.ok()["status"], "error", "the variable is gone");
    assert_eq!(s.delete(&machine.path(&format!("/contexts/{id}"))).await.status, 204);
    assert_eq!(s.delete(&machine.path(&format!("/contexts/{id}"))).await.code(), "not_found");
}

#[tokio::test]
async fn the_same_comes_as_events_while_it_happens() {
    let s = Service::start().await;
    let machine = s.machine().await;
    let id = context(&s, &machine).await;
    let code = "print out; err bad; value 7; picture 20; raise KeyError";
    let ask = asks(&s, &machine, &id, code, "text/event-stream").map(|_| Bytes::new());
    let body = json!({"code": code.replace("; ", "\n")}).to_string();
    let reply = s.send(ask.map(|_| Bytes::from(body))).await;
    assert_eq!((reply.status.as_u16(), &reply.headers["content-type"]), (200, &"text/event-stream".parse().unwrap()));
    let text = String::from_utf8(reply.body.to_vec()).unwrap();
    let events: Vec<(String, Value)> = text
        .split("\n\n")
        .filter(|e| e.starts_with("event: "))
        .map(|e| {
            let (name, data) = e.split_once('\n').unwrap();
            let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
            (name.strip_prefix("event: ").unwrap().to_owned(), data)
        })
        .collect();
    let names: Vec<&str> = events.iter().map(|(n, _)| n.as_str()).collect();
    assert_eq!(names, ["stdout", "stderr", "result", "display", "error", "done"]);
    assert!(events.iter().all(|(n, d)| d["type"] == n.as_str()));
    assert_eq!(events[0].1["text"], "out\n");
    assert_eq!(events[4].1["name"], "KeyError");
    assert_eq!((events[5].1["status"].as_str(), events[5].1["executionCount"].as_u64()), (Some("error"), Some(1)));
    // What can be refused before it begins is refused with a status.
    let ask = asks(&s, &machine, "ctx-none", "value 1", "text/event-stream");
    let reply = s.send(ask.map(|_| Bytes::from(json!({"code": "value 1"}).to_string()))).await;
    assert_eq!((reply.status.as_u16(), reply.code().as_str()), (404, "not_found"));
    // What ends in the middle says so in the stream.
    let ask = asks(&s, &machine, &id, "", "text/event-stream");
    let reply = s.send(ask.map(|_| Bytes::from(json!({"code": "print a\ndie"}).to_string()))).await;
    let text = String::from_utf8(reply.body.to_vec()).unwrap();
    let last = text.trim_end().rsplit("\n\n").next().unwrap();
    assert!(last.starts_with("event: failed\ndata: {\"type\":\"failed\",\"code\":\"context_dead\""), "{text}");
}

#[tokio::test]
async fn a_caller_that_closes_the_connection_interrupts_its_code() {
    let s = Service::start().await;
    let machine = s.machine().await;
    let id = context(&s, &machine).await;
    for accept in ["application/json", "text/event-stream"] {
        let stream = TcpStream::connect(s.address).await.unwrap();
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        let driving = tokio::spawn(connection);
        let answer = sender.send_request(asks(&s, &machine, &id, "print begun; sleep 60000", accept));
        if accept == "text/event-stream" {
            let mut body = answer.await.unwrap().into_body();
            let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
            assert!(first.starts_with(b"event: stdout\n"), "{first:?}");
        } else {
            let waited = tokio::time::timeout(Duration::from_millis(200), answer).await;
            assert!(waited.is_err(), "it runs");
        }
        assert_eq!(state(&s, &machine, &id).await, "busy");
        driving.abort();
        let _ = driving.await;
        drop(sender);
        until_idle(&s, &machine, &id).await;
        assert_eq!(run(&s, &machine, &id, "value 1").await.ok()["status"], "ok");
    }
}

#[tokio::test]
async fn a_dead_kernel_has_a_code_of_its_own_and_an_interrupt_leaves_it_alive() {
    let s = Service::start().await;
    let machine = s.machine().await;
    let id = context(&s, &machine).await;
    let reply = run(&s, &machine, &id, "die").await;
    assert_eq!((reply.status.as_u16(), reply.code().as_str()), (409, "context_dead"));
    assert_eq!(reply.json()["message"], "The context's kernel was ended by signal 9.");
    assert_eq!(state(&s, &machine, &id).await, "dead");
    assert_eq!(run(&s, &machine, &id, "value 1").await.code(), "context_dead");
    assert_eq!(s.post(&machine.path(&format!("/contexts/{id}/interrupt")), json!({})).await.code(), "context_dead");
    s.post(&machine.path(&format!("/contexts/{id}/restart")), json!({})).await.ok();
    assert_eq!(s.post(&machine.path(&format!("/contexts/{id}/interrupt")), json!({})).await.ok()["state"], "idle");
    assert_eq!(run(&s, &machine, &id, "value 1").await.ok()["status"], "ok");
}

#[tokio::test]
async fn what_is_not_understood_or_cannot_be_is_refused() {
    let s = Service::start().await;
    let machine = s.machine().await;
    let id = context(&s, &machine).await;
    for body in [json!({}), json!({"language": "cobol"}), json!({"language": "python", "lang": 1})] {
        assert_eq!(s.post(&machine.path("/contexts"), body).await.code(), "invalid_request");
    }
    let path = machine.path(&format!("/contexts/{id}/run"));
    for body in [json!({}), json!({"code": 1}), json!({"code": "1", "timeoutMs": 0}), json!({"code": "1", "stdin": ""})]
    {
        assert_eq!(s.post(&path, body).await.code(), "invalid_request");
    }
    let long = json!({"code": "x".repeat(1024 * 1024 + 1)});
    assert_eq!(s.post(&path, long).await.code(), "payload_too_large");
    let other = path.replace(&machine.created_at, "2020-01-01T00:00:00.000Z");
    assert_eq!(s.post(&other, json!({"code": "1"})).await.code(), "generation_mismatch");
    for _ in 1..8 {
        context(&s, &machine).await;
    }
    let reply = s.post(&machine.path("/contexts"), json!({"language": "python"})).await;
    assert_eq!((reply.status.as_u16(), reply.code().as_str()), (503, "overloaded"));
    let c = s.get("/v1/capabilities").await.ok();
    assert_eq!(c["execution"]["codeContexts"], json!(["python"]));
    assert_eq!((c["limits"]["contextsMax"].as_u64(), c["limits"]["codeMaxBytes"].as_u64()), (Some(8), Some(1_048_576)));
    let t = s.get("/v1/templates").await.ok();
    let brings: Vec<&Value> = t["templates"].as_array().unwrap().iter().map(|t| &t["codeContexts"]).collect();
    assert_eq!(brings, [&json!([]), &json!(["python"])], "{t}");
}
