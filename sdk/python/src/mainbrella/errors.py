"""Everything the SDK can raise.

Each error carries data for programs (``code``, ``status``, ``retryable``, ``request_id``, ``idempotency_key``) and a
sentence with a hint for people. A non-zero exit code of a command is a normal result and never an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .models import CommandResult

__all__ = [
    "AuthenticationError",
    "BuildFailedError",
    "BuildStateError",
    "CallerStoppedWaitingError",
    "CleanupUncertainError",
    "CommandFailedError",
    "CommandNotStartedError",
    "ConfigurationError",
    "ConflictError",
    "ContextDeadError",
    "CreateFailedError",
    "EgressLockedError",
    "FileOperationError",
    "GenerationMismatchError",
    "GuestFileExistsError",
    "GuestFileNotFoundError",
    "GuestUnavailableError",
    "IdempotencyConflictError",
    "InputClosedError",
    "InputFullError",
    "InputLimitError",
    "InvalidRequestError",
    "InvalidResponseError",
    "JobInputError",
    "JobStateError",
    "JobStillRunningError",
    "MachineNotRunningError",
    "MainbrellaError",
    "NotFoundError",
    "PartlyRemovedError",
    "PayloadTooLargeError",
    "PermissionDeniedError",
    "PreviewEndedError",
    "PreviewLimitError",
    "PreviewReconciliationRequiredError",
    "RateLimitedError",
    "RedirectRefusedError",
    "SecretLimitError",
    "ServerError",
    "SlotInUseError",
    "SnapshotDamagedError",
    "SnapshotLimitError",
    "SnapshotMismatchError",
    "TemplateInUseError",
    "TemplateLimitError",
    "TransportError",
    "UnavailableError",
    "UnsafeArchiveError",
    "UnsupportedError",
]


class MainbrellaError(Exception):
    """The base of every error of this package.

    Attributes:
        code: stable name of what went wrong, e.g. ``generation_mismatch``.
        message: one sentence.
        status: HTTP status of the answer; ``None`` when there was none.
        hint: what to do next; may be empty.
        request_id: names the request in the service's log.
        retryable: the same request may be sent again after a pause: nothing was done by it.
        ambiguous: the request may or may not have been carried out.
        idempotency_key: the key of the request; send the same request with it to find out or finish.
        retry_after: seconds the service asked to wait; ``None`` when it did not say.
    """

    default_code = "error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        status: int | None = None,
        hint: str = "",
        request_id: str | None = None,
        retryable: bool = False,
        ambiguous: bool = False,
        idempotency_key: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code if code is not None else self.default_code
        self.message = message
        self.status = status
        self.hint = hint
        self.request_id = request_id
        self.retryable = retryable
        self.ambiguous = ambiguous
        self.idempotency_key = idempotency_key
        self.retry_after = retry_after

    def __str__(self) -> str:
        text = f"{self.message} [{self.code}]"
        return f"{text} {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.__dict__.copy()))


def _rebuild(kind: type[MainbrellaError], message: str, state: dict[str, Any]) -> MainbrellaError:
    error = kind(message)
    error.__dict__.update(state)
    return error


class ConfigurationError(MainbrellaError, ValueError):
    """An argument cannot be used: nothing was sent."""

    default_code = "configuration"


class InvalidRequestError(MainbrellaError):
    """The service found a field, header or body of the wrong form."""


class AuthenticationError(MainbrellaError):
    """No or unknown API key."""


class PermissionDeniedError(MainbrellaError):
    """The key may not do this."""


class NotFoundError(MainbrellaError):
    """No such machine, template or route."""


class GuestFileNotFoundError(NotFoundError):
    """The path does not exist inside the machine."""


class ConflictError(MainbrellaError):
    """The state of something forbids the request."""


class GenerationMismatchError(ConflictError):
    """The slot holds another generation than the one named; the newer machine was not touched."""


class MachineNotRunningError(ConflictError):
    """The machine is not in a state that allows the call."""


class SlotInUseError(ConflictError):
    """A living machine holds the slot."""


class EgressLockedError(ConflictError):
    """The machine has no internet, and never gets it."""


class IdempotencyConflictError(ConflictError):
    """The idempotency key belongs to a different request."""


class CommandNotStartedError(MainbrellaError):
    """The command could not be started: no such program or working directory."""


class FileOperationError(MainbrellaError):
    """The machine's file system refused the operation, or its disk is full."""


class GuestFileExistsError(FileOperationError):
    """There is something at the path inside the machine where a new file was asked for."""


