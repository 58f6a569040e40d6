"""What running code in a context gives."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .models import Fields, Omitted, omitted, told_error

__all__ = ["CodeError", "CodeEvent", "CodeOutput", "CodeResult", "ContextInfo"]

# Characters of a value that its short form shows.
_SHOWN = 200


@dataclass(frozen=True)
class ContextInfo:
    """A code context as it was when the service was asked."""

    id: str
    language: str
    state: str
    """``starting idle busy dead``."""
    created_at: str
    """RFC 3339."""


@dataclass(frozen=True)
class CodeOutput:
    """One rich value, in every form the code offered it in. ``data`` is by MIME type; the rest are short cuts to it.

    A short cut is ``None`` when there is no such form.
    """

    type: str
    """``result``: the value of the last expression; ``display``: shown on the way, e.g. a plot."""
    data: Mapping[str, Any]

    def __repr__(self) -> str:
        text = self.text
        if text is not None and len(text) > _SHOWN:
            text = text[:_SHOWN] + "…"
        return f"CodeOutput(type={self.type!r}, text={text!r}, forms={sorted(self.data)})"

    @property
    def text(self) -> str | None:
        """Plain text, as ``repr`` gives it."""
        return self._text("text/plain")

    @property
    def html(self) -> str | None:
        """HTML. It comes from the machine: do not show it as your own."""
        return self._text("text/html")

    @property
    def markdown(self) -> str | None:
        """Markdown."""
        return self._text("text/markdown")

    @property
    def latex(self) -> str | None:
        """LaTeX."""
        return self._text("text/latex")

    @property
    def svg(self) -> str | None:
        """An SVG picture."""
        return self._text("image/svg+xml")

    @property
    def json(self) -> Any:
        """A JSON value, decoded."""
        value = self.data.get("application/json")
        if isinstance(value, str):
            try:
                return json.loads(value)
            except ValueError:
                return value
        return value

    @property
    def png(self) -> bytes | None:
        """The bytes of a PNG picture."""
        return self._bytes("image/png")

    @property
    def jpeg(self) -> bytes | None:
        """The bytes of a JPEG picture."""
        return self._bytes("image/jpeg")

    @property
    def pdf(self) -> bytes | None:
        """The bytes of a PDF document."""
        return self._bytes("application/pdf")

    def _text(self, mime: str) -> str | None:
        value = self.data.get(mime)
        return value if isinstance(value, str) else None

    def _bytes(self, mime: str) -> bytes | None:
        value = self._text(mime)
        if value is None:
            return None
        try:
            return base64.b64decode(value)
        except (binascii.Error, ValueError):
            return None


@dataclass(frozen=True)
class CodeError:
    """An exception the code did not catch."""

    name: str
    """Its class, e.g. ``ValueError``."""
    value: str
    """Its text."""
    traceback: tuple[str, ...]
    """Lines to show."""

    def __str__(self) -> str:
        return f"{self.name}: {self.value}" if self.value else self.name


@dataclass(frozen=True)
class CodeResult:
    """How a run of code ended. An exception of the code is a normal result."""

    status: str
    """``ok error timed_out interrupted``."""
    stdout: str
    stderr: str
    results: tuple[CodeOutput, ...]
    """Rich values in the order they came."""
    error: CodeError | None
    execution_count: int | None
    truncated: bool
    """Some output is missing: it went over a limit."""
    duration_ms: int
    stdout_omitted: Omitted | None = None
    """What is missing in ``stdout``, in bytes of UTF-8; the text is the head and the tail around it."""
    stderr_omitted: Omitted | None = None

    @property
    def ok(self) -> bool:
        """It ran to its end without an exception."""
        return self.status == "ok"

    @property
    def exit_code(self) -> int:
        """0 when it ran to its end, 1 after an exception, -1 when it timed out or was interrupted."""
        return {"ok": 0, "error": 1}.get(self.status, -1)

    @property
    def timed_out(self) -> bool:
        """It ran into its own time limit."""
        return self.status == "timed_out"

    @property
    def text(self) -> str | None:
        """Plain text of the value of the last expression."""
        return next((r.text for r in reversed(self.results) if r.type == "result"), None)


@dataclass(frozen=True)
class CodeEvent:
    """Something a run of code did.

    ``type`` is ``stdout`` or ``stderr`` (then ``text`` is set), ``gap`` (text of ``stream`` was left out: ``omitted``),
    ``result`` or ``display`` (``output``), ``error`` (``error``), or ``done``, the last one (``status``).
    """

    type: str
    text: str = ""
    stream: str | None = None
    omitted: Omitted | None = None
    output: CodeOutput | None = None
    error: CodeError | None = None
    status: str | None = None


def parse_context(data: Any) -> ContextInfo:
    """A context of the wire."""
    f = Fields(data, "context")
    return ContextInfo(f.text("id"), f.text("language"), f.text("state"), f.text("createdAt"))


def parse_error(f: Fields) -> CodeError:
    """An exception."""
    return CodeError(f.text("name"), f.text("value"), tuple(f.texts("traceback")))


def parse_code_result(data: Any) -> CodeResult:
    """The reply to a run."""
    f = Fields(data, "result")
    error = f.object_or_none("error")
    outputs = [Fields(entry, "result.results") for entry in f.objects("results")]
    return CodeResult(
        status=f.text("status"),
        stdout=f.text("stdout"),
        stderr=f.text("stderr"),
        results=tuple(CodeOutput(output.text("type"), output.plain("data")) for output in outputs),
        error=None if error is None else parse_error(error),
        execution_count=f.number_or_none("executionCount"),
        truncated=f.flag_or("truncated", False),
        duration_ms=f.number("durationMs"),
        stdout_omitted=omitted(f, "stdoutOmitted"),
        stderr_omitted=omitted(f, "stderrOmitted"),
    )


def parse_code_event(kind: str, f: Fields) -> CodeEvent | None:
    """An event of a run; ``None`` for a kind this version does not know. One that says it failed is raised."""
    if kind in ("stdout", "stderr"):
        return CodeEvent(kind, text=f.text("text"))
    if kind in ("result", "display"):
        return CodeEvent(kind, output=CodeOutput(kind, f.plain("data")))
    if kind == "error":
        return CodeEvent(kind, error=parse_error(f))
    if kind == "gap":
        return CodeEvent(kind, stream=f.text("stream"), omitted=Omitted(f.number("offset"), f.number("length")))
    if kind == "failed":
        raise told_error(f)
    if kind == "done":
        return CodeEvent(kind, status=f.text("status"))
    return None
