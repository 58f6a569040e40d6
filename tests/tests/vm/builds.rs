//! Templates built from recipes, by the command, in real machines; and machines of them.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Output;

use mainbrella_client::api::{
    CreateContext, CreateMachine, CreatePreview, ForkMachine, RestoreSnapshot, SaveSnapshot, SnapshotKind,
};
use mainbrella_tests::{Machine, Service};

use crate::images::command;
use crate::previews;

const RECIPE: &str = r#"# A server, and everything a recipe may say on the way.
FROM python
ARG GREETING=hello
ENV APP_HOME=/srv/app GREETING=$GREETING
RUN groupadd --gid 777 staff2 && useradd --uid 1234 --gid staff2 --create-home app
WORKDIR /srv/app
COPY --chown=app:staff2 src/ ./
COPY --chmod=755 tool.sh /usr/local/bin/tool
RUN tool >made-by-root && id -un >>made-by-root && test "$APP_HOME" = "$PWD"
USER app
RUN id -un >/home/app/made-by-app && echo "$GREETING" >>/home/app/made-by-app
EXPOSE 3000
LABEL org.example.part=server
HEALTHCHECK --interval=1s --start-period=90s --start-interval=1s --timeout=20s CMD ["python3", "probe.py"]
CMD ["python3", "server.py"]
"#;

const SERVER: &str = "import http.server, os\n\
    class Answer(http.server.BaseHTTPRequestHandler):\n\
    \x20   def do_GET(self):\n\
    \x20       body = (os.environ['GREETING'] + ' from ' + str(os.getuid())).encode()\n\
    \x20       self.send_response(200); self.send_header('content-length', str(len(body))); self.end_headers()\n\
    \x20       self.wfile.write(body)\n\
    http.server.HTTPServer(('127.0.0.1', 3000), Answer).serve_forever()\n";
const PROBE: &str = "import urllib.request; urllib.request.urlopen('http://127.0.0.1:3000/', timeout=10)\n";

fn write(dir: &Path, path: &str, text: &str, mode: u32) {
    let path = dir.join(path);
    fs::create_dir_all(path.parent().expect("a parent")).expect("made");
    fs::write(&path, text).expect("written");
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("set");
}

fn context(recipe: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a folder");
    write(dir.path(), "Dockerfile", recipe, 0o644);
    write(dir.path(), ".dockerignore", "**/*.secret\n", 0o644);
    write(dir.path(), "src/server.py", SERVER, 0o644);
    write(dir.path(), "src/probe.py", PROBE, 0o644);
    write(dir.path(), "src/deep/data", &"data\n".repeat(100_000), 0o640);
    write(dir.path(), "src/key.secret", "not for the machine", 0o600);
    write(dir.path(), "tool.sh", "#!/bin/sh\necho tool\n", 0o600);
    dir
}

