"""What the service says of machines and commands, as plain immutable values."""

from __future__ import annotations

import base64
import binascii
import codecs
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from .errors import InvalidResponseError, MainbrellaError, api_error

__all__ = ["CommandResult", "EgressPolicy", "EndReason", "MachineInfo", "MachineLimits", "Omitted", "StopResult"]


@dataclass(frozen=True)
class MachineLimits:
    """What a machine may use at most."""

    memory_mib: int
    vcpus: int
    disk_mib: int


@dataclass(frozen=True)
class EndReason:
    """Why a machine ended: a code for programs, e.g. ``idle`` or ``vmm_died``, and one sentence."""

    code: str
    message: str


@dataclass(frozen=True)
class EgressPolicy:
    """What a machine may reach."""

    kind: str
    """``off``: nothing, for the rest of its life; ``open``: public addresses; ``allow-list``: what the rules name."""
    rules: tuple[str, ...] = ()
    """``example.org``, ``*.example.org``, ``192.0.2.0/24``, each perhaps with ``:PORT``. Without a port a name means 80
    and 443, an address every port."""
    dry_run: bool = False
    """An allow-list that lets every public host pass and records what it would have denied."""

    @classmethod
    def allow(cls, *rules: str, dry_run: bool = False) -> EgressPolicy:
        """An allow-list."""
        return cls("allow-list", tuple(rules), dry_run)

    def wire(self) -> dict[str, Any]:
        """As the service takes it."""
        body: dict[str, Any] = {"policy": self.kind}
        if self.rules:
            body["rules"] = list(self.rules)
        if self.dry_run:
            body["dryRun"] = True
        return body


@dataclass(frozen=True)
class MachineInfo:
    """One generation of a machine, as it was when the service was asked. Instants are Unix milliseconds."""

    id: str
    created_at: str
    state: str
    """``creating running pausing paused resuming stopping stopped failed``."""
    catalog_id: str
    size: str
    internet: bool
    metadata: dict[str, str]
    isolation: str
    """``hardware``, ``emulated``, …: what separates it from the host."""
    limits: MachineLimits
    hard_deadline_ms: int
    idle_timeout_seconds: int | None
    idle_deadline_ms: int | None
    started_at_ms: int | None
    ended_at_ms: int | None
    reason: EndReason | None
    capabilities: dict[str, Any] = field(default_factory=dict[str, Any])
    egress: EgressPolicy = EgressPolicy("off")
    """What it may reach."""
    on_idle: str = "stop"
    """What becomes of it after its idle timeout: ``stop`` or ``pause``."""
    auto_resume: bool = False
    """Whether its next use resumes it when it is paused."""

    @property
    def ended(self) -> bool:
        """Whether this generation is over."""
        return self.state in ("stopped", "failed")


@dataclass(frozen=True)
class ReseedHook:
    """How a reseed hook of a machine ended."""

    name: str
    exit_code: int | None
    """128 and the signal for one that a signal ended; ``None``: it could not be started."""
    timed_out: bool


@dataclass(frozen=True)
class ForkReceipt:
    """What was done for a copy of a machine."""

    secrets: dict[str, str]
    """The secrets of the source by name: ``dropped``, ``inherited`` or ``reissued``."""
    kernel_reseeded: bool = False
    """Whether the kernel's random numbers were made its own before any process went on."""
    hooks: tuple[ReseedHook, ...] = ()
    """What of ``/etc/mainbrella/reseed.d`` was run before that, by name."""
    registered: int = 0
    """Processes that had registered to draw other random numbers in a copy."""
    acknowledged: int = 0
    """Those of them that did."""


@dataclass(frozen=True)
class Forked:
    """What a fork made: the children, and what was done for each that runs, by ``(id, created_at)``."""

    children: list[MachineInfo]
    receipts: dict[tuple[str, str], ForkReceipt]


@dataclass(frozen=True)
class StopResult:
    """Whether that exact generation is gone. ``uncertain``: ask again, stopping is idempotent."""

    outcome: str
    info: MachineInfo

    @property
    def stopped(self) -> bool:
        """Nothing of it is left on the host."""
        return self.outcome == "stopped"


@dataclass(frozen=True)
class Omitted:
    """The part of a stream that was produced but not returned: ``length`` bytes after the first ``offset``."""

    offset: int
    length: int


