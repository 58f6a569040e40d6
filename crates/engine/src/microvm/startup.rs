//! The start command of a template: started once, before the template is captured, and waited for until it is ready.

use std::time::Duration;

use connectrpc::ConnectError;
use mainbrella_guest_protocol::pb::__buffa::view::oneof::job_event::Event as Told;
use mainbrella_guest_protocol::{GuestClient, pb};
use mainbrella_types::limits::TEMPLATE_READY_MAX_MS;
use tokio::time::Instant;

use super::boot::QUICK;
use super::content::StartCommand;
use crate::error::DriverError;
use crate::image::BuiltProbe;
use crate::machine::START_JOB;

/// Where the command's output goes.
pub const OUTPUT: &str = "/var/log/mainbrella-start.log";
/// Causes of an exit, as the guest numbers them.
const EXITED: i32 = 1;
const TIMED_OUT: i32 = 3;
/// What is shown of it when the command fails, bytes of its end.
const OUTPUT_SHOWN: u64 = 4096;
/// The same of its probe's last try, of each stream.
const PROBE_SHOWN: u64 = 1024;
/// Longest and shortest pause between two looks.
const LOOK_MOST: Duration = Duration::from_secs(1);
const LOOK_LEAST: Duration = Duration::from_millis(100);
/// How long ports are waited for where there is no probe.
const PORTS_PATIENCE: Duration = Duration::from_secs(120);
/// How long a command without probe and ports is watched. One that ends well meanwhile is no failure.
const ALIVE: Duration = Duration::from_secs(2);
/// Longest time for what runs to answer once more.
const EXERCISE_PATIENCE: Duration = Duration::from_secs(10);

/// Starts `command` and returns when it is ready.
///
/// # Errors
/// `StartFailed` when it cannot be started, ends, or is not ready in time.
pub(super) async fn bring_up(client: &GuestClient, command: &StartCommand) -> Result<(), DriverError> {
    let mut probe_said = String::new();
    let Err(why) = run(client, command, &mut probe_said).await else { return Ok(()) };
    let mut output = output(client).await;
    if !probe_said.is_empty() {
        output.push_str("\nThe probe said:\n");
        output.push_str(&probe_said);
    }
    Err(DriverError::StartFailed { why, output: output.trim_start().to_owned() })
}

async fn run(client: &GuestClient, command: &StartCommand, probe_said: &mut String) -> Result<(), String> {
    let request = pb::StartJobRequest {
        job_id: START_JOB.to_owned(),
        argv: command.argv.iter().map(|a| a.clone().into_bytes()).collect(),
        output_file: OUTPUT.as_bytes().to_vec(),
        ..Default::default()
    };
    let lost = |e: ConnectError| format!("the guest did not take it: {e}");
    let mut events = client.streams().run_job(request).await.map_err(lost)?;
    let started = tokio::time::timeout(QUICK, events.message()).await;
    match started.map_err(|_| "it was not started in time".to_owned())?.map_err(lost)? {
        Some(event) => match &event.view().event {
            Some(Told::Started(_)) => {}
            Some(Told::NotStarted(failed)) => {
                return Err(not_started(&command.argv, failed.stage, failed.errno));
            }
            _ => return Err("the guest said something else than that it was started".to_owned()),
        },
        None => return Err("the guest did not say that it was started".to_owned()),
    }
    let ended = async {
        loop {
            match events.message().await.map_err(lost)? {
                Some(event) => {
                    if let Some(Told::Exit(exit)) = &event.view().event {
                        match exit.cause.to_i32() {
                            // It may have left something running; or it is the shell of an image that nobody talks to.
                            EXITED if exit.code == 0 => std::future::pending().await,
                            EXITED => return Err(format!("it ended with code {}", exit.code)),
                            _ => return Err(format!("it was ended by signal {}", exit.signal)),
                        }
                    }
                }
                None => return Err("it ended".to_owned()),
            }
        }
    };
    tokio::select! {
        biased;
        over = ended => over,
        ready = ready(client, command, probe_said) => ready,
    }
}

/// Has what runs answer once: its probe, else a connection to each of its ports. How that goes does not matter here.
pub(super) async fn exercise(client: &GuestClient, command: &StartCommand) {
    let answered = async {
        match &command.probe {
            Some(probe) => {
                // It must not go on when the VMM has become a machine.
                let most = u64::try_from(EXERCISE_PATIENCE.as_millis()).unwrap_or(u64::MAX);
                let probe = BuiltProbe { timeout_ms: probe.timeout_ms.min(most), ..probe.clone() };
                probe_once(client, &probe, 0, &mut String::new()).await
            }
            None => {
                for port in &command.ports {
                    let _ = client.dial(*port).await;
                }
                Ok(None)
            }
        }
    };
    match tokio::time::timeout(EXERCISE_PATIENCE + QUICK, answered).await {
        Ok(Ok(None)) => {}
        Ok(Ok(Some(why)) | Err(why)) => {
            tracing::debug!(why, "what a template runs does not answer its probe in a waiting VMM")
        }
        Err(_) => tracing::debug!("what a template runs did not answer its probe in time in a waiting VMM"),
    }
}

fn not_started(argv: &[String], stage: &str, errno: i32) -> String {
    let program = super::vmm::plain(argv.first().map_or("", String::as_str).as_bytes());
    let why = std::io::Error::from_raw_os_error(errno);
    match stage {
        "user" | "group" => "its user or group is not known in the template".to_owned(),
        "cwd" => format!("its directory cannot be entered: {why}"),
        _ => format!("`{program}` cannot be started: {why}"),
    }
}