fn build(service: &Service, dir: &Path, more: &[&str]) -> Output {
    let dir = dir.display().to_string();
    let arguments = [&["template", "build", "app", "--from", dir.as_str(), "--size", "micro"], more].concat();
    command(service, &arguments)
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

async fn of(service: &mut Service, name: &str) -> Machine {
    let mut body = CreateMachine::new(name);
    body.size = "micro".to_owned();
    service.create(&body).await.expect("created")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recipe_becomes_a_template_whose_machines_answer_at_once() {
    let (mut service, _) = previews::service().await;
    let dir = context(RECIPE);
    let made = build(&service, dir.path(), &["--tag", "stable", "--build-arg", "GREETING=welcome"]);
    assert!(made.status.success(), "{}", said(&made));
    assert!(String::from_utf8_lossy(&made.stdout).starts_with("app:v1 "), "{}", said(&made));
    assert!(said(&made).contains("[6/6] RUN id -un") && said(&made).contains("app is now app:v1"), "{}", said(&made));
    assert_eq!(service.list().await.iter().filter(|m| !m.state.is_final()).count(), 0, "the build's machine is gone");

    let machine = of(&mut service, "app:stable").await;
    assert_eq!(machine.record().await.catalog_id, "app:v1");
    let body = CreatePreview { port: 3000, ttl_seconds: None };
    let preview = machine.client.create_preview(&machine.name, &body, "p").await.expect("a preview");
    let answer = previews::get(&preview.url.expect("told"), "/").await;
    assert_eq!(answer, (200, "welcome from 1234".to_owned()), "it runs from the first moment, as its user");

    // Files, owners, permissions; commands run as the template's user, where it says, with what it says.
    let text = machine.text("id -un; pwd; echo $APP_HOME $GREETING; cat /home/app/made-by-app made-by-root").await;
    assert_eq!(text, "app\n/srv/app\n/srv/app welcome\napp\nwelcome\ntool\nroot\n");
    let stat = machine.text("stat -c '%U:%G %a %s %n' server.py deep deep/data /usr/local/bin/tool; ls -A").await;
    let want = "app:staff2 644 {} server.py\napp:staff2 755 4096 deep\napp:staff2 640 500000 deep/data\nroot:root 755 20 \
                /usr/local/bin/tool\ndeep\nmade-by-root\nprobe.py\nserver.py\n";
    assert_eq!(stat, want.replace("{}", &SERVER.len().to_string()));

    // Another machine of it is another machine.
    let other = of(&mut service, "app").await;
    assert_ne!(machine.text("cat /etc/machine-id").await, other.text("cat /etc/machine-id").await);

    // The same again: nothing is done. A change: what comes before it is cached.
    let again = build(&service, dir.path(), &["--build-arg", "GREETING=welcome"]);
    assert!(String::from_utf8_lossy(&again.stdout).starts_with("app:v1  6 steps, 6 cached"), "{}", said(&again));
    write(dir.path(), "tool.sh", "#!/bin/sh\necho other tool\n", 0o600);
    let next = build(&service, dir.path(), &["--build-arg", "GREETING=welcome"]);
    assert!(String::from_utf8_lossy(&next.stdout).starts_with("app:v2  6 steps, 3 cached"), "{}", said(&next));
    let newest = of(&mut service, "app").await;
    assert_eq!(newest.text("head -1 /srv/app/made-by-root").await.trim(), "other tool");
    for m in [machine, other, newest] {
        m.stop().await;
    }
    let removed = command(&service, &["template", "rm", "app", "--all"]);
    assert!(removed.status.success(), "{}", said(&removed));
    service.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_fails_in_a_recipe_is_told_and_nothing_of_it_stays() {
    let mut service = Service::start().await;
    let failing = context("FROM python\nRUN echo so far && echo to the point >&2\nRUN exit 42\n");
    let failed = build(&service, failing.path(), &[]);
    assert_eq!(failed.status.code(), Some(1), "{}", said(&failed));
    for part in ["so far", "to the point", "line 3: RUN exit 42: The command exited with code 42"] {
        assert!(said(&failed).contains(part), "{part}: {}", said(&failed));
    }
    let unready = context(
        "FROM python\nHEALTHCHECK --interval=100ms --retries=2 CMD [\"false\"]\nCMD [\"sh\", \"-c\", \"echo last words; sleep 1000\"]\n",
    );
    let failed = build(&service, unready.path(), &[]);
    assert_eq!(failed.status.code(), Some(1), "{}", said(&failed));
    assert!(said(&failed).contains("last words"), "{}", said(&failed));
    let list = command(&service, &["--json", "template", "list"]);
    assert!(!said(&list).contains("app:v"), "{}", said(&list));
    // On another template, in the size that one has.
    let base = context("FROM python\nRUN echo base >/base\n");
    assert!(build(&service, base.path(), &[]).status.success());
    let above = context("FROM app\nRUN cat /base >/above\nCOPY tool.sh /\n");
    let dir = above.path().display().to_string();
    let made = command(&service, &["template", "build", "above", "--from", &dir]);
    assert!(made.status.success(), "{}", said(&made));
    let machine = of(&mut service, "above").await;
    assert_eq!(machine.text("cat /above; stat -c %a /tool.sh").await, "base\n600\n");
    machine.stop().await;
    service.finish().await;
}

/// Whether its server answers, asked from inside.
async fn answers(machine: &Machine) -> bool {
    machine.text("cd /srv/app && python3 probe.py && echo yes").await == "yes\n"
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_template_started_goes_on_in_copies_and_is_left_alone_by_the_service() {
    let mut service = Service::start().await;
    let dir = context(RECIPE);
    let made = build(&service, dir.path(), &[]);
    assert!(made.status.success(), "{}", said(&made));
    let machine = of(&mut service, "app").await;
    let two = ForkMachine { count: Some(2), ..ForkMachine::default() };
    let forked = machine.client.fork(&machine.name, &two, None).await.expect("forked");
    let mut all: Vec<Machine> = forked.children.iter().map(|child| service.attach(child.into())).collect();
    let body = SaveSnapshot { name: "full".to_owned(), kind: SnapshotKind::Full, ttl_seconds: None, stop: false };
    let saved = machine.client.save(&machine.name, &body, "s").await.expect("saved");
    let restored = service.client().restore(&saved.id, &RestoreSnapshot::default(), "r").await.expect("restored");
    all.push(service.attach((&restored.machine).into()));
    all.push(machine);
    service.crash().await;
    for m in &all {
        // The service looks for its own programs in the guest before this answers, and there are none.
        assert!(m.client.contexts(&m.name).await.expect("contexts").is_empty() && answers(m).await);
        // With one of them running the two are told apart.
        m.client.create_context(&m.name, &CreateContext::new("python")).await.expect("a context");
        assert!(answers(m).await);
    }
    service.crash().await;
    for m in &all {
        assert_eq!(m.client.contexts(&m.name).await.expect("contexts").len(), 1);
        assert!(answers(m).await);
    }
    for m in &all {
        m.stop().await;
    }
    service.client().delete_snapshot(&saved.id).await.expect("deleted");
    service.finish().await;
}
