//! Builds over a ground without machines.
#![allow(clippy::unwrap_used)]

mod ground;

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use ground::{Fake, name};
use mainbrella_builder::{
    Build, BuildRequest, BuildState, Builds, BuildsError, ContextError, Event, EventKind, Limits, OutputStream, Reason,
};
use mainbrella_engine::SystemClock;
use mainbrella_tree::{Archive, Meta};
use mainbrella_types::{EgressPolicy, SizeClass};

const LIMITS: Limits = Limits { at_once: 1, keep_versions: 1, cached_steps: 64 };
const RECIPE: &str = "FROM python\n\
    ARG VERSION=1\n\
    ENV MODE=prod\n\
    WORKDIR /srv/app\n\
    COPY --chown=app:staff src/ ./src/\n\
    COPY --chmod=700 run.sh /usr/local/run\n\
    RUN say hello $VERSION\n\
    USER app\n\
    EXPOSE 8080\n\
    CMD [\"python3\", \"src/app.py\"]\n";

struct Bed {
    fake: Fake,
    builds: Builds,
    _dir: tempfile::TempDir,
    path: std::path::PathBuf,
}

async fn open(fake: &Fake, path: &std::path::Path, limits: Limits) -> Builds {
    Builds::open(path, Arc::new(fake.clone()), Arc::new(SystemClock), limits).await.expect("opened")
}

async fn bed() -> Bed {
    let dir = tempfile::tempdir().unwrap();
    let (fake, path) = (Fake::new(), dir.path().join("builds"));
    let builds = open(&fake, &path, LIMITS).await;
    Bed { fake, builds, _dir: dir, path }
}

fn request(recipe: &str) -> BuildRequest {
    BuildRequest {
        name: name("app"),
        tags: Vec::new(),
        recipe: Some(recipe.to_owned()),
        recipe_path: "Dockerfile".to_owned(),
        arguments: BTreeMap::new(),
        size: None,
        no_cache: false,
        pull: false,
        egress: EgressPolicy::Open,
        timeout_seconds: 60,
    }
}

fn tar(files: &[(&str, &str)]) -> Vec<u8> {
    let meta = Meta { mode: 0o644, uid: 5, gid: 5, mtime: 0 };
    let mut archive = Archive::default();
    for (path, text) in files {
        archive.file(path, text.len() as u64, meta);
        archive.content(text.as_bytes());
        archive.pad(text.len() as u64);
    }
    archive.end();
    archive.take()
}

const FILES: [(&str, &str); 3] = [("src/app.py", "print()"), ("src/lib/a.py", "a"), ("run.sh", "#!")];

impl Bed {
    async fn send(&self, id: &str, files: &[(&str, &str)]) -> Build {
        let mut upload = self.builds.begin_context(id).await.expect("begun");
        for piece in tar(files).chunks(700) {
            upload.push(Bytes::copy_from_slice(piece)).await.expect("taken");
        }
        upload.finish().await.expect("whole")
    }

    async fn begin(&self, request: BuildRequest) -> String {
        let id = self.builds.create(request).await.expect("created").id;
        assert_eq!(self.send(&id, &FILES).await.state, BuildState::Queued);
        id
    }

    /// The build when it is over, and what it told.
    async fn end(&self, id: &str) -> (Build, Vec<Event>) {
        let mut reader = self.builds.events(id, 0).expect("there");
        let mut all = Vec::new();
        loop {
            let page = reader.next(1000).await.expect("read");
            if page.is_empty() {
                break;
            }
            all.extend(page);
        }
        assert!(matches!(all.last().map(|e| &e.kind), Some(EventKind::Done { .. })));
        assert!(!self.path.join(id).join("context").exists(), "the context is left");
        assert_eq!(self.fake.is_clean(), Ok(()));
        (self.builds.get(id).expect("there"), all)
    }

    async fn built(&self, request: BuildRequest) -> (Build, Vec<Event>) {
        let id = self.begin(request).await;
        self.end(&id).await
    }
}

fn output(events: &[Event]) -> Vec<(OutputStream, &str)> {
    let one = |e: &'_ Event| match &e.kind {
        EventKind::Output { stream, text } => Some((*stream, text.clone().leak() as &str)),
        _ => None,
    };
    events.iter().filter_map(one).collect()
}

