"""Server-sent events, read from bytes as they come, cut wherever the network cut them."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Sse", "SseParser", "SseTooLongError"]

_LINE_END = re.compile(rb"\r\n|\n|\r")
_EVENT_MAX = 64 * 1024 * 1024


class SseTooLongError(Exception):
    """One event is longer than any this API sends."""


@dataclass(frozen=True)
class Sse:
    """One event as it was sent."""

    event: str
    """Its type; ``message`` when it had none."""
    data: str
    id: str | None
    """Its own id; ``None`` when it had none."""


class SseParser:
    """Feed it bytes; it gives back the events that became complete. What is incomplete at the end is no event."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0
        self._after_cr = False
        self._data: list[bytes] = []
        self._size = 0
        self._event = b""
        self._id: bytes | None = None
        self.heard = 0
        """Complete lines seen so far, comments included: a sign of life."""

    def feed(self, data: bytes) -> list[Sse]:
        """Takes what was received."""
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]
        self._after_cr = self._after_cr and not data
        self._buffer += data
        events: list[Sse] = []
        begin = 0
        while found := _LINE_END.search(self._buffer, max(begin, self._searched)):
            line = bytes(self._buffer[begin : found.start()])
            begin = self._searched = found.end()
            self.heard += 1
            event = self._line(line)
            if event is not None:
                events.append(event)
        self._after_cr = self._after_cr or (begin > 0 and begin == len(self._buffer) and self._buffer.endswith(b"\r"))
        del self._buffer[:begin]
        self._searched = len(self._buffer)
        if self._size + len(self._buffer) > _EVENT_MAX:
            raise SseTooLongError
        return events

    def _line(self, line: bytes) -> Sse | None:
        if not line:
            data, event, own_id = self._data, self._event, self._id
            self._data, self._event, self._id, self._size = [], b"", None, 0
            if not data:
                return None
            return Sse(
                event.decode("utf-8", "replace") or "message",
                b"\n".join(data).decode("utf-8", "replace"),
                None if own_id is None else own_id.decode("utf-8", "replace"),
            )
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._size += len(value) + 1
        elif name == b"event":
            self._event = value
        elif name == b"id" and b"\0" not in value:
            self._id = value
        return None
