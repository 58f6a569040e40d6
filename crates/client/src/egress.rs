//! What machines may reach.

use std::time::Duration;

use reqwest::Method;

use mainbrella_api::egress::{EgressExplanation, EgressLog, EgressPolicy};
use mainbrella_api::machine::Machine;

use crate::error::ClientError;
use crate::machines::MachineRef;
use crate::transport::{Client, with_json};

/// How long a lookup or a change may take beyond the usual wait.
const SLOW: Duration = Duration::from_secs(30);

impl Client {
    /// Puts a machine under another policy. Repeating it does no harm.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn set_egress(&self, machine: &MachineRef, policy: &EgressPolicy) -> Result<Machine, ClientError> {
        let url = self.bound(machine, &["egress"]);
        self.json(with_json(self.request(Method::PUT, url), policy), SLOW).await
    }

    /// What would become of a connection from inside to `host` and `port`.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn explain_egress(
        &self,
        machine: &MachineRef,
        host: &str,
        port: u16,
    ) -> Result<EgressExplanation, ClientError> {
        let mut url = self.bound(machine, &["egress", "explain"]);
        url.query_pairs_mut().append_pair("host", host).append_pair("port", &port.to_string());
        self.json(self.request(Method::GET, url), SLOW).await
    }

    /// One page of what a machine was not let through to, oldest first. `cursor`: the `next_cursor` of the page before,
    /// or 0.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn egress_log(
        &self,
        machine: &MachineRef,
        cursor: u64,
        limit: Option<u32>,
    ) -> Result<EgressLog, ClientError> {
        let mut url = self.bound(machine, &["egress", "log"]);
        url.query_pairs_mut().append_pair("cursor", &cursor.to_string());
        if let Some(limit) = limit {
            url.query_pairs_mut().append_pair("limit", &limit.to_string());
        }
        self.json(self.request(Method::GET, url), Duration::ZERO).await
    }
}
