//! Whole machines through a whole service. See the support crate for what they need; `tests/all` provides it.

mod abuse;
mod build_faults;
mod build_images;
mod builds;
mod cli;
mod clock;
mod commands;
mod contexts;
mod create;
mod cycles;
mod dev_server;
mod directories;
mod disks;
mod faults;
mod files;
mod front_door;
mod identity;
mod images;
mod jail;
mod jobs;
mod leases;
mod network;
mod pause;
mod previews;
mod restart;
mod saved;
mod secrets;
mod sizes;
mod start;
mod trees;
mod users;

use mainbrella_client::ClientError;
use mainbrella_types::ErrorCode;

/// The code of a refusal.
#[track_caller]
fn code<T: std::fmt::Debug>(answer: Result<T, ClientError>) -> ErrorCode {
    match answer {
        Err(ClientError::Api(failure)) => {
            assert!(!failure.body.message.is_empty() && !failure.body.hint.is_empty(), "{failure:?}");
            assert!(!failure.body.message.contains("/tmp/mb-"), "a path of the host is told: {failure:?}");
            assert_eq!(failure.body.known_code().map(ErrorCode::status), Some(failure.status), "{failure:?}");
            failure.body.known_code().expect("a known code")
        }
        other => panic!("a refusal was expected: {other:?}"),
    }
}
