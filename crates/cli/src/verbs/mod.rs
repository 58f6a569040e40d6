//! One file a verb.

pub mod completions;
pub mod contexts;
pub mod cp;
pub mod create;
pub mod df;
pub mod doctor;
pub mod egress;
pub mod env;
pub mod exec;
pub mod extend;
pub mod fork;
pub mod get;
pub mod jobs;
pub mod key;
pub mod list;
pub mod logs;
pub mod ls;
pub mod pause;
pub mod preview;
pub mod resume;
pub mod secret;
pub mod serve;
pub mod shell;
pub mod stop;
pub mod template;
pub mod watch;
