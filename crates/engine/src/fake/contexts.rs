//! The scripted bridge: contexts that run a few words instead of Python, over the real lines.
//!
//! Code is one statement a line: `print TEXT`, `err TEXT`, `value TEXT`, `picture N` (N bytes), `set NAME VALUE`, `get NAME`,
//! `sleep MS`, `chat N` (N lines, one a millisecond), `raise NAME`, `die` (the kernel is killed), `hang` (ends with its kernel
//! only). Breaches of what was agreed on: `garbage`, `flood` (more text than a cell may keep), `mute` (no more answers),
//! `upgrade N` (the bridge is of version N from now on).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use connectrpc::{ConnectError, ServiceStream};
use futures::StreamExt;
use mainbrella_guest_protocol::pb;
use pb::__buffa::oneof::job_event::Event;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Output is cut into pieces of so many bytes, so that lines have to be put together.
const PIECE: usize = 48;
/// How long a cell at its time limit goes on before its kernel is killed.
const GRACE: Duration = Duration::from_millis(200);

/// The bridges of one machine, by job.
#[derive(Clone, Default)]
pub(super) struct Bridges(Arc<Mutex<HashMap<String, Bridge>>>);

#[derive(Clone)]
struct Bridge {
    state: Arc<Mutex<State>>,
    grown: watch::Sender<()>,
    end: CancellationToken,
}

#[derive(Default)]
struct State {
    events: Vec<pb::JobEvent>,
    written: u64,
    finished: bool,
    mute: bool,
    input: Vec<u8>,
    accepted: u64,
    seen: u64,
    version: Option<u64>,
    contexts: HashMap<String, Kernel>,
}

struct Kernel {
    created_ms: Value,
    cwd: Value,
    env: Value,
    dead: bool,
    count: u64,
    variables: HashMap<String, String>,
    cell: Option<(String, CancellationToken)>,
}

impl Kernel {
    fn new(order: &Value) -> Self {
        let cwd = order["cwd"].as_str().unwrap_or("/workspace");
        Self {
            created_ms: order["createdMs"].clone(),
            cwd: json!(cwd),
            env: order["env"].clone(),
            dead: false,
            count: 0,
            variables: HashMap::new(),
            cell: None,
        }
    }
}

impl Bridges {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Bridge>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, id: &str) -> Result<Bridge, ConnectError> {
        self.lock().get(id).cloned().ok_or_else(|| ConnectError::not_found("no such job"))
    }

    /// Starts a bridge, or follows the one that has this id.
    pub(super) fn run(&self, request: pb::StartJobRequest, no_kernel: bool) -> ServiceStream<pb::JobEvent> {
        let mut all = self.lock();
        let bridge = all.entry(request.job_id).or_insert_with(|| {
            let bridge = Bridge { state: Arc::default(), grown: watch::channel(()).0, end: CancellationToken::new() };
            bridge.push(pb::JobStarted { pid: 43, ..Default::default() }.into());
            if no_kernel {
                bridge.say(&json!({"ev": "unable", "why": "No module named 'ipykernel'"}));
                bridge.exit(0, 0);
            }
            bridge
        });
        bridge.follow(0)
    }

    pub(super) fn follow(&self, id: &str, after: u64) -> Result<ServiceStream<pb::JobEvent>, ConnectError> {
        Ok(self.find(id)?.follow(after))
    }

    pub(super) fn list(&self) -> Vec<pb::JobStatus> {
        let status = |(id, bridge): (&String, &Bridge)| {
            let state = bridge.lock();
            pb::JobStatus {
                job_id: id.clone(),
                finished: state.finished,
                last_sequence: state.events.len() as u64,
                ..Default::default()
            }
        };
        self.lock().iter().map(status).collect()
    }

    pub(super) fn kill(&self, id: &str) -> bool {
        self.find(id).is_ok_and(|bridge| bridge.exit(2, 9))
    }

    pub(super) fn forget(&self, id: &str) -> Result<(), ConnectError> {
        let mut all = self.lock();
        if all.get(id).is_some_and(|bridge| !bridge.lock().finished) {
            return Err(ConnectError::failed_precondition("the job is running"));
        }
        all.remove(id);
        Ok(())
    }

    pub(super) fn write(&self, id: &str, data: &[u8]) -> Result<u64, ConnectError> {
        let bridge = self.find(id)?;
        let (lines, accepted) = {
            let mut state = bridge.lock();
            state.input.extend_from_slice(data);
            state.accepted += data.len() as u64;
            let whole = state.input.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
            let lines: Vec<u8> = state.input.drain(..whole).collect();
            (lines, state.accepted)
        };
        for line in lines.split(|b| *b == b'\n') {
            if let Ok(order) = serde_json::from_slice::<Value>(line) {
                bridge.obey(&order);
            }
        }
        Ok(accepted)
    }
}

