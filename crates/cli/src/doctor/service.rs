//! The service: does it answer, does the key work.

use std::time::Duration;

use mainbrella_client::{ApiKey, Client};

use super::Check;
use super::host::Told;
use crate::context::{Context, KeySource};

const SERVICE: &str = "Service";
const PATIENCE: Duration = Duration::from_secs(5);

/// What was found out.
pub struct Found {
    pub checks: Vec<Check>,
    /// What the service says of its accelerator.
    pub accelerator: Option<Told>,
}

/// Asks the service, if there is one.
pub async fn ask(context: &Context) -> Found {
    let found = |checks| Found { checks, accelerator: None };
    let client = match Client::new(context.url(), None) {
        Ok(c) => c.with_answer_timeout(PATIENCE),
        Err(e) => return found(vec![Check::fail(SERVICE, "address", e.to_string(), e.hint())]),
    };
    let health = match client.health().await {
        Ok(h) if h.status == "ok" => h,
        Ok(h) => {
            return found(vec![Check::fail(
                SERVICE,
                "answers",
                format!("{} says {}", client.url(), h.status),
                "Read its log.",
            )]);
        }
        Err(e) => {
            let fix = "If it should run: mainbrella serve (or ./run up).";
            return found(vec![Check::warn(SERVICE, "answers", format!("{}: {e}", client.url()), fix)]);
        }
    };
    let mut checks = Vec::new();
    let detail = format!("{}, version {}", client.url(), health.version);
    checks.push(if health.version == env!("CARGO_PKG_VERSION") {
        Check::ok(SERVICE, "answers", detail)
    } else {
        let fix = format!("This command has version {}; install the same on both sides.", env!("CARGO_PKG_VERSION"));
        Check::warn(SERVICE, "answers", detail, fix)
    });
    let (key, source) = match context.key() {
        Ok(found) => found,
        Err(e) => {
            checks.push(Check::warn(SERVICE, "key", e.message, e.hint));
            return found(checks);
        }
    };
    let place = match source {
        KeySource::File(path) => format!("the key in {}", path.display()),
        KeySource::Environment => "the key in MAINBRELLA_API_KEY".to_owned(),
    };
    let asked = async {
        Client::new(context.url(), Some(ApiKey::new(&key)?))?.with_answer_timeout(PATIENCE).capabilities().await
    };
    match asked.await {
        Ok(capabilities) => {
            checks.push(Check::ok(SERVICE, "key", format!("{place} works")));
            checks.push(if capabilities.previews.supported {
                Check::ok(SERVICE, "previews", "issued".to_owned())
            } else {
                let fix = "If ports of machines should be reachable: start it with an address in --preview-listen.";
                Check::warn(SERVICE, "previews", "not issued".to_owned(), fix)
            });
            let isolation = capabilities.isolation;
            let accelerator = isolation.accelerator.map(|accelerator| Told { accelerator, reason: isolation.reason });
            Found { checks, accelerator }
        }
        Err(e) => {
            checks.push(Check::fail(SERVICE, "key", format!("{place} does not work: {e}"), e.hint()));
            found(checks)
        }
    }
}
