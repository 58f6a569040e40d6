"""Mainbrella: one virtual machine for each agent session.

>>> from mainbrella import Mainbrella
>>> client = Mainbrella(os.environ["MAINBRELLA_API_KEY"])
>>> with client.create(catalog_id="python") as sandbox:
...     result = sandbox.commands.run("python --version")
"""

from ._version import __version__
from .client import Mainbrella
from .commands import Commands
from .errors import (
    AuthenticationError,
    CallerStoppedWaitingError,
    CleanupUncertainError,
    CommandNotStartedError,
    ConfigurationError,
    ConflictError,
    CreateFailedError,
    FileOperationError,
    GenerationMismatchError,
    GuestFileExistsError,
    GuestFileNotFoundError,
    GuestUnavailableError,
    IdempotencyConflictError,
    InvalidRequestError,
    InvalidResponseError,
    MachineNotRunningError,
    MainbrellaError,
    NotFoundError,
    PayloadTooLargeError,
    PermissionDeniedError,
    RateLimitedError,
    RedirectRefusedError,
    ServerError,
    SlotInUseError,
    TransportError,
    UnavailableError,
    UnsupportedError,
)
from .files import Files, RemoteFile
from .models import CommandResult, EndReason, MachineInfo, MachineLimits, Omitted, StopResult
from .sandbox import Sandbox

__all__ = [
    "AuthenticationError",
    "CallerStoppedWaitingError",
    "CleanupUncertainError",
    "CommandNotStartedError",
    "CommandResult",
    "Commands",
    "ConfigurationError",
    "ConflictError",
    "CreateFailedError",
    "EndReason",
    "FileOperationError",
    "Files",
    "GenerationMismatchError",
    "GuestFileExistsError",
    "GuestFileNotFoundError",
    "GuestUnavailableError",
    "IdempotencyConflictError",
    "InvalidRequestError",
    "InvalidResponseError",
    "MachineInfo",
    "MachineLimits",
    "MachineNotRunningError",
    "Mainbrella",
    "MainbrellaError",
    "NotFoundError",
    "Omitted",
    "PayloadTooLargeError",
    "PermissionDeniedError",
    "RateLimitedError",
    "RedirectRefusedError",
    "RemoteFile",
    "Sandbox",
    "ServerError",
    "SlotInUseError",
    "StopResult",
    "TransportError",
    "UnavailableError",
    "UnsupportedError",
    "__version__",
]
