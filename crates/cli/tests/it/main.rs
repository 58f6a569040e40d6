//! The command as its users meet it: exit code, standard output, standard error.

mod contexts;
mod copies;
mod exec;
mod helps;
mod machines;
mod mistakes;
mod snapshots;
mod support;
mod templates;
