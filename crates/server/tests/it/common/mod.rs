//! A whole service over the fake driver on a loopback port, and a bare HTTP client.
#![allow(dead_code, clippy::unwrap_used)]

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use mainbrella_api::ErrorBody;
use mainbrella_engine::fake::FakeDriver;
use mainbrella_engine::{Engine, EngineConfig, SystemClock};
use mainbrella_server::auth::admin_key;
use mainbrella_server::auth::token::Token;
use mainbrella_server::config::{ServerConfig, defaults};
use mainbrella_server::journal::StoreJournal;
use mainbrella_server::serve::{Ending, serve};
use mainbrella_server::state::AppState;
use mainbrella_server::vault::Vault;
use mainbrella_server::{reconcile, router};
use mainbrella_store::{KeyRole, NewApiKey, Store};
use mainbrella_types::{Millis, ProjectId};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

pub struct Reply {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Reply {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {:?}", self.body))
    }

    /// The error, which must have our form in every part.
    #[track_caller]
    pub fn error(&self) -> ErrorBody {
        assert!(self.status.as_u16() >= 400, "{} {:?}", self.status, self.body);
        assert_eq!(self.headers["content-type"], "application/json");
        let e: ErrorBody = serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {:?}", self.body));
        let keys: Vec<String> = self.json().as_object().unwrap().keys().cloned().collect();
        assert_eq!(keys, ["code", "hint", "message", "requestId"]);
        let code = e.known_code().unwrap_or_else(|| panic!("unknown code {}", e.code));
        let protocol = matches!(self.status.as_u16(), 405 | 408 | 415);
        assert!(protocol || self.status.as_u16() == code.status(), "{} is not the status of {code}", self.status);
        assert!(!e.message.is_empty() && e.hint.ends_with('.'), "{e:?}");
        assert_eq!(self.headers["x-request-id"], e.request_id.as_str());
        e
    }

    #[track_caller]
    pub fn code(&self) -> String {
        self.error().code
    }

    #[track_caller]
    pub fn ok(&self) -> Value {
        assert!(self.status.is_success(), "{} {:?}", self.status, self.body);
        self.json()
    }
}

pub struct Service {
    pub address: SocketAddr,
    pub admin: String,
    pub state: AppState,
    pub driver: FakeDriver,
    pub ending: Ending,
    pub dir: Arc<TempDir>,
    /// Where previews are, unless they are off.
    pub ingress: Option<SocketAddr>,
    task: JoinHandle<bool>,
}

pub fn config(dir: &Path) -> ServerConfig {
    let mut config = defaults(dir);
    config.shutdown_grace = Duration::from_secs(5);
    config
}

impl Service {
    pub async fn start() -> Self {
        Self::with(FakeDriver::default(), |_| {}).await
    }

    pub async fn with(driver: FakeDriver, adjust: impl FnOnce(&mut ServerConfig)) -> Self {
        Self::on(Arc::new(TempDir::new().unwrap()), driver, adjust).await
    }

    pub async fn on(dir: Arc<TempDir>, driver: FakeDriver, adjust: impl FnOnce(&mut ServerConfig)) -> Self {
        let mut config = config(dir.path());
        adjust(&mut config);
        let now = Millis(1_000_000);
        let store = Store::open_sqlite(&dir.path().join("mainbrella.sqlite"), now).await.unwrap();
        admin_key::ensure(&store, dir.path(), now).await.unwrap();
        let admin = std::fs::read_to_string(admin_key::path(dir.path())).unwrap().trim().to_owned();
        let journal = Arc::new(StoreJournal::new(store.clone(), config.host_name.clone(), Vault::new(dir.path())));
        let clock = Arc::new(SystemClock);
        let limits = EngineConfig { jobs_dir: Some(dir.path().join("jobs")), ..EngineConfig::default() };
        let engine = Engine::new(Arc::new(driver.clone()), journal, clock.clone(), limits);
        let state = AppState::new(config, engine, store, clock);
        reconcile::recover(&state).await.unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let ending = Ending::default();
        state.closes_with(&ending.stop);
        let ingress = match state.config.preview_listen {
            Some(_) => {
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                let address = listener.local_addr().unwrap();
                let ingress = state.previews.open(&state.config, address);
                tokio::spawn(mainbrella_preview::serve(listener, ingress, None, 2048, ending.stop.clone()));
                Some(address)
            }
            None => None,
        };
        let grace = state.config.shutdown_grace;
        let task = tokio::spawn(serve(listener, router(state.clone()), 1000, grace, ending.clone()));
        Self { address, admin, state, driver, ending, dir, ingress, task }
    }

    /// Ends the service as a signal would; machines stay.
    pub async fn end(self) -> (Arc<TempDir>, FakeDriver, bool) {
        self.ending.stop.cancel();
        let finished = self.task.await.unwrap();
        self.state.engine.shutdown().await;
        self.state.store.close().await;
        (self.dir, self.driver, finished)
    }

