//! Support for the whole-system tests: a real service in a data directory of its own, real machines, and a look at the
//! host afterwards.
//!
//! Two environment variables, both set by `tests/all`: `MAINBRELLA_TEST_BIN_DIR` holds the programs `mainbrella` and
//! `mainbrella-guest`; `MAINBRELLA_TEST_DATA` is a data directory with a kernel, the `python` template and its frozen
//! sizes, which every service here shares by hard links and none writes.

mod ground;
pub mod host;
mod machine;
mod service;

pub use ground::{base_dir, bin_dir, link_images, program};
pub use machine::{Machine, Out, machine_body};
pub use service::{Service, Setup};
