"""Paths, modes and bodies of file operations, checked before anything is sent."""

from __future__ import annotations

import io
import stat
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import Any, Protocol, cast

from .errors import ConfigurationError

__all__ = [
    "ReadableBinary",
    "WritableBinary",
    "as_pieces",
    "check_mode",
    "check_mutable",
    "check_path",
    "number_in",
]

_PIECE = 1024 * 1024
_PATH_MAX = 4095


class ReadableBinary(Protocol):
    """A file object opened in binary mode for reading."""

    def read(self, size: int, /) -> bytes:
        """At most ``size`` bytes; none at the end."""
        ...


class WritableBinary(Protocol):
    """A file object opened in binary mode for writing."""

    def write(self, data: bytes, /) -> object:
        """Takes all of ``data``."""
        ...


def check_path(path: str) -> str:
    """An absolute path that can be sent as UTF-8."""
    try:
        raw = path.encode("utf-8")
    except UnicodeEncodeError:
        raw = b""
    if not raw.startswith(b"/") or b"\0" in raw or len(raw) > _PATH_MAX:
        raise ConfigurationError(
            "path must be absolute, valid UTF-8 without NUL, and at most 4095 bytes long.",
            hint="Paths inside the machine begin with '/', e.g. /workspace/notes.txt.",
        )
    return path


def check_mutable(path: str) -> str:
    """A path that may be changed: any but the root."""
    if not check_path(path).strip("/"):
        raise ConfigurationError("path must not be the root of the machine's file system.")
    return path


def check_mode(mode: str | int) -> str:
    """Permission bits as four octal digits."""
    bits = number_in(mode, 8) if isinstance(mode, str) else mode
    if bits is None or not 0 <= bits <= 0o7777:
        raise ConfigurationError("mode must be permission bits such as '0644' or 0o644.")
    return f"{stat.S_IMODE(bits):04o}"


def number_in(text: str | None, base: int) -> int | None:
    """A number in text; ``None`` when it is not one."""
    try:
        return None if text is None else int(text.strip(), base)
    except ValueError:
        return None


def as_pieces(data: Any, *, is_async: bool) -> bytes | Iterable[bytes | memoryview] | AsyncIterable[bytes | memoryview]:
    """What can be sent as a body: all of it, or an iterable of its pieces."""
    if isinstance(data, str):
        return data.encode("utf-8")
    if isinstance(data, bytes):
        return data
    if isinstance(data, (bytearray, memoryview)):
        return bytes(cast("bytearray", data))
    if isinstance(data, io.TextIOBase):
        raise ConfigurationError("data is a file opened in text mode.", hint="Open it with mode 'rb'.")
    if hasattr(data, "read"):
        return _pieces_of_file(cast("ReadableBinary", data))
    if is_async and isinstance(data, AsyncIterable):
        return _pieces_async(cast("AsyncIterable[object]", data))
    if isinstance(data, Iterable):
        return _pieces(cast("Iterable[object]", data))
    raise ConfigurationError("data must be bytes, text, a binary file object or an iterable of bytes.")


def _pieces_of_file(source: ReadableBinary) -> Iterator[bytes | memoryview]:
    while piece := source.read(_PIECE):
        yield _bytes(piece)


def _pieces(source: Iterable[object]) -> Iterator[bytes | memoryview]:
    for piece in source:
        yield _bytes(piece)


async def _pieces_async(source: AsyncIterable[object]) -> AsyncIterator[bytes | memoryview]:
    async for piece in source:
        yield _bytes(piece)


def _bytes(piece: object) -> bytes | memoryview:
    if isinstance(piece, (bytes, bytearray)):
        return bytes(piece)
    if isinstance(piece, memoryview):
        return piece.cast("B")
    raise ConfigurationError("data gave something that is not bytes.", hint="Open files with mode 'rb'; encode text.")