fn steps(events: &[Event]) -> Vec<(u32, bool)> {
    let one = |e: &Event| match e.kind {
        EventKind::Step { step, cached, .. } => Some((step, cached)),
        _ => None,
    };
    events.iter().filter_map(one).collect()
}

fn why(build: &Build) -> (Reason, &str, Option<u64>) {
    assert_eq!(build.state, BuildState::Failed);
    let failure = build.failure.as_ref().expect("a reason");
    (failure.reason, &failure.message, failure.line)
}

#[tokio::test]
async fn a_recipe_becomes_a_template() {
    let bed = bed().await;
    let mut asked = request(RECIPE);
    asked.tags = vec![name("app:stable")];
    let (build, events) = bed.built(asked).await;
    assert_eq!((build.state, build.template.as_deref()), (BuildState::Succeeded, Some("app:v1")), "{events:?}");
    assert_eq!((build.steps, build.steps_done, build.steps_cached), (4, 4, 0));
    assert_eq!(output(&events), [(OutputStream::Stderr, "warn"), (OutputStream::Stdout, "hello $VERSION")]);
    assert_eq!(steps(&events), [(1, false), (2, false), (3, false), (4, false)]);
    bed.fake.world(|w| {
        let (version, made) = &w.versions[0];
        assert_eq!(version.tags, [name("app:stable"), name("app")]);
        assert_eq!((made.size, made.origin.as_str(), made.base.as_str()), (SizeClass::Small, "python", "python"));
        assert_eq!(made.settings.start(), ["python3", "src/app.py"]);
        let disk = &w.snapshots[&made.snapshot];
        let at = |path: &str| {
            let t = &disk[path];
            (t.data.as_deref().map(|d| String::from_utf8_lossy(d).into_owned()), t.owner, t.mode)
        };
        assert_eq!(at("/srv"), (None, (0, 0), 0o755));
        assert_eq!(at("/srv/app/src"), (None, (1000, 77), 0o755));
        assert_eq!(at("/srv/app/src/app.py"), (Some("print()".to_owned()), (1000, 77), 0o644));
        assert_eq!(at("/srv/app/src/lib/a.py"), (Some("a".to_owned()), (1000, 77), 0o644));
        assert_eq!(at("/usr/local/run"), (Some("#!".to_owned()), (0, 0), 0o700));
        assert_eq!(at("/etc/mainbrella/commands").0.as_deref(), Some("/srv/app\0MODE=prod\0PATH=/usr/bin\0"));
        assert_eq!(at("/etc/mainbrella/user").0.as_deref(), Some("app"));
        assert_eq!(at("/etc/profile.d/zz-image-path.sh").0.as_deref(), Some("export PATH='/usr/bin'\n"));
        let run = &w.runs[0];
        assert_eq!((run.workdir.as_str(), run.user.as_deref()), ("/srv/app", None));
        assert_eq!((run.env["MODE"].as_str(), run.env["VERSION"].as_str()), ("prod", "1"));
        assert!(run.timeout_ms <= 60_000);
        // Four steps and the template.
        assert_eq!((w.steps.len(), w.snapshots.len()), (4, 5));
        assert_eq!(w.orders[0].egress, EgressPolicy::Open);
    });
}

