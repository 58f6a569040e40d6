//! A real service: its process, its log, its end, and what is left of it.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use mainbrella_client::api::{CreateMachine, Machine as Record, State};
use mainbrella_client::{ApiKey, Client, ClientError, ListFilter, MachineRef};
use rustix::process::Signal;

use crate::{Machine, ground, host, machine_body};

/// How a service is set up.
#[derive(Clone, Debug, Default)]
pub struct Setup {
    /// Waiting VMMs.
    pub pool: u32,
    /// Where its data directory is made; `None`: the temporary folder.
    pub data_dir: Option<PathBuf>,
    /// Further arguments of `serve`.
    pub arguments: Vec<String>,
    /// What it sees as `/etc/hosts`; `None`: the host's own.
    pub hosts: Option<PathBuf>,
    /// Variables of its environment.
    pub env: Vec<(String, String)>,
    /// Keeps a Ctrl-C on the terminal from it: whoever started it ends it.
    pub own_group: bool,
}

/// A service. Ends with [`Service::finish`]; when a test panics before, its processes are killed all the same.
pub struct Service {
    setup: Setup,
    data: PathBuf,
    own: Option<tempfile::TempDir>,
    port: u16,
    child: Option<Child>,
    client: Client,
    expected: Vec<&'static str>,
    seen: BTreeSet<String>,
    finished: bool,
}

impl Service {
    /// A service with no waiting VMMs.
    pub async fn start() -> Self {
        Self::with(Setup::default()).await
    }

    /// A service over the shared images.
    ///
    /// # Panics
    /// When it does not answer within a minute.
    pub async fn with(setup: Setup) -> Self {
        let own = setup.data_dir.is_none().then(|| tempfile::Builder::new().prefix("mb-").tempdir().expect("temp dir"));
        let data = match (&setup.data_dir, &own) {
            (Some(dir), _) => dir.clone(),
            (None, Some(own)) => own.path().join("data"),
            (None, None) => unreachable!("one of both was made"),
        };
        fs::create_dir_all(&data).expect("data directory");
        ground::link_images(&data);
        let port = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port").port();
        let client = Client::new(&format!("http://127.0.0.1:{port}"), None).expect("client");
        let mut service = Self {
            setup,
            data,
            own,
            port,
            child: None,
            client,
            expected: Vec::new(),
            seen: BTreeSet::new(),
            finished: false,
        };
        service.launch().await;
        service
    }

