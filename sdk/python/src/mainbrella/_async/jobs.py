"""Managed jobs: they outlive the connection, the client and a restart of the service."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import quote

from .._paths import number_in
from ..errors import (
    ConfigurationError,
    InputClosedError,
    InvalidResponseError,
    JobStateError,
    JobStillRunningError,
    MainbrellaError,
)
from ..jobs import (
    InputStatus,
    JobEvent,
    JobExited,
    JobInfo,
    JobOutput,
    RecordedOutput,
    StreamName,
    Texts,
    parse_event,
    parse_gap,
    parse_input,
    parse_job,
)
from ..models import CommandResult, Fields, Omitted, decode_around_gap
from . import net
from .sse import AsyncSseSource, StreamEndedError, backoff, event_fields, open_sse, pause_after

if TYPE_CHECKING:
    from .sandbox import AsyncSandbox

__all__ = ["AsyncEventStream", "AsyncJob", "AsyncJobInput", "AsyncRunResult", "signal_value"]

_OUTPUT_LIMIT = 1024 * 1024
_POLL_SECONDS = 30.0
_RECONNECT_SECONDS = 120.0


@dataclass(frozen=True)
class AsyncRunResult(CommandResult):
    """How a command ended, and the job it ran as."""

    job: AsyncJob | None = field(default=None, repr=False, compare=False)
    """To wait for or follow it, when it is ``still_running``. A command whose end was returned is not kept as a job."""


class AsyncJobInput:
    """``job.stdin``: the input of a job that was started with ``stdin=True``.

    Nothing here is ever sent twice: after an error whose ``ambiguous`` is true the bytes may have been accepted, and
    then they count. The service takes at most 64 KiB a write, 256 KiB that the job has not read yet, and 1 MiB in all.
    """

    def __init__(self, job: AsyncJob) -> None:
        self._job = job

    async def write(self, data: bytes | bytearray | memoryview | str) -> InputStatus:
        """Sends bytes, or text as UTF-8."""
        return await self._send(data.encode("utf-8") if isinstance(data, str) else bytes(data), "false")

    async def close(self) -> InputStatus:
        """Ends the input: the job reads end of file after what was written. In a terminal it may hang up.

        Harmless when it was ended before, and when the job is over.
        """
        try:
            return await self._send(b"", "true")
        except (InputClosedError, JobStateError):
            info = await self._job.get()
            if not info.stdin:
                raise
            return InputStatus(info.stdin_accepted_bytes, 0, closed=True)

    async def _send(self, data: bytes, eof: str) -> InputStatus:
        exchange = await self._job.sandbox.api.open(
            "POST",
            self._job.path + "/stdin",
            query={"eof": eof},
            body=data,
            content_type="application/octet-stream",
        )
        return parse_input(await self._job.sandbox.api.json(exchange))


class AsyncJob:
    """A managed job of one generation. ``Execution(sandbox, id)`` makes one without asking the service.

    Attributes:
        id: names the job within its machine.
        cursor: of the last event this object has given out; ``events()`` goes on after it. Keep it to go on later:
            ``Execution(sandbox, id, cursor=…)``.
        stdin: its input.
    """

    def __init__(self, sandbox: AsyncSandbox, id: str, *, cursor: int = 0, info: JobInfo | None = None) -> None:
        if not id:
            raise ConfigurationError("id must not be empty.")
        if cursor < 0:
            raise ConfigurationError("cursor must not be negative.")
        self.sandbox = sandbox
        self.id = id
        self.cursor = cursor
        self.stdin = AsyncJobInput(self)
        self.path = f"/jobs/{quote(id, safe='')}"
        self._info = info
        self._texts = Texts()

    @property
    def info(self) -> JobInfo | None:
        """What the service last said of it; ``get()`` asks again."""
        return self._info

    async def get(self) -> JobInfo:
        """Asks the service what the job is doing."""
        return self._learn(await self.sandbox.api.get(self.path))

    async def wait(self, timeout: float | None = None, *, output_limit: int = _OUTPUT_LIMIT) -> AsyncRunResult:
        """Waits for the end of the job and returns how it ended, with its output.

        Lost connections and a restart of the service are waited out. A job that ran into its own ``timeout_ms`` is a
        normal result with ``timed_out=True``; when *this call* is over first, that is ``JobStillRunningError``, and the
        job goes on.

        Args:
            timeout: seconds to wait; ``None`` for as long as it takes.
            output_limit: bytes returned of each of stdout and stderr, half from the start and half from the end.
        """
        info = await self.wait_info(timeout)
        assert info.exit is not None
        out, out_gap = await self._output("stdout", info.stdout_bytes, output_limit)
        err, err_gap = await self._output("stderr", info.stderr_bytes, output_limit)
        return AsyncRunResult(
            exit_code=info.exit.exit_code,
            signal=info.exit.signal,
            timed_out=info.exit.cause == "timed_out",
            stdout=decode_around_gap(out, out_gap),
            stderr=decode_around_gap(err, err_gap),
            stdout_bytes=out,
            stderr_bytes=err,
            stdout_total_bytes=info.stdout_bytes,
            stderr_total_bytes=info.stderr_bytes,
            stdout_omitted=out_gap,
            stderr_omitted=err_gap,
            duration_ms=info.duration_ms,
            cause=info.exit.cause,
            job_id=self.id,
            job=self,
        )

    async def wait_info(self, timeout: float | None = None) -> JobInfo:
        """``wait`` without the output."""
        end = None if timeout is None else time.monotonic() + timeout
        tries = backoff(_RECONNECT_SECONDS)
        while True:
            left = _POLL_SECONDS if end is None else min(_POLL_SECONDS, max(0.0, end - time.monotonic()))
            pause = 0.0
            try:
                query = {"timeoutMs": str(round(left * 1000))}
                info = self._learn(await self.sandbox.api.get(self.path + "/wait", query, extra_wait=left))
                tries.progress()
                if info.ended:
                    return info
            except MainbrellaError as error:
                pause = pause_after(error, tries)
            if end is not None and time.monotonic() + pause >= end:
                over = JobStillRunningError(
                    f"Job {self.id} has not ended in {timeout:g} seconds.",
                    hint="It goes on: wait again, follow job.events(), or job.cancel().",
                )
                over.job_id = self.id
                raise over
            if pause:
                await net.sleep(pause)

    async def cancel(self, *, grace_ms: int | None = None) -> JobInfo:
        """Ends the job's process group: SIGTERM, and SIGKILL for what is left after ``grace_ms`` milliseconds.

        Processes that have left the group live on until the machine ends. Harmless when the job has ended.
        """
        return self._learn(
            await self.sandbox.api.post(self.path + "/cancel", {} if grace_ms is None else {"graceMs": grace_ms})
        )

    async def signal(self, signal: str | int) -> JobInfo:
        """Asks for a signal, e.g. ``"SIGTERM"``, to be delivered. What the job does with it shows in its state."""
        return self._learn(await self.sandbox.api.post(self.path + "/signal", {"signal": signal_value(signal)}))

    async def resize(self, cols: int, rows: int) -> JobInfo:
        """Gives the job's terminal another size, in characters; its programs get SIGWINCH."""
        return self._learn(await self.sandbox.api.post(self.path + "/resize", {"cols": cols, "rows": rows}))

    async def forget(self) -> None:
        """Removes a finished job and its log from the service."""
        await self.sandbox.api.post(self.path, method="DELETE")

    async def output(
        self, stream: StreamName = "stdout", *, offset: int = 0, length: int | None = None
    ) -> RecordedOutput:
        """What is recorded of a stream from ``offset`` on, ``length`` bytes of it; of a running job, so far."""
        query = {"stream": stream, "offset": str(offset)}
        if length is not None:
            query["length"] = str(length)
        exchange = await self.sandbox.api.open("GET", self.path + "/output", query=query)
        pieces: list[bytes] = []
        try:
            while piece := await exchange.read():
                pieces.append(piece)
        finally:
            exchange.close()
        size = number_in(exchange.headers.get("x-mainbrella-size"), 10)
        data, gap = b"".join(pieces), parse_gap(exchange.headers.get("x-mainbrella-omitted"))
        return RecordedOutput(data, offset, max(size or 0, offset + len(data)), gap)

    def events(self, *, cursor: int | None = None, reconnect_seconds: float = _RECONNECT_SECONDS) -> AsyncEventStream:
        """Everything the job has said and says, each event once and in order, up to its exit.

        The stream comes back by itself after a lost connection, a stream that the service ended, or a restart of the
        service, and goes on where it was. Closing it, or letting go of it, leaves the job alone.

        Args:
            cursor: begin after this event; default: where this object is, ``job.cursor``.
            reconnect_seconds: how long to try when the service cannot be reached, before its error is raised.
        """
        return AsyncEventStream(self, self.cursor if cursor is None else cursor, reconnect_seconds)

    def __repr__(self) -> str:
        state = self._info.state if self._info is not None else "not asked yet"
        return f"Job(id={self.id!r}, cursor={self.cursor}, {state})"

    def _learn(self, data: object) -> JobInfo:
        info = parse_job(data)
        if info.id != self.id:
            raise InvalidResponseError("The service answered about another job.")
        self._info = info
        return info

    async def _output(self, stream: StreamName, total: int, limit: int) -> tuple[bytes, Omitted | None]:
        """Head and tail of a finished stream within ``limit`` bytes, and what lies between them."""
        if total == 0:
            return b"", None
        if total <= limit:
            head, tail = (await self.output(stream, length=total)).around_gap()
        else:
            head, _ = (await self.output(stream, length=limit - limit // 2)).around_gap()
            last = await self.output(stream, offset=total - limit // 2, length=limit // 2)
            first, rest = last.around_gap()
            tail = rest if last.omitted is not None else first
        missing = total - len(head) - len(tail)
        return head + tail, Omitted(len(head), missing) if missing > 0 else None


class AsyncEventStream:
    """The events of a job. Iterate over it; ``aclose()`` it, use it in a ``with`` block, or let go of it.

    Attributes:
        cursor: of the last event it has given out.
    """

    def __init__(self, job: AsyncJob, cursor: int, reconnect_seconds: float) -> None:
        if cursor < 0:
            raise ConfigurationError("cursor must not be negative.")
        self.job = job
        self.cursor = cursor
        self._source: AsyncSseSource | None = None
        self._waiting: deque[Fields] = deque()
        self._expected: dict[str, int] = {}
        self._tries = backoff(reconnect_seconds)
        self._over = False
        self._begun_at = -1

    def __aiter__(self) -> AsyncEventStream:
        return self

    async def __anext__(self) -> JobEvent:
        while not self._over:
            try:
                while self._waiting:
                    event = self._next(self._waiting.popleft())
                    if event is not None:
                        self._tries.progress()
                        return event
                await self._more()
            except MainbrellaError as error:
                self._drop()
                if self._over or (isinstance(error, StreamEndedError) and await self._nothing_left()):
                    break
                await net.sleep(pause_after(error, self._tries))
        self._drop()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Detaches. The job goes on."""
        self._over = True
        self._drop()

    async def __aenter__(self) -> AsyncEventStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _drop(self) -> None:
        self._waiting.clear()
        source, self._source = self._source, None
        if source is not None:
            source.close()

    async def _nothing_left(self) -> bool:
        """Whether a stream ended because its last event was given out before it began."""
        if self.cursor != self._begun_at:
            return False
        try:
            info = await self.job.get()
        except MainbrellaError:
            return False
        return info.ended and self.cursor >= info.last_cursor

    async def _more(self) -> None:
        """Receives something, or raises. The end of a stream without an exit is for the next connection."""
        if self._source is None:
            query = {"cursor": str(self.cursor)}
            self._begun_at = self.cursor
            self._source = await open_sse(self.job.sandbox.api, "GET", self.job.path + "/events", query=query)
            if self._over:
                return
        received = await self._source.receive()
        if not received and self._source.lasting:
            self._tries.progress()
        self._waiting.extend(event_fields(event.data) for event in received)

    def _next(self, fields: Fields) -> JobEvent | None:
        """An event to give out; ``None`` for one that was given out before or is of an unknown kind."""
        cursor = fields.number("cursor")
        if cursor <= self.cursor:
            return None
        if fields.text("type") == "output":
            expected = self._expected.get(fields.text("stream"))
            if expected is not None and fields.number("offset") != expected:
                raise InvalidResponseError(
                    f"The service left out output of job {self.job.id}.", hint="Report this: nothing may be lost."
                )
        event = parse_event(fields, self.job._texts)  # pyright: ignore[reportPrivateUsage]
        self.cursor = cursor
        self.job.cursor = max(self.job.cursor, cursor)
        if isinstance(event, JobOutput):
            self._expected[event.stream] = event.offset + len(event.data)
        elif event is not None and event.type == "gap":
            self._expected[event.stream] = event.offset + event.length
        elif isinstance(event, JobExited):
            self._over = True
        return event


def signal_value(signal: str | int) -> str | int:
    """A signal that can be asked for, by name or number."""
    if isinstance(signal, bool) or (isinstance(signal, int) and not 1 <= signal <= 64) or signal == "":
        raise ConfigurationError("signal must be a name such as 'SIGTERM', or a number from 1 to 64.")
    return int(signal) if isinstance(signal, int) else signal
