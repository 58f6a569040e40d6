//! The network of machines: found out by making what one needs, in a namespace that is gone afterwards.

use mainbrella_engine::microvm::network::trial;

use super::Check;

const NETWORK: &str = "Network of machines";

/// What machines on this host can be given, and what can be enforced.
pub fn checks() -> Vec<Check> {
    if !rustix::process::geteuid().is_root() {
        return vec![Check::warn(
            NETWORK,
            "cards and rules",
            "only root can make them: machines of a service that is not root have no network at all",
            "Run the service as root to give machines a network; `internet` false is kept without it.",
        )];
    }
    let tried = trial().into_iter().map(|(name, result)| match result {
        Ok(()) => Check::ok(NETWORK, name, "tried, and works"),
        Err(why) => Check::warn(
            NETWORK,
            name,
            format!("missing: {why}"),
            "Install nftables; the kernel needs tun, veth, nf_tables with nat, fib, connlimit and log.",
        ),
    });
    tried.collect()
}
