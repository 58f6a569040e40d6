//! What the rules of a seat deny, put into the machine's log.

use std::sync::Arc;
use std::time::Duration;

use mainbrella_types::egress::{GATEWAY_ADDRESS, reserved};
use mainbrella_types::{DenyRule, EgressPolicy};
use tokio_util::task::AbortOnDropHandle;

use crate::error::NetError;
use crate::events::{Denied, EgressLog, Verdict};
use crate::namespace::Namespace;
use crate::nflog::{Dropped, Reader};

/// Pause after a failure to read; the socket is tried again.
const PAUSE: Duration = Duration::from_millis(200);

/// A running listener; ends when dropped.
pub(crate) type Told = AbortOnDropHandle<()>;

/// Which of the policies is in force; all that matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Off,
    Open,
    Listed,
}

/// Begins to put what the rules of `seat` deny into `log`.
pub(crate) fn listen(seat: &Namespace, policy: &EgressPolicy, log: Arc<EgressLog>) -> Result<Told, NetError> {
    let kind = match policy {
        EgressPolicy::Off => Kind::Off,
        EgressPolicy::Open => Kind::Open,
        EgressPolicy::AllowList(_) => Kind::Listed,
    };
    let mut reader = Reader::open(seat)?;
    Ok(AbortOnDropHandle::new(tokio::spawn(async move {
        loop {
            match reader.next().await {
                Ok(dropped) => dropped.iter().for_each(|d| take(kind, d, &log)),
                Err(e) => {
                    tracing::debug!(error = %e, "denied packets could not be read");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    })))
}

fn take(kind: Kind, dropped: &Dropped, log: &EgressLog) {
    let address = dropped.address;
    let tcp = i32::from(dropped.protocol) == libc::IPPROTO_TCP;
    let (rule, reason) = match (kind, dropped.which) {
        (Kind::Off, _) => (DenyRule::Off, "the machine has no network".to_owned()),
        (_, _) if address == GATEWAY_ADDRESS => {
            (DenyRule::Reserved, format!("{address} is the machine's gateway, which offers nothing there"))
        }
        // The gateway takes these and says itself what became of them.
        (Kind::Listed, _) if tcp => return,
        (Kind::Listed, _) => (
            DenyRule::Protocol,
            "under an allow-list only TCP leads out; names are resolved by the machine's own name server".to_owned(),
        ),
        (Kind::Open, _) => {
            let kind = reserved(address.into()).unwrap_or("not a public address");
            (DenyRule::Reserved, format!("{address} is {kind}: no machine may reach it"))
        }
    };
    log.record(Denied {
        verdict: Verdict::Denied,
        name: None,
        address: Some(address.into()),
        port: dropped.port,
        rule,
        reason: &reason,
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nflog::Which;

    #[test]
    fn each_packet_is_told_once_and_with_its_rule() {
        let udp = Dropped { which: Which::Nowhere, address: [8, 8, 8, 8].into(), protocol: 17, port: 53 };
        let tcp = Dropped { protocol: 6, port: 443, ..udp };
        let inward = Dropped { which: Which::Inward, address: [169, 254, 169, 254].into(), ..tcp };
        let own = Dropped { address: GATEWAY_ADDRESS, ..tcp };
        for (kind, dropped, rule) in [
            (Kind::Off, udp, Some(DenyRule::Off)),
            (Kind::Off, tcp, Some(DenyRule::Off)),
            (Kind::Listed, udp, Some(DenyRule::Protocol)),
            (Kind::Listed, tcp, None),
            (Kind::Listed, own, Some(DenyRule::Reserved)),
            (Kind::Open, inward, Some(DenyRule::Reserved)),
        ] {
            let log = EgressLog::default();
            take(kind, &dropped, &log);
            let told = log.after(0, 9).events;
            assert_eq!(told.first().map(|e| (e.rule, e.port)), rule.map(|r| (r, dropped.port)), "{kind:?} {dropped:?}");
        }
        let log = EgressLog::default();
        take(Kind::Open, &inward, &log);
        assert!(log.after(0, 9).events[0].reason.contains("link-local"));
    }
}