@dataclass(frozen=True)
class CommandResult:
    """How a command ended. A non-zero exit code is a normal result.

    ``stdout`` and ``stderr`` are text (UTF-8, what cannot be decoded becomes U+FFFD); ``stdout_bytes`` and
    ``stderr_bytes`` are exactly the bytes that were returned. When ``*_omitted`` is set they are the head and the
    tail of the stream, and the text leaves out a character that the gap cut in two.
    """

    exit_code: int
    """The exit code; 128 + signal when a signal ended it; -1 when it has none: timed out, cancelled, still running."""
    signal: int | None
    timed_out: bool
    """Its own ``timeout_ms`` ended it; the output is what it had produced by then."""
    stdout: str
    stderr: str
    stdout_bytes: bytes = field(repr=False)
    stderr_bytes: bytes = field(repr=False)
    stdout_total_bytes: int
    """Bytes produced in all, returned or not."""
    stderr_total_bytes: int
    stdout_omitted: Omitted | None
    stderr_omitted: Omitted | None
    duration_ms: int
    cause: str = "exited"
    """``exited signalled timed_out cancelled machine_stopped lost``; empty while it is ``still_running``."""
    still_running: bool = False
    """The wait ended before the command did; the output is what had come by then, and the command goes on."""
    job_id: str | None = None
    """The job it ran as."""

    @property
    def ok(self) -> bool:
        """It exited with code 0."""
        return self.exit_code == 0

    @property
    def truncated(self) -> bool:
        """Some output is missing from this result."""
        return self.stdout_omitted is not None or self.stderr_omitted is not None