async fn ready(client: &GuestClient, command: &StartCommand, probe_said: &mut String) -> Result<(), String> {
    if let Some(probe) = &command.probe {
        return probed(client, probe, probe_said).await;
    }
    if command.ports.is_empty() {
        tokio::time::sleep(ALIVE).await;
        return Ok(());
    }
    let until = Instant::now() + PORTS_PATIENCE;
    for port in &command.ports {
        let mut pause = LOOK_LEAST;
        while client.dial(*port).await.is_err() {
            if Instant::now() >= until {
                return Err(format!("nothing listens on its port {port} after {} s", PORTS_PATIENCE.as_secs()));
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LOOK_MOST);
        }
    }
    Ok(())
}

/// How long a probe may fail, all its tries together.
fn patience(probe: &BuiltProbe) -> Duration {
    let tries = probe.interval_ms.saturating_add(probe.timeout_ms).saturating_mul(u64::from(probe.retries));
    Duration::from_millis(probe.start_period_ms.saturating_add(tries).min(TEMPLATE_READY_MAX_MS))
}

/// Tries until the probe succeeds. A build waits for it: it is tried at least once a second, whatever interval it names for later.
async fn probed(client: &GuestClient, probe: &BuiltProbe, said: &mut String) -> Result<(), String> {
    let patience = patience(probe);
    let until = Instant::now() + patience;
    let most = Duration::from_millis(probe.interval_ms.min(probe.start_interval_ms)).clamp(LOOK_LEAST, LOOK_MOST);
    let mut pause = LOOK_LEAST;
    let mut tries = 0u32;
    loop {
        tries += 1;
        said.clear();
        let Some(code) = probe_once(client, probe, tries, said).await? else { return Ok(()) };
        if Instant::now() >= until {
            return Err(format!(
                "its probe failed {tries} times in {} s, the last time with {code}",
                patience.as_secs()
            ));
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(most);
    }
}

/// `None`: it is ready. Else how the probe failed.
async fn probe_once(
    client: &GuestClient,
    probe: &BuiltProbe,
    number: u32,
    said: &mut String,
) -> Result<Option<String>, String> {
    let lost = |e: ConnectError| format!("the guest did not run its probe: {e}");
    let request = pb::StartJobRequest {
        job_id: format!("probe-{number}"),
        argv: probe.argv.iter().map(|a| a.clone().into_bytes()).collect(),
        timeout_ms: probe.timeout_ms,
        output_limit: PROBE_SHOWN,
        forget_when_followed: true,
        ..Default::default()
    };
    let mut events = client.streams().run_job(request).await.map_err(lost)?;
    let mut outcome = None;
    let mut words = Vec::new();
    let follow = async {
        while let Some(event) = events.message().await.map_err(lost)? {
            match &event.view().event {
                Some(Told::NotStarted(failed)) => {
                    return Err(format!("its probe: {}", not_started(&probe.argv, failed.stage, failed.errno)));
                }
                Some(Told::Output(output)) if words.len() < 2 * PROBE_SHOWN as usize => {
                    words.extend_from_slice(output.data);
                }
                Some(Told::Exit(exit)) => outcome = Some((exit.cause.to_i32(), exit.code, exit.signal)),
                _ => {}
            }
        }
        Ok(())
    };
    let most = Duration::from_millis(probe.timeout_ms) + QUICK;
    let followed = tokio::time::timeout(most, follow).await.map_err(|_| "its probe does not end".to_owned());
    *said = super::vmm::plain(&words);
    followed??;
    Ok(match outcome {
        Some((EXITED, 0, _)) => None,
        Some((EXITED, code, _)) => Some(format!("code {code}")),
        Some((TIMED_OUT, ..)) => Some("a time-out".to_owned()),
        Some((_, _, signal)) => Some(format!("signal {signal}")),
        None => Some("no answer".to_owned()),
    })
}

/// The end of what the command said; empty when it cannot be read.
async fn output(client: &GuestClient) -> String {
    let read = async {
        let path = OUTPUT.as_bytes().to_vec();
        let stat =
            client.rpc().stat_file(pb::StatFileRequest { path: path.clone(), ..Default::default() }).await.ok()?;
        let offset = stat.view().size.saturating_sub(OUTPUT_SHOWN);
        let request = pb::ReadFileRequest { path, offset, length: OUTPUT_SHOWN, ..Default::default() };
        let mut chunks = client.streams().read_file(request).await.ok()?;
        let mut said = Vec::new();
        while let Ok(Some(chunk)) = chunks.message().await {
            said.extend_from_slice(chunk.view().data);
            if said.len() as u64 >= OUTPUT_SHOWN {
                break;
            }
        }
        said.truncate(usize::try_from(OUTPUT_SHOWN).unwrap_or(0));
        Some(super::vmm::plain(&said))
    };
    tokio::time::timeout(QUICK, read).await.ok().flatten().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_has_as_long_as_its_recipe_says_and_no_longer_than_any_may() {
        let probe = BuiltProbe {
            argv: vec!["true".to_owned()],
            interval_ms: 30_000,
            timeout_ms: 5_000,
            start_period_ms: 10_000,
            start_interval_ms: 5_000,
            retries: 3,
        };
        assert_eq!(patience(&probe), Duration::from_secs(10 + 3 * 35));
        let endless = BuiltProbe { retries: u32::MAX, interval_ms: u64::MAX, ..probe };
        assert_eq!(patience(&endless), Duration::from_millis(TEMPLATE_READY_MAX_MS));
    }
}
