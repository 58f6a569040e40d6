//! What this machine has and lacks. Looks itself; needs no running service.

mod agent;
mod data;
mod host;
mod jail;
mod network;
mod service;

use serde::Serialize;

use crate::context::Context;

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Works, with less.
    Warn,
    /// Does not work.
    Fail,
}

/// One thing that was looked at.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Check {
    /// The group it belongs to.
    pub area: &'static str,
    /// What was looked at.
    pub name: String,
    /// How it stands.
    pub level: Level,
    /// What was found.
    pub detail: String,
    /// What to do; empty when nothing.
    pub fix: String,
}

/// Everything that was looked at.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// Nothing failed.
    pub ok: bool,
    /// In the order they are shown.
    pub checks: Vec<Check>,
}

impl Check {
    fn ok(area: &'static str, name: &str, detail: impl Into<String>) -> Self {
        Self { area, name: name.to_owned(), level: Level::Ok, detail: detail.into(), fix: String::new() }
    }

    fn warn(area: &'static str, name: &str, detail: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { area, name: name.to_owned(), level: Level::Warn, detail: detail.into(), fix: fix.into() }
    }

    fn fail(area: &'static str, name: &str, detail: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { area, name: name.to_owned(), level: Level::Fail, detail: detail.into(), fix: fix.into() }
    }
}

/// Looks at everything.
pub async fn examine(context: &Context) -> Report {
    let service = service::ask(context).await;
    let data_dir = context.data_dir();
    let verdict = service.accelerator.clone();
    let (url_checks, dir) = (service.checks, data_dir.ok());
    let mut checks = tokio::task::spawn_blocking(move || {
        let mut checks = host::checks();
        checks.extend(host::accelerator(dir.as_deref(), verdict));
        checks.extend(jail::checks());
        checks.extend(network::checks());
        checks.extend(data::checks(dir.as_deref()));
        checks
    })
    .await
    .unwrap_or_else(|_| vec![Check::fail("This program", "doctor", "an examination broke off", "Report this.")]);
    checks.extend(url_checks);
    Report { ok: checks.iter().all(|c| c.level != Level::Fail), checks }
}
