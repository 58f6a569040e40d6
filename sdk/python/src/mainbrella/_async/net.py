"""The network, files and threads as ``asyncio`` sees them. The twin of ``_sync/net.py``, by hand."""

from __future__ import annotations

import asyncio
import io
import select
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["ASYNC", "Connection", "Pieces", "in_thread", "iterate", "reading", "sleep"]

T = TypeVar("T")

Pieces: TypeAlias = AsyncIterable[bytes | memoryview] | Iterable[bytes | memoryview]
"""A body that is produced piece by piece."""

ASYNC = True
"""This is the asynchronous side."""

_BUFFERED_MAX = 1024 * 1024


class _Link(asyncio.Protocol):
    """Holds what has come until it is asked for, and stops reading when that is much."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.chunks: deque[bytes] = deque()
        self.ended = False
        self.lost: BaseException | None = None
        self.full = False
        self._size = 0
        self._stopped = False
        self._waiters: set[asyncio.Future[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.chunks.append(data)
        self._size += len(data)
        if self._size > _BUFFERED_MAX and not self._stopped and self.transport is not None:
            self._stopped = True
            self.transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        self.ended = True
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = True
        self.lost = exc or ConnectionAbortedError("connection ended")
        self._wake()

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        self._wake()

    def take(self) -> bytes:
        data = self.chunks.popleft()
        self._size -= len(data)
        if self._stopped and self._size <= _BUFFERED_MAX // 2 and self.transport is not None:
            self._stopped = False
            if not self.transport.is_closing():
                self.transport.resume_reading()
        return data

    async def changed(self, wait: float) -> None:
        """Waits for anything to happen."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters.add(waiter)
        timer = loop.call_later(wait, _expire, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiters.discard(waiter)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


def _expire(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError("deadline passed"))


class Connection:
    """One TCP or TLS connection. All waits are bounded by seconds the caller gives; ``TimeoutError`` when over."""

    def __init__(self, link: _Link, transport: asyncio.Transport) -> None:
        self._link = link
        self._transport = transport
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def open(cls, host: str, port: int, tls: ssl.SSLContext | None, wait: float) -> Connection:
        """Connects."""
        loop = asyncio.get_running_loop()
        connecting = loop.create_connection(_Link, host, port, ssl=tls, server_hostname=host if tls else None)
        try:
            transport, link = await asyncio.wait_for(connecting, wait)
        except asyncio.TimeoutError as error:
            raise TimeoutError("deadline passed") from error
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(link, transport)

    async def send(self, data: bytes | memoryview, wait: float) -> None:
        """Sends all of ``data``, or leaves the last part of it to the event loop."""
        if self._link.lost is not None or self._link.ended or self._transport.is_closing():
            raise self._link.lost or ConnectionResetError("connection ended")
        self._transport.write(data)
        end = self._loop.time() + wait
        while self._link.full:
            await self._link.changed(max(0.0, end - self._loop.time()))
            if self._link.lost is not None:
                raise self._link.lost

    async def receive(self, wait: float) -> bytes:
        """What has come, waiting for something; ``b""`` when the peer has ended the connection."""
        end = self._loop.time() + wait
        while not self._link.chunks:
            if isinstance(self._link.lost, OSError) and not isinstance(self._link.lost, ConnectionAbortedError):
                raise self._link.lost
            if self._link.ended:
                return b""
            await self._link.changed(max(0.0, end - self._loop.time()))
        return self._link.take()

    async def spoken(self) -> bool:
        """Whether the peer has said something, or ended the connection, without our waiting for it."""
        if not self._heard() and _readable(self._transport):
            # The event loop has not come round to it yet.
            for _ in range(3):
                await asyncio.sleep(0)
        return self._heard()

    async def usable(self) -> bool:
        """Whether a kept connection can carry another exchange."""
        return self._loop is asyncio.get_running_loop() and not await self.spoken()

    def close(self) -> None:
        """Gives the connection up."""
        if self._loop.is_closed():
            return
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        try:
            if here:
                self._transport.abort()
            else:
                self._loop.call_soon_threadsafe(self._transport.abort)
        except RuntimeError:
            pass

    abort = close

    def _heard(self) -> bool:
        return bool(self._link.chunks) or self._link.ended or self._link.lost is not None


def _readable(transport: asyncio.Transport) -> bool:
    sock = transport.get_extra_info("socket")
    if sock is None or sock.fileno() < 0:
        return True
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(sock.fileno(), select.POLLIN)
        return bool(poll.poll(0))
    return bool(select.select([sock.fileno()], [], [], 0)[0])


async def sleep(seconds: float) -> None:
    """Waits."""
    await asyncio.sleep(seconds)


async def in_thread(work: Callable[[], T]) -> T:
    """Does work that may block without stopping the event loop."""
    return await asyncio.to_thread(work)


async def iterate(pieces: Pieces) -> AsyncIterator[bytes | memoryview]:
    """The pieces of a body. Those of an ordinary iterable are made in a thread, since making them may block."""
    if isinstance(pieces, AsyncIterable):
        async for piece in pieces:
            yield piece
        return
    iterator = iter(pieces)
    following: Callable[[], bytes | memoryview | None] = partial(next, iterator, None)
    while (piece_made := await asyncio.to_thread(following)) is not None:
        yield piece_made


class _Reading(io.RawIOBase):
    def __init__(self, take: Callable[[int], Awaitable[bytes]], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._take = take
        self._loop = loop

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        taking = cast("Coroutine[Any, Any, bytes]", self._take(len(view)))
        data = asyncio.run_coroutine_threadsafe(taking, self._loop).result()
        view[: len(data)] = data
        return len(data)


def reading(take: Callable[[int], Awaitable[bytes]]) -> io.RawIOBase:
    """A file object over ``take(limit)``, for code such as ``tarfile`` that wants to pull, inside ``in_thread``."""
    return _Reading(take, asyncio.get_running_loop())
