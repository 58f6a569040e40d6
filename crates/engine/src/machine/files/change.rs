//! What changes names and modes.

use std::time::Duration;

use mainbrella_guest_protocol::pb;
use mainbrella_types::limits;
use tokio::time::timeout;

use super::list::{PathStat, path_stat};
use super::{FILE_DEADLINE, Hold, file_failed, too_slow};
use crate::error::EngineError;
use crate::machine::command::reason;
use crate::machine::link::{Link, silent};

/// How long the guest may take over a removal or a move: a little less than we wait for its answer.
const GUEST_DEADLINE: Duration = Duration::from_secs(25);
const _: () = assert!(GUEST_DEADLINE.as_secs() < FILE_DEADLINE.as_secs());
/// Longest time a file call waits for its answer: a call's own default deadline is not to be the shorter one.
const _: () = assert!(FILE_DEADLINE.as_secs() <= 30);

/// What a removal did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Entries that are gone.
    pub removed: u64,
    /// Paths of some that are left, at most [`limits::REMAINING_NAMED_MAX`].
    pub remaining: Vec<Vec<u8>>,
    /// How many are known to be left.
    pub remaining_count: u64,
    /// Why, in a few words.
    pub reason: Option<String>,
}

fn stat_of(answer: Result<pb::FileStat, connectrpc::ConnectError>) -> Result<PathStat, EngineError> {
    path_stat(answer.map_err(file_failed)?).map_err(silent)
}

pub(crate) async fn make_dir(
    link: &Link,
    _hold: Hold,
    path: &[u8],
    recursive: bool,
    mode: u32,
) -> Result<PathStat, EngineError> {
    let client = link.client().await?;
    let request = pb::MakeDirRequest { path: path.to_vec(), recursive, mode, ..Default::default() };
    let answer = timeout(FILE_DEADLINE, client.rpc().make_dir(request)).await.map_err(|_| too_slow())?;
    stat_of(answer.map(connectrpc::client::UnaryResponse::into_owned))
}

pub(crate) async fn rename(
    link: &Link,
    _hold: Hold,
    source: &[u8],
    destination: &[u8],
) -> Result<PathStat, EngineError> {
    let client = link.client().await?;
    let request = pb::RenameRequest {
        source: source.to_vec(),
        destination: destination.to_vec(),
        deadline_ms: GUEST_DEADLINE.as_millis() as u64,
        ..Default::default()
    };
    let answer = timeout(FILE_DEADLINE, client.rpc().rename(request)).await.map_err(|_| too_slow())?;
    stat_of(answer.map(connectrpc::client::UnaryResponse::into_owned))
}

pub(crate) async fn chmod(link: &Link, _hold: Hold, path: &[u8], mode: u32) -> Result<PathStat, EngineError> {
    let client = link.client().await?;
    let request = pb::ChmodRequest { path: path.to_vec(), mode, ..Default::default() };
    let answer = timeout(FILE_DEADLINE, client.rpc().chmod(request)).await.map_err(|_| too_slow())?;
    stat_of(answer.map(connectrpc::client::UnaryResponse::into_owned))
}

pub(crate) async fn remove(link: &Link, _hold: Hold, path: &[u8], recursive: bool) -> Result<Removed, EngineError> {
    let client = link.client().await?;
    let deadline_ms = GUEST_DEADLINE.as_millis() as u64;
    let request = pb::RemoveRequest { path: path.to_vec(), recursive, deadline_ms, ..Default::default() };
    let answer = timeout(FILE_DEADLINE, client.rpc().remove(request)).await.map_err(|_| too_slow())?;
    removed(answer.map_err(file_failed)?.into_owned()).map_err(silent)
}

/// Takes what a guest says it removed.
fn removed(answer: pb::RemoveResponse) -> Result<Removed, &'static str> {
    let named = answer.remaining.len();
    let bad = |p: &Vec<u8>| p.first() != Some(&b'/') || p.len() > limits::PATH_MAX || p.contains(&0);
    if named > limits::REMAINING_NAMED_MAX || named as u64 > answer.remaining_count || answer.remaining.iter().any(bad)
    {
        return Err("a removal that left what cannot be there");
    }
    let reason = match answer.errno {
        _ if answer.remaining_count == 0 => None,
        errno @ 1..4096 => Some(match errno {
            libc::EXDEV => "another file system is mounted there".to_owned(),
            _ => reason(&std::io::Error::from_raw_os_error(errno)),
        }),
        _ if answer.timed_out => Some("it took longer than 25 seconds".to_owned()),
        _ => Some("it was filled again meanwhile".to_owned()),
    };
    Ok(Removed {
        removed: answer.removed,
        remaining: answer.remaining,
        remaining_count: answer.remaining_count,
        reason,
    })
}

/// Any bytes as what a removal left: bounded, and with a reason exactly when something is left.
#[cfg(any(test, fuzzing))]
pub(crate) fn any_removal(bytes: &[u8]) {
    use buffa::Message as _;
    let Ok(answer) = pb::RemoveResponse::decode_from_slice(bytes) else { return };
    let Ok(r) = removed(answer) else { return };
    assert!(r.remaining.len() <= 100 && r.remaining.iter().all(|p| p.len() <= 4095));
    assert_eq!(r.reason.is_some(), r.remaining_count > 0);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn whatever_a_guest_says_is_left_is_bounded(removed_count in any::<u64>(), errno in any::<i32>(), timed_out in any::<bool>(), count in 0u64..300,
            paths in proptest::collection::vec(proptest::collection::vec(prop_oneof![4 => Just(b'/'), 1 => any::<u8>()], 0..5000), 0..130)) {
            let answer = pb::RemoveResponse { removed: removed_count, remaining: paths, remaining_count: count, errno, timed_out, ..Default::default() };
            if let Ok(r) = removed(answer) {
                prop_assert!(r.remaining.len() <= 100 && r.remaining.iter().all(|p| p.len() <= 4095));
                prop_assert_eq!(r.reason.is_some(), r.remaining_count > 0);
                prop_assert!(r.reason.is_none_or(|t| !t.contains("os error")));
            }
        }
    }

    #[test]
    fn the_reason_is_said_in_words() {
        let say = |errno, timed_out| {
            let answer = pb::RemoveResponse {
                remaining: vec![b"/a".to_vec()],
                remaining_count: 1,
                errno,
                timed_out,
                ..Default::default()
            };
            removed(answer).expect("honest").reason.expect("a reason")
        };
        assert_eq!(say(1, false), "operation not permitted");
        assert_eq!(say(18, false), "another file system is mounted there");
        assert_eq!(say(0, true), "it took longer than 25 seconds");
    }
}
