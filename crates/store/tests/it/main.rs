//! The store on SQLite and, where MAINBRELLA_TEST_POSTGRES is set, on PostgreSQL.
#![allow(clippy::unwrap_used)]

mod common;
mod durability;
mod keys;
mod list;
mod machines;
mod model;
mod previews;
mod secrets;
mod snapshots;
