//! A machine as a test uses it.

use std::io;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use mainbrella_client::api::{CommandLine, CommandResult, CreateMachine, Machine as Record, RunCommand, State};
use mainbrella_client::{Client, ClientError, MachineRef, Upload, WriteOptions};

/// The body most tests create with: `python` in `micro`.
#[must_use]
pub fn machine_body() -> CreateMachine {
    let mut body = CreateMachine::new("python");
    body.size = "micro".to_owned();
    body
}

/// A machine and a client to reach it.
#[derive(Clone, Debug)]
pub struct Machine {
    /// The client.
    pub client: Client,
    /// Which machine.
    pub name: MachineRef,
}

/// What a command did, decoded.
#[derive(Clone, Debug)]
pub struct Out {
    /// As answered.
    pub raw: CommandResult,
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
}

impl Out {
    /// Standard output as text.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// Standard error as text.
    #[must_use]
    pub fn error(&self) -> String {
        String::from_utf8_lossy(&self.stderr).into_owned()
    }
}

/// A command with nothing set but the command.
#[must_use]
pub(crate) fn order(command: CommandLine) -> RunCommand {
    RunCommand {
        command,
        cwd: None,
        user: None,
        env: std::collections::BTreeMap::new(),
        timeout_ms: None,
        output_limit_bytes: None,
        stdin_base64: None,
        wait_ms: None,
    }
}

impl Machine {
    /// A command for the shell, nothing else set.
    #[must_use]
    pub fn shell_order(text: &str) -> RunCommand {
        order(CommandLine::Text(text.to_owned()))
    }

    /// A program and its arguments, nothing else set.
    #[must_use]
    pub fn argv_order(argv: &[&str]) -> RunCommand {
        order(CommandLine::Argv(argv.iter().map(|a| (*a).to_owned()).collect()))
    }

    /// Runs a command.
    ///
    /// # Errors
    /// What the service answered.
    ///
    /// # Panics
    /// When its output is not base64.
    pub async fn run(&self, order: &RunCommand) -> Result<Out, ClientError> {
        let raw = self.client.run(&self.name, order).await?;
        let stdout = STANDARD.decode(&raw.stdout_base64).expect("base64");
        let stderr = STANDARD.decode(&raw.stderr_base64).expect("base64");
        Ok(Out { raw, stdout, stderr })
    }

    /// Runs a command in the shell.
    ///
    /// # Errors
    /// What the service answered.
    pub async fn try_sh(&self, text: &str) -> Result<Out, ClientError> {
        self.run(&Self::shell_order(text)).await
    }

    /// Runs a command in the shell.
    ///
    /// # Panics
    /// When it cannot be run.
    pub async fn sh(&self, text: &str) -> Out {
        self.try_sh(text).await.unwrap_or_else(|e| panic!("`{text}`: {e:?}"))
    }

    /// What a command prints, which must end with 0.
    ///
    /// # Panics
    /// When it does not.
    pub async fn text(&self, text: &str) -> String {
        let out = self.sh(text).await;
        assert_eq!(out.raw.exit_code, 0, "`{text}`: {} {}", out.text(), out.error());
        out.text()
    }

    /// The record.
    ///
    /// # Panics
    /// When it cannot be read.
    pub async fn record(&self) -> Record {
        self.client.machine(&self.name.id, Some(&self.name.created_at)).await.expect("get")
    }

    /// Waits for a final state.
    ///
    /// # Panics
    /// When it does not come within `patience`.
    pub async fn ended(&self, patience: Duration) -> Record {
        let mut record = self.record().await;
        crate::host::until("the machine ends", patience, async || {
            record = self.record().await;
            record.state.is_final()
        })
        .await;
        record
    }

    /// Stops it.
    ///
    /// # Panics
    /// When it cannot be stopped.
    pub async fn stop(&self) {
        let done = self.client.stop(&self.name).await.expect("stop");
        assert_eq!(done.machine.state, State::Stopped, "{done:?}");
    }

    /// Writes a file.
    ///
    /// # Errors
    /// What the service answered.
    pub async fn write(&self, path: &str, data: impl Into<Bytes>) -> Result<u64, ClientError> {
        let data = data.into();
        let length = Some(data.len() as u64);
        let bytes = futures::stream::once(async move { Ok::<_, io::Error>(data) });
        let done = self.client.write_file(&self.name, path, &WriteOptions::default(), Upload { bytes, length }).await?;
        Ok(done.size)
    }

    /// Writes a file of `length` bytes piece by piece, each made by `piece` from its offset.
    ///
    /// # Errors
    /// What the service answered.
    pub async fn write_stream(
        &self,
        path: &str,
        length: u64,
        piece: impl Fn(u64) -> Bytes + Send + 'static,
    ) -> Result<u64, ClientError> {
        let bytes = futures::stream::unfold(0u64, move |at| {
            let next = (at < length).then(|| piece(at));
            async move {
                // As a file or a network would: a body that is always there keeps its connection from reading the answer.
                tokio::task::yield_now().await;
                next.map(|b| (Ok::<_, io::Error>(b.clone()), at + b.len() as u64))
            }
        });
        let upload = Upload { bytes, length: Some(length) };
        let done = self.client.write_file(&self.name, path, &WriteOptions::default(), upload).await?;
        Ok(done.size)
    }

    /// Reads a file.
    ///
    /// # Errors
    /// What the service answered.
    pub async fn read(&self, path: &str) -> Result<Vec<u8>, ClientError> {
        let mut download = self.client.read_file(&self.name, path, None, None).await?;
        let mut all = Vec::new();
        while let Some(bytes) = download.chunk().await? {
            all.extend_from_slice(&bytes);
        }
        Ok(all)
    }
}
