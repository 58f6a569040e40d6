//! Whether a request fits the state of a machine. Pure; the actor does what it says.

use mainbrella_types::MachineState;

/// What may be asked of a machine's actor. (Whether it can be used is its gate's to say.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// Change its lease.
    Extend,
    /// Change what it may reach.
    SetEgress,
    /// Save it and end its processes.
    Pause,
    /// Bring it back.
    Resume,
    /// Bring it back when it is needed, now or when it is done with being saved.
    Wake,
    /// Copy it.
    Fork,
    /// Save it under a name of its own.
    Save,
    /// End it.
    Stop,
}

/// The answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// Do it.
    Accept,
    /// What is asked for is already so.
    AlreadyDone,
    /// It cannot be done in this state.
    Deny,
}

/// Decides.
pub(crate) fn admit(state: MachineState, request: Request) -> Admission {
    use MachineState::{Creating, Failed, Paused, Pausing, Resuming, Running, Stopped, Stopping};
    match (request, state) {
        (Request::Extend, Creating | Running | Pausing | Paused | Resuming) => Admission::Accept,
        (Request::Extend, Stopping | Stopped | Failed) => Admission::Deny,
        // The policy in force and the one on record change together: only where there is one in force.
        (Request::SetEgress, Running) => Admission::Accept,
        (Request::SetEgress, _) => Admission::Deny,
        (Request::Pause | Request::Fork | Request::Save, Running) | (Request::Resume, Paused) => Admission::Accept,
        (Request::Wake, Running | Pausing | Paused | Resuming) => Admission::Accept,
        (Request::Wake, _) => Admission::Deny,
        (Request::Pause, Paused) | (Request::Resume, Running) => Admission::AlreadyDone,
        (Request::Pause | Request::Resume | Request::Fork | Request::Save, _) => Admission::Deny,
        (Request::Stop, Stopped | Failed) => Admission::AlreadyDone,
        (Request::Stop, _) => Admission::Accept,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_final_machine_is_never_extended_and_stopping_it_is_done() {
        for s in MachineState::ALL.into_iter().filter(|s| s.is_final()) {
            assert_eq!(admit(s, Request::Extend), Admission::Deny);
            let requests =
                [Request::SetEgress, Request::Pause, Request::Resume, Request::Wake, Request::Fork, Request::Save];
            for request in requests {
                assert_eq!(admit(s, request), Admission::Deny);
            }
            assert_eq!(admit(s, Request::Stop), Admission::AlreadyDone);
        }
    }

    #[test]
    fn a_living_machine_can_always_be_stopped() {
        for s in MachineState::ALL.into_iter().filter(|s| !s.is_final()) {
            assert_eq!(admit(s, Request::Stop), Admission::Accept, "{s}");
        }
    }
}
