//! The command line against a real service.

use std::io::{Read as _, Write as _};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use mainbrella_tests::{Service, program};

struct Cli {
    url: String,
    data: PathBuf,
}

impl Cli {
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(program());
        for (name, _) in std::env::vars_os().filter(|(n, _)| n.as_encoded_bytes().starts_with(b"MAINBRELLA_")) {
            command.env_remove(name);
        }
        command.env("MAINBRELLA_API_URL", &self.url).arg("--data-dir").arg(&self.data).args(arguments);
        command.stdin(Stdio::null());
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().expect("run")
    }

    fn ok(&self, arguments: &[&str]) -> String {
        let out = self.run(arguments);
        assert!(out.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).expect("text")
    }

    fn code(&self, arguments: &[&str]) -> i32 {
        self.run(arguments).status.code().expect("a code")
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_on_the_command_line() {
    let mut service = Service::start().await;
    let cli = Cli { url: service.url(), data: service.data().to_owned() };
    tokio::task::spawn_blocking(move || session(&cli)).await.expect("session");
    service.look();
    service.finish().await;
}

/// Input of a pipe, output while a command runs, and Ctrl-C.
fn streams(cli: &Cli, name: &str) {
    let data: Vec<u8> = (0..900_000u32).map(|i| (i % 241) as u8).collect();
    let mut there = cli.command(&["exec", name, "-c", "sleep 0.5; cat; echo end >&2"]);
    let mut there = there.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("run");
    let mut stdin = there.stdin.take().expect("piped");
    let sent = data.clone();
    let sending = std::thread::spawn(move || stdin.write_all(&sent));
    let out = there.wait_with_output().expect("ended");
    sending.join().expect("joined").expect("sent");
    assert!(out.status.success() && out.stdout == data && out.stderr == b"end\n", "{:?}", out.status);

    let mut there = cli.command(&["exec", name, "-c", "trap 'echo bye; exit 3' TERM; echo up; sleep 120"]);
    let mut there = there.stdout(Stdio::piped()).spawn().expect("run");
    let mut said = there.stdout.take().expect("piped");
    let mut line = [0u8; 3];
    said.read_exact(&mut line).expect("output while it runs");
    let pid = rustix::process::Pid::from_raw(i32::try_from(there.id()).expect("a pid")).expect("a pid");
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("sent");
    let mut rest = String::new();
    said.read_to_string(&mut rest).expect("read");
    assert_eq!((&line, rest.as_str(), there.wait().expect("ended").code()), (b"up\n", "bye\n", Some(130)));
    let jobs: serde_json::Value = serde_json::from_str(&cli.ok(&["--json", "jobs", name])).expect("json");
    assert_eq!(jobs["executions"], serde_json::json!([]), "what was told is let go of");
    assert_eq!(cli.code(&["exec", name, "-c", "! pgrep -x sleep"]), 0, "nothing of it runs on");
}

/// Code whose state survives from one command to the next.
fn contexts(cli: &Cli, name: &str) {
    let id = cli.ok(&["context", "create", name]);
    let id = id.trim();
    assert_eq!(cli.ok(&["context", "run", name, id, "x = 41; print('set')"]), "set\n");
    let out = tempfile::tempdir().expect("temp dir");
    let code = "from IPython.display import HTML, display; display(HTML('<b>hi</b>')); x + 1";
    let dir = out.path().to_str().expect("text");
    assert_eq!(cli.ok(&["context", "run", name, id, code, "--out", dir]), "<IPython.core.display.HTML object>\n42\n");
    let saved: Vec<_> = std::fs::read_dir(dir).expect("listed").map(|e| e.expect("an entry").path()).collect();
    assert_eq!(saved.len(), 1, "{saved:?}");
    assert_eq!(std::fs::read(&saved[0]).expect("read"), b"<b>hi</b>");
    let raised = cli.run(&["context", "run", name, id, "1/0"]);
    assert_eq!(raised.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&raised.stderr).contains("ZeroDivisionError"));
    assert_eq!(cli.code(&["context", "run", name, id, "-t", "1s", "import time; time.sleep(60)"]), 124);
    assert!(cli.ok(&["context", "list", name]).contains("idle"));
    assert_eq!(cli.ok(&["context", "restart", name, id]).split_whitespace().next(), Some(id));
    assert_eq!(cli.code(&["context", "run", name, id, "x"]), 1, "its state is gone");
    cli.ok(&["context", "rm", name, id]);
    assert_eq!(cli.code(&["context", "run", name, id, "1"]), 3);
}

