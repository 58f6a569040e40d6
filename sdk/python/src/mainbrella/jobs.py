"""What the service says of jobs and processes, and the events of a job with its text."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, TypedDict

from .models import Fields, Omitted, decode_around_gap, malformed

__all__ = [
    "ExecutionsPage",
    "InputStatus",
    "JobEvent",
    "JobExit",
    "JobExited",
    "JobGap",
    "JobInfo",
    "JobOutput",
    "JobStarted",
    "ProcessInfo",
    "ProcessList",
    "RecordedOutput",
    "TerminalSize",
]

StreamName = Literal["stdout", "stderr"]
_STREAMS: dict[str, StreamName] = {"stdout": "stdout", "stderr": "stderr"}


class TerminalSize(TypedDict):
    """The size of a terminal, in characters."""

    cols: int
    rows: int


class ExecutionsPage(TypedDict):
    """One page of the jobs of a machine, newest first, as the service sends them."""

    executions: list[dict[str, Any]]
    nextCursor: str | None


@dataclass(frozen=True)
class JobExit:
    """How a job ended."""

    cause: str
    """``exited signalled timed_out cancelled machine_stopped lost``."""
    code: int | None
    """The exit code, when it exited."""
    signal: int | None
    """The signal that ended it, when one did."""

    @property
    def exit_code(self) -> int:
        """The exit code; 128 + signal when a signal ended it; -1 when it timed out or went with its machine."""
        if self.cause in ("exited", "signalled", "cancelled"):
            if self.code is not None:
                return self.code
            if self.signal is not None:
                return 128 + self.signal
        return -1


@dataclass(frozen=True)
class JobInfo:
    """A job as it was when the service was asked. Instants are RFC 3339."""

    id: str
    command: str | list[str]
    state: str
    """``running`` or ``ended``."""
    exit: JobExit | None
    """``None`` while it runs."""
    started_at: str
    ended_at: str | None
    pid: int | None
    """Its process in the machine; the leader of its process group."""
    timeout_ms: int
    cwd: str | None
    stdin: bool
    pty: TerminalSize | None
    last_cursor: int
    """Cursor of the last event that was recorded."""
    stdout_bytes: int
    """Bytes produced in all."""
    stderr_bytes: int
    stdin_accepted_bytes: int
    stdout_omitted_bytes: int = 0
    """Of ``stdout_bytes``, those that are not kept: the log keeps the head and the tail up to its limit."""
    stderr_omitted_bytes: int = 0

    @property
    def ended(self) -> bool:
        """Whether it is over."""
        return self.state == "ended"

    @property
    def duration_ms(self) -> int:
        """Milliseconds from its start to its end; 0 while it runs."""
        if self.ended_at is None:
            return 0
        return max(0, round((_instant(self.ended_at) - _instant(self.started_at)) * 1000))


@dataclass(frozen=True)
class RecordedOutput:
    """A part of a stream of a job, as far as it is kept."""

    data: bytes
    """The bytes that are kept."""
    offset: int
    """Where in the stream the part begins."""
    total_bytes: int
    """Bytes the stream has so far."""
    omitted: Omitted | None
    """What is missing within the part: ``length`` bytes from ``offset`` of the stream on."""

    @property
    def text(self) -> str:
        """As text: UTF-8, U+FFFD for what is not; no character is cut at what is missing."""
        gap = self.omitted
        return decode_around_gap(self.data, None if gap is None else Omitted(gap.offset - self.offset, gap.length))

    def around_gap(self) -> tuple[bytes, bytes]:
        """The bytes before and after what is missing."""
        at = len(self.data) if self.omitted is None else max(0, self.omitted.offset - self.offset)
        return self.data[:at], self.data[at:]


@dataclass(frozen=True)
class InputStatus:
    """What became of the input of a job."""

    accepted_bytes: int
    """Bytes accepted in all."""
    pending_bytes: int
    """Bytes accepted that the process has not read yet."""
    closed: bool
    """No more is accepted."""


@dataclass(frozen=True)
class ProcessInfo:
    """One process of a machine."""

    pid: int
    ppid: int
    uid: int
    state: str
    """One letter, as in ``/proc``: ``R S D Z T …``."""
    command: str
    """Its short name."""
    argv: list[str]
    started_at_ms: int
    """Unix milliseconds, by the clock of the machine."""
    cpu_time_ms: int
    rss_bytes: int
    job_id: str | None
    """The managed job it belongs to."""


class ProcessList(list[ProcessInfo]):
    """The processes of a machine. ``truncated``: there were more than the service returns."""

    truncated: bool = False


@dataclass(frozen=True)
class JobStarted:
    """The job's process is there. ``time_ms``: Unix milliseconds."""

    cursor: int
    time_ms: int
    pid: int | None
    type: Literal["started"] = "started"


@dataclass(frozen=True)
class JobOutput:
    """Some output.

    ``data`` are its bytes, ``offset`` their place in the stream. ``text`` is what of the stream became readable with
    them: a character whose bytes came in two events is in the text of the later one. What is not UTF-8 is U+FFFD.
    """

    cursor: int
    time_ms: int
    stream: StreamName
    offset: int
    data: bytes
    text: str
    type: Literal["output"] = "output"


@dataclass(frozen=True)
class JobGap:
    """``length`` bytes of a stream from ``offset`` on were produced but not kept: the log's limit was reached."""

    cursor: int
    time_ms: int
    stream: StreamName
    offset: int
    length: int
    type: Literal["gap"] = "gap"