    pub fn data(&self) -> PathBuf {
        self.dir.path().to_owned()
    }

    /// A key of any project and role, kept directly in the store.
    pub async fn key(&self, project: &str, role: KeyRole) -> Token {
        let project: ProjectId = project.parse().unwrap();
        self.state.store.ensure_project(&project, Millis(1)).await.unwrap();
        let token = Token::generate().unwrap();
        let new = NewApiKey {
            id: token.id().to_owned(),
            project,
            name: "test".into(),
            role,
            prefix: token.id().to_owned(),
            secret_hash: token.hash(),
            now: Millis(1),
        };
        self.state.store.insert_key(&new).await.unwrap();
        token
    }

    pub async fn send(&self, request: Request<Bytes>) -> Reply {
        send(self.address, request).await
    }

    pub fn request(&self, method: Method, path: &str) -> http::request::Builder {
        Request::builder()
            .method(method)
            .uri(path)
            .header("host", self.address.to_string())
            .header("authorization", format!("Bearer {}", self.admin))
    }

    pub async fn get(&self, path: &str) -> Reply {
        self.send(self.request(Method::GET, path).body(Bytes::new()).unwrap()).await
    }

    pub async fn post(&self, path: &str, body: Value) -> Reply {
        self.post_with(path, body, &[]).await
    }

    pub async fn post_with(&self, path: &str, body: Value, headers: &[(&str, &str)]) -> Reply {
        let mut request = self.request(Method::POST, path).header("content-type", "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        self.send(request.body(body.to_string().into()).unwrap()).await
    }

    pub async fn put(&self, path: &str, body: impl Into<Bytes>) -> Reply {
        self.send(self.request(Method::PUT, path).body(body.into()).unwrap()).await
    }

    pub async fn delete(&self, path: &str) -> Reply {
        self.send(self.request(Method::DELETE, path).body(Bytes::new()).unwrap()).await
    }

    /// A job of `machine`; see the scripted guest for what it can be.
    pub async fn job(&self, machine: &Machine, body: Value) -> Value {
        let reply = self.post(&machine.path("/jobs"), body).await;
        assert_eq!(reply.status, StatusCode::CREATED, "{:?}", reply.body);
        reply.json()
    }

    /// The id of a snapshot of a machine.
    pub async fn saved(&self, machine: &Machine) -> String {
        let reply = self.post(&machine.path("/snapshots"), json!({"name": "files", "kind": "workspace"})).await;
        assert_eq!(reply.status, StatusCode::CREATED, "{:?}", reply.body);
        reply.json()["id"].as_str().unwrap().to_owned()
    }

    pub async fn patch(&self, path: &str, body: Value) -> Reply {
        let request = self.request(Method::PATCH, path).header("content-type", "application/json");
        self.send(request.body(body.to_string().into()).unwrap()).await
    }

    /// A running machine.
    pub async fn machine(&self) -> Machine {
        let reply = self.post("/v1/machines", json!({"catalogId": "python"})).await;
        assert_eq!(reply.status, StatusCode::CREATED, "{:?}", reply.body);
        Machine::of(&reply.json())
    }
}

#[derive(Clone, Debug)]
pub struct Machine {
    pub id: String,
    /// A code context in it, where a test made one.
    pub context: String,
    /// A preview of it, where a test made one.
    pub preview: String,
    /// A snapshot of it, where a test saved one.
    pub snapshot: String,
    /// A build of a template, where a test asked for one.
    pub build: String,
    pub created_at: String,
}

impl Machine {
    pub fn of(v: &Value) -> Self {
        let context = "ctx-none".into();
        let preview = "pv-none".into();
        let snapshot = "s-none".into();
        Self {
            id: v["id"].as_str().unwrap().into(),
            context,
            preview,
            snapshot,
            build: "0".repeat(32),
            created_at: v["createdAt"].as_str().unwrap().into(),
        }
    }

    /// A path below this machine, with its generation.
    pub fn path(&self, rest: &str) -> String {
        format!("/v1/machines/{}{rest}?createdAt={}", self.id, self.created_at)
    }
}

pub async fn send(address: SocketAddr, request: Request<Bytes>) -> Reply {
    let stream = TcpStream::connect(address).await.unwrap();
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
    let driving = tokio::spawn(connection);
    // A watch has no end: its first frame will do.
    let endless = request.uri().path().ends_with("/files/watch");
    let response = sender.send_request(request.map(Full::new)).await.unwrap();
    let (parts, mut body) = response.into_parts();
    let body = match endless && parts.status.is_success() {
        true => body.frame().await.unwrap().unwrap().into_data().unwrap(),
        false => body.collect().await.unwrap().to_bytes(),
    };
    driving.abort();
    Reply { status: parts.status, headers: parts.headers, body }
}

/// The committed description.
pub fn document() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../openapi/v1.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}
