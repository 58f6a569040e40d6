//! What host and guest say, tried with what neither should.
#![allow(clippy::unwrap_used)]

mod arbitrary;
mod dial;
mod hostile;
mod link;
mod surface;
