//! Images from files and registries, as root: every file of what comes out is what the layers hold.
#![allow(clippy::unwrap_used)]

mod archives;
mod registries;
mod registry;
mod support;
