"""Commands inside a machine."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .errors import CallerStoppedWaitingError, ConfigurationError
from .models import CommandResult, drop_none, parse_command

if TYPE_CHECKING:
    from .sandbox import Sandbox

__all__ = ["Commands"]

_TIMEOUT_DEFAULT_MS = 60_000
# Two streams of at most 16 MiB each, as base64, and the rest of the answer.
_ANSWER_MAX = 2 * (16 * 1024 * 1024 // 3 * 4) + 1024 * 1024


class Commands:
    """``sandbox.commands``."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def run(
        self,
        command: str | Sequence[str],
        *,
        timeout_ms: int = _TIMEOUT_DEFAULT_MS,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        output_limit: int | None = None,
    ) -> CommandResult:
        """Runs a command, waits for its end and returns what it said. It is never repeated automatically.

        Args:
            command: a string runs as ``/bin/sh -lc STRING``; a list is the program and its arguments.
            timeout_ms: the command is ended after so long; the result then has ``timed_out=True``.
            cwd: working directory, absolute.
            env: variables over those of the machine. The machine can read them: no place for protected secrets.
            stdin: its whole standard input; without it the command reads end of file at once.
            output_limit: bytes kept of each of stdout and stderr, half from the start and half from the end.

        Raises:
            CallerStoppedWaitingError: no answer came in ``timeout_ms`` plus the client's ``timeout``. The command may
                still be running; this is not the command's own time-out.
        """
        if not isinstance(timeout_ms, int) or timeout_ms <= 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError("timeout_ms must be a positive number of milliseconds.")
        if isinstance(command, (bytes, bytearray)) or not command:
            raise ConfigurationError("command must be a string, or a list of strings with at least the program.")
        argv = command if isinstance(command, str) else list(command)
        data = stdin.encode("utf-8") if isinstance(stdin, str) else stdin
        body = drop_none(
            {
                "command": argv,
                "cwd": cwd,
                "env": dict(env) if env else None,
                "timeoutMs": timeout_ms,
                "outputLimitBytes": output_limit,
                "stdinBase64": None if data is None else base64.b64encode(data).decode("ascii"),
            }
        )
        try:
            return parse_command(
                self._sandbox.post("/commands/run", body, extra_wait=timeout_ms / 1000, limit=_ANSWER_MAX)
            )
        except CallerStoppedWaitingError as error:
            error.hint = "The command may still be running in the machine; inspect before running it again."
            raise
