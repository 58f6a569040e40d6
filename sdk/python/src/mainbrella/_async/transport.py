"""HTTP/1.1 over a pool of kept-open connections, with deadlines that hold and no hidden repeats.

One connection carries one exchange at a time. A connection goes back to the pool only when its answer was read to the
end, so that nothing of one call can be seen by the next. Proxies named in the environment are not used.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from .. import _wire
from .._address import Address
from .._clock import Clock
from .._http1 import Answer, CutShortError, NotHttpError
from ..errors import (
    CallerStoppedWaitingError,
    ConfigurationError,
    MainbrellaError,
    TransportError,
)
from . import net

__all__ = ["AsyncExchange", "AsyncTransport"]

T = TypeVar("T")

_IDLE_CONNECTIONS_MAX = 16
_IDLE_SECONDS_MAX = 20.0
_PIECE = 256 * 1024
_EARLY_ANSWER_SECONDS = 2.0
_READ_ATTEMPTS = 3
_KEYED_ATTEMPTS = 5
_KEYED_ATTEMPT_SECONDS = 180.0
_BACKOFF_SECONDS = 0.25
_BACKOFF_MAX_SECONDS = 15.0


class AsyncExchange:
    """One answer whose body is still to be read.

    Attributes:
        status: HTTP status.
        headers: by lower-case name.
        framed: the answer itself says where its body ends.
        request_id: names the request in the service's log.
    """

    def __init__(
        self,
        pool: AsyncTransport,
        connection: net.Connection,
        answer: Answer,
        clock: Clock,
        request_id: str,
        *,
        reusable: bool,
    ) -> None:
        self._pool = pool
        self._connection: net.Connection | None = connection
        self._answer = answer
        self._clock = clock
        self._reusable = reusable
        self.request_id = answer.headers.get("x-request-id") or request_id
        self.status = answer.status
        self.headers: Mapping[str, str] = answer.headers
        self.framed = answer.framed
        if answer.done:
            self._finish()

    async def read(self, limit: int = _PIECE) -> bytes:
        """Some of the body, at most ``limit`` bytes; ``b""`` at its end. A body that ends too early is an error."""
        try:
            while (piece := self._answer.body(limit)) is None:
                if self._connection is None:
                    raise CutShortError(silent=False)
                self._answer.feed(await self._connection.receive(self._clock.next_wait()))
        except (OSError, CutShortError, NotHttpError, ValueError) as error:
            self.close()
            raise _wire.cut(error, status=self.status, request_id=self.request_id) from error
        except BaseException:
            self.close()
            raise
        if self._answer.done:
            self._finish()
        return piece

    async def read_all(self, limit: int) -> bytes:
        """The whole body, refused beyond ``limit`` bytes."""
        pieces: list[bytes] = []
        total = self._answer.length or 0
        if total <= limit:
            total = 0
            while piece := await self.read():
                pieces.append(piece)
                total += len(piece)
                if total > limit:
                    break
        if total > limit:
            self.close()
            raise _wire.too_long(limit, status=self.status, request_id=self.request_id)
        return b"".join(pieces)

    def close(self) -> None:
        """Gives the connection up; harmless when it has been finished."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    def __del__(self) -> None:
        if getattr(self, "_connection", None) is not None:
            self.close()

    def _finish(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._reusable and self._answer.reusable:
            self._pool.give_back(connection)
        else:
            connection.close()


class AsyncTransport:
    """Sends requests to one service with one key."""

    def __init__(
        self, address: Address, api_key: str, *, timeout: float, ssl_context: ssl.SSLContext | None = None
    ) -> None:
        self.address = address
        self.timeout = timeout
        self._authorization = f"Bearer {api_key}"
        self._tls = (ssl_context or ssl.create_default_context()) if address.secure else None
        self._lock = threading.Lock()
        self._idle: list[tuple[net.Connection, float]] = []
        self._owner = os.getpid()
        self._closed = False

    def close(self) -> None:
        """Closes the connections that are not in use and refuses further calls."""
        self._closed = True
        self.drop_idle()

    def drop_idle(self) -> None:
        """Closes the connections that are not in use."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.close()

    def __del__(self) -> None:
        for connection, _ in getattr(self, "_idle", ()):
            connection.close()

    def give_back(self, connection: net.Connection) -> None:
        """Keeps a connection whose exchange is over for the next one."""
        with self._lock:
            if not self._closed and self._owner == os.getpid() and len(self._idle) < _IDLE_CONNECTIONS_MAX:
                self._idle.append((connection, time.monotonic()))
                return
        connection.close()

    async def _take(self, clock: Clock) -> net.Connection:
        with self._lock:
            if self._closed:
                raise ConfigurationError("This client has been closed.", hint="Make another one.")
            if self._owner != os.getpid():
                # After a fork the parent's connections are not ours to write on, nor to shut down.
                self._idle, self._owner = [], os.getpid()
        while True:
            with self._lock:
                entry = self._idle.pop() if self._idle else None
            if entry is None:
                wait = min(clock.next_wait(), self.timeout)
                return await net.Connection.open(self.address.host, self.address.port, self._tls, wait)
            connection, since = entry
            try:
                if time.monotonic() - since < _IDLE_SECONDS_MAX and await connection.usable():
                    return connection
            except BaseException:
                connection.close()
                raise
            connection.close()

    async def open(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: bytes | net.Pieces | None = None,
        content_type: str | None = None,
        headers: Mapping[str, str] | None = None,
        clock: Clock,
        idempotency_key: str | None = None,
    ) -> AsyncExchange:
        """Sends one request, once, and returns its successful answer with the body unread.

        Error answers, redirects and failures of the network are raised. A body in pieces is sent in chunks; if it
        raises, the connection is cut so that the service sees an incomplete body, and the exception goes on.
        """
        request_id = uuid.uuid4().hex
        fields: dict[str, str] = {}
        if idempotency_key is not None:
            fields["Idempotency-Key"] = idempotency_key
        if content_type is not None:
            fields["Content-Type"] = content_type
        fields.update(headers or {})
        head = _wire.head(
            self.address,
            method,
            path,
            query=query,
            authorization=self._authorization,
            request_id=request_id,
            length=len(body) if isinstance(body, bytes) else None,
            chunked=body is not None and not isinstance(body, bytes),
            headers=fields,
        )
        try:
            connection = await self._take(clock)
        except (OSError, ValueError) as error:
            if isinstance(error, MainbrellaError):
                raise
            raise _wire.not_connected(error, self.address, request_id, idempotency_key) from error
        answer = Answer(method)
        try:
            whole = await _converse(connection, answer, head, body, clock)
        except _BodyFailedError as failed:
            connection.abort()
            raise failed.cause from None
        except (OSError, CutShortError, NotHttpError) as error:
            connection.abort()
            raise _wire.lost(error, request_id, idempotency_key) from error
        except BaseException:
            connection.abort()
            raise
        # A service that refuses need not have read the body, and then ends the connection at some moment.
        read = whole and (answer.status < 400 or not body)
        exchange = AsyncExchange(self, connection, answer, clock, request_id, reusable=read)
        if 200 <= exchange.status < 300:
            return exchange
        data: bytes | None = None
        try:
            data = await exchange.read_all(_wire.ERROR_BODY_MAX)
        except TransportError:
            pass
        raise _wire.refused(
            exchange.status, exchange.headers, data, request_id=exchange.request_id, key=idempotency_key
        )

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        json_body: Mapping[str, Any] | None = None,
        wait: float | None = None,
        limit: int = 4 * 1024 * 1024,
        idempotency_key: str | None = None,
    ) -> dict[str, Any]:
        """One request with a JSON answer. Only ``GET`` is repeated, when the network failed. ``wait``: seconds."""
        body = None if json_body is None else _wire.json_bytes(json_body)
        total = self.timeout if wait is None else wait
        attempt = 0
        while True:
            attempt += 1
            try:
                exchange = await self.open(
                    method,
                    path,
                    query=query,
                    body=body,
                    content_type=None if body is None else "application/json",
                    clock=Clock(total=total, silence=total),
                    idempotency_key=idempotency_key,
                )
                return await self.parse(exchange, limit)
            except TransportError as error:
                error.idempotency_key = idempotency_key
                again = method == "GET" and attempt < _READ_ATTEMPTS
                if not again or isinstance(error, CallerStoppedWaitingError):
                    raise
            await net.sleep(0.05 * 4 ** (attempt - 1))

    async def keyed(
        self,
        path: str,
        body: Mapping[str, Any],
        parse: Callable[[dict[str, Any]], T],
        *,
        query: Mapping[str, str] | None = None,
        key: str,
        timeout: float,
    ) -> T:
        """A ``POST`` that makes something, repeated under one idempotency key until it is known what became of it.

        Every error carries the key. ``ambiguous`` stays true once the fate of one attempt is unknown, whatever later
        attempts met: a plain failure then does not settle it. ``timeout``: seconds for all attempts together.
        """
        end = time.monotonic() + timeout
        attempt = 0
        uncertain = False
        while True:
            attempt += 1
            wait = max(0.001, min(end - time.monotonic(), _KEYED_ATTEMPT_SECONDS))
            try:
                return parse(await self.call("POST", path, query=query, json_body=body, idempotency_key=key, wait=wait))
            except MainbrellaError as error:
                error.idempotency_key = key
                uncertain = uncertain or error.ambiguous
                pause = error.retry_after if error.retry_after is not None else _BACKOFF_SECONDS * 2 ** (attempt - 1)
                again = error.retryable or error.ambiguous
                late = time.monotonic() + pause >= end
                if not again or late or attempt >= _KEYED_ATTEMPTS or pause > _BACKOFF_MAX_SECONDS:
                    error.ambiguous = error.ambiguous or (uncertain and again)
                    raise
            await net.sleep(pause)

    async def parse(self, exchange: AsyncExchange, limit: int) -> dict[str, Any]:
        """Reads an answer to its end, at most ``limit`` bytes, as a JSON object. An empty one is ``{}``."""
        raw = await exchange.read_all(limit)
        if exchange.status == 204:
            return {}
        return _wire.parse_json(raw, status=exchange.status, request_id=exchange.request_id)


class _BodyFailedError(Exception):
    """The caller's own body raised."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__()
        self.cause = cause


async def _converse(
    connection: net.Connection, answer: Answer, head: bytes, body: bytes | net.Pieces | None, clock: Clock
) -> bool:
    """Sends a request and reads the head of its answer. ``False``: the answer came before all had been sent."""
    whole = True
    try:
        if isinstance(body, bytes) and len(body) <= _PIECE:
            await connection.send(head + body, clock.next_wait())
        else:
            await connection.send(head, clock.next_wait())
            if isinstance(body, bytes):
                whole = await _send_sized(connection, body, clock)
            elif body is not None:
                whole = await _send_chunked(connection, body, clock)
    except OSError:
        # The service may have answered before it had read everything, and closed: that answer is worth more than the
        # broken pipe.
        early = Clock(total=_EARLY_ANSWER_SECONDS, silence=_EARLY_ANSWER_SECONDS)
        try:
            await _read_head(connection, answer, early)
            return False
        except (OSError, CutShortError, NotHttpError):
            pass
        raise
    await _read_head(connection, answer, clock)
    return whole


async def _read_head(connection: net.Connection, answer: Answer, clock: Clock) -> None:
    while not answer.head():
        answer.feed(await connection.receive(clock.next_wait()))


async def _send_sized(connection: net.Connection, body: bytes, clock: Clock) -> bool:
    view = memoryview(body)
    for start in range(0, len(view), _PIECE):
        if await connection.spoken():
            return False
        await connection.send(view[start : start + _PIECE], clock.next_wait())
    return True


async def _send_chunked(connection: net.Connection, pieces: net.Pieces, clock: Clock) -> bool:
    iterator = net.iterate(pieces).__aiter__()
    while True:
        try:
            piece = await iterator.__anext__()
        except StopAsyncIteration:
            await connection.send(b"0\r\n\r\n", clock.next_wait())
            return True
        except BaseException as error:
            raise _BodyFailedError(error) from error
        view = memoryview(piece)
        for start in range(0, len(view), _PIECE):
            if await connection.spoken():
                return False
            part = view[start : start + _PIECE]
            await connection.send(b"".join((b"%x\r\n" % len(part), part, b"\r\n")), clock.next_wait())
