"""Commands inside a machine."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from .._wire import check_key
from ..errors import CallerStoppedWaitingError, ConfigurationError
from ..jobs import ExecutionsPage, TerminalSize, parse_job
from ..models import Fields, drop_none, parse_command
from .jobs import AsyncJob, AsyncRunResult

if TYPE_CHECKING:
    from .sandbox import AsyncSandbox

__all__ = ["AsyncCommands"]

_RUN_TIMEOUT_MS = 60_000
_START_TIMEOUT_MS = 300_000
_START_WAIT_SECONDS = 180.0
# Two streams of at most 16 MiB each, as base64, and the rest of the answer.
_ANSWER_MAX = 2 * (16 * 1024 * 1024 // 3 * 4) + 1024 * 1024
_LIST_MAX = 256 * 1024 * 1024


class AsyncCommands:
    """``sandbox.commands``."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        self._sandbox = sandbox

    async def run(
        self,
        command: str | Sequence[str],
        *,
        timeout_ms: int = _RUN_TIMEOUT_MS,
        cwd: str | None = None,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        output_limit: int | None = None,
        wait_ms: int | None = None,
    ) -> AsyncRunResult:
        """Runs a command, waits for its end and returns what it said. It is never repeated automatically.

        Two kinds of late differ. ``timeout_ms`` is the command's own limit: it is ended, and the result has
        ``timed_out=True``. ``wait_ms`` is how long this call waits: the command goes on, and the result has
        ``still_running=True`` and a ``job`` to wait for or follow. Both hold the output that had come by then.

        Args:
            command: a string runs as ``/bin/sh -lc STRING``; a list is the program and its arguments.
            timeout_ms: milliseconds after which the command is ended.
            cwd: working directory, absolute.
            user: who it runs as, ``"USER"`` or ``"USER:GROUP"`` by name or number; default: the template's user, else root.
            env: variables over those of the machine. The machine can read them: no place for protected secrets.
            stdin: its whole standard input; without it the command reads end of file at once.
            output_limit: bytes kept of each of stdout and stderr, half from the start and half from the end.
            wait_ms: milliseconds after which this call returns anyway; default: no such limit.

        Raises:
            CallerStoppedWaitingError: no answer came in ``timeout_ms`` (or ``wait_ms``) plus the client's ``timeout``.
                The command may still be running; this is not the command's own time-out.
        """
        if wait_ms is not None and wait_ms <= 0:
            raise ConfigurationError("wait_ms must be a positive number of milliseconds.")
        data = stdin.encode("utf-8") if isinstance(stdin, str) else stdin
        body = {
            **_command(command, timeout_ms, cwd, user, env),
            **drop_none(
                {
                    "outputLimitBytes": output_limit,
                    "stdinBase64": None if data is None else base64.b64encode(data).decode("ascii"),
                    "waitMs": wait_ms,
                }
            ),
        }
        wait = timeout_ms if wait_ms is None else min(timeout_ms, wait_ms)
        try:
            reply = await self._sandbox.api.post("/commands/run", body, extra_wait=wait / 1000, limit=_ANSWER_MAX)
        except CallerStoppedWaitingError as error:
            error.hint = "The command may still be running: look for it in commands.list() before running it again."
            raise
        fields = parse_command(reply)
        id = fields["job_id"] if fields["still_running"] else None
        return AsyncRunResult(**fields, job=None if id is None else AsyncJob(self._sandbox, id))

    async def start(
        self,
        command: str | Sequence[str],
        *,
        timeout_ms: int = _START_TIMEOUT_MS,
        cwd: str | None = None,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bool = False,
        pty: TerminalSize | Mapping[str, int] | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncJob:
        """Starts a managed job: it goes on whatever becomes of this program, and its output is kept.

        All attempts of one call carry one idempotency key, so at most one job is started. An error whose
        ``ambiguous`` is true leaves open whether there is one: within an hour, call again with the same arguments and
        ``idempotency_key=error.idempotency_key``.

        Args:
            command: a string runs as ``/bin/sh -lc STRING``; a list is the program and its arguments.
            timeout_ms: milliseconds after which the job is ended.
            cwd: working directory, absolute.
            user: who it runs as, ``"USER"`` or ``"USER:GROUP"`` by name or number; default: the template's user, else root.
            env: variables over those of the machine. The machine can read them: no place for protected secrets.
            stdin: give it an input, see ``job.stdin``; without it the job reads end of file at once.
            pty: ``{"cols": 80, "rows": 24}``: run it in a terminal of that size. stderr then comes as stdout.
            idempotency_key: generated when not given; kept for one hour.
        """
        body: dict[str, Any] = _command(command, timeout_ms, cwd, user, env)
        if stdin:
            body["stdin"] = True
        if pty is not None:
            given: Any = pty
            if not isinstance(given, Mapping) or "cols" not in given or "rows" not in given:
                raise ConfigurationError('pty must be a size such as {"cols": 80, "rows": 24}.')
            body["pty"] = {"cols": pty["cols"], "rows": pty["rows"]}
        api = self._sandbox.api
        info = await api.transport.keyed(
            api.path + "/jobs",
            body,
            parse_job,
            query={"createdAt": api.created_at},
            key=check_key(idempotency_key),
            timeout=max(_START_WAIT_SECONDS, api.transport.timeout),
        )
        return AsyncJob(self._sandbox, info.id, info=info)

    async def attach(self, id: str) -> AsyncJob:
        """A job that was started before, by anyone. Raises ``NotFoundError`` when it is not retained."""
        job = AsyncJob(self._sandbox, id)
        await job.get()
        return job

    async def list(self, *, limit: int | None = None, cursor: str | None = None) -> ExecutionsPage:
        """One page of the retained jobs of this machine, newest first, finished ones too.

        ``page["executions"]`` are the jobs as the service sends them; pass ``page["nextCursor"]`` as ``cursor`` for the
        next page, if it is not ``None``.
        """
        query = drop_none({"limit": None if limit is None else str(limit), "cursor": cursor})
        data = await self._sandbox.api.get("/jobs", query, limit=_LIST_MAX)
        page = Fields(data, "list")
        page.objects("executions")
        page.text_or_none("nextCursor")
        return cast("ExecutionsPage", {"nextCursor": None, **data})


def _command(
    command: str | Sequence[str],
    timeout_ms: int,
    cwd: str | None,
    user: str | None,
    env: Mapping[str, str] | None,
) -> dict[str, Any]:
    if not isinstance(timeout_ms, int) or timeout_ms <= 0:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError("timeout_ms must be a positive number of milliseconds.")
    words: Any = [command] if isinstance(command, str) else command
    if not command or not isinstance(words, Sequence) or not _texts(words):
        raise ConfigurationError("command must be a string, or a list of strings with at least the program.")
    if env and not _texts([*env, *env.values()]):
        raise ConfigurationError("env must have strings as names and values.")
    return drop_none(
        {
            "command": command if isinstance(command, str) else list(command),
            "cwd": cwd,
            "user": user,
            "env": dict(env) if env else None,
            "timeoutMs": timeout_ms,
        }
    )


def _texts(values: Sequence[Any]) -> bool:
    return all(isinstance(value, str) for value in values)
