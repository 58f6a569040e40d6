//! What machines of a template are set to, from one crate's words to another's.

use std::time::Duration;

use mainbrella_engine::image::oci::{Health, ImageConfig};
use mainbrella_engine::image::{BuiltProbe, BuiltSettings};
use mainbrella_recipe::{Probe, Settings};

/// Directory commands begin in where nobody says otherwise.
pub(super) const WORKSPACE: &str = "/workspace";

fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// As a version remembers them.
pub(super) fn to_built(s: &Settings) -> BuiltSettings {
    BuiltSettings {
        env: s.env.clone(),
        workdir: s.workdir.clone(),
        user: s.user.clone(),
        entrypoint: s.entrypoint.clone(),
        cmd: s.cmd.clone(),
        shell: s.shell.clone(),
        ports: s.ports.iter().map(ToString::to_string).collect(),
        labels: s.labels.clone(),
        probe: s.probe.as_ref().map(|p| BuiltProbe {
            argv: p.argv.clone(),
            interval_ms: ms(p.interval),
            timeout_ms: ms(p.timeout),
            start_period_ms: ms(p.start_period),
            start_interval_ms: ms(p.start_interval),
            retries: p.retries,
        }),
    }
}

/// Of a version that recipes begin with.
pub(super) fn of_built(s: &BuiltSettings) -> Settings {
    Settings {
        env: s.env.clone(),
        workdir: s.workdir.clone(),
        user: s.user.clone(),
        entrypoint: s.entrypoint.clone(),
        cmd: s.cmd.clone(),
        shell: s.shell.clone(),
        ports: s.ports.iter().filter_map(|p| p.parse().ok()).collect(),
        labels: s.labels.clone(),
        probe: s.probe.as_ref().map(|p| Probe {
            argv: p.argv.clone(),
            interval: Duration::from_millis(p.interval_ms),
            timeout: Duration::from_millis(p.timeout_ms),
            start_period: Duration::from_millis(p.start_period_ms),
            start_interval: Duration::from_millis(p.start_interval_ms),
            retries: p.retries,
        }),
    }
}

/// Of an image of a container that became a template.
pub(super) fn of_image(config: &ImageConfig) -> Settings {
    let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let root = |user: &String| matches!(user.as_str(), "root" | "0" | "root:root" | "0:0");
    let plain = Settings::default();
    let shell = if config.shell.is_empty() { plain.shell } else { config.shell.clone() };
    let workdir = some(&config.workdir).filter(|dir| dir.starts_with('/'));
    Settings {
        env: config.env.iter().cloned().collect(),
        workdir: workdir.unwrap_or_else(|| "/".to_owned()),
        user: some(&config.user).filter(|user| !root(user)),
        entrypoint: config.entrypoint.clone(),
        cmd: config.cmd.clone(),
        probe: config.health.as_ref().and_then(|health| probe(health, &shell)),
        shell,
        ports: config.ports.iter().filter_map(|p| p.parse().ok()).collect(),
        labels: config.labels.clone(),
    }
}

fn probe(health: &Health, shell: &[String]) -> Option<Probe> {
    let argv = if health.line { shell.iter().chain(&health.test).cloned().collect() } else { health.test.clone() };
    if argv.is_empty() {
        return None;
    }
    let plain = Probe::new(argv);
    // An image says nothing, or zero, for what it leaves to whoever runs it.
    let given = |value: Option<Duration>, plain: Duration| value.filter(|d| !d.is_zero()).unwrap_or(plain);
    Some(Probe {
        interval: given(health.interval, plain.interval),
        timeout: given(health.timeout, plain.timeout),
        start_period: given(health.start_period, plain.start_period),
        start_interval: given(health.start_interval, plain.start_interval),
        retries: health.retries.filter(|n| *n > 0).unwrap_or(plain.retries),
        ..plain
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_survive_being_kept() {
        let probe =
            Probe { retries: 7, start_period: Duration::from_millis(1500), ..Probe::new(vec!["true".to_owned()]) };
        let settings = Settings {
            env: [("A".to_owned(), "1".to_owned())].into(),
            user: Some("app:staff".to_owned()),
            cmd: vec!["serve".to_owned()],
            ports: ["80/tcp", "53/udp"].map(|p| p.parse().expect("a port")).into(),
            labels: [("k".to_owned(), "v".to_owned())].into(),
            probe: Some(probe),
            ..Settings::default()
        };
        assert_eq!(of_built(&to_built(&settings)), settings);
    }

    #[test]
    fn what_an_image_says_is_taken_over() {
        let config = ImageConfig {
            env: vec![("PATH".to_owned(), "/bin".to_owned())],
            user: "0:0".to_owned(),
            ports: vec!["80/tcp".to_owned(), "nonsense".to_owned()],
            health: Some(Health {
                test: vec!["curl x".to_owned()],
                line: true,
                interval: Some(Duration::ZERO),
                timeout: None,
                start_period: None,
                start_interval: None,
                retries: Some(0),
            }),
            ..ImageConfig::default()
        };
        let settings = of_image(&config);
        assert_eq!((settings.user, settings.workdir.as_str(), settings.ports.len()), (None, "/", 1));
        let probe = settings.probe.expect("a probe");
        assert_eq!(probe.argv, ["/bin/sh", "-c", "curl x"]);
        assert_eq!((probe.interval, probe.retries), (Duration::from_secs(30), 3));
    }
}