#[tokio::test]
async fn nothing_is_built_twice() {
    let bed = bed().await;
    bed.built(request(RECIPE)).await;
    let machines = bed.fake.world(|w| w.orders.len());
    let mut again = request(RECIPE);
    again.tags = vec![name("app:same")];
    let (build, events) = bed.built(again).await;
    assert_eq!(build.template.as_deref(), Some("app:v1"));
    assert_eq!((build.steps_cached, build.steps), (4, 4));
    assert_eq!(bed.fake.world(|w| (w.orders.len(), w.versions.len())), (machines, 1));
    assert!(steps(&events).iter().all(|(_, cached)| *cached));
    assert!(bed.fake.world(|w| w.versions[0].0.tags.contains(&name("app:same"))));
    // Another argument: from the step that has it on.
    let mut other = request(RECIPE);
    other.arguments.insert("VERSION".to_owned(), "2".to_owned());
    let (build, events) = bed.built(other).await;
    assert_eq!(build.template.as_deref(), Some("app:v2"));
    assert_eq!(steps(&events), [(1, true), (2, true), (3, true), (4, false)]);
    assert!(bed.fake.world(|w| w.orders.last().unwrap().snapshot.is_some()));
    // A command that is another: every step is cached but the settings differ.
    let (build, events) = bed.built(request(&RECIPE.replace("app.py", "other.py"))).await;
    assert_eq!((build.steps_cached, build.template.as_deref()), (4, Some("app:v3")));
    assert!(steps(&events).iter().all(|(_, cached)| *cached));
    // Without the cache all is done anew, and nothing is left of what it replaces.
    let mut anew = request(RECIPE);
    anew.no_cache = true;
    let (build, events) = bed.built(anew).await;
    assert!(steps(&events).iter().all(|(_, cached)| !*cached));
    assert_eq!(build.template.as_deref(), Some("app:v4"));
    // One version without a tag is kept beside the tagged ones.
    let left = bed.fake.world(|w| w.versions.iter().map(|(v, _)| v.name.to_string()).collect::<Vec<_>>());
    assert_eq!(left, ["app:v1", "app:v3", "app:v4"]);
    // In another size nothing fits.
    let mut larger = request(RECIPE);
    larger.size = Some(SizeClass::Large);
    let (_, events) = bed.built(larger).await;
    assert!(steps(&events).iter().all(|(_, cached)| !*cached));
}

#[tokio::test]
async fn a_template_may_be_built_on_another_and_on_an_image() {
    let bed = bed().await;
    bed.built(request(RECIPE)).await;
    let mut on = request("FROM app\nRUN say more\nUSER root\n");
    on.name = name("more");
    let (build, _) = bed.built(on.clone()).await;
    assert_eq!(build.template.as_deref(), Some("more:v1"));
    bed.fake.world(|w| {
        let order = w.orders.last().unwrap();
        assert_eq!(order.snapshot, Some(w.versions[0].1.snapshot));
        assert_eq!(order.template.as_str(), "python");
        let disk = &w.snapshots[&w.versions[1].1.snapshot];
        assert!(disk.contains_key("/srv/app/src/app.py") && !disk.contains_key("/etc/mainbrella/user"));
    });
    on.size = Some(SizeClass::Micro);
    let (build, _) = bed.built(on).await;
    assert!(matches!(why(&build), (Reason::Base, text, Some(1)) if text.contains("size small")), "{build:?}");
    let image = request("FROM registry.example.org/app:1\nRUN say x");
    let (build, events) = bed.built(image.clone()).await;
    assert_eq!(build.state, BuildState::Succeeded, "{build:?}");
    let told = |text: &str| events.iter().any(|e| matches!(&e.kind, EventKind::Notice { text: t } if t.contains(text)));
    assert!(told("fetching registry.example.org/app:1") && told("layer of"));
    let imports = || bed.fake.world(|w| w.calls.iter().filter(|c| **c == "import").count());
    bed.built(image.clone()).await;
    assert_eq!(imports(), 1);
    bed.built(BuildRequest { pull: true, ..image }).await;
    assert_eq!(imports(), 2);
    for (from, says) in
        [("debian:12", "no default registry"), ("local:/etc", "template import"), ("no/registry", "registry")]
    {
        let (build, _) = bed.built(request(&format!("FROM {from}\n"))).await;
        let (reason, text, line) = why(&build);
        assert!(reason == Reason::Base && text.contains(says) && line == Some(1), "{from}: {text}");
    }
}

#[tokio::test]
async fn whatever_fails_the_build_fails_and_nothing_is_left() {
    for (call, reason) in [
        ("template", Reason::Base),
        ("versions", Reason::Internal),
        ("machine", Reason::Machine),
        ("unpack", Reason::Step),
        ("run", Reason::Step),
        ("save", Reason::Machine),
        ("keep_step", Reason::Machine),
        ("publish", Reason::Internal),
        ("prepare", Reason::Start),
        ("tag", Reason::Internal),
    ] {
        let bed = bed().await;
        bed.fake.fails(call);
        let (build, _) = bed.built(request(RECIPE)).await;
        assert_eq!(why(&build).0, reason, "{call}: {build:?}");
        assert_eq!(bed.fake.world(|w| w.versions.len()), usize::from(call == "tag"), "{call}");
        // Without the fault it goes on from what is cached.
        bed.fake.world(|w| w.at = None);
        let (build, _) = bed.built(request(RECIPE)).await;
        assert_eq!(build.state, BuildState::Succeeded, "{call}: {build:?}");
    }
}

