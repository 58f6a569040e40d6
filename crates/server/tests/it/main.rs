//! The API over HTTP, on a service with the fake driver.
#![allow(clippy::unwrap_used)]

mod authorization;
mod builds;
mod common;
mod contexts;
mod create;
mod egress;
mod files;
mod fork;
mod http;
mod jobs;
mod machines;
mod openapi;
mod pause;
mod previews;
mod secrets;
mod signed;
mod snapshots;
mod start;
mod streams;
mod uploads;
