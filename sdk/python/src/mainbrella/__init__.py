"""Mainbrella: one virtual machine for each agent session.

>>> from mainbrella import Mainbrella
>>> client = Mainbrella(os.environ["MAINBRELLA_API_KEY"])
>>> with client.create(catalog_id="python") as sandbox:
...     result = sandbox.commands.run("python --version")

``AsyncMainbrella`` has the same verbs for ``asyncio``.
"""

from ._async.client import AsyncMainbrella
from ._async.commands import AsyncCommands
from ._async.contexts import AsyncCodeContext, AsyncCodeStream
from ._async.egress import AsyncEgress
from ._async.files import AsyncFiles, AsyncReadFiles, AsyncRemoteFile
from ._async.jobs import AsyncEventStream, AsyncJob, AsyncJobInput, AsyncRunResult
from ._async.previews import AsyncPreviews
from ._async.sandbox import AsyncSandbox
from ._async.secrets import AsyncSecrets
from ._async.snapshots import AsyncSnapshotFiles, AsyncSnapshots
from ._async.templates import AsyncBuilds, AsyncTemplates
from ._async.watch import AsyncFileWatch
from ._sync.client import Mainbrella
from ._sync.commands import Commands
from ._sync.contexts import CodeContext, CodeStream
from ._sync.egress import Egress
from ._sync.files import Files, ReadFiles, RemoteFile
from ._sync.jobs import EventStream, Job, JobInput, RunResult
from ._sync.previews import Previews
from ._sync.sandbox import Sandbox
from ._sync.secrets import Secrets
from ._sync.snapshots import SnapshotFiles, Snapshots
from ._sync.templates import Builds, Templates
from ._sync.watch import FileWatch
from ._version import __version__
from .codetypes import CodeError, CodeEvent, CodeOutput, CodeResult, ContextInfo
from .egresstypes import EgressEvent, EgressExplanation, EgressLogPage, EgressPolicy, ResolvedAddress
from .errors import (
    AuthenticationError,
    BuildFailedError,
    BuildStateError,
    CallerStoppedWaitingError,
    CleanupUncertainError,
    CommandFailedError,
    CommandNotStartedError,
    ConfigurationError,
    ConflictError,
    ContextDeadError,
    CreateFailedError,
    EgressLockedError,
    FileOperationError,
    GenerationMismatchError,
    GuestFileExistsError,
    GuestFileNotFoundError,
    GuestUnavailableError,
    IdempotencyConflictError,
    InputClosedError,
    InputFullError,
    InputLimitError,
    InvalidRequestError,
    InvalidResponseError,
    JobInputError,
    JobStateError,
    JobStillRunningError,
    MachineNotRunningError,
    MainbrellaError,
    NotFoundError,
    PartlyRemovedError,
    PayloadTooLargeError,
    PermissionDeniedError,
    PreviewEndedError,
    PreviewLimitError,
    PreviewReconciliationRequiredError,
    RateLimitedError,
    RedirectRefusedError,
    SecretLimitError,
    ServerError,
    SlotInUseError,
    SnapshotDamagedError,
    SnapshotLimitError,
    SnapshotMismatchError,
    TemplateInUseError,
    TemplateLimitError,
    TransportError,
    UnavailableError,
    UnsafeArchiveError,
    UnsupportedError,
)
from .filetypes import DownloadedTree, FileEntry, FilePage, FileWatchEvent, SignedUrl, UploadedTree
from .jobs import (
    ExecutionsPage,
    InputStatus,
    JobEvent,
    JobExit,
    JobExited,
    JobGap,
    JobInfo,
    JobOutput,
    JobStarted,
    ProcessInfo,
    ProcessList,
    RecordedOutput,
    TerminalSize,
)
from .models import CommandResult, EndReason, ForkReceipt, MachineInfo, MachineLimits, Omitted, StopResult
from .previewtypes import IssuedPreview, Preview, PreviewPage
from .secrettypes import Secret, SecretInfo
from .snapshottypes import Snapshot