class Fields:
    """Reads the fields of a JSON object; one that is missing or of another type is an error that names it."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, dict):
            raise malformed(where)
        self._data = cast("dict[str, Any]", data)
        self._where = where

    def text(self, name: str) -> str:
        """A string."""
        value = self._data.get(name)
        if not isinstance(value, str):
            raise malformed(f"{self._where}.{name}")
        return value

    def flag(self, name: str) -> bool:
        """A boolean."""
        value = self._data.get(name)
        if not isinstance(value, bool):
            raise malformed(f"{self._where}.{name}")
        return value

    def flag_or(self, name: str, otherwise: bool) -> bool:
        """A boolean, or ``otherwise`` when there is none."""
        return otherwise if self._data.get(name) is None else self.flag(name)

    def number(self, name: str) -> int:
        """An integer."""
        value = self._data.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise malformed(f"{self._where}.{name}")
        return value

    def number_or_none(self, name: str) -> int | None:
        """An integer, ``null`` or nothing."""
        return None if self._data.get(name) is None else self.number(name)

    def text_or_none(self, name: str) -> str | None:
        """A string, ``null`` or nothing."""
        return None if self._data.get(name) is None else self.text(name)

    def object(self, name: str) -> Fields:
        """An object."""
        return Fields(self._data.get(name), f"{self._where}.{name}")

    def object_or_none(self, name: str) -> Fields | None:
        """An object, ``null`` or nothing."""
        return None if self._data.get(name) is None else self.object(name)

    def objects(self, name: str) -> list[Any]:
        """An array."""
        value = self._data.get(name)
        if not isinstance(value, list):
            raise malformed(f"{self._where}.{name}")
        return value  # pyright: ignore[reportUnknownVariableType]

    def texts(self, name: str) -> list[str]:
        """An array of strings."""
        values = self.objects(name)
        if not all(isinstance(value, str) for value in values):
            raise malformed(f"{self._where}.{name}")
        return values

    def raw(self, name: str) -> Any:
        """Whatever is there; ``None`` when there is nothing."""
        return self._data.get(name)

    def all(self) -> dict[str, Any]:
        """The object as it is."""
        return dict(self._data)

    def plain(self, name: str) -> dict[str, Any]:
        """An object as it is; an empty one when there is none."""
        value = self._data.get(name)
        return dict(cast("dict[str, Any]", value)) if isinstance(value, dict) else {}

    def data(self, name: str) -> bytes:
        """Base64."""
        try:
            return base64.b64decode(self.text(name), validate=True)
        except (binascii.Error, ValueError) as error:
            raise malformed(f"{self._where}.{name}") from error


def malformed(where: str) -> InvalidResponseError:
    """The error for a field that is missing or of another form."""
    return InvalidResponseError(
        f"The answer has no valid field {where}.",
        hint="Check that the SDK and the service have matching versions.",
        ambiguous=True,
    )


def told_error(f: Fields) -> MainbrellaError:
    """The error that a stream of events tells of in its last event."""
    body = {name: f.raw(name) for name in ("code", "message", "hint", "requestId")}
    error = api_error(500, body, request_id=None, retry_after=None, idempotency_key=None)
    error.status = None
    return error


def parse_machine(data: Any) -> MachineInfo:
    """A ``Machine`` of the wire. Fields this version does not know are ignored."""
    f = Fields(data, "machine")
    limits, reason = f.object("limits"), f.object_or_none("reason")
    egress = f.object_or_none("egress")
    # A service that knows no policies has machines with internet or without.
    plain = EgressPolicy("open" if f.flag("internet") else "off")
    return MachineInfo(
        id=f.text("id"),
        created_at=f.text("createdAt"),
        state=f.text("state"),
        catalog_id=f.text("catalogId"),
        size=f.text("size"),
        internet=f.flag("internet"),
        metadata={key: str(value) for key, value in f.plain("metadata").items()},
        isolation=f.text("isolation"),
        limits=MachineLimits(limits.number("memoryMib"), limits.number("vcpus"), limits.number("diskMib")),
        hard_deadline_ms=f.number("hardDeadlineMs"),
        idle_timeout_seconds=f.number_or_none("idleTimeoutSeconds"),
        idle_deadline_ms=f.number_or_none("idleDeadlineMs"),
        started_at_ms=f.number_or_none("startedAtMs"),
        ended_at_ms=f.number_or_none("endedAtMs"),
        reason=None if reason is None else EndReason(reason.text("code"), reason.text("message")),
        capabilities=f.plain("capabilities"),
        egress=plain if egress is None else parse_policy(egress),
        on_idle="stop" if f.raw("onIdle") is None else f.text("onIdle"),
        auto_resume=f.flag_or("autoResume", False),
    )


def parse_fork(data: Any) -> Forked:
    """A ``ForkResult`` of the wire."""
    f = Fields(data, "fork")
    receipts = f.objects("receipts") if f.raw("receipts") is not None else []
    return Forked(
        [parse_machine(child) for child in f.objects("children")],
        {(r.text("id"), r.text("createdAt")): _receipt(r) for r in (Fields(entry, "receipt") for entry in receipts)},
    )


def _receipt(f: Fields) -> ForkReceipt:
    secrets = [Fields(entry, "secret") for entry in f.objects("secrets")]
    random = f.object("random")
    hooks = [Fields(entry, "hook") for entry in random.objects("hooks")]
    return ForkReceipt(
        secrets={s.text("name"): s.text("outcome") for s in secrets},
        kernel_reseeded=random.flag("kernel"),
        hooks=tuple(ReseedHook(h.text("name"), h.number_or_none("exitCode"), h.flag("timedOut")) for h in hooks),
        registered=random.number("registered"),
        acknowledged=random.number("acknowledged"),
    )


def parse_policy(f: Fields) -> EgressPolicy:
    """An ``EgressPolicy`` of the wire."""
    rules = () if f.raw("rules") is None else tuple(f.texts("rules"))
    return EgressPolicy(f.text("policy"), rules, f.flag_or("dryRun", False))


def parse_stop(data: Any) -> StopResult:
    """The reply to a stop."""
    f = Fields(data, "stop")
    outcome = f.text("outcome")
    if outcome not in ("stopped", "uncertain"):
        raise malformed("stop.outcome")
    return StopResult(outcome, parse_machine(data.get("machine")))


def parse_command(data: Any) -> dict[str, Any]:
    """The reply to a blocking run, as the arguments of a ``CommandResult``."""
    f = Fields(data, "result")
    out, err = f.data("stdoutBase64"), f.data("stderrBase64")
    out_gap, err_gap = omitted(f, "stdoutOmitted"), omitted(f, "stderrOmitted")
    still_running = f.flag_or("stillRunning", False)
    signal, timed_out = f.number_or_none("signal"), f.flag("timedOut")
    code = f.number_or_none("exitCode") if still_running else f.number("exitCode")
    plain = "" if still_running else "timed_out" if timed_out else "exited" if signal is None else "signalled"
    return {
        "exit_code": -1 if code is None or still_running else code,
        "signal": signal,
        "timed_out": timed_out,
        "stdout": decode_around_gap(out, out_gap),
        "stderr": decode_around_gap(err, err_gap),
        "stdout_bytes": out,
        "stderr_bytes": err,
        "stdout_total_bytes": f.number("stdoutBytes"),
        "stderr_total_bytes": f.number("stderrBytes"),
        "stdout_omitted": out_gap,
        "stderr_omitted": err_gap,
        "duration_ms": f.number("durationMs"),
        "cause": f.text_or_none("cause") or plain,
        "still_running": still_running,
        "job_id": f.text_or_none("jobId"),
    }


def omitted(f: Fields, name: str) -> Omitted | None:
    """A missing part of a stream; ``None`` when nothing is missing."""
    gap = f.object_or_none(name)
    return None if gap is None else Omitted(gap.number("offset"), gap.number("length"))


def decode_around_gap(data: bytes, gap: Omitted | None) -> str:
    """Text of a head and a tail: a character whose bytes fell partly into the gap is left out, not mangled."""
    if gap is None:
        return data.decode("utf-8", "replace")
    head, tail = data[: gap.offset], data[gap.offset :]
    # Not final: the decoder holds back an incomplete last character, which is what must go.
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(head, False)
    cut = 0
    while cut < min(3, len(tail)) and tail[cut] & 0xC0 == 0x80:
        cut += 1
    return text + tail[cut:].decode("utf-8", "replace")


def drop_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that were given."""
    return {key: value for key, value in fields.items() if value is not None}
