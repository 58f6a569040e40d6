"""The network, files and threads as blocking code sees them. The twin of ``_async/net.py``, by hand."""

from __future__ import annotations

import io
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeAlias, TypeVar

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["ASYNC", "Connection", "Pieces", "in_thread", "iterate", "reading", "sleep"]

T = TypeVar("T")

Pieces: TypeAlias = Iterable[bytes | memoryview]
"""A body that is produced piece by piece."""

ASYNC = False
"""This is the blocking side."""

_RECEIVE = 256 * 1024


class Connection:
    """One TCP or TLS connection. All waits are bounded by seconds the caller gives; ``TimeoutError`` when over."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        # TLS has no way to look without taking: what was taken while looking is kept here.
        self._ahead = b""
        self._ahead_end = False

    @classmethod
    def open(cls, host: str, port: int, tls: ssl.SSLContext | None, wait: float) -> Connection:
        """Connects."""
        sock = socket.create_connection((host, port), timeout=wait)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return cls(sock if tls is None else tls.wrap_socket(sock, server_hostname=host))
        except BaseException:
            sock.close()
            raise

    def send(self, data: bytes | memoryview, wait: float) -> None:
        """Sends all of ``data``."""
        self._sock.settimeout(wait)
        self._sock.sendall(data)

    def receive(self, wait: float) -> bytes:
        """What has come, waiting for something; ``b""`` when the peer has ended the connection."""
        if self._ahead or self._ahead_end:
            data, self._ahead = self._ahead, b""
            return data
        self._sock.settimeout(wait)
        return self._sock.recv(_RECEIVE)

    def spoken(self) -> bool:
        """Whether the peer has said something, or ended the connection, without our waiting for it."""
        if self._ahead or self._ahead_end:
            return True
        tls = isinstance(self._sock, ssl.SSLSocket)
        if not (tls and self._sock.pending()) and not _readable(self._sock):  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
            return False
        if not tls:
            return True
        # Readable need not mean data: TLS sends tickets and key updates of its own.
        self._sock.settimeout(0)
        try:
            self._ahead = self._sock.recv(_RECEIVE)
            self._ahead_end = not self._ahead
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except OSError:
            self._ahead_end = True
        return True

    def usable(self) -> bool:
        """Whether a kept connection can carry another exchange."""
        return not self.spoken()

    def close(self) -> None:
        """Gives the connection up. Another process that holds it too is not disturbed."""
        self._sock.close()

    def abort(self) -> None:
        """Ends the connection, also under a thread that waits for it."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._sock.close()


def _readable(sock: socket.socket) -> bool:
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return bool(poll.poll(0))
    return bool(select.select([sock], [], [], 0)[0])


def sleep(seconds: float) -> None:
    """Waits."""
    time.sleep(seconds)


def in_thread(work: Callable[[], T]) -> T:
    """Does work that may block: here, at once."""
    return work()


def iterate(pieces: Pieces) -> Iterator[bytes | memoryview]:
    """The pieces of a body."""
    return iter(pieces)


class _Reading(io.RawIOBase):
    def __init__(self, take: Callable[[int], bytes]) -> None:
        super().__init__()
        self._take = take

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        data = self._take(len(view))
        view[: len(data)] = data
        return len(data)


def reading(take: Callable[[int], bytes]) -> io.RawIOBase:
    """A file object over ``take(limit)``, for code such as ``tarfile`` that wants to pull, inside ``in_thread``."""
    return _Reading(take)
