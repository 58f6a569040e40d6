"""Files inside a machine: binary safe, any size, never more than a buffer in memory when streamed."""

from __future__ import annotations

import io
import stat
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, cast

from ._transport import Exchange
from .errors import ConfigurationError, InvalidResponseError
from .models import Fields

if TYPE_CHECKING:
    from .sandbox import Sandbox

__all__ = ["Files", "ReadableBinary", "RemoteFile", "WritableBinary"]

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


class RemoteFile:
    """A file of a machine that is being read. Iterate over it, call ``read(size)``, and close it or use ``with``.

    Attributes:
        size: bytes the file had when it was opened; ``None`` when the machine did not say.
        mode: permission bits; ``None`` when the machine did not say.
        mtime: time of the last change as the machine reported it.
    """

    def __init__(self, exchange: Exchange, *, whole: bool) -> None:
        self._exchange = exchange
        self._got = 0
        self._done = False
        self.size = _count(exchange.headers.get("X-Mainbrella-Size"), 10)
        self.mode = _count(exchange.headers.get("X-Mainbrella-Mode"), 8)
        self.mtime = exchange.headers.get("X-Mainbrella-Mtime")
        # An answer that only ends with its connection cannot tell an end from a cut: then the size decides.
        self._expected = self.size if whole and not exchange.framed else None

    def readinto(self, buffer: bytearray | memoryview) -> int:
        """Fills some of ``buffer``; 0 at the end. Raises ``InvalidResponseError`` when the connection was cut."""
        if self._done or len(buffer) == 0:
            return 0
        count = self._exchange.readinto(buffer)
        self._got += count
        if count == 0:
            self._done = True
            if self._expected is not None and self._got < self._expected:
                raise InvalidResponseError("The connection was lost before the file was complete.", ambiguous=True)
        return count

    def read(self, size: int = -1) -> bytes:
        """At most ``size`` bytes, or all the rest."""
        out = bytearray()
        buffer = memoryview(bytearray(_PIECE if size < 0 else min(size, _PIECE)))
        while size < 0 or len(out) < size:
            room = len(buffer) if size < 0 else min(len(buffer), size - len(out))
            count = self.readinto(buffer[:room])
            if count == 0:
                break
            out += buffer[:count]
        return bytes(out)

    def __iter__(self) -> Iterator[bytes]:
        while piece := self.read(_PIECE):
            yield piece

    def close(self) -> None:
        """Ends the reading, wherever it is."""
        self._done = True
        self._exchange.close()

    def __enter__(self) -> RemoteFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Files:
    """``sandbox.files``. Paths are absolute, as the machine sees them."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def read(self, path: str, *, offset: int | None = None, length: int | None = None) -> bytes:
        """The bytes of a file, or ``length`` of them from ``offset``. Use ``read_to`` for what memory cannot hold."""
        with self.open_read(path, offset=offset, length=length) as remote:
            return remote.read()

    def open_read(self, path: str, *, offset: int | None = None, length: int | None = None) -> RemoteFile:
        """Opens a file for reading piece by piece. Give up is after a silence of the client's ``timeout``."""
        query = {"path": check_path(path)}
        for name, value in (("offset", offset), ("length", length)):
            if value is not None:
                if value < 0:
                    raise ConfigurationError(f"{name} must be a number of bytes.")
                query[name] = str(value)
        return RemoteFile(self._sandbox.open("GET", "/files/content", query=query), whole=len(query) == 1)

    def read_to(self, path: str, target: WritableBinary) -> int:
        """Copies a file into ``target``, an open binary file. Returns the number of bytes.

        When it raises, ``target`` holds the part that came.
        """
        total = 0
        with self.open_read(path) as remote:
            for piece in remote:
                target.write(piece)
                total += len(piece)
        return total

    def write(
        self,
        path: str,
        data: bytes | bytearray | memoryview | str | ReadableBinary | Iterable[bytes],
        *,
        mode: str | int | None = None,
        create_parents: bool = True,
        exclusive: bool = False,
    ) -> int:
        """Writes a file and returns its size. It is never repeated automatically.

        Args:
            path: absolute path inside the machine.
            data: bytes; text, sent as UTF-8; a file object opened in binary mode; or an iterable of bytes. The last
                two are sent piece by piece, whatever their size. If ``data`` raises, the file is not put in place.
            mode: permission bits, ``"0644"`` or ``0o644``.
            create_parents: make missing directories above it.
            exclusive: fail when the path exists.
        """
        query = {
            "path": check_path(path),
            "createParents": "true" if create_parents else "false",
            "exclusive": "true" if exclusive else "false",
        }
        if mode is not None:
            query["mode"] = _mode(mode)
        exchange = self._sandbox.open(
            "PUT", "/files/content", query=query, body=_body(data), content_type="application/octet-stream"
        )
        return Fields(self._sandbox.json(exchange), "written").number("size")


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


def _mode(mode: str | int) -> str:
    bits = _count(mode, 8) if isinstance(mode, str) else mode
    if bits is None or not 0 <= bits <= 0o7777:
        raise ConfigurationError("mode must be permission bits such as '0644' or 0o644.")
    return f"{stat.S_IMODE(bits):04o}"


def _count(text: str | None, base: int) -> int | None:
    try:
        return None if text is None else int(text.strip(), base)
    except ValueError:
        return None


def _body(data: Any) -> bytes | Iterable[bytes | memoryview]:
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
    if isinstance(data, Iterable):
        return _pieces(cast("Iterable[object]", data))
    raise ConfigurationError("data must be bytes, text, a binary file object or an iterable of bytes.")


def _pieces_of_file(source: ReadableBinary) -> Iterator[bytes | memoryview]:
    while piece := source.read(_PIECE):
        yield _bytes(piece)


def _pieces(source: Iterable[object]) -> Iterator[bytes | memoryview]:
    for piece in source:
        yield _bytes(piece)


def _bytes(piece: object) -> bytes | memoryview:
    if isinstance(piece, (bytes, bytearray)):
        return bytes(piece)
    if isinstance(piece, memoryview):
        return piece.cast("B")
    raise ConfigurationError("data gave something that is not bytes.", hint="Open files with mode 'rb'; encode text.")