#[tokio::test]
async fn a_build_is_cancelled_wherever_it_is() {
    let calls = {
        let bed = bed().await;
        bed.built(request(RECIPE)).await;
        bed.fake.world(|w| w.calls.clone())
    };
    for (n, call) in calls.iter().enumerate() {
        let bed = bed().await;
        let id = bed.builds.create(request(RECIPE)).await.unwrap().id;
        let (builds, at) = (bed.builds.clone(), id.clone());
        bed.fake.world(|w| {
            w.at = Some(Arc::new(move |_, now| {
                if now == n {
                    let (builds, id) = (builds.clone(), at.clone());
                    // The cancel itself is done before the call goes on.
                    futures::executor::block_on(async move { builds.cancel(&id).await }).unwrap();
                }
                None
            }));
        });
        bed.send(&id, &FILES).await;
        let (build, _) = bed.end(&id).await;
        // Once tags move, it is done.
        let over = calls[..=n].contains(&"tag");
        let want = if over { BuildState::Succeeded } else { BuildState::Cancelled };
        assert_eq!(build.state, want, "{call} ({n})");
        assert_eq!(bed.fake.world(|w| w.versions.len()), usize::from(over), "{call} ({n})");
    }
}

#[tokio::test]
async fn a_command_that_fails_hangs_or_is_killed_fails_the_build() {
    let bed = bed().await;
    let (build, _) = bed.built(request("FROM python\n\nRUN fail 3\n")).await;
    assert_eq!(why(&build), (Reason::Step, "the command exited with code 3", Some(3)));
    assert_eq!(build.failure.unwrap().instruction.as_deref(), Some("RUN fail 3"));
    let (build, _) = bed.built(request("FROM python\nRUN killed\n")).await;
    assert!(why(&build).1.contains("signal 9"));
    let id = bed.begin(request("FROM python\nRUN hang\n")).await;
    bed.builds.cancel(&id).await.unwrap();
    assert_eq!(bed.end(&id).await.0.state, BuildState::Cancelled);
    for (recipe, says) in [
        ("FROM python\nCOPY --chown=nobody run.sh /x\n", "no user `nobody`"),
        ("FROM python\nCOPY --chown=0:nobody run.sh /x\n", "no group `nobody`"),
        ("FROM python\nWORKDIR /etc/passwd/x\n", "/etc/passwd in the machine is not a directory"),
    ] {
        let (build, _) = bed.built(request(recipe)).await;
        let (reason, text, line) = why(&build);
        assert!(reason == Reason::Step && text.contains(says) && line == Some(2), "{recipe}: {text}");
    }
    let (build, _) = bed.built(request("FROM python\nADD x y\nCOPY none /x\n")).await;
    assert_eq!(why(&build).0, Reason::Recipe);
}

#[tokio::test(start_paused = true)]
async fn a_build_has_a_time_limit_and_a_context_is_not_waited_for_for_ever() {
    let bed = bed().await;
    let id = bed.begin(request("FROM python\nRUN hang\n")).await;
    let (build, _) = bed.end(&id).await;
    assert!(matches!(why(&build), (Reason::TimedOut, text, Some(2)) if text.contains("60 s")), "{build:?}");
    let id = bed.builds.create(request(RECIPE)).await.unwrap().id;
    let (build, _) = bed.end(&id).await;
    assert_eq!(why(&build).0, Reason::Context);
    let refused = bed.builds.begin_context(&id).await.err();
    assert!(matches!(refused, Some(BuildsError::NotAwaiting { state: BuildState::Failed, .. })));
}

#[tokio::test]
async fn a_flood_of_output_is_bounded() {
    let bed = bed().await;
    let (build, events) = bed.built(request("FROM python\nRUN flood\n")).await;
    assert_eq!(build.state, BuildState::Succeeded);
    let size = std::fs::metadata(bed.path.join(&build.id).join("log")).unwrap().len();
    assert!(size < 17 * 1024 * 1024, "{size}");
    assert!(events.iter().any(|e| matches!(&e.kind, EventKind::Notice { text } if text.contains("left out"))));
}

