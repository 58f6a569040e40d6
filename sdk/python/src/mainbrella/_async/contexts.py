"""Code contexts: interpreters in a machine whose state lasts from one run to the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import quote

from .._wire import json_bytes
from ..codetypes import (
    CodeEvent,
    CodeResult,
    ContextInfo,
    parse_code_event,
    parse_code_result,
    parse_context,
)
from ..errors import (
    CallerStoppedWaitingError,
    ConfigurationError,
    MachineNotRunningError,
    MainbrellaError,
    NotFoundError,
)
from ..models import Fields, drop_none
from .sse import AsyncSseSource, event_fields, open_sse

if TYPE_CHECKING:
    from .sandbox import AsyncSandbox

__all__ = ["AsyncCodeContext", "AsyncCodeStream", "create_code_context", "list_code_contexts"]

_RUN_SECONDS = 60.0
_START_WAIT_SECONDS = 120.0
_RESULT_MAX = 64 * 1024 * 1024


class AsyncCodeContext:
    """One interpreter. What one ``run_code`` defines, the next can use. Leaving its ``with`` block closes it.

    Attributes:
        id: names it within its machine.
    """

    def __init__(self, sandbox: AsyncSandbox, info: ContextInfo) -> None:
        self.sandbox = sandbox
        self.id = info.id
        self._info = info
        self._path = f"/contexts/{quote(info.id, safe='')}"

    @property
    def info(self) -> ContextInfo:
        """What the service last said of it; ``inspect()`` asks again."""
        return self._info

    async def inspect(self) -> ContextInfo:
        """Asks the service how it is."""
        self._info = parse_context(await self.sandbox.api.get(self._path))
        return self._info

    async def run_code(self, code: str, *, timeout_seconds: float = _RUN_SECONDS) -> CodeResult:
        """Runs code, waits for its end and returns what it said, showed and raised. Never repeated automatically.

        An exception of the code is a normal result: ``result.error``, with exit code 1. Code that runs into
        ``timeout_seconds`` is interrupted; the result then has ``timed_out``, and the state is kept. A call that is
        given up on this side (``CallerStoppedWaitingError``, a cancelled task, Ctrl-C) interrupts the code too.

        Raises:
            ContextDeadError: the interpreter has ended, and its state with it; ``restart()`` begins a fresh one.
        """
        body = _run(code, timeout_seconds)
        try:
            reply = await self.sandbox.api.post(
                self._path + "/run", body, extra_wait=timeout_seconds, limit=_RESULT_MAX
            )
        except CallerStoppedWaitingError as error:
            error.hint = (
                "The code is interrupted when its caller is gone; look at what it has done before repeating it."
            )
            raise
        return parse_code_result(reply)

    def stream_code(self, code: str, *, timeout_seconds: float = _RUN_SECONDS) -> AsyncCodeStream:
        """``run_code``, but what the code does is given out as it happens. The code begins with the iteration.

        Closing the iterator before its last event, or letting go of it, interrupts the code.
        """
        return AsyncCodeStream(self, self._path + "/run", _run(code, timeout_seconds), timeout_seconds)

    async def interrupt(self) -> None:
        """Interrupts what is running, as Ctrl-C does. Its state is kept."""
        await self.sandbox.api.post(self._path + "/interrupt")

    async def restart(self) -> ContextInfo:
        """Begins a fresh interpreter under the same id: all state of the old one is gone."""
        reply = await self.sandbox.api.post(self._path + "/restart", extra_wait=_START_WAIT_SECONDS)
        if reply:
            self._info = parse_context(reply)
        return self._info

    async def close(self) -> None:
        """Ends the interpreter. Harmless when it, or its machine, has ended."""
        try:
            await self.sandbox.api.post(self._path, method="DELETE")
        except (NotFoundError, MachineNotRunningError):
            pass

    async def __aenter__(self) -> AsyncCodeContext:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"CodeContext(id={self.id!r}, language={self._info.language!r}, state={self._info.state!r})"


class AsyncCodeStream:
    """What a run of code does, as it happens. Iterate over it; ``aclose()`` it, or use it in a ``with`` block."""

    def __init__(self, context: AsyncCodeContext, verb: str, body: Mapping[str, object], seconds: float) -> None:
        self._api = context.sandbox.api
        self._verb = verb
        self._body = body
        self._seconds = seconds
        self._source: AsyncSseSource | None = None
        self._waiting: deque[CodeEvent] = deque()
        self._failure: MainbrellaError | None = None
        self._over = False

    def __aiter__(self) -> AsyncCodeStream:
        return self

    async def __anext__(self) -> CodeEvent:
        try:
            while not self._waiting:
                if self._failure is not None:
                    raise self._failure
                if self._over:
                    raise StopAsyncIteration
                await self._more()
        except BaseException:
            # Never begun again: the code has been sent.
            await self.aclose()
            raise
        event = self._waiting.popleft()
        if event.type == "done":
            await self.aclose()
        return event

    async def aclose(self) -> None:
        """Lets go of it; code that still runs is interrupted."""
        self._over = True
        self._failure = None
        self._waiting.clear()
        source, self._source = self._source, None
        if source is not None:
            source.close()

    async def __aenter__(self) -> AsyncCodeStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _more(self) -> None:
        if self._source is None:
            self._source = await open_sse(
                self._api,
                "POST",
                self._verb,
                query={},
                body=json_bytes(self._body),
                total=self._seconds + self._api.transport.timeout,
            )
        for event in await self._source.receive():
            fields = event_fields(event.data)
            try:
                parsed = parse_code_event(fields.text_or_none("type") or event.event, fields)
            except MainbrellaError as error:
                # What came before it, in the same piece of the stream perhaps, is given out first.
                self._failure = _begun(error)
                return
            if parsed is not None:
                self._waiting.append(parsed)


async def create_code_context(
    sandbox: AsyncSandbox, language: str, *, cwd: str | None, env: Mapping[str, str] | None
) -> AsyncCodeContext:
    """Starts an interpreter."""
    body = drop_none({"language": language, "cwd": cwd, "env": dict(env) if env else None})
    info = parse_context(await sandbox.api.post("/contexts", body, extra_wait=_START_WAIT_SECONDS))
    return AsyncCodeContext(sandbox, info)


async def list_code_contexts(sandbox: AsyncSandbox) -> list[AsyncCodeContext]:
    """The interpreters of a machine."""
    page = Fields(await sandbox.api.get("/contexts"), "list")
    return [AsyncCodeContext(sandbox, parse_context(entry)) for entry in page.objects("contexts")]


def _begun(error: MainbrellaError) -> MainbrellaError:
    """An error that ends a run which has begun: whatever its code says elsewhere, something may have been done."""
    error.ambiguous = error.ambiguous or error.retryable
    error.retryable = False
    return error


def _run(code: str, timeout_seconds: float) -> dict[str, object]:
    if not timeout_seconds > 0:
        raise ConfigurationError("timeout_seconds must be a positive number of seconds.")
    return {"code": code, "timeoutMs": max(1, round(timeout_seconds * 1000))}
