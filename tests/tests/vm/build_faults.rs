//! The service is killed while it builds, again and again: nothing acknowledged is lost, nothing is left over.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use mainbrella_client::api::{BuildState, CreateMachine};
use mainbrella_tests::Service;
use tokio::time::{Instant, sleep};

use crate::images::{client_command, command};

const PATIENCE: Duration = Duration::from_secs(60);

fn recipe(round: usize) -> String {
    format!(
        "FROM python\nWORKDIR /srv\nRUN echo first > first\nRUN echo {round} > round && sleep 0.3\nRUN head -c 3000000 /dev/urandom > big && sha256sum big > sum\n\
         CMD [\"sh\", \"-c\", \"echo up; sleep 10000\"]\n"
    )
}

/// Snapshots that a manifest below `dir` names, as `pick` finds them in it.
fn named(dir: &Path, pick: impl Fn(&serde_json::Value) -> Option<&str>) -> BTreeSet<String> {
    let entries = fs::read_dir(dir).map(|entries| entries.flatten().collect::<Vec<_>>()).unwrap_or_default();
    let texts = entries.iter().filter_map(|entry| {
        let path = entry.path();
        let file = if path.is_dir() { path.join("manifest.json") } else { path };
        fs::read(file).ok()
    });
    let values = texts.filter_map(|text| serde_json::from_slice::<serde_json::Value>(&text).ok());
    values.filter_map(|value| pick(&value).map(str::to_owned)).collect()
}

/// What is on the host, and what is on record of it.
fn snapshots(data: &Path) -> (BTreeSet<String>, BTreeSet<String>) {
    let there = fs::read_dir(data.join("snapshots")).expect("list").flatten();
    let there = there.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    let steps = named(&data.join("steps"), |step| step["snapshot"].as_str());
    let versions = named(&data.join("templates"), |version| version["made"]["snapshot"].as_str());
    (there, steps.union(&versions).cloned().collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_killed_while_it_builds_goes_on_with_what_was_kept_and_leaves_nothing_else() {
    let mut service = Service::start().await;
    let context = tempfile::tempdir().expect("a folder");
    let mut delay = Duration::from_millis(60);
    let mut interrupted = 0;
    for round in 0..9 {
        fs::write(context.path().join("Dockerfile"), recipe(round)).expect("written");
        let dir = context.path().display().to_string();
        let mut building = client_command(&service, &["template", "build", "app", "--from", &dir, "--size", "micro"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the command");
        sleep(delay).await;
        delay = delay * 8 / 5;
        service.kill();
        building.kill().expect("killed");
        building.wait().expect("over");
        service.launch().await;
        let until = Instant::now() + PATIENCE;
        loop {
            let builds = service.client().builds().await.expect("builds").builds;
            let over = builds
                .iter()
                .all(|b| matches!(b.state, BuildState::Failed | BuildState::Succeeded | BuildState::AwaitingContext));
            let living = service.list().await.iter().filter(|m| !m.state.is_final()).count();
            let (there, on_record) = snapshots(service.data());
            if over && living == 0 && there == on_record {
                interrupted = builds.iter().filter(|b| b.state == BuildState::Failed).count();
                break;
            }
            assert!(Instant::now() < until, "round {round}: {builds:?} {living} {there:?} {on_record:?}");
            sleep(Duration::from_millis(100)).await;
        }
    }
    assert!(interrupted >= 4, "{interrupted} builds were cut off");
    // What was kept is whole: the steps before the one that changes, and every version that there is.
    let dir = context.path().display().to_string();
    let made = command(&service, &["template", "build", "app", "--from", &dir, "--size", "micro"]);
    let said = format!("{}{}", String::from_utf8_lossy(&made.stdout), String::from_utf8_lossy(&made.stderr));
    assert!(made.status.success() && said.contains("(cached)"), "{said}");
    let versions: Vec<String> =
        service.client().templates().await.expect("list").templates.into_iter().map(|t| t.name).collect();
    for version in versions.iter().filter(|name| name.starts_with("app:v")) {
        let mut body = CreateMachine::new(version.as_str());
        body.size = "micro".to_owned();
        let machine = service.create(&body).await.expect("created");
        assert_eq!(
            machine.text("cd /srv && cat first && sha256sum -c sum && cat /var/log/mainbrella-start.log").await,
            "first\nbig: OK\nup\n"
        );
        machine.stop().await;
    }
    let removed = command(&service, &["template", "rm", "app", "--all"]);
    assert!(removed.status.success(), "{}", String::from_utf8_lossy(&removed.stderr));
    service.finish().await;
}
