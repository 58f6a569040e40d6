//! What host and guest say to each other, and the limits both keep.

/// Messages and service stubs generated from `proto/guest.proto`.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod proto {
    connectrpc::include_generated!();
}

/// Version of the wire surface. A sender uses a newer field or method only with a peer that says so.
pub const PROTOCOL_VERSION: u32 = 1;
