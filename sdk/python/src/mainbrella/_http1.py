"""One HTTP/1.1 answer, read from bytes as they come. Knows nothing of sockets: both drivers feed it.

Strict where laxness hides faults: an answer whose framing is unclear is refused, and a body that ends before its
declared end is an error, never a short body.
"""

from __future__ import annotations

import re

__all__ = ["Answer", "CutShortError", "NotHttpError"]

_HEAD_MAX = 64 * 1024
_CHUNK_LINE_MAX = 4 * 1024
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: .*)?")
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?")


class NotHttpError(Exception):
    """The peer sent something that is not an HTTP/1.1 answer."""


class CutShortError(Exception):
    """The peer ended the connection in the middle of its answer.

    Attributes:
        silent: not one byte of an answer had come.
    """

    def __init__(self, *, silent: bool) -> None:
        super().__init__("cut short")
        self.silent = silent


class Answer:
    """The state of one answer. ``feed`` what arrives (``b""`` for the end of the connection), then ask.

    Attributes:
        status: HTTP status; 0 until ``headed``.
        headers: by lower-case name; values of repeated names are joined with ``", "``.
        headed: the head has been read.
        framed: the answer itself says where its body ends.
        length: bytes of the body where the head says so.
        done: everything has been read.
    """

    def __init__(self, method: str) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.headed = False
        self.framed = False
        self.length: int | None = None
        self.done = False
        self._method = method
        self._data = b""
        self._pos = 0
        self._ended = False
        self._anything = False
        self._chunked = False
        self._left: int | None = None
        self._in_chunk = False
        self._trailers = 0
        self._keep = False

    def feed(self, data: bytes) -> None:
        """Takes what was received; ``b""`` means that nothing more will come."""
        if not data:
            self._ended = True
            return
        self._anything = True
        rest = self._data[self._pos :]
        self._data, self._pos = (rest + data if rest else data), 0

    def head(self) -> bool:
        """Reads the head as far as it came. ``False``: feed more. Interim answers (1xx) are passed over."""
        while not self.headed:
            end = self._data.find(b"\r\n\r\n", self._pos)
            if end < 0:
                if len(self._data) - self._pos > _HEAD_MAX:
                    raise NotHttpError("head too long")
                if self._data and not b"HTTP/1.".startswith(self._data[self._pos : self._pos + 7]):
                    raise NotHttpError("no status line")
                if self._ended:
                    raise CutShortError(silent=not self._anything)
                return False
            lines = self._data[self._pos : end].split(b"\r\n")
            self._pos = end + 4
            if end > _HEAD_MAX or not self._read_head(lines):
                raise NotHttpError("bad head")
        return True

    def body(self, limit: int) -> bytes | None:
        """Some of the body, at most ``limit`` bytes. ``b""``: its end. ``None``: feed more."""
        if self.done:
            return b""
        if self._chunked and self._left == 0 and not self._next_chunk():
            self._starved()
            return None
        if self.done:
            return b""
        count = min(limit, len(self._data) - self._pos)
        if self._left is not None:
            count = min(count, self._left)
        if count == 0:
            if self._left is None and self._ended:
                self.done = True
                return b""
            self._starved()
            return None
        piece = self._data[self._pos : self._pos + count]
        self._pos += count
        if self._left is not None:
            self._left -= count
            self.done = self._left == 0 and not self._chunked
        return piece

    @property
    def reusable(self) -> bool:
        """Whether the connection can carry another exchange: all was read and nothing is left over."""
        return self.done and self._keep and self.framed and not self._ended and self._pos == len(self._data)

    def _starved(self) -> None:
        """More is needed: that there is none is an error."""
        if self._ended:
            raise CutShortError(silent=False)

    def _read_head(self, lines: list[bytes]) -> bool:
        found = _STATUS.fullmatch(lines[0])
        if found is None:
            return False
        status = int(found[2])
        headers: dict[str, str] = {}
        for line in lines[1:]:
            name, colon, value = line.decode("latin-1").partition(":")
            if not colon or _NAME.fullmatch(name) is None or "\n" in value or "\r" in value or "\0" in value:
                return False
            name, value = name.lower(), value.strip(" \t")
            if name == "content-length" and headers.get(name, value) == value:
                headers[name] = value
            else:
                headers[name] = f"{headers[name]}, {value}" if name in headers else value
        if 100 <= status < 200:
            return status != 101
        self.status, self.headers, self.headed = status, headers, True
        options = {token.strip().lower() for token in headers.get("connection", "").split(",")}
        self._keep = found[1] == b"1" and "close" not in options
        return self._frame()

    def _frame(self) -> bool:
        coding, length = self.headers.get("transfer-encoding"), self.headers.get("content-length")
        if self._method == "HEAD" or self.status in (204, 304):
            self.framed = self.done = True
        elif coding is not None:
            if coding.lower() != "chunked":
                return False
            self.framed = self._chunked = True
            self._left = 0
            # Two framings at once are how requests are smuggled: the connection is not used again.
            self._keep = self._keep and length is None
        elif length is not None:
            if not (length.isascii() and length.isdigit()) or len(length) > 18:
                return False
            self.framed = True
            self.length = self._left = int(length)
            self.done = self._left == 0
        return True

    def _next_chunk(self) -> bool:
        """Goes to the data of the next chunk, or past the last one. ``False``: feed more."""
        while True:
            end = self._data.find(b"\n", self._pos)
            if end < 0 or end - self._pos > _CHUNK_LINE_MAX:
                if len(self._data) - self._pos > _CHUNK_LINE_MAX:
                    raise NotHttpError("chunk line too long")
                return False
            line = self._data[self._pos : end].removesuffix(b"\r")
            self._pos = end + 1
            if self._trailers:
                self._trailers += len(line) + 1
                if self._trailers > _HEAD_MAX:
                    raise NotHttpError("trailers too long")
                if not line:
                    self.done = True
                    return True
            elif self._in_chunk:
                if line:
                    raise NotHttpError("chunk too long")
                self._in_chunk = False
            else:
                found = _CHUNK.fullmatch(line)
                if found is None:
                    raise NotHttpError("bad chunk")
                self._left = int(found[1], 16)
                self._in_chunk = self._left > 0
                if self._in_chunk:
                    return True
                self._trailers = 1