fn session(cli: &Cli) {
    let made = cli.ok(&[
        "create", "python", "--size", "micro", "--slot", "cli", "--ttl", "10m", "--label", "a=b", "--env", "X=1",
    ]);
    let name = made.trim();
    assert!(name.starts_with("cli@20"), "{name}");
    assert_eq!(cli.ok(&["exec", name, "--", "python3", "-c", "print('hi')"]), "hi\n");
    assert_eq!(cli.ok(&["exec", "cli", "-c", "echo $X | tr 1 2"]), "2\n");
    for (script, code) in [("exit 7", 7), ("exit 0", 0), ("kill -9 $$", 137), ("exit 255", 255)] {
        assert_eq!(cli.code(&["exec", name, "-c", script]), code, "{script}");
    }
    assert_eq!(cli.code(&["exec", "--timeout", "1s", name, "-c", "sleep 20"]), 124);
    assert_eq!(cli.code(&["exec", name, "--", "no-such-program"]), 127);
    assert_eq!(cli.code(&["exec", "no-such-machine", "-c", "true"]), 125);
    let both = cli.run(&["exec", name, "-c", "echo out; echo err >&2"]);
    assert_eq!((both.stdout.as_slice(), both.stderr.as_slice()), (&b"out\n"[..], &b"err\n"[..]));

    streams(cli, name);
    contexts(cli, name);
    let here = tempfile::tempdir().expect("temp dir");
    let (from, to) = (here.path().join("re\"port é"), here.path().join("back"));
    let data: Vec<u8> = (0..3_000_000u32).map(|i| (i % 251) as u8).collect();
    std::fs::write(&from, &data).expect("write");
    let (from, to) = (from.to_str().expect("text"), to.to_str().expect("text"));
    cli.ok(&["cp", from, &format!("{name}:/srv/")]);
    cli.ok(&["cp", "cli:/srv/re\"port é", to]);
    assert!(std::fs::read(to).expect("read") == data, "there and back");
    assert_eq!(cli.ok(&["cp", &format!("{name}:/etc/debian_version"), "-"]).as_bytes()[..3], *b"13.");
    assert_eq!(cli.code(&["cp", &format!("{name}:/no/such"), to]), 3);
    assert!(std::fs::read(to).expect("read") == data, "a failed copy leaves what was there");

    let listed: serde_json::Value = serde_json::from_str(&cli.ok(&["--json", "list"])).expect("json");
    assert_eq!(listed["machines"][0]["id"], "cli");
    assert!(cli.ok(&["list"]).contains("cli"));
    let record: serde_json::Value = serde_json::from_str(&cli.ok(&["--json", "get", name])).expect("json");
    assert_eq!(record["metadata"]["a"], "b");
    cli.ok(&["extend", name, "--ttl", "20m"]);
    let longer: serde_json::Value = serde_json::from_str(&cli.ok(&["--json", "get", name])).expect("json");
    assert!(longer["hardDeadlineMs"].as_i64() > record["hardDeadlineMs"].as_i64());
    assert!(cli.ok(&["template", "list"]).contains("python"));
    assert!(cli.ok(&["doctor"]).contains("QEMU"));
    assert!(cli.ok(&["stop", name]).contains("stopped"));
    assert_eq!(cli.code(&["exec", name, "-c", "true"]), 125);
    assert_eq!(cli.code(&["get", "never-was"]), 3);
    assert_eq!(cli.code(&["create", "no-such-template"]), 3);
    assert_eq!(cli.code(&["create", "--size"]), 2);
    let mut stranger = cli.command(&["list"]);
    stranger.env("MAINBRELLA_API_KEY", "mb_00000000_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA");
    assert_eq!(stranger.output().expect("run").status.code(), Some(4));
    let nowhere = Cli { url: "http://127.0.0.1:9".into(), data: cli.data.clone() };
    assert_eq!(nowhere.code(&["list"]), 5);
}