#[tokio::test]
async fn a_file_that_changes_under_way_fails_the_build() {
    let bed = bed().await;
    let id = bed.builds.create(request("FROM python\nRUN say x\nCOPY run.sh /x\n")).await.unwrap().id;
    let file = bed.path.join(&id).join("context/run.sh");
    bed.fake.world(|w| {
        w.at = Some(Arc::new(move |call, _| {
            if call == "run" {
                std::fs::write(&file, "??").unwrap();
            }
            None
        }));
    });
    bed.send(&id, &FILES).await;
    let (build, _) = bed.end(&id).await;
    assert!(matches!(why(&build), (Reason::Context, text, Some(3)) if text.contains("run.sh")), "{build:?}");
}

#[tokio::test]
async fn a_cached_step_that_is_damaged_is_done_anew() {
    let bed = bed().await;
    bed.built(request("FROM python\nRUN say one\nRUN say two\n")).await;
    bed.fake.world(|w| {
        let version = w.versions[0].1.snapshot;
        w.snapshots.retain(|key, _| *key == version);
    });
    let (build, events) = bed.built(request("FROM python\nRUN say one\nRUN say two\nRUN say three\n")).await;
    assert_eq!(build.state, BuildState::Succeeded, "{build:?}");
    assert_eq!(steps(&events), [(1, false), (2, false), (3, false)]);
}

#[tokio::test]
async fn the_cache_has_a_limit() {
    let dir = tempfile::tempdir().unwrap();
    let (fake, path) = (Fake::new(), dir.path().join("builds"));
    let builds = open(&fake, &path, Limits { cached_steps: 2, ..LIMITS }).await;
    let bed = Bed { fake, builds, _dir: dir, path };
    bed.built(request("FROM python\nRUN say one\nRUN say two\nRUN say three\n")).await;
    assert_eq!(bed.fake.world(|w| w.steps.len()), 2);
    let (_, events) = bed.built(request("FROM python\nRUN say one\nRUN say two\nRUN say four\n")).await;
    assert_eq!(steps(&events), [(1, true), (2, true), (3, false)]);
}

#[tokio::test]
async fn contexts_are_checked_and_a_second_try_is_possible() {
    let bed = bed().await;
    let mut asked = request("");
    (asked.recipe, asked.recipe_path) = (None, "deploy/Recipe".to_owned());
    let id = bed.builds.create(asked.clone()).await.unwrap().id;
    let mut upload = bed.builds.begin_context(&id).await.unwrap();
    assert!(matches!(bed.builds.begin_context(&id).await.err(), Some(BuildsError::Sending(_))));
    let refused = upload.push(Bytes::from(tar(&[("../x", "")]))).await;
    assert!(matches!(refused, Err(BuildsError::Context(ContextError::Archive(_)))), "{refused:?}");
    assert!(upload.finish().await.is_err());
    let upload = bed.builds.begin_context(&id).await.unwrap();
    assert!(matches!(upload.finish().await, Err(BuildsError::Context(ContextError::Archive(_)))));
    assert_eq!(bed.builds.get(&id).unwrap().state, BuildState::AwaitingContext);
    bed.send(&id, &[("deploy/Recipe", "FROM python\nRUN say x\n")]).await;
    assert_eq!(bed.end(&id).await.0.state, BuildState::Succeeded);
    let id = bed.begin(asked.clone()).await;
    let (build, _) = bed.end(&id).await;
    assert!(matches!(why(&build), (Reason::Recipe, text, None) if text.contains("deploy/Recipe")), "{build:?}");
    let id = bed.builds.create(asked).await.unwrap().id;
    let mut upload = bed.builds.begin_context(&id).await.unwrap();
    bed.builds.cancel(&id).await.unwrap();
    assert!(matches!(upload.push(Bytes::from(tar(&FILES))).await, Err(BuildsError::NotAwaiting { .. })));
    assert!(!bed.path.join(&id).join("context").exists());
    assert!(matches!(bed.builds.get("none"), Err(BuildsError::NotFound(_))));
}