class PartlyRemovedError(FileOperationError):
    """A tree was removed only in part. Inspect what is left before trying again.

    Attributes:
        removed: entries that are gone.
        remaining: paths that are left, at most the first hundred.
        remaining_count: how many are left in all.
    """

    default_code = "partly_removed"
    removed: int = 0
    remaining: tuple[str, ...] = ()
    remaining_count: int = 0


class UnsafeArchiveError(FileOperationError):
    """A downloaded tree names a place outside the folder it was to be unpacked into."""

    default_code = "unsafe_archive"


class CommandFailedError(MainbrellaError):
    """A command that was run with ``check=True`` did not exit with code 0.

    Attributes:
        result: how it ended and what it said; ``None`` only on an error that was made by hand.
    """

    default_code = "command_failed"
    result: CommandResult | None = None


class ContextDeadError(ConflictError):
    """The kernel of a code context has ended, and its state with it. ``restart()`` begins a fresh one."""


class PreviewLimitError(ConflictError):
    """The generation has as many active previews as it may."""


class PreviewEndedError(MainbrellaError):
    """The preview has ended; another one needs another idempotency key."""


class PreviewReconciliationRequiredError(ConflictError):
    """A preview was made whose URL cannot be told: ``sandbox.previews.revoke(error.preview_id)``, then make another.

    Attributes:
        preview_id: names it; ``None`` only on an error that was made by hand.
    """

    default_code = "preview_reconciliation_required"
    preview_id: str | None = None


class SecretLimitError(ConflictError):
    """The machine has as many secrets as it may."""


class SnapshotLimitError(ConflictError):
    """The project has as many snapshots as it may."""


class SnapshotMismatchError(ConflictError):
    """Another template, size or internet policy was saved than the one that is asked for; the hint says which."""


class SnapshotDamagedError(ConflictError):
    """What was saved is not there any more as it was written: nothing can be started from it."""


class TemplateInUseError(ConflictError):
    """A tag points to the version that was to be removed; the message names it."""


class TemplateLimitError(ConflictError):
    """There are as many versions or tags of templates as there may be."""


class BuildStateError(ConflictError):
    """The build is not in a state that allows the call, e.g. over already."""


