//! An agent in process, and one in a process of its own.

use std::time::Duration;

use mainbrella_guest::{Agent, AgentOptions, Authority, ReapMode, Reaper};
use mainbrella_guest_protocol::host::JobStream;
use mainbrella_guest_protocol::pb::__buffa::oneof::job_event::Event;
use mainbrella_guest_protocol::{GuestClient, LinkOptions, connect, guest_side, pb};

/// An agent served over a pipe in memory.
pub async fn in_process() -> GuestClient {
    let reaper = Reaper::start(ReapMode::Known).unwrap();
    let agent = Agent::new(AgentOptions {
        authority: Authority::Process,
        reaper,
        cgroup: None,
        defaults: mainbrella_guest::Defaults::default(),
        pending: None,
    });
    attach(&agent).await
}

/// One more connection to `agent`.
pub async fn attach(agent: &std::sync::Arc<Agent>) -> GuestClient {
    let (host, guest) = tokio::io::duplex(64 * 1024);
    tokio::spawn(guest_side::serve(guest, agent.service()));
    connect(host, LinkOptions::default()).await.unwrap()
}

/// The agent's program on a unix socket; killed when dropped.
pub struct OwnProcess {
    child: std::process::Child,
    dir: tempfile::TempDir,
}

impl OwnProcess {
    pub fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let child = std::process::Command::new(env!("CARGO_BIN_EXE_mainbrella-guest"))
            .arg("--serve-unix")
            .arg(dir.path().join("agent.sock"))
            .spawn()
            .unwrap();
        Self { child, dir }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub async fn attach(&self) -> GuestClient {
        for _ in 0..500 {
            if let Ok(stream) = tokio::net::UnixStream::connect(self.dir.path().join("agent.sock")).await {
                return connect(stream, LinkOptions::default()).await.unwrap();
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("the agent did not listen");
    }
}

impl Drop for OwnProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A job that runs `script` in a shell.
pub fn sh(id: &str, script: &str) -> pb::StartJobRequest {
    pb::StartJobRequest {
        job_id: id.into(),
        argv: vec![b"/bin/sh".to_vec(), b"-c".to_vec(), script.as_bytes().to_vec()],
        cwd: b"/".to_vec(),
        ..Default::default()
    }
}

/// All a job told.
#[derive(Debug, Default)]
pub struct Told {
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub gaps: Vec<(pb::Stream, u64, u64)>,
    pub exit: Option<pb::JobExit>,
    pub not_started: Option<(i32, String)>,
    pub last_sequence: u64,
}

impl Told {
    pub fn add(&mut self, event: pb::JobEvent) {
        assert!(event.sequence > self.last_sequence, "numbers increase");
        self.last_sequence = event.sequence;
        match event.event.unwrap() {
            Event::Started(started) => assert!(started.pid > 1),
            Event::Output(output) => match output.stream.as_known().unwrap() {
                pb::Stream::STREAM_STDOUT => self.stdout.extend(&output.data),
                pb::Stream::STREAM_STDERR => self.stderr.extend(&output.data),
                other => panic!("{other:?}"),
            },
            Event::Gap(gap) => self.gaps.push((gap.stream.as_known().unwrap(), gap.offset, gap.length)),
            Event::Exit(exit) => self.exit = Some(*exit),
            Event::NotStarted(failure) => self.not_started = Some((failure.errno, failure.stage)),
        }
    }

    pub fn code(&self) -> Option<i32> {
        let exit = self.exit.as_ref()?;
        (exit.cause == pb::job_exit::Cause::CAUSE_EXITED).then_some(exit.code)
    }

    pub fn cause(&self) -> pb::job_exit::Cause {
        self.exit.as_ref().unwrap().cause.as_known().unwrap()
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

/// Follows a stream to its end.
pub async fn all(mut stream: JobStream) -> Told {
    let mut told = Told::default();
    while let Some(event) = stream.message().await.unwrap() {
        told.add(event.to_owned_message());
    }
    told
}

/// Runs a job to its end.
pub async fn run(client: &GuestClient, request: pb::StartJobRequest) -> Told {
    let stream = client.streams().run_job(request).await.unwrap();
    tokio::time::timeout(Duration::from_secs(30), all(stream)).await.expect("the job ends")
}

/// An agent served over a pipe in memory, whose image names a user.
pub async fn in_process_of(user: &str) -> GuestClient {
    let reaper = Reaper::start(ReapMode::Known).unwrap();
    let agent = Agent::new(AgentOptions {
        authority: Authority::Process,
        reaper,
        cgroup: None,
        defaults: mainbrella_guest::Defaults { user: Some(user.to_owned()), ..Default::default() },
        pending: None,
    });
    attach(&agent).await
}