#[tokio::test]
async fn builds_wait_for_their_turn_up_to_a_limit() {
    let bed = bed().await;
    let first = bed.begin(request("FROM python\nRUN hang\n")).await;
    while bed.fake.world(|w| w.machines) == 0 {
        tokio::task::yield_now().await;
    }
    let second = bed.begin(request("FROM python\nRUN say x\n")).await;
    let third = bed.begin(request("FROM python\nRUN say y\n")).await;
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert_eq!(bed.builds.get(&second).unwrap().state, BuildState::Queued);
    bed.builds.cancel(&third).await.unwrap();
    for _ in 3..=mainbrella_types::limits::BUILDS_WAITING_MAX + 1 {
        if bed.builds.create(request(RECIPE)).await.is_err() {
            break;
        }
    }
    assert!(matches!(bed.builds.create(request(RECIPE)).await, Err(BuildsError::TooMany(_))));
    bed.builds.cancel(&first).await.unwrap();
    while !bed.builds.get(&second).unwrap().state.is_final() {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    assert_eq!(bed.builds.get(&second).unwrap().state, BuildState::Succeeded);
    assert_eq!(bed.builds.get(&third).unwrap().state, BuildState::Cancelled);
    assert_eq!(bed.fake.world(|w| w.most_machines), 1);
}

#[tokio::test]
async fn after_a_restart_what_was_cut_off_has_failed() {
    let bed = bed().await;
    bed.built(request(RECIPE)).await;
    let running = bed.begin(request("FROM python\nRUN say x\nRUN hang\n")).await;
    let mut reader = bed.builds.events(&running, 0).unwrap();
    let mut seen = 0;
    while seen < 2 {
        seen += reader.next(100).await.unwrap().iter().filter(|e| matches!(e.kind, EventKind::Step { .. })).count();
    }
    let waiting = bed.builds.create(request(RECIPE)).await.unwrap().id;
    // The process is gone; another opens the same folder.
    let again = open(&bed.fake, &bed.path, LIMITS).await;
    for id in [&running, &waiting] {
        assert_eq!(why(&again.get(id).unwrap()).0, Reason::Interrupted);
        let events = again.events(id, 0).unwrap().next(1000).await.unwrap();
        assert!(matches!(events.last().unwrap().kind, EventKind::Done { state: BuildState::Failed, .. }));
        assert!(events.iter().enumerate().all(|(n, e)| e.sequence == n as u64 + 1));
    }
    bed.fake.world(|w| assert_eq!(w.stopped_for, [running.clone(), waiting.clone()]));
    assert_eq!(again.list().len(), 3);
    assert_eq!(again.list()[2].state, BuildState::Succeeded);
}

#[tokio::test]
async fn a_version_that_was_not_ready_when_the_service_was_killed_is_none() {
    let bed = bed().await;
    let (told, _) = bed.built(request(RECIPE)).await;
    bed.fake.world(|w| w.prepare_hangs = true);
    bed.begin(request("FROM python\nRUN say x\n")).await;
    while bed.fake.world(|w| w.versions.len()) < 2 {
        tokio::task::yield_now().await;
    }
    // The process is gone; another opens the same folder. What was told stays, though no tag points to it any more.
    bed.fake.world(|w| w.versions[0].0.tags.clear());
    let again = open(&bed.fake, &bed.path, LIMITS).await;
    assert_eq!(why(&again.list()[0]).0, Reason::Interrupted);
    let left = bed.fake.world(|w| w.versions.iter().map(|(v, _)| v.name.to_string()).collect::<Vec<_>>());
    assert_eq!(left, [told.template.unwrap()]);
    assert_eq!(bed.fake.is_clean(), Ok(()));
}

#[tokio::test]
async fn the_end_of_the_service_ends_builds() {
    let bed = bed().await;
    let id = bed.begin(request("FROM python\nRUN hang\n")).await;
    while bed.fake.world(|w| w.machines) == 0 {
        tokio::task::yield_now().await;
    }
    bed.builds.close().await;
    assert_eq!(why(&bed.builds.get(&id).unwrap()).0, Reason::Interrupted);
    assert_eq!(bed.fake.is_clean(), Ok(()));
    assert!(matches!(bed.builds.create(request(RECIPE)).await, Err(BuildsError::Closing)));
}
