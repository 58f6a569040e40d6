//! What host and guest say to each other, and the limits both keep.

pub mod dial;
pub mod fault;
pub mod frames;
pub mod guest_side;
pub mod host;
pub mod limits;
pub mod link;
mod prefixed;

/// Messages and service stubs generated from `proto/guest.proto`.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod proto {
    connectrpc::include_generated!();
}

pub use dial::PortStream;
pub use fault::{GuestError, fault};
pub use host::{GuestClient, LinkOptions, connect};
pub use link::LinkError;
pub use prefixed::Prefixed;
/// The messages, without the path.
pub use proto::mainbrella::guest::v1 as pb;

/// Version of the wire surface. A sender uses a newer field or method only with a peer that says so.
pub const PROTOCOL_VERSION: u32 = 1;
