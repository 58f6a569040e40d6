//! What would happen to a connection, and why, without making it.

use std::net::IpAddr;

use mainbrella_types::{Decision, Denial, DenyRule, EgressPolicy, HostName, Target};
use tokio::time::timeout;

use crate::resolve::{Outside, RESOLVE_DEADLINE, inward};

/// Addresses of a name that are told.
const ADDRESSES_MAX: usize = 16;

/// What would become of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is made.
    Allowed,
    /// It is made because the policy is a dry run.
    WouldDeny,
    /// It is not made.
    Denied,
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// What would become of it.
    pub outcome: Outcome,
    /// The rule of the allow-list that allows it, in its own form.
    pub allowed_by: Option<String>,
    /// What denies it, or would.
    pub denied_by: Option<DenyRule>,
    /// Why, in one sentence without a full stop.
    pub reason: String,
    /// Addresses of the name, where the policy lets it be resolved; each with what kind of address it is when no machine
    /// may reach it.
    pub addresses: Vec<(IpAddr, Option<&'static str>)>,
}

impl Explanation {
    /// What is said of a machine without a network.
    #[must_use]
    pub fn off() -> Self {
        Self { reason: Denial::Off.to_string(), ..Self::closed() }
    }

    /// What is said of a machine whose policy is not in force: it reaches nothing.
    #[must_use]
    pub fn closed() -> Self {
        Self {
            outcome: Outcome::Denied,
            allowed_by: None,
            denied_by: Some(DenyRule::Off),
            reason: "the policy could not be put in force, so the machine reaches nothing until it is set again"
                .to_owned(),
            addresses: Vec::new(),
        }
    }
}

/// Says what `policy` does to a connection to `target`. Names the policy allows are resolved through `outside`.
pub async fn explain(policy: &EgressPolicy, target: &Target<'_>, port: u16, outside: &dyn Outside) -> Explanation {
    let decision = policy.decide(target, port);
    let mut said = match &decision {
        Decision::Allowed(rule) => Explanation {
            outcome: Outcome::Allowed,
            allowed_by: rule.as_ref().map(ToString::to_string),
            denied_by: None,
            reason: match rule {
                Some(rule) => format!("the rule {rule} allows it"),
                None => "the policy is open: every public address may be reached".to_owned(),
            },
            addresses: Vec::new(),
        },
        Decision::WouldDeny(denial) | Decision::Denied(denial) => Explanation {
            outcome: if decision.lets_pass() { Outcome::WouldDeny } else { Outcome::Denied },
            allowed_by: None,
            denied_by: Some(denial.into()),
            reason: denial.to_string(),
            addresses: Vec::new(),
        },
    };
    if !decision.lets_pass() {
        return said;
    }
    match target {
        Target::Address(address) => {
            if let Some(kind) = inward(*address) {
                deny(&mut said, format!("{address} is {kind}: no machine may reach it"));
            }
        }
        Target::Name(name) => look_up(&mut said, name, outside).await,
    }
    said
}

async fn look_up(said: &mut Explanation, name: &HostName, outside: &dyn Outside) {
    let found = timeout(RESOLVE_DEADLINE, outside.resolve(name)).await.ok().and_then(Result::ok).unwrap_or_default();
    said.addresses = found.into_iter().take(ADDRESSES_MAX).map(|a| (a, inward(a))).collect();
    if said.addresses.is_empty() {
        said.reason.push_str("; but the host's resolver finds no address for it now");
    } else if said.addresses.iter().all(|(_, kind)| kind.is_some())
        && let Some((address, Some(kind))) = said.addresses.first()
    {
        let why = format!("{name} resolves to {address}, which is {kind}: no machine may reach it");
        deny(said, why);
    }
}

fn deny(said: &mut Explanation, reason: String) {
    said.outcome = Outcome::Denied;
    (said.allowed_by, said.denied_by, said.reason) = (None, Some(DenyRule::Reserved), reason);
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::net::SocketAddr;

    use futures::future::BoxFuture;
    use tokio::net::TcpStream;

    use super::*;

    struct Book(Vec<&'static str>);
    impl Outside for Book {
        fn resolve<'a>(&'a self, _: &'a HostName) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
            let found = self.0.iter().map(|a| a.parse().expect("an address")).collect();
            Box::pin(async { Ok(found) })
        }
        fn connect(&self, _: SocketAddr) -> BoxFuture<'_, io::Result<TcpStream>> {
            Box::pin(async { unreachable!("an explanation connects to nothing") })
        }
        fn ask<'a>(&'a self, _: &'a [u8]) -> BoxFuture<'a, io::Result<Vec<u8>>> {
            Box::pin(async { unreachable!("an explanation asks no name server by itself") })
        }
    }

    async fn said(policy: &str, host: &str, port: u16, book: &[&'static str]) -> Explanation {
        let policy: EgressPolicy = policy.parse().expect("a policy");
        let name = host.parse::<HostName>();
        let target = match &name {
            Ok(name) => Target::Name(name),
            Err(_) => Target::Address(host.parse().expect("an address")),
        };
        explain(&policy, &target, port, &Book(book.to_vec())).await
    }

    #[tokio::test]
    async fn each_policy_says_what_it_does_and_why() {
        let list = "allow-list *.example.org:443";
        let yes = said(list, "a.example.org", 443, &["93.184.216.34"]).await;
        assert_eq!((yes.outcome, yes.allowed_by.as_deref()), (Outcome::Allowed, Some("*.example.org:443")));
        assert_eq!(yes.addresses, [("93.184.216.34".parse().expect("an address"), None)]);
        let port = said(list, "a.example.org", 22, &[]).await;
        assert_eq!((port.outcome, port.denied_by), (Outcome::Denied, Some(DenyRule::Port)));
        let other = said(list, "b.example", 443, &["93.184.216.34"]).await;
        assert_eq!(
            (other.outcome, other.denied_by, other.addresses.len()),
            (Outcome::Denied, Some(DenyRule::NoRule), 0)
        );
        let dry = said("allow-list dry-run", "b.example", 443, &["93.184.216.34"]).await;
        assert_eq!((dry.outcome, dry.denied_by), (Outcome::WouldDeny, Some(DenyRule::NoRule)));
        let off = said("off", "b.example", 443, &["93.184.216.34"]).await;
        assert_eq!((off.outcome, off.denied_by), (Outcome::Denied, Some(DenyRule::Off)));
        assert_eq!(said("open", "b.example", 443, &["93.184.216.34"]).await.outcome, Outcome::Allowed);
    }

    #[tokio::test]
    async fn what_leads_inwards_is_denied_whatever_the_policy_says() {
        for policy in ["open", "allow-list rebind.example", "allow-list dry-run"] {
            let name = said(policy, "rebind.example", 443, &["127.0.0.1", "169.254.169.254"]).await;
            assert_eq!((name.outcome, name.denied_by), (Outcome::Denied, Some(DenyRule::Reserved)), "{policy}");
            let address = said(policy, "10.0.0.1", 443, &[]).await;
            assert_eq!((address.outcome, address.denied_by), (Outcome::Denied, Some(DenyRule::Reserved)), "{policy}");
        }
        let mixed = said("open", "mixed.example", 443, &["10.0.0.1", "93.184.216.34"]).await;
        assert_eq!(mixed.outcome, Outcome::Allowed);
        assert_eq!(mixed.addresses[0].1, Some("private"));
    }

    #[tokio::test]
    async fn a_name_without_an_address_says_so() {
        let none = said("open", "nowhere.example", 443, &[]).await;
        assert!(none.outcome == Outcome::Allowed && none.reason.contains("no address"), "{none:?}");
    }
}
