//! Network seats and egress policy. Can traffic escape? That is answered here, and only here are network links and
//! packet rules touched.
//!
//! A machine's *seat* is a network namespace with the machine's tap in it ([`tap`]). The namespace is the one its VMM was
//! put into, so it ends with the VMM: nothing of it can be left over. [`Seat::attach`] loads the same fixed rules into every
//! seat ([`rules`]) before any link is up, so that whatever fails, fails closed:
//!
//! - `off`: the link inside is up and nothing answers on it.
//! - `open`: a second link leads out ([`Seat::attach`] makes it last); the host translates addresses and forwards to public
//!   ones only ([`Uplink`]).
//! - `allow-list`: no second link. The machine's name server ([`dns`]) gives every allowed name an address that means
//!   only that name, and the gateway ([`gateway`]) takes every connection, checks it, resolves and connects itself.
//!
//! Under both, hosts for which the machine has a secret are reached through the gateway, which adds it ([`secrets`]).
//!
//! What is denied is told: the gateway and the name server say so themselves, the rules through the kernel ([`nflog`]),
//! and all of it ends in the machine's [`EgressLog`].

mod addresses;
pub mod dns;
mod error;
mod events;
mod explain;
pub mod gateway;
mod link;
pub mod names;
pub mod namespace;
mod nflog;
mod nft;
pub mod resolve;
pub mod rules;
mod seat;
pub mod secrets;
pub mod sniff;
pub mod tap;
mod told;
mod uplink;

pub use error::NetError;
pub use events::{Denied, EgressEvent, EgressLog, EgressPage, Verdict};
pub use explain::{Explanation, Outcome, explain};
pub use seat::{Seat, SeatOrder, SeatView};
pub use secrets::{Authority, SeatSecrets, Secret};
pub use uplink::{Uplink, UplinkConfig};