    /// The command that serves this data directory.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut command = match &self.setup.hosts {
            None => Command::new(ground::program()),
            // In a mount namespace of its own, under the same process id.
            Some(hosts) => {
                let mut command = Command::new("unshare");
                command.args(["--mount", "--propagation", "slave", "sh", "-ec"]);
                command
                    .arg("hosts=$1; shift; mount --bind \"$hosts\" /etc/hosts; exec \"$@\"")
                    .args(["sh".as_ref(), hosts.as_os_str()]);
                command.arg(ground::program());
                command
            }
        };
        for (name, _) in std::env::vars_os().filter(|(n, _)| n.as_encoded_bytes().starts_with(b"MAINBRELLA_")) {
            command.env_remove(name);
        }
        command.envs(self.setup.env.iter().cloned());
        command.arg("--data-dir").arg(&self.data).args(["serve", "--listen", &format!("127.0.0.1:{}", self.port)]);
        if !self.setup.arguments.iter().any(|a| a == "--preview-listen") {
            // Any free port: the one beside the API's may be another test's.
            command.args(["--preview-listen", "127.0.0.1:0"]);
        }
        command.args(["--accel", "auto", "--pool-size", &self.setup.pool.to_string()]).args(&self.setup.arguments);
        command.stdin(Stdio::null());
        if self.setup.own_group {
            std::os::unix::process::CommandExt::process_group(&mut command, 0);
        }
        command
    }

    /// Starts the process again after it has ended.
    ///
    /// # Panics
    /// When it runs already or does not answer within a minute.
    pub async fn launch(&mut self) {
        assert!(self.child.is_none(), "it runs already");
        let log = File::options().create(true).append(true).open(self.log_file()).expect("log");
        let child = self.command().stdout(log.try_clone().expect("log")).stderr(log).spawn().expect("spawn");
        self.child = Some(child);
        let end = Instant::now() + Duration::from_secs(60);
        while self.client.health().await.is_err() {
            let ended = self.child.as_mut().and_then(|c| c.try_wait().expect("wait"));
            assert!(ended.is_none(), "the service ended at once: {}", self.log());
            assert!(Instant::now() < end, "the service does not answer: {}", self.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        self.client = self.client_for(&self.admin_key());
    }

    /// A client with this key.
    ///
    /// # Panics
    /// When the key has a form that cannot be sent.
    #[must_use]
    pub fn client_for(&self, key: &str) -> Client {
        Client::new(&self.url(), Some(ApiKey::new(key).expect("key"))).expect("client")
    }

    /// A client with the first key.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// The first key.
    ///
    /// # Panics
    /// When there is none.
    #[must_use]
    pub fn admin_key(&self) -> String {
        fs::read_to_string(self.data.join("keys/admin.key")).expect("the first key").trim().to_owned()
    }

    /// Where it is reached.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Its data directory.
    #[must_use]
    pub fn data(&self) -> &Path {
        &self.data
    }

    /// Its process id.
    ///
    /// # Panics
    /// When it does not run.
    #[must_use]
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.as_ref().expect("it runs").id()).expect("a pid")
    }

    fn log_file(&self) -> PathBuf {
        // Beside the data: a full data directory must not silence it.
        std::env::temp_dir().join(format!("mb-service-{}-{}.log", std::process::id(), self.port))
    }

    /// What it has logged, over all its lives.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_file()).unwrap_or_default()
    }

    /// An error in the log that has this text in it belongs to the test.
    pub fn expect_error(&mut self, text: &'static str) {
        self.expected.push(text);
    }

    /// Kills it as `kill -9` does; machines stay.
    ///
    /// # Panics
    /// When it does not run.
    pub fn kill(&mut self) {
        let mut child = self.child.take().expect("it runs");
        child.kill().expect("kill");
        child.wait().expect("wait");
    }

    /// Asks it to end (SIGTERM) and waits for it.
    ///
    /// # Panics
    /// When it does not end within 40 seconds.
    pub async fn terminate(&mut self) -> ExitStatus {
        host::signal(self.pid(), Signal::TERM);
        self.ended(Duration::from_secs(40)).await
    }

    /// Waits for its end.
    ///
    /// # Panics
    /// When it does not come within `patience`.
    pub async fn ended(&mut self, patience: Duration) -> ExitStatus {
        let end = Instant::now() + patience;
        loop {
            if let Some(status) = self.child.as_mut().expect("it runs").try_wait().expect("wait") {
                self.child = None;
                return status;
            }
            assert!(Instant::now() < end, "it does not end: {}", self.log());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Kills it and starts it again.
    pub async fn crash(&mut self) {
        self.look();
        self.kill();
        self.launch().await;
        self.look();
    }

    /// A `micro` machine from `python`.
    ///
    /// # Panics
    /// When it cannot be made.
    pub async fn machine(&mut self) -> Machine {
        self.create(&machine_body()).await.unwrap_or_else(|e| panic!("create: {e:?}; log: {}", self.log()))
    }

    /// Creates a machine.
    ///
    /// # Errors
    /// What the service answered.
    pub async fn create(&mut self, body: &CreateMachine) -> Result<Machine, ClientError> {
        let made = self.client.create(body, None).await;
        self.look();
        Ok(self.attach(MachineRef::from(&made?.machine)))
    }

    /// The code with which a create is refused.
    ///
    /// # Panics
    /// When it is not refused.
    pub async fn machine_refused(&mut self) -> mainbrella_types::ErrorCode {
        let answer = self.create(&machine_body()).await;
        let error = answer.expect_err("a refusal");
        error.code().unwrap_or_else(|| panic!("a known code: {error:?}"))
    }

    /// A machine that exists, for use through this service as it runs now.
    #[must_use]
    pub fn attach(&self, name: MachineRef) -> Machine {
        Machine { client: self.client.clone(), name }
    }

    /// Remembers which generations there are, so that none is overlooked at the end.
    pub fn look(&mut self) {
        for dir in ["machines", "waiting"] {
            self.seen.extend(host::names_in(&self.data.join(dir)));
        }
    }

    /// Keys of machines that have a folder.
    #[must_use]
    pub fn keys(&self) -> BTreeSet<String> {
        host::names_in(&self.data.join("machines"))
    }

    /// Process ids of the VMMs of machines, by key.
    #[must_use]
    pub fn vmms(&self) -> Vec<(String, i32)> {
        self.keys().into_iter().filter_map(|k| Some((k.clone(), self.recorded_pid("machines", &k)?))).collect()
    }

    /// The VMM of the only machine there is.
    ///
    /// # Panics
    /// When there is not exactly one.
    #[must_use]
    pub fn only_vmm(&self) -> i32 {
        let vmms = self.vmms();
        assert_eq!(vmms.len(), 1, "one machine: {vmms:?}");
        vmms[0].1
    }

    fn recorded_pid(&self, dir: &str, key: &str) -> Option<i32> {
        let text = fs::read(self.data.join(dir).join(key).join("vmm.json")).ok()?;
        serde_json::from_slice::<serde_json::Value>(&text).ok()?.get("pid")?.as_i64()?.try_into().ok()
    }

    /// Every machine, newest first.
    ///
    /// # Panics
    /// When they cannot be listed.
    pub async fn list(&self) -> Vec<Record> {
        self.client.list(&ListFilter { limit: Some(1000), ..ListFilter::default() }, None).await.expect("list").machines
    }

    /// Stops every machine, ends the service as an operator would, and looks for what should not be left.
    ///
    /// # Panics
    /// When something is left, the service ended badly, or its log has an error in it that was not expected.
    pub async fn finish(mut self) {
        self.look();
        if self.child.is_none() {
            self.launch().await;
        }
        for machine in self.list().await {
            if !matches!(machine.state, State::Stopped | State::Failed) {
                let done = self.client.stop(&MachineRef::from(&machine)).await.expect("stop");
                assert!(done.machine.state.is_final(), "stopped: {done:?}");
            }
        }
        let status = self.terminate().await;
        assert!(status.success(), "the service ended with {status}: {}", self.log());
        let mut left = self.leftovers();
        let end = Instant::now() + Duration::from_secs(10);
        while !left.is_empty() && Instant::now() < end {
            tokio::time::sleep(Duration::from_millis(50)).await;
            left = self.leftovers();
        }
        assert!(left.is_empty(), "left over: {left:#?}\nlog: {}", self.log());
        let log = self.log();
        let errors: Vec<&str> = log
            .lines()
            .filter(|l| l.contains(" ERROR ") || l.contains("panicked at"))
            .filter(|l| !self.expected.iter().any(|e| l.contains(e)))
            .collect();
        assert!(errors.is_empty(), "errors in the log: {errors:#?}");
        self.finished = true;
    }

    /// What a service that has ended and whose machines are stopped must not leave.
    #[must_use]
    pub fn leftovers(&self) -> Vec<String> {
        let mut left = Vec::new();
        for dir in ["machines", "waiting", "tmp", "jail"] {
            left.extend(host::names_in(&self.data.join(dir)).into_iter().map(|n| format!("{dir}/{n}")));
        }
        let instance = host::instance(&self.data);
        left.extend(host::processes_of(&instance).into_iter().map(|p| format!("process {p} in a group")));
        left.extend(host::groups_of(&instance).into_iter().map(|p| p.display().to_string()));
        if let Ok(number) = fs::read_to_string(self.data.join("network-block")) {
            let (links, table) = (format!("mb{}-", number.trim()), format!("mainbrella_{}", number.trim()));
            left.extend(host::links().into_iter().filter(|l| l.starts_with(&links)).map(|l| format!("link {l}")));
            left.extend(host::tables().into_iter().filter(|t| *t == table).map(|t| format!("rules {t}")));
        }
        left.extend(host::mounts_below(&self.data).into_iter().filter(|m| Path::new(m) != self.data));
        for key in &self.seen {
            let name = format!("mainbrella-{}", key.replace('-', ""));
            left.extend(host::processes_with(&name).into_iter().map(|p| format!("process {p} of {key}")));
        }
        left
    }

    /// Kills whatever belongs to this service.
    fn sweep(&mut self) {
        if self.child.is_some() {
            self.kill();
        }
        for dir in ["machines", "waiting"] {
            for key in host::names_in(&self.data.join(dir)) {
                if let Some(pid) = self.recorded_pid(dir, &key) {
                    let name = format!("mainbrella-{}", key.replace('-', ""));
                    let group = host::processes_with("qemu-system-x86_64 -name mainbrella-");
                    if group.contains(&pid) || host::processes_with(&name).contains(&pid) {
                        host::signal(pid, Signal::KILL);
                    }
                }
            }
        }
        let instance = host::instance(&self.data);
        for _ in 0..100 {
            host::processes_of(&instance).into_iter().for_each(|p| host::signal(p, Signal::KILL));
            let groups = host::groups_of(&instance);
            if groups.is_empty() {
                break;
            }
            for group in &groups {
                let _ = fs::remove_dir(group);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let log = self.log_file();
        if !self.finished {
            self.sweep();
            let text = self.log();
            let from = text.len().saturating_sub(6000);
            eprintln!("--- log of the service ---\n{}", text.get(from..).unwrap_or(&text));
        }
        let _ = fs::remove_file(log);
        drop(self.own.take());
        assert!(self.finished || std::thread::panicking(), "the test did not call finish()");
    }
}