@dataclass(frozen=True)
class JobExited:
    """The last event: how the job ended, and how much it had said in all."""

    cursor: int
    time_ms: int
    exit: JobExit
    stdout_bytes: int
    stderr_bytes: int
    duration_ms: int
    type: Literal["exit"] = "exit"

    @property
    def exit_code(self) -> int:
        """The exit code; 128 + signal when a signal ended it; -1 when it timed out or went with its machine."""
        return self.exit.exit_code


JobEvent = JobStarted | JobOutput | JobGap | JobExited
"""What ``job.events()`` yields; ``event.type`` is ``started``, ``output``, ``gap`` or ``exit``."""


@dataclass
class _Reading:
    at: int
    leave_out: int
    """Bytes that may still belong to a character whose beginning is not known."""
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))


class Texts:
    """Turns the bytes of a job's streams into text without ever cutting a character.

    It knows how far it has read each stream. Bytes that follow continue the text; any others begin anew, and then the
    rest of a character whose beginning is not known is left out.
    """

    def __init__(self) -> None:
        self._streams: dict[str, _Reading] = {}

    def decode(self, stream: str, offset: int, data: bytes) -> str:
        """The text that became readable with ``data``, which lies at ``offset`` of ``stream``."""
        reading = self._streams.get(stream)
        if reading is None or reading.at != offset:
            reading = self._streams[stream] = _Reading(offset, 3 if offset > 0 else 0)
        reading.at = offset + len(data)
        begin = 0
        while reading.leave_out and begin < len(data):
            if data[begin] & 0xC0 != 0x80:
                reading.leave_out = 0
                break
            reading.leave_out -= 1
            begin += 1
        return reading.decoder.decode(data[begin:], False)


def parse_exit(data: Any) -> JobExit:
    """The ``exit`` of a job, or the fields of an exit event."""
    f = Fields(data, "exit")
    return JobExit(f.text("cause"), f.number_or_none("code"), f.number_or_none("signal"))


def parse_job(data: Any) -> JobInfo:
    """A ``Job`` of the wire. Fields this version does not know are ignored."""
    f = Fields(data, "job")
    command: Any = f.raw("command")
    size, ended = f.object_or_none("pty"), f.raw("exit")
    state = f.text("state")
    if state == "ended" and ended is None:
        raise malformed("job.exit")
    return JobInfo(
        id=f.text("id"),
        command=command if isinstance(command, str) else f.texts("command"),
        state=state,
        exit=None if ended is None else parse_exit(ended),
        started_at=f.text("startedAt"),
        ended_at=f.text_or_none("endedAt"),
        pid=f.number_or_none("pid"),
        timeout_ms=f.number("timeoutMs"),
        cwd=f.text_or_none("cwd"),
        stdin=f.flag_or("stdin", False),
        pty=None if size is None else {"cols": size.number("cols"), "rows": size.number("rows")},
        last_cursor=f.number("cursor"),
        stdout_bytes=f.number("stdoutBytes"),
        stderr_bytes=f.number("stderrBytes"),
        stdin_accepted_bytes=f.number_or_none("stdinAcceptedBytes") or 0,
        stdout_omitted_bytes=f.number_or_none("stdoutOmittedBytes") or 0,
        stderr_omitted_bytes=f.number_or_none("stderrOmittedBytes") or 0,
    )


def parse_gap(text: str | None) -> Omitted | None:
    """``OFFSET+LENGTH`` of a header."""
    if text is None:
        return None
    offset, plus, length = text.partition("+")
    if not (plus and offset.isascii() and offset.isdigit() and length.isascii() and length.isdigit()):
        raise malformed("X-Mainbrella-Omitted")
    return Omitted(int(offset), int(length))


def parse_input(data: Any) -> InputStatus:
    """The reply to a write to a job's input."""
    f = Fields(data, "stdin")
    return InputStatus(f.number("acceptedBytes"), f.number("pendingBytes"), f.flag("closed"))


def parse_processes(data: Any) -> ProcessList:
    """The processes of a machine."""
    page = Fields(data, "list")
    found = ProcessList()
    for entry in page.objects("processes"):
        f = Fields(entry, "process")
        found.append(
            ProcessInfo(
                pid=f.number("pid"),
                ppid=f.number("ppid"),
                uid=f.number("uid"),
                state=f.text("state"),
                command=f.text("command"),
                argv=f.texts("argv"),
                started_at_ms=f.number("startedAtMs"),
                cpu_time_ms=f.number("cpuTimeMs"),
                rss_bytes=f.number("rssBytes"),
                job_id=f.text_or_none("jobId"),
            )
        )
    found.truncated = page.flag_or("truncated", False)
    return found


def parse_event(f: Fields, texts: Texts) -> JobEvent | None:
    """An event; ``None`` for a kind this version does not know. Call it once for each, in their order."""
    cursor, time_ms, kind = f.number("cursor"), f.number("time"), f.text("type")
    if kind == "started":
        return JobStarted(cursor, time_ms, f.number_or_none("pid"))
    if kind == "output":
        stream, offset, data = _stream(f), f.number("offset"), f.data("dataBase64")
        return JobOutput(cursor, time_ms, stream, offset, data, texts.decode(stream, offset, data))
    if kind == "gap":
        return JobGap(cursor, time_ms, _stream(f), f.number("offset"), f.number("length"))
    if kind == "exit":
        exit = JobExit(f.text("cause"), f.number_or_none("code"), f.number_or_none("signal"))
        totals = f.number("stdoutBytes"), f.number("stderrBytes"), f.number("durationMs")
        return JobExited(cursor, time_ms, exit, *totals)
    return None


def _instant(text: str) -> float:
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError as error:
        raise malformed("job.endedAt") from error


def _stream(f: Fields) -> StreamName:
    name = _STREAMS.get(f.text("stream"))
    if name is None:
        raise malformed("event.stream")
    return name