Execution = Job
"""A job by its id: ``Execution(sandbox, id)``; nothing is asked of the service until it is used."""

AsyncExecution = AsyncJob
"""``Execution`` for ``AsyncSandbox``."""

__all__ = [
    "AsyncBuilds",
    "AsyncCodeContext",
    "AsyncCodeStream",
    "AsyncCommands",
    "AsyncEgress",
    "AsyncEventStream",
    "AsyncExecution",
    "AsyncFileWatch",
    "AsyncFiles",
    "AsyncJob",
    "AsyncJobInput",
    "AsyncMainbrella",
    "AsyncPreviews",
    "AsyncReadFiles",
    "AsyncRemoteFile",
    "AsyncRunResult",
    "AsyncSandbox",
    "AsyncSecrets",
    "AsyncSnapshotFiles",
    "AsyncSnapshots",
    "AsyncTemplates",
    "AuthenticationError",
    "BuildFailedError",
    "BuildStateError",
    "Builds",
    "CallerStoppedWaitingError",
    "CleanupUncertainError",
    "CodeContext",
    "CodeError",
    "CodeEvent",
    "CodeOutput",
    "CodeResult",
    "CodeStream",
    "CommandFailedError",
    "CommandNotStartedError",
    "CommandResult",
    "Commands",
    "ConfigurationError",
    "ConflictError",
    "ContextDeadError",
    "ContextInfo",
    "CreateFailedError",
    "DownloadedTree",
    "Egress",
    "EgressEvent",
    "EgressExplanation",
    "EgressLockedError",
    "EgressLogPage",
    "EgressPolicy",
    "EndReason",
    "EventStream",
    "Execution",
    "ExecutionsPage",
    "FileEntry",
    "FileOperationError",
    "FilePage",
    "FileWatch",
    "FileWatchEvent",
    "Files",
    "ForkReceipt",
    "GenerationMismatchError",
    "GuestFileExistsError",
    "GuestFileNotFoundError",
    "GuestUnavailableError",
    "IdempotencyConflictError",
    "InputClosedError",
    "InputFullError",
    "InputLimitError",
    "InputStatus",
    "InvalidRequestError",
    "InvalidResponseError",
    "IssuedPreview",
    "Job",
    "JobEvent",
    "JobExit",
    "JobExited",
    "JobGap",
    "JobInfo",
    "JobInput",
    "JobInputError",
    "JobOutput",
    "JobStarted",
    "JobStateError",
    "JobStillRunningError",
    "MachineInfo",
    "MachineLimits",
    "MachineNotRunningError",
    "Mainbrella",
    "MainbrellaError",
    "NotFoundError",
    "Omitted",
    "PartlyRemovedError",
    "PayloadTooLargeError",
    "PermissionDeniedError",
    "Preview",
    "PreviewEndedError",
    "PreviewLimitError",
    "PreviewPage",
    "PreviewReconciliationRequiredError",
    "Previews",
    "ProcessInfo",
    "ProcessList",
    "RateLimitedError",
    "RecordedOutput",
    "RedirectRefusedError",
    "ReadFiles",
    "RemoteFile",
    "ResolvedAddress",
    "RunResult",
    "Sandbox",
    "Secret",
    "SecretInfo",
    "SecretLimitError",
    "Secrets",
    "ServerError",
    "SignedUrl",
    "SlotInUseError",
    "Snapshot",
    "SnapshotDamagedError",
    "SnapshotLimitError",
    "SnapshotMismatchError",
    "SnapshotFiles",
    "Snapshots",
    "StopResult",
    "TemplateInUseError",
    "TemplateLimitError",
    "Templates",
    "TerminalSize",
    "TransportError",
    "UnavailableError",
    "UnsafeArchiveError",
    "UnsupportedError",
    "UploadedTree",
    "__version__",
]
