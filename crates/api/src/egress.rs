//! What a machine may reach.

use mainbrella_types::{AllowList, EgressPolicy as Policy};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The kind of an egress policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum EgressKind {
    /// Nothing, for the rest of this generation.
    Off,
    /// Every public address; never a private, local or otherwise reserved one.
    Open,
    /// What the rules name, and nothing else.
    AllowList,
}

impl EgressKind {
    /// The wire name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Open => "open",
            Self::AllowList => "allow-list",
        }
    }
}

/// An egress policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EgressPolicy {
    /// Its kind.
    pub policy: EgressKind,
    /// The rules of an allow-list, at most 256; one that matches is enough. `example.org`, `*.example.org` (everything
    /// below, not the name itself), `192.0.2.0/24`, `[2001:db8::]/32`, each perhaps with `:PORT`. Without a port a name
    /// means 80 and 443, an address every port. Private, local and reserved addresses are reached by no rule.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 256)]
    pub rules: Vec<String>,
    /// An allow-list that lets every public host pass and records what it would have denied.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
}

impl EgressPolicy {
    /// Nothing.
    #[must_use]
    pub fn off() -> Self {
        Self { policy: EgressKind::Off, rules: Vec::new(), dry_run: false }
    }

    /// Every public address.
    #[must_use]
    pub fn open() -> Self {
        Self { policy: EgressKind::Open, rules: Vec::new(), dry_run: false }
    }

    /// What `rules` name.
    #[must_use]
    pub fn allow_list(rules: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self { policy: EgressKind::AllowList, rules: rules.into_iter().map(Into::into).collect(), dry_run: false }
    }

    /// The policy of the vocabulary.
    ///
    /// # Errors
    /// When a rule is none, there are too many, or an `off` or `open` policy has any.
    pub fn checked(&self) -> Result<Policy, String> {
        let only = "rules and dryRun belong to the policy `allow-list`".to_owned();
        match self.policy {
            EgressKind::Off | EgressKind::Open if !self.rules.is_empty() || self.dry_run => Err(only),
            EgressKind::Off => Ok(Policy::Off),
            EgressKind::Open => Ok(Policy::Open),
            EgressKind::AllowList => {
                // Before any is parsed: a list that is refused costs nothing.
                if self.rules.len() > mainbrella_types::limits::EGRESS_RULES_MAX {
                    return Err(mainbrella_types::egress::RuleError::TooMany.to_string());
                }
                let rules = self.rules.iter().map(|r| r.parse()).collect::<Result<Vec<_>, _>>();
                let list = rules.and_then(|rules| AllowList::new(rules, self.dry_run));
                list.map(Policy::AllowList).map_err(|e| e.to_string())
            }
        }
    }
}

impl From<&Policy> for EgressPolicy {
    fn from(policy: &Policy) -> Self {
        match policy {
            Policy::Off => Self::off(),
            Policy::Open => Self::open(),
            Policy::AllowList(list) => {
                Self { dry_run: list.dry_run, ..Self::allow_list(list.rules().iter().map(ToString::to_string)) }
            }
        }
    }
}

/// Both settings of a create, which must agree: what a machine may reach. `None`: neither was given.
///
/// # Errors
/// When they contradict each other, or the policy is none.
pub fn wanted(internet: Option<bool>, egress: Option<&EgressPolicy>) -> Result<Option<Policy>, String> {
    let policy = egress.map(EgressPolicy::checked).transpose()?;
    match (internet, policy) {
        (Some(internet), Some(policy)) if internet != policy.leads_out() => {
            Err("internet and egress contradict each other: `internet` false is the policy `off`".to_owned())
        }
        (_, Some(policy)) => Ok(Some(policy)),
        (Some(true), None) => Ok(Some(Policy::Open)),
        (Some(false), None) => Ok(Some(Policy::Off)),
        (None, None) => Ok(None),
    }
}

/// What would become of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum EgressOutcome {
    /// It is made.
    Allowed,
    /// It is made because the policy is a dry run.
    WouldDeny,
    /// It is not made.
    Denied,
}

impl EgressOutcome {
    /// The wire name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::WouldDeny => "would-deny",
            Self::Denied => "denied",
        }
    }
}

