"""The jobs of a scripted service: events of the wire, and ways to deliver them badly."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

from .scripted import Request

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
UNFRAMED = HEAD + b"Connection: close\r\n\r\n"


def started(cursor: int) -> dict[str, Any]:
    return {"cursor": cursor, "type": "started", "time": 1_790_000_000_000 + cursor, "pid": 77}


def output(cursor: int, offset: int, data: bytes, stream: str = "stdout") -> dict[str, Any]:
    encoded = base64.b64encode(data).decode()
    return {
        "cursor": cursor,
        "type": "output",
        "time": 1_790_000_000_000,
        "stream": stream,
        "offset": offset,
        "dataBase64": encoded,
    }


def gap(cursor: int, offset: int, length: int) -> dict[str, Any]:
    return {"cursor": cursor, "type": "gap", "time": 1, "stream": "stdout", "offset": offset, "length": length}


def ended(cursor: int, cause: str = "exited", code: int | None = 0, signal: int | None = None) -> dict[str, Any]:
    return {
        "cursor": cursor,
        "type": "exit",
        "time": 1_790_000_000_000,
        "cause": cause,
        "code": code,
        "signal": signal,
        "stdoutBytes": 9,
        "stderrBytes": 2,
        "durationMs": 12,
    }


def pieces(data: bytes, size: int, first: int = 2) -> list[dict[str, Any]]:
    """Output events of ``size`` bytes each."""
    return [output(first + n, at, data[at : at + size]) for n, at in enumerate(range(0, len(data), size))]


def job(**changes: Any) -> dict[str, Any]:
    """A job of the wire."""
    return {
        "id": "j-1",
        "command": "cat",
        "state": "running",
        "exit": None,
        "startedAt": "2026-10-08T12:00:01.000Z",
        "endedAt": None,
        "pid": 77,
        "timeoutMs": 300_000,
        "cwd": None,
        "stdin": True,
        "pty": None,
        "cursor": 4,
        "stdoutBytes": 9,
        "stderrBytes": 2,
        "stdinAcceptedBytes": 0,
        "somethingNewer": 1,
        **changes,
    }


def finished(cause: str = "exited", code: int | None = 0, signal: int | None = None, **changes: Any) -> dict[str, Any]:
    """A job that has ended."""
    exit = {"cause": cause, "code": code, "signal": signal}
    return job(state="ended", exit=exit, endedAt="2026-10-08T12:00:01.250Z", **changes)


def sse(events: list[dict[str, Any]]) -> bytes:
    """Events as they are sent, with a sign of life in front."""
    out = b": hello\n\n"
    for event in events:
        out += f"id: {event['cursor']}\nevent: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()
    return out


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def after(events: list[dict[str, Any]], r: Request) -> list[dict[str, Any]]:
    """What a request for events is owed."""
    assert r.path == "/v1/machines/m-1/jobs/j-1/events", r.path
    assert r.headers["accept"] == "text/event-stream"
    return [e for e in events if e["cursor"] > int(r.query["cursor"])]


def follow(events: list[dict[str, Any]]) -> Callable[[Request], None]:
    """Delivers everything well."""

    def handler(r: Request) -> None:
        if not r.path.endswith("/events"):
            return r.reply(200, job(cursor=99))
        r.raw(CHUNKED + chunk(sse(after(events, r))) + b"0\r\n\r\n")

    return handler


def follow_cut(
    events: list[dict[str, Any]], at: int, framing: bytes = CHUNKED, size: int = 50
) -> Callable[[Request], None]:
    """Delivers the first ``at`` bytes of the whole answer, head included, then ends the connection."""

    def handler(r: Request) -> None:
        if not r.path.endswith("/events"):
            return r.reply(200, job(cursor=99))
        body = sse(after(events, r))
        if framing is CHUNKED:
            body = b"".join(chunk(body[i : i + size]) for i in range(0, len(body), size)) + b"0\r\n\r\n"
        r.raw((framing + body)[:at])
        r.cut()

    return handler