class BuildFailedError(MainbrellaError):
    """A build did not become a template.

    Attributes:
        build: id of the build; ``client.builds.events`` has its log.
        reason: what kept it, e.g. ``step``, ``base``, ``start``, ``timed_out``, ``cancelled``.
        line: the line of the recipe it is about, from 1, if there is one.
        instruction: the instruction on that line.
    """

    default_code = "build_failed"

    def __init__(
        self,
        message: str,
        *,
        build: str = "",
        reason: str = "",
        line: int | None = None,
        instruction: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(message, **options)
        self.build, self.reason, self.line, self.instruction = build, reason, line, instruction


class UnsupportedError(MainbrellaError):
    """This host cannot do it; ``client.capabilities()`` says what it can."""


class PayloadTooLargeError(MainbrellaError):
    """More was sent than the limit allows."""


class JobInputError(MainbrellaError):
    """The input of a job did not take a write, nor any part of it."""


class InputClosedError(JobInputError, ConflictError):
    """The job has no input, its end was sent, or the job has closed it."""


class InputFullError(JobInputError, ConflictError):
    """Too much input waits for the job to read it; write again when it has read more."""


class InputLimitError(JobInputError, PayloadTooLargeError):
    """The job was given as much input as one may be; larger input goes into the machine as a file."""


class JobStateError(ConflictError):
    """The job has ended, or has not ended, and so cannot do this."""


class RateLimitedError(MainbrellaError):
    """Too many requests; wait ``retry_after`` seconds."""


class UnavailableError(MainbrellaError):
    """The service cannot take the request now: a queue is full, it is going down, or its disk is full."""


class CreateFailedError(MainbrellaError):
    """The machine could not be made; its record says why."""


class GuestUnavailableError(MainbrellaError):
    """The machine's agent did not answer in time."""


class ServerError(MainbrellaError):
    """A fault of the service."""


class RedirectRefusedError(MainbrellaError):
    """The service answered with a redirect. It was not followed, so that the API key goes nowhere else."""

    default_code = "redirect_refused"


class TransportError(MainbrellaError):
    """The network failed. ``ambiguous`` says whether the request may have been carried out."""

    default_code = "transport"


class InvalidResponseError(TransportError):
    """The answer was not one of this API: cut short, not JSON, or lacking required fields."""

    default_code = "invalid_response"


class CallerStoppedWaitingError(TransportError):
    """This side gave up waiting for the answer. What was asked may go on in the machine.

    Not to be confused with a command that ran into its own limit: that is a normal result with ``timed_out=True``.
    """

    default_code = "caller_stopped_waiting"


class JobStillRunningError(CallerStoppedWaitingError):
    """``job.wait(timeout=…)`` ended before the job did. The job goes on: wait again, or ``job.cancel()``.

    What it has said so far is there: ``job.output()`` or ``job.events()``.

    Attributes:
        job_id: names the job; ``sandbox.commands.attach(error.job_id)``.
    """

    default_code = "job_still_running"
    job_id: str | None = None


class CleanupUncertainError(MainbrellaError):
    """The machine was asked to stop, but its removal could not be confirmed. Stopping again is safe."""

    default_code = "cleanup_uncertain"


_KINDS: dict[str, type[MainbrellaError]] = {
    "invalid_request": InvalidRequestError,
    "unauthenticated": AuthenticationError,
    "forbidden": PermissionDeniedError,
    "not_found": NotFoundError,
    "template_not_found": NotFoundError,
    "file_not_found": GuestFileNotFoundError,
    "generation_mismatch": GenerationMismatchError,
    "machine_not_running": MachineNotRunningError,
    "slot_in_use": SlotInUseError,
    "egress_locked": EgressLockedError,
    "idempotency_conflict": IdempotencyConflictError,
    "in_progress": ConflictError,
    "file_error": FileOperationError,
    "file_exists": GuestFileExistsError,
    "guest_disk_full": FileOperationError,
    "command_not_started": CommandNotStartedError,
    "stdin_closed": InputClosedError,
    "stdin_full": InputFullError,
    "stdin_limit": InputLimitError,
    "job_running": JobStateError,
    "job_ended": JobStateError,
    "context_dead": ContextDeadError,
    "preview_limit": PreviewLimitError,
    "preview_ended": PreviewEndedError,
    "preview_reconciliation_required": PreviewReconciliationRequiredError,
    "secret_limit": SecretLimitError,
    "snapshot_limit": SnapshotLimitError,
    "snapshot_mismatch": SnapshotMismatchError,
    "snapshot_damaged": SnapshotDamagedError,
    "template_in_use": TemplateInUseError,
    "template_limit": TemplateLimitError,
    "build_state": BuildStateError,
    "unsupported": UnsupportedError,
    "payload_too_large": PayloadTooLargeError,
    "rate_limited": RateLimitedError,
    "overloaded": UnavailableError,
    "shutting_down": UnavailableError,
    "host_full": UnavailableError,
    "create_failed": CreateFailedError,
    "guest_unavailable": GuestUnavailableError,
    "deadline_exceeded": GuestUnavailableError,
    "internal": ServerError,
}

_STATUSES: dict[int, type[MainbrellaError]] = {
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    413: PayloadTooLargeError,
    429: RateLimitedError,
    503: UnavailableError,
}

# Codes after which nothing was done, and codes after which only the service knows.
_SAFE = frozenset({"rate_limited", "overloaded", "shutting_down", "in_progress", "stdin_full"})
_UNKNOWN_OUTCOME = frozenset({"internal", "deadline_exceeded", "guest_unavailable"})


def api_error(
    status: int,
    body: dict[str, Any] | None,
    *,
    request_id: str | None,
    retry_after: float | None,
    idempotency_key: str | None,
) -> MainbrellaError:
    """The error for an answer with an error status. ``body`` is ``None`` when it was not the API's JSON."""
    fields = body or {}
    code = fields.get("code")
    if not isinstance(code, str) or not code:
        # Not ours: a proxy in between, or another service on this address.
        code = f"http_{status}"
    kind = _KINDS.get(code) or _STATUSES.get(status)
    if kind is None:
        kind = ServerError if status >= 500 else InvalidRequestError
    message = fields.get("message")
    hint = fields.get("hint")
    answered_id = fields.get("requestId")
    foreign_5xx = code.startswith("http_5")
    error = kind(
        message if isinstance(message, str) and message else f"The service answered with HTTP status {status}.",
        code=code,
        status=status,
        hint=hint if isinstance(hint, str) else "",
        request_id=answered_id if isinstance(answered_id, str) else request_id,
        retryable=code in _SAFE or code in ("http_429", "http_503"),
        ambiguous=code in _UNKNOWN_OUTCOME or (foreign_5xx and status != 503),
        idempotency_key=idempotency_key,
        retry_after=retry_after,
    )
    if isinstance(error, PreviewReconciliationRequiredError):
        preview_id = fields.get("previewId")
        error.preview_id = preview_id if isinstance(preview_id, str) else None
    return error
