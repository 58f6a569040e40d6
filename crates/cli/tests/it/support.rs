//! A scripted service, and the command run against it.

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

/// The key of every test.
pub const KEY: &str = "mb_0123abcd_test";

/// One request as it came.
#[derive(Clone, Debug)]
pub struct Request {
    /// Method and target.
    pub line: String,
    /// Lower-case names.
    pub headers: Vec<(String, String)>,
    /// The whole body.
    pub body: Vec<u8>,
}

impl Request {
    /// A header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }

    /// The body as JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).expect("a JSON body")
    }
}

/// What is sent back.
#[derive(Clone)]
pub enum Reply {
    /// Status, headers, body.
    Answer(u16, Vec<(String, String)>, Vec<u8>),
    /// These bytes, then the connection is cut.
    Cut(Vec<u8>),
    /// Whatever this writes, then the connection is cut.
    Live(Arc<dyn Fn(&mut TcpStream) + Send + Sync>),
}

/// What answers requests, given what came before.
type Answering = dyn Fn(&Request) -> Reply + Send + Sync;

/// A JSON answer.
pub fn json(status: u16, body: serde_json::Value) -> Reply {
    Reply::Answer(status, vec![], body.to_string().into_bytes())
}

/// An error answer.
pub fn error(status: u16, code: &str, message: &str) -> Reply {
    json(status, serde_json::json!({ "code": code, "message": message, "hint": "Do this.", "requestId": "r-1" }))
}

/// Answers requests in order; the last reply answers all further ones.
pub struct Service {
    /// Where it is.
    pub url: String,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl Service {
    /// Starts it; it lives as long as the test's process.
    pub fn start(replies: impl IntoIterator<Item = Reply>) -> Self {
        let replies = Mutex::new(replies.into_iter().collect::<VecDeque<_>>());
        Self::answering(move |_| {
            let mut replies = replies.lock().expect("unpoisoned");
            let reply = if replies.len() > 1 { replies.pop_front() } else { replies.front().cloned() };
            reply.expect("a reply")
        })
    }

    /// Starts one that answers each request by what it is.
    pub fn answering(answer: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let requests = Arc::new(Mutex::new(Vec::new()));
        let answer: Arc<Answering> = Arc::new(answer);
        let kept = requests.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (kept, answer) = (kept.clone(), answer.clone());
                std::thread::spawn(move || serve(stream, &kept, &*answer));
            }
        });
        Self { url, requests }
    }

    /// What has come so far.
    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().expect("unpoisoned").clone()
    }
}

fn serve(mut stream: TcpStream, kept: &Mutex<Vec<Request>>, answer: &Answering) {
    let mut reader = BufReader::new(stream.try_clone().expect("a second handle"));
    while let Some(request) = read(&mut reader) {
        kept.lock().expect("unpoisoned").push(request.clone());
        match answer(&request) {
            Reply::Answer(status, headers, body) => {
                let mut headers: String = headers.iter().map(|(n, v)| format!("{n}: {v}\r\n")).collect();
                // What follows this status on a connection would be taken for the next answer.
                let body = if status == 204 { Vec::new() } else { body };
                if status != 204 {
                    headers += &format!("content-length: {}\r\n", body.len());
                }
                let head = format!("HTTP/1.1 {status} X\r\n{headers}\r\n");
                let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body));
            }
            Reply::Cut(bytes) => {
                let _ = stream.write_all(&bytes);
                let _ = stream.shutdown(std::net::Shutdown::Both);
                return;
            }
            Reply::Live(write) => {
                write(&mut stream);
                let _ = stream.shutdown(std::net::Shutdown::Both);
                return;
            }
        }
    }
}

fn read(reader: &mut BufReader<TcpStream>) -> Option<Request> {
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|n| *n > 0)?;
    let mut headers = Vec::new();
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).ok()?;
        match header.trim_end().split_once(':') {
            Some((name, value)) => headers.push((name.to_lowercase(), value.trim().to_owned())),
            None => break,
        }
    }
    let find = |name: &str| headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str());
    let mut body = Vec::new();
    if find("transfer-encoding") == Some("chunked") {
        loop {
            let mut size = String::new();
            reader.read_line(&mut size).ok()?;
            let size = usize::from_str_radix(size.trim(), 16).ok()?;
            let mut piece = vec![0; size + 2];
            reader.read_exact(&mut piece).ok()?;
            body.extend_from_slice(&piece[..size]);
            if size == 0 {
                break;
            }
        }
    } else {
        body = vec![0; find("content-length").map_or(0, |n| n.parse().expect("a length"))];
        reader.read_exact(&mut body).ok()?;
    }
    let line = line.trim_end().trim_end_matches(" HTTP/1.1").to_owned();
    Some(Request { line, headers, body })
}

/// The command, with nothing of this machine's environment in it.
pub fn mainbrella() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mainbrella"));
    command.env_clear().env("PATH", "/usr/bin:/bin").env("HOME", "/nonexistent").stdin(Stdio::null());
    command.env("MAINBRELLA_DATA_DIR", "/nonexistent/mainbrella");
    command
}

/// Runs it against `service` and gives code, output and errors as one text.
pub fn run(service: &Service, words: &[&str]) -> String {
    run_with(service, words, b"")
}

/// As `run`, with standard input.
pub fn run_with(service: &Service, words: &[&str], input: &[u8]) -> String {
    let mut command = mainbrella();
    command.env("MAINBRELLA_API_URL", &service.url).env("MAINBRELLA_API_KEY", KEY).args(words);
    told(&mut command, input).replace(&service.url, "http://SERVICE")
}

/// Runs `command` and gives code, output and errors as one text.
pub fn told(command: &mut Command, input: &[u8]) -> String {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    let mut stdin = child.stdin.take().expect("piped");
    // It may end without reading it all.
    let _ = stdin.write_all(input);
    drop(stdin);
    let out = child.wait_with_output().expect("it ends");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let code = out.status.code().map_or_else(|| "signal".to_owned(), |c| c.to_string());
    format!("code: {code}\n--- stdout\n{}--- stderr\n{}", text(&out.stdout), text(&out.stderr))
}

/// A running machine whose deadlines are `minutes` and a half from now.
pub fn machine(id: &str, minutes: i64) -> serde_json::Value {
    let now = jiff::Timestamp::now().as_millisecond();
    serde_json::json!({
        "id": id, "createdAt": "2026-10-08T12:00:00.000Z", "state": "running", "catalogId": "python", "size": "small",
        "internet": false, "metadata": {"owner": "me"}, "isolation": "emulated",
        "limits": {"memoryMib": 1024, "vcpus": 1, "diskMib": 8192},
        "hardDeadlineMs": now + minutes * 60_000 + 30_000, "idleTimeoutSeconds": null, "idleDeadlineMs": null,
        "startedAtMs": now - 185_000, "endedAtMs": null, "reason": null,
        "capabilities": {"commands": true, "files": true, "internet": false, "previews": false, "memorySnapshot": false,
            "pauseResume": false, "fork": false},
        "addedLater": true,
    })
}

/// Compares with the snapshot called `name`, whatever characters that has.
pub fn snapshot(name: impl AsRef<str>, text: impl AsRef<str>) {
    let words = name.as_ref().split(|c: char| !c.is_ascii_alphanumeric()).filter(|w| !w.is_empty());
    let name = words.collect::<Vec<_>>().join("-").to_lowercase();
    insta::with_settings!({ prepend_module_to_snapshot => false, omit_expression => true }, {
        insta::assert_snapshot!(name, text.as_ref());
    });
}
