//! The states of a machine and the moves between them, as data.

use std::fmt;
use std::str::FromStr;

use crate::IdError;

/// What a machine is doing. "Unknown" is an observation, never a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MachineState {
    /// Its intent is durable; its resources are being made.
    Creating,
    /// The guest agent has answered.
    Running,
    /// Memory and disk are being saved.
    Pausing,
    /// Saved; no process runs.
    Paused,
    /// Being brought back from a pause.
    Resuming,
    /// Its resources are being removed.
    Stopping,
    /// Gone on request or at the end of a lease; nothing is left of it on the host.
    Stopped,
    /// Gone, or never came to life, for a recorded reason.
    Failed,
}

use MachineState::{Creating, Failed, Paused, Pausing, Resuming, Running, Stopped, Stopping};

/// Every allowed move. Anything not listed is refused.
pub const TRANSITIONS: &[(MachineState, MachineState)] = &[
    (Creating, Running),
    (Creating, Stopping),
    (Creating, Failed),
    (Running, Pausing),
    (Running, Stopping),
    (Running, Failed),
    (Pausing, Paused),
    (Pausing, Running),
    (Pausing, Stopping),
    (Pausing, Failed),
    (Paused, Resuming),
    (Paused, Stopping),
    (Paused, Failed),
    (Resuming, Running),
    (Resuming, Paused),
    (Resuming, Stopping),
    (Resuming, Failed),
    (Stopping, Stopped),
    (Stopping, Failed),
];

impl MachineState {
    /// Every state.
    pub const ALL: [Self; 8] = [Creating, Running, Pausing, Paused, Resuming, Stopping, Stopped, Failed];

    /// Whether `self → next` is an allowed move.
    #[must_use]
    pub fn may_become(self, next: Self) -> bool {
        TRANSITIONS.contains(&(self, next))
    }

    /// Whether the machine is over: nothing moves out of a final state.
    #[must_use]
    pub const fn is_final(self) -> bool {
        matches!(self, Stopped | Failed)
    }

    /// The wire name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Creating => "creating",
            Running => "running",
            Pausing => "pausing",
            Paused => "paused",
            Resuming => "resuming",
            Stopping => "stopping",
            Stopped => "stopped",
            Failed => "failed",
        }
    }
}

impl fmt::Display for MachineState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for MachineState {
    type Err = IdError;
    fn from_str(s: &str) -> Result<Self, IdError> {
        Self::ALL.into_iter().find(|c| c.as_str() == s).ok_or(IdError::new("state", "one of the machine states"))
    }
}

/// Why a machine is failed or stopped: a kind for programs and one plain sentence for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The kind.
    pub kind: FailureKind,
    /// One sentence, free of paths, secrets and internal text.
    pub message: String,
}

/// The kinds of ending. `Stop…` kinds end in `stopped`, the others in `failed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FailureKind {
    /// Someone asked for it.
    StopRequested,
    /// The hard lease ended.
    StopDeadline,
    /// Nobody used it for its idle timeout.
    StopIdle,
    /// It could not be brought to life.
    CreateFailed,
    /// The snapshot it was to start from is not as it was saved.
    SnapshotDamaged,
    /// Its VMM ended by itself or was killed.
    VmmDied,
    /// The guest shut itself down or its kernel panicked.
    GuestEnded,
    /// The host has no room left for its disk or memory.
    HostFull,
    /// After a restart of the service its resources were missing or not whole.
    Lost,
}

impl FailureKind {
    /// Every kind.
    pub const ALL: [Self; 9] = [
        Self::StopRequested,
        Self::StopDeadline,
        Self::StopIdle,
        Self::CreateFailed,
        Self::SnapshotDamaged,
        Self::VmmDied,
        Self::GuestEnded,
        Self::HostFull,
        Self::Lost,
    ];

    /// The final state this ending leads to.
    #[must_use]
    pub const fn final_state(self) -> MachineState {
        match self {
            Self::StopRequested | Self::StopDeadline | Self::StopIdle => Stopped,
            Self::CreateFailed
            | Self::SnapshotDamaged
            | Self::VmmDied
            | Self::GuestEnded
            | Self::HostFull
            | Self::Lost => Failed,
        }
    }

    /// The wire name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::StopRequested => "stop_requested",
            Self::StopDeadline => "deadline",
            Self::StopIdle => "idle",
            Self::CreateFailed => "create_failed",
            Self::SnapshotDamaged => "snapshot_damaged",
            Self::VmmDied => "vmm_died",
            Self::GuestEnded => "guest_ended",
            Self::HostFull => "host_full",
            Self::Lost => "lost",
        }
    }
}

impl fmt::Display for FailureKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for FailureKind {
    type Err = IdError;
    fn from_str(s: &str) -> Result<Self, IdError> {
        Self::ALL
            .into_iter()
            .find(|c| c.as_str() == s)
            .ok_or(IdError::new("reason", "one of the reasons a machine ends"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for s in MachineState::ALL {
            assert_eq!(s.as_str().parse::<MachineState>().expect("valid"), s);
        }
        for k in FailureKind::ALL {
            assert_eq!(k.as_str().parse::<FailureKind>().expect("valid"), k);
        }
    }

    #[test]
    fn final_states_have_no_way_out_and_all_others_can_be_stopped() {
        for s in MachineState::ALL {
            let out = TRANSITIONS.iter().filter(|(from, _)| *from == s).count();
            assert_eq!(out == 0, s.is_final(), "{s}");
            if !s.is_final() && s != MachineState::Stopping {
                assert!(s.may_become(MachineState::Stopping), "{s} can be stopped");
            }
        }
    }

    #[test]
    fn every_state_is_reachable_from_creating() {
        let mut seen = vec![MachineState::Creating];
        let mut next = 0;
        while let Some(from) = seen.get(next).copied() {
            for (a, b) in TRANSITIONS {
                if *a == from && !seen.contains(b) {
                    seen.push(*b);
                }
            }
            next += 1;
        }
        assert_eq!(seen.len(), MachineState::ALL.len());
    }
}