impl Bridge {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, event: Event) {
        let mut state = self.lock();
        if !state.finished {
            let sequence = state.events.len() as u64 + 1;
            state.events.push(pb::JobEvent { sequence, event: Some(event), ..Default::default() });
        }
        drop(state);
        self.grown.send_replace(());
    }

    fn raw(&self, bytes: &[u8]) {
        for piece in bytes.chunks(PIECE.max(bytes.len() / 64)) {
            let offset = {
                let mut state = self.lock();
                if state.mute {
                    return;
                }
                let offset = state.written;
                state.written += piece.len() as u64;
                offset
            };
            let stream = pb::Stream::STREAM_STDOUT.into();
            self.push(pb::JobOutput { stream, offset, data: piece.to_vec(), ..Default::default() }.into());
        }
    }

    fn say(&self, line: &Value) {
        self.raw(format!("{line}\n").as_bytes());
    }

    fn exit(&self, cause: i32, signal: i32) -> bool {
        let cause = if cause == 2 { pb::job_exit::Cause::CAUSE_SIGNALLED } else { pb::job_exit::Cause::CAUSE_EXITED };
        if self.lock().finished {
            return false;
        }
        let written = self.lock().written;
        let exit = pb::JobExit { cause: cause.into(), signal, stdout_bytes: written, ..Default::default() };
        self.push(exit.into());
        self.lock().finished = true;
        self.end.cancel();
        true
    }

    fn follow(&self, after: u64) -> ServiceStream<pb::JobEvent> {
        let bridge = self.clone();
        let grown = self.grown.subscribe();
        futures::stream::unfold((bridge, grown, after), |(bridge, mut grown, after)| async move {
            loop {
                grown.borrow_and_update();
                let (next, finished) = {
                    let state = bridge.lock();
                    (state.events.get(usize::try_from(after).unwrap_or(usize::MAX)).cloned(), state.finished)
                };
                match next {
                    Some(event) => return Some((Ok(event), (bridge, grown, after + 1))),
                    None if finished => return None,
                    None => grown.changed().await.ok()?,
                }
            }
        })
        .boxed()
    }

    fn obey(&self, order: &Value) {
        let seq = order["seq"].as_u64();
        if let Some(seq) = seq {
            let mut state = self.lock();
            if seq <= state.seen {
                return;
            }
            state.seen = seq;
        }
        let id = order["id"].as_str().unwrap_or_default().to_owned();
        let refusal = match order["do"].as_str() {
            Some("hello") => return self.hello(order),
            Some("start") if order["cwd"] == "/none" => Some("cwd"),
            Some("start") => {
                self.lock().contexts.insert(id, Kernel::new(order));
                None
            }
            Some("run") => self.run(&id, order),
            Some("interrupt") => {
                let state = self.lock();
                if let Some((cell, stop)) = state.contexts.get(&id).and_then(|k| k.cell.as_ref())
                    && (order["cell"].is_null() || order["cell"] == cell.as_str())
                {
                    stop.cancel();
                }
                None
            }
            Some("restart") => {
                self.end_cell(&id, "interrupted");
                let mut state = self.lock();
                match state.contexts.get_mut(&id) {
                    Some(kernel) => {
                        (kernel.dead, kernel.count) = (false, 0);
                        kernel.variables.clear();
                        None
                    }
                    None => Some("unknown"),
                }
            }
            Some("close") => {
                self.end_cell(&id, "interrupted");
                self.lock().contexts.remove(&id);
                None
            }
            _ => Some("unknown"),
        };
        match refusal {
            None => self.say(&json!({"ev": "reply", "seq": seq})),
            Some(kind) => self.say(&json!({"ev": "reply", "seq": seq, "error": {"kind": kind, "why": "as asked"}})),
        }
    }

    fn hello(&self, order: &Value) {
        let (seen, contexts) = {
            let state = self.lock();
            let describe = |(id, k): (&String, &Kernel)| {
                let doing = if k.dead { "dead" } else { "idle" };
                json!({"id": id, "state": doing, "createdMs": k.created_ms, "cwd": k.cwd, "env": k.env,
                       "cell": k.cell.as_ref().map(|c| &c.0)})
            };
            (state.seen, state.contexts.iter().map(describe).collect::<Vec<_>>())
        };
        self.say(&json!({"ev": "hello", "version": self.lock().version.unwrap_or(1), "nonce": order["nonce"], "seen": seen, "contexts": contexts}));
    }

    fn end_cell(&self, id: &str, status: &str) {
        let cell = self.lock().contexts.get_mut(id).and_then(|k| k.cell.take());
        if let Some((cell, stop)) = cell {
            stop.cancel();
            self.say(&json!({"ev": "done", "id": id, "cell": cell, "status": status, "count": null,
                             "truncated": false, "ms": 1}));
        }
    }

    fn die(&self, id: &str, status: &str) {
        if let Some(kernel) = self.lock().contexts.get_mut(id) {
            kernel.dead = true;
        }
        self.say(&json!({"ev": "dead", "id": id, "signal": 9}));
        self.end_cell(id, status);
    }

    fn run(&self, id: &str, order: &Value) -> Option<&'static str> {
        let (cell, code) = (order["cell"].as_str().unwrap_or_default(), order["code"].as_str().unwrap_or_default());
        let stop = CancellationToken::new();
        {
            let mut state = self.lock();
            let Some(kernel) = state.contexts.get_mut(id) else { return Some("unknown") };
            if kernel.dead {
                return Some("dead");
            }
            if kernel.cell.is_some() {
                return Some("busy");
            }
            kernel.count += 1;
            kernel.cell = Some((cell.to_owned(), stop.clone()));
        }
        let limit = Duration::from_millis(order["timeoutMs"].as_u64().unwrap_or(0));
        let (bridge, id, cell) = (self.clone(), id.to_owned(), cell.to_owned());
        let statements: Vec<String> = code.lines().map(str::to_owned).collect();
        tokio::spawn(async move {
            let end = bridge.end.clone();
            let stubborn = statements.iter().any(|s| s == "hang");
            let status = tokio::select! {
                () = end.cancelled() => return,
                status = bridge.play(&id, &cell, &statements) => status,
                () = stop.cancelled(), if !stubborn => Some("interrupted"),
                () = tokio::time::sleep(limit) => {
                    if stubborn {
                        tokio::time::sleep(GRACE).await;
                        return bridge.die(&id, "timed_out");
                    }
                    Some("timed_out")
                }
            };
            if let Some(status) = status {
                bridge.done(&id, &cell, status);
            }
        });
        None
    }

    fn done(&self, id: &str, cell: &str, status: &str) {
        let count = {
            let mut state = self.lock();
            let Some(kernel) = state.contexts.get_mut(id) else { return };
            if kernel.cell.take_if(|c| c.0 == cell).is_none() {
                return;
            }
            kernel.count
        };
        self.say(&json!({"ev": "done", "id": id, "cell": cell, "status": status, "count": count,
                         "truncated": false, "ms": 1}));
    }

    /// Runs statements; `None` when the cell ends otherwise.
    async fn play(&self, id: &str, cell: &str, statements: &[String]) -> Option<&'static str> {
        let tell = |mut line: Value| {
            line["id"] = json!(id);
            line["cell"] = json!(cell);
            self.say(&line);
        };
        for statement in statements {
            let (word, rest) = statement.split_once(' ').unwrap_or((statement, ""));
            let number = rest.parse::<u64>().unwrap_or(0);
            match word {
                "print" => tell(json!({"ev": "stdout", "text": format!("{rest}\n")})),
                "err" => tell(json!({"ev": "stderr", "text": format!("{rest}\n")})),
                "value" => tell(json!({"ev": "result", "data": {"text/plain": rest}})),
                "picture" => {
                    let picture = "A".repeat(usize::try_from(number).unwrap_or(0));
                    tell(json!({"ev": "display", "data": {"text/plain": "<Figure>", "image/png": picture}}));
                }
                "set" => {
                    let (name, value) = rest.split_once(' ').unwrap_or((rest, ""));
                    let mut state = self.lock();
                    let kernel = state.contexts.get_mut(id)?;
                    kernel.variables.insert(name.to_owned(), value.to_owned());
                }
                "get" => {
                    let value = self.lock().contexts.get(id).and_then(|k| k.variables.get(rest).cloned());
                    match value {
                        Some(value) => tell(json!({"ev": "result", "data": {"text/plain": value}})),
                        None => {
                            tell(
                                json!({"ev": "error", "name": "NameError", "value": rest, "traceback": ["NameError"]}),
                            );
                            return Some("error");
                        }
                    }
                }
                "sleep" => tokio::time::sleep(Duration::from_millis(number)).await,
                "chat" => {
                    for n in 0..number {
                        tell(json!({"ev": "stdout", "text": format!("{n}\n")}));
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                }
                "raise" => {
                    tell(json!({"ev": "error", "name": rest, "value": "as asked", "traceback": [rest]}));
                    return Some("error");
                }
                "die" => {
                    self.die(id, "dead");
                    return None;
                }
                "hang" => std::future::pending().await,
                "garbage" => self.raw(b"this is not what was agreed on\n"),
                "flood" => {
                    for _ in 0..40 {
                        tell(json!({"ev": "stdout", "text": "x".repeat(64 * 1024)}));
                    }
                }
                "upgrade" => self.lock().version = Some(number),
                "mute" => self.lock().mute = true,
                _ => return Some("error"),
            }
        }
        Some("ok")
    }
}