/// One address of a name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedAddress {
    /// The address.
    pub address: String,
    /// What kind of address it is, when no machine may reach it; it is then left out.
    pub reserved: Option<String>,
}

/// What would become of a connection, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct EgressExplanation {
    /// The host that was asked about.
    pub host: String,
    /// The port.
    pub port: u16,
    /// What would become of it.
    pub outcome: EgressOutcome,
    /// The rule of the allow-list that allows it.
    pub allowed_by: Option<String>,
    /// What denies it, or would.
    #[schema(schema_with = crate::schema::maybe_egress_rule)]
    pub denied_by: Option<String>,
    /// Why, in one sentence.
    pub reason: String,
    /// Addresses of the name as the host resolves it now; empty when the policy keeps it from being resolved.
    pub addresses: Vec<ResolvedAddress>,
}

/// One connection or lookup that was denied, or would have been.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct EgressEvent {
    /// Its number, from 1. Numbers that are missing were counted and not kept.
    pub sequence: u64,
    /// When, Unix milliseconds.
    pub time_ms: u64,
    /// `denied`, or `would-deny` in a dry run.
    pub outcome: EgressOutcome,
    /// The name that was asked for, if there was one.
    pub name: Option<String>,
    /// The address, if there was one.
    pub address: Option<String>,
    /// The port; 53 for a lookup, 0 for what has none.
    pub port: u16,
    /// What denied it.
    #[schema(schema_with = crate::schema::egress_rule)]
    pub rule: String,
    /// Why, in one sentence.
    pub reason: String,
}

/// One page of a machine's egress log, oldest first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct EgressLog {
    /// The slot.
    pub id: String,
    /// The generation.
    pub created_at: String,
    /// Denied connections and lookups, the latest of them.
    pub events: Vec<EgressEvent>,
    /// Whether there are more now.
    pub has_more: bool,
    /// Send as `cursor` for what comes after this page.
    pub next_cursor: u64,
    /// How many were denied in all, kept or not.
    pub denied: u64,
    /// How many would have been, but for a dry run.
    pub would_deny: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_goes_over_the_wire_and_back() {
        for text in [
            "off",
            "open",
            "allow-list",
            "allow-list example.org *.example.org:8443",
            "allow-list dry-run 93.184.216.0/24",
        ] {
            let policy: Policy = text.parse().expect("a policy");
            let wire = EgressPolicy::from(&policy);
            let json = serde_json::to_string(&wire).expect("JSON");
            let back: EgressPolicy = serde_json::from_str(&json).expect("a policy");
            assert_eq!(back.checked(), Ok(policy), "{json}");
        }
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        for text in [
            r#"{"policy":"open","rules":["example.org"]}"#,
            r#"{"policy":"off","dryRun":true}"#,
            r#"{"policy":"allow-list","rules":["10.0.0.0/8"]}"#,
            r#"{"policy":"allow-list","rules":["https://example.org/"]}"#,
        ] {
            let policy: EgressPolicy = serde_json::from_str(text).expect("the form is right");
            assert!(policy.checked().is_err(), "{text}");
        }
        let many = EgressPolicy::allow_list((0..257).map(|n| format!("h{n}.example")));
        assert!(many.checked().is_err_and(|e| e.contains("256")));
        for text in [r#"{"policy":"ajar"}"#, r#"{"rules":[]}"#, r#"{"policy":"open","allow":[]}"#] {
            assert!(serde_json::from_str::<EgressPolicy>(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_two_settings_of_a_create_agree() {
        let list = EgressPolicy::allow_list(["example.org"]);
        let policy =
            |internet, egress: Option<&EgressPolicy>| wanted(internet, egress).map(|p| p.map(|p| p.to_string()));
        assert_eq!(policy(None, None), Ok(None));
        assert_eq!(policy(Some(false), None), Ok(Some("off".into())));
        assert_eq!(policy(Some(true), None), Ok(Some("open".into())));
        assert_eq!(policy(Some(true), Some(&list)), Ok(Some("allow-list example.org".into())));
        assert_eq!(policy(None, Some(&EgressPolicy::off())), Ok(Some("off".into())));
        assert!(policy(Some(false), Some(&list)).is_err());
        assert!(policy(Some(true), Some(&EgressPolicy::off())).is_err());
    }
}
