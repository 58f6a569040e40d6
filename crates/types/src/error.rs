//! The codes an API caller can meet. Each says, as data, its HTTP status, whether a retry can help,
//! and what to do next.

use std::fmt;

/// Whether sending the same request again can help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// Nothing was done; the same request may be sent again, after a pause.
    Safe,
    /// It may or may not have been done; only a request with its idempotency key may be repeated.
    SameKeyOnly,
    /// The request itself must change first.
    Never,
}

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $wire:literal, $status:literal, $retry:ident, $hint:literal;)*) => {
        /// A stable code of the public API.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum ErrorCode { $($(#[$doc])* $name,)* }

        impl ErrorCode {
            /// Every code.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The wire name.
            #[must_use]
            pub const fn as_str(self) -> &'static str { match self { $(Self::$name => $wire,)* } }

            /// The HTTP status it is sent with.
            #[must_use]
            pub const fn status(self) -> u16 { match self { $(Self::$name => $status,)* } }

            /// Whether a retry can help.
            #[must_use]
            pub const fn retry(self) -> Retry { match self { $(Self::$name => Retry::$retry,)* } }

            /// What to do next, when the place that failed knows nothing better.
            #[must_use]
            pub const fn hint(self) -> &'static str { match self { $(Self::$name => $hint,)* } }
        }
    };
}

