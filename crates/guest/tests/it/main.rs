//! The agent over a real link, in this process.
#![allow(clippy::unwrap_used)]

mod dial;
mod directories;
mod files;
mod jobs;
mod support;
mod trees;
mod users;
mod watching;