codes! {
    /// A field, header or body is not of the required form.
    InvalidRequest = "invalid_request", 400, Never, "Correct the field named in the message.";
    /// No or unknown credentials.
    Unauthenticated = "unauthenticated", 401, Never, "Send a valid API key as `Authorization: Bearer …`; `mainbrella key create` makes one.";
    /// The key may not do this.
    Forbidden = "forbidden", 403, Never, "Use a key whose role allows this call.";
    /// No such route or object.
    NotFound = "not_found", 404, Never, "Check the ids in the path: a list shows what there is; finished machines stay listed for seven days.";
    /// The slot holds another generation than the one named.
    GenerationMismatch = "generation_mismatch", 409, Never, "The named generation is not the one in this slot any more; inspect the slot and decide whether the newer machine is meant.";
    /// The machine is not in a state that allows the call.
    MachineNotRunning = "machine_not_running", 409, Never, "Inspect the machine; its state and reason say what happened. If it is paused, resume it; if it has ended, create another one.";
    /// The slot is taken by a living machine.
    SlotInUse = "slot_in_use", 409, Never, "Stop the machine in this slot first, or create without a slot name.";
    /// The machine has no network, for ever.
    EgressLocked = "egress_locked", 409, Never, "A machine without internet never gets it; create another machine.";
    /// The key was used with another body.
    IdempotencyConflict = "idempotency_conflict", 409, Never, "Use a new Idempotency-Key for a different request.";
    /// The first request with this key is still being carried out.
    InProgress = "in_progress", 409, Safe, "Send the same request with the same Idempotency-Key again in a moment.";
    /// A path in the guest does not exist.
    FileNotFound = "file_not_found", 404, Never, "Check the path inside the machine.";
    /// There is something at a path in the guest where nothing may be.
    FileExists = "file_exists", 409, Never, "Choose another path, or write without asking for a new file.";
    /// The guest refused a file operation.
    FileError = "file_error", 422, Never, "The message says what the machine's file system answered.";
    /// The machine's disk is full.
    GuestDiskFull = "guest_disk_full", 507, Never, "Free space inside the machine or use a larger size.";
    /// The command could not be started in the guest.
    CommandNotStarted = "command_not_started", 422, Never, "Check that the program and the working directory exist in the machine.";
    /// The input of a job takes nothing more.
    StdinClosed = "stdin_closed", 409, Never, "Start the job with `stdin` true, and write before its end is sent or the job ends.";
    /// Too much input waits for a job to read it.
    StdinFull = "stdin_full", 409, Safe, "Nothing of this write was taken; write again when the job has read more.";
    /// A job was given as much input as one may be.
    StdinLimit = "stdin_limit", 413, Never, "Copy larger input into the machine as a file and let the job read that.";
    /// The job must have ended for this.
    JobRunning = "job_running", 409, Never, "Cancel the job, or wait for its end, first.";
    /// The job must run for this.
    JobEnded = "job_ended", 409, Never, "Inspect the job; its exit says how it ended.";
    /// The kernel of a code context has ended.
    ContextDead = "context_dead", 409, Never, "Restart the context, or make another one; the variables of the old kernel are gone.";
    /// The generation has as many active previews as it may.
    PreviewLimit = "preview_limit", 409, Never, "Revoke a preview that is not needed, or wait until one ends.";
    /// The preview has ended.
    PreviewEnded = "preview_ended", 410, Never, "Create another preview, with another Idempotency-Key if there is one.";
    /// A preview was made whose URL cannot be told.
    PreviewReconciliationRequired = "preview_reconciliation_required", 409, Never, "Revoke the preview named by `previewId`, then create another one.";
    /// The machine has as many secrets as it may.
    SecretLimit = "secret_limit", 409, Never, "Remove a secret that is not needed first.";
    /// The project has as many snapshots as it may.
    SnapshotLimit = "snapshot_limit", 409, Never, "Delete a snapshot that is not needed, or raise `max-snapshots-per-project` of the service.";
    /// What was asked for is not what was saved.
    SnapshotMismatch = "snapshot_mismatch", 409, Never, "Leave out size, template and internet policy, or name those that were saved; the message says them.";
    /// What was saved is not there any more as it was written.
    SnapshotDamaged = "snapshot_damaged", 409, Never, "Nothing can be started from this snapshot; delete it, and restore an older one or save again.";
    /// The template is not known.
    TemplateNotFound = "template_not_found", 404, Never, "`mainbrella template list` shows what is there; `mainbrella template build NAME` makes it.";
    /// The template is still needed.
    TemplateInUse = "template_in_use", 409, Never, "Remove the tags that point to it first, or let them point to another version.";
    /// There are as many versions or tags as there may be.
    TemplateLimit = "template_limit", 409, Never, "Remove versions or tags that are not needed; `mainbrella template list` shows them.";
    /// The build is not in a state that allows the call.
    BuildState = "build_state", 409, Never, "Inspect the build; its state says what happened. Ask for another build if it is over.";
    /// This driver or host cannot do it.
    Unsupported = "unsupported", 422, Never, "See `/v1/capabilities` for what this host can do.";
    /// The body is too large.
    PayloadTooLarge = "payload_too_large", 413, Never, "Send less at once; the message names the limit.";
    /// Too many requests.
    RateLimited = "rate_limited", 429, Safe, "Wait as long as `Retry-After` says.";
    /// A queue or a limit of this host is full.
    Overloaded = "overloaded", 503, Safe, "Try again shortly, or stop machines that are not needed.";
    /// The host's disk is full.
    HostFull = "host_full", 507, Never, "Free space in the data directory of the service.";
    /// The machine could not be made.
    CreateFailed = "create_failed", 502, SameKeyOnly, "Inspect the machine for the reason; `mainbrella doctor` checks the host.";
    /// The machine's guest agent did not answer in time.
    GuestUnavailable = "guest_unavailable", 504, SameKeyOnly, "The machine may be overloaded; inspect it, and stop it if it stays silent.";
    /// The call's own deadline passed; what it started may go on.
    DeadlineExceeded = "deadline_exceeded", 504, SameKeyOnly, "The outcome is not known; inspect before repeating.";
    /// The service is going down.
    ShuttingDown = "shutting_down", 503, Safe, "Try again when the service is back; machines keep running.";
    /// A fault of ours.
    Internal = "internal", 500, SameKeyOnly, "Report the request id; the service log has the cause.";
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn codes_are_unique_snake_case_and_say_what_to_do() {
        let names: HashSet<_> = ErrorCode::ALL.iter().map(|c| c.as_str()).collect();
        assert_eq!(names.len(), ErrorCode::ALL.len());
        for c in ErrorCode::ALL {
            assert!(c.as_str().bytes().all(|b| b.is_ascii_lowercase() || b == b'_'), "{c}");
            assert!((400..600).contains(&c.status()), "{c}");
            assert!(c.hint().ends_with('.') && c.hint().len() > 15, "{c}: a hint is a sentence");
        }
    }
}
