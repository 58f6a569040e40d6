"""HTTP/1.1 over a pool of kept-open connections, with deadlines that hold and no hidden repeats.

One connection carries one exchange at a time. A connection goes back to the pool only when its answer was read to the
end, so that nothing of one call can be seen by the next. Proxies named in the environment are not used.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import select
import socket
import ssl
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ._address import Address
from ._version import __version__
from .errors import (
    CallerStoppedWaitingError,
    ConfigurationError,
    InvalidResponseError,
    MainbrellaError,
    RedirectRefusedError,
    TransportError,
    api_error,
)

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_IDLE_CONNECTIONS_MAX = 16
_IDLE_SECONDS_MAX = 20.0
_SEND_PIECE = 256 * 1024
_READ_BUFFER = 256 * 1024
_ERROR_BODY_MAX = 256 * 1024
_EARLY_ANSWER_SECONDS = 2.0
_READ_ATTEMPTS = 3


class Clock:
    """When to give up: at a fixed moment, or after so long a silence."""

    def __init__(self, *, total: float | None, silence: float) -> None:
        self._at = None if total is None else time.monotonic() + total
        self._silence = silence

    def next_wait(self) -> float:
        """Seconds the next socket operation may take. Raises ``TimeoutError`` when there are none left."""
        if self._at is None:
            return self._silence
        left = self._at - time.monotonic()
        if left <= 0:
            raise TimeoutError("deadline passed")
        return min(left, self._silence)


class _ClockedReader(io.RawIOBase):
    """Reads a socket under a clock."""

    def __init__(self, sock: socket.socket, clock: Clock) -> None:
        super().__init__()
        self._sock = sock
        self._clock = clock
        self._raw = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int | None:
        self._sock.settimeout(self._clock.next_wait())
        return self._raw.readinto(buffer)

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


class _ClockedSocket:
    """What ``http.client.HTTPResponse`` needs of a socket."""

    def __init__(self, sock: socket.socket, clock: Clock) -> None:
        self._sock = sock
        self._clock = clock

    def makefile(self, mode: str = "rb") -> io.BufferedReader:
        return io.BufferedReader(_ClockedReader(self._sock, self._clock), _READ_BUFFER)


def _readable_now(sock: socket.socket) -> bool:
    """Whether the peer has said something, or closed, without our asking."""
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return bool(poll.poll(0))
    return bool(select.select([sock], [], [], 0)[0])


def _as_timeout(error: BaseException) -> bool:
    return isinstance(error, TimeoutError)


class Exchange:
    """One answer whose body is still to be read."""

    def __init__(
        self,
        pool: Transport,
        sock: socket.socket,
        answer: http.client.HTTPResponse,
        request_id: str,
        *,
        whole_request_sent: bool,
    ) -> None:
        self._pool = pool
        self._sock: socket.socket | None = sock
        self._answer = answer
        self._reusable = whole_request_sent and not answer.will_close
        self.request_id = answer.headers.get("X-Request-Id") or request_id
        self.status = answer.status
        self.headers = answer.headers
        length = answer.headers.get("Content-Length")
        self._chunked = answer.chunked is True
        self._expected = int(length) if length is not None and length.isdigit() and not self._chunked else None
        self._got = 0

    @property
    def framed(self) -> bool:
        """Whether the answer itself says where its body ends."""
        return self._chunked or self._expected is not None

    def readinto(self, buffer: bytearray | memoryview) -> int:
        """Reads some of the body; 0 at its end. A body that ends too early is an error, not an end."""
        if len(buffer) == 0:
            return 0
        try:
            count = self._answer.readinto(buffer)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            raise self._cut(error) from error
        self._got += count
        if count == 0:
            if self._expected is not None and self._got < self._expected:
                self.close()
                raise self._cut(None)
            self._finish()
        elif self._expected is not None and self._got >= self._expected:
            self._finish()
        return count

    def read_all(self, limit: int) -> bytes:
        """The whole body, refused beyond ``limit`` bytes."""
        if self._expected is not None and self._expected > limit:
            self.close()
            raise self._too_long(limit)
        out = bytearray()
        buffer = bytearray(min(_READ_BUFFER, (self._expected or _READ_BUFFER) + 1))
        view = memoryview(buffer)
        while count := self.readinto(view):
            out += view[:count]
            if len(out) > limit:
                self.close()
                raise self._too_long(limit)
        return bytes(out)

    def close(self) -> None:
        """Gives the connection up; harmless when it has been finished."""
        sock, self._sock = self._sock, None
        if sock is not None:
            self._answer.close()
            sock.close()

    def _finish(self) -> None:
        sock, self._sock = self._sock, None
        if sock is None:
            return
        self._answer.close()
        if self._reusable:
            self._pool.give_back(sock)
        else:
            sock.close()

    def _cut(self, error: BaseException | None) -> MainbrellaError:
        if error is not None and _as_timeout(error):
            return CallerStoppedWaitingError("The answer stopped coming.", request_id=self.request_id, ambiguous=True)
        return InvalidResponseError(
            "The connection was lost before the answer was complete.",
            status=self.status,
            request_id=self.request_id,
            ambiguous=True,
        )

    def _too_long(self, limit: int) -> MainbrellaError:
        return InvalidResponseError(
            f"The answer is longer than {limit} bytes.", status=self.status, request_id=self.request_id, ambiguous=True
        )


class Transport:
    """Sends requests to one service with one key. Safe to share between threads."""

    def __init__(
        self, address: Address, api_key: str, *, timeout: float, ssl_context: ssl.SSLContext | None = None
    ) -> None:
        self.address = address
        self.timeout = timeout
        self._authorization = f"Bearer {api_key}"
        self._tls = (ssl_context or ssl.create_default_context()) if address.secure else None
        self._lock = threading.Lock()
        self._idle: list[tuple[socket.socket, float]] = []
        self._owner = os.getpid()
        self._closed = False

    def close(self) -> None:
        """Closes the connections that are not in use and refuses further calls."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for sock, _ in idle:
            sock.close()

    def __del__(self) -> None:
        for sock, _ in getattr(self, "_idle", ()):
            sock.close()

    def give_back(self, sock: socket.socket) -> None:
        """Keeps a connection whose exchange is over for the next one."""
        with self._lock:
            if not self._closed and self._owner == os.getpid() and len(self._idle) < _IDLE_CONNECTIONS_MAX:
                self._idle.append((sock, time.monotonic()))
                return
        sock.close()

    def _take(self, clock: Clock) -> socket.socket:
        with self._lock:
            if self._closed:
                raise ConfigurationError("This client has been closed.", hint="Make another Mainbrella(...).")
            if self._owner != os.getpid():
                # After a fork the parent's connections are not ours to write on, nor to shut down.
                self._idle, self._owner = [], os.getpid()
        while True:
            with self._lock:
                entry = self._idle.pop() if self._idle else None
            if entry is None:
                return self._connect(clock)
            sock, since = entry
            if time.monotonic() - since < _IDLE_SECONDS_MAX and not _readable_now(sock):
                return sock
            sock.close()

    def _connect(self, clock: Clock) -> socket.socket:
        wait = min(clock.next_wait(), self.timeout)
        connection: http.client.HTTPConnection
        if self._tls is not None:
            connection = http.client.HTTPSConnection(
                self.address.host, self.address.port, timeout=wait, context=self._tls
            )
        else:
            connection = http.client.HTTPConnection(self.address.host, self.address.port, timeout=wait)
        try:
            connection.connect()
        except BaseException:
            connection.close()
            raise
        sock: socket.socket = connection.sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def open(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: bytes | Iterable[bytes | memoryview] | None = None,
        content_type: str | None = None,
        headers: Mapping[str, str] | None = None,
        clock: Clock,
        idempotency_key: str | None = None,
    ) -> Exchange:
        """Sends one request, once, and returns its successful answer with the body unread.

        Error answers, redirects and failures of the network are raised. An iterable body is sent in chunks; if it
        raises, the connection is cut so that the service sees an incomplete body, and the exception goes on.
        """
        request_id = uuid.uuid4().hex
        head = self._head(method, path, query, body, content_type, headers, request_id, idempotency_key)
        try:
            sock = self._take(clock)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, MainbrellaError):
                raise
            raise self._not_connected(error, request_id, idempotency_key) from error
        try:
            answer, whole = self._converse(sock, method, head, body, clock)
        except _BodyFailedError as failed:
            sock.close()
            raise failed.cause from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            sock.close()
            raise self._lost(error, request_id, idempotency_key) from error
        except BaseException:
            sock.close()
            raise
        exchange = Exchange(self, sock, answer, request_id, whole_request_sent=whole)
        if exchange.status >= 300 or exchange.status < 200:
            raise self._refused(exchange, idempotency_key)
        return exchange

    def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        json_body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        wait: float | None = None,
        limit: int = 4 * 1024 * 1024,
        idempotency_key: str | None = None,
    ) -> tuple[dict[str, Any], Exchange]:
        """One request with a JSON answer. Only ``GET`` is repeated, when the network failed. ``wait``: seconds."""
        body = None if json_body is None else json.dumps(json_body, ensure_ascii=False).encode("utf-8")
        total = self.timeout if wait is None else wait
        attempt = 0
        while True:
            attempt += 1
            clock = Clock(total=total, silence=total)
            try:
                exchange = self.open(
                    method,
                    path,
                    query=query,
                    body=body,
                    content_type=None if body is None else "application/json",
                    headers=headers,
                    clock=clock,
                    idempotency_key=idempotency_key,
                )
                return self.parse(exchange, limit), exchange
            except TransportError as error:
                error.idempotency_key = idempotency_key
                again = method == "GET" and attempt < _READ_ATTEMPTS
                if not again or isinstance(error, CallerStoppedWaitingError):
                    raise
                time.sleep(0.05 * 4 ** (attempt - 1))

    def parse(self, exchange: Exchange, limit: int) -> dict[str, Any]:
        """Reads an answer to its end, at most ``limit`` bytes, as a JSON object."""
        return self._json(exchange, exchange.read_all(limit))

    def _head(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: bytes | Iterable[bytes | memoryview] | None,
        content_type: str | None,
        headers: Mapping[str, str] | None,
        request_id: str,
        idempotency_key: str | None,
    ) -> bytes:
        target = self.address.prefix + path
        if query:
            target += "?" + "&".join(f"{quote(k, safe='')}={quote(v, safe='')}" for k, v in query.items())
        fields = {
            "Host": self.address.authority,
            "Authorization": self._authorization,
            "User-Agent": f"mainbrella-python/{__version__}",
            "Accept": "application/json",
            "X-Request-Id": request_id,
        }
        if idempotency_key is not None:
            fields["Idempotency-Key"] = idempotency_key
        if content_type is not None:
            fields["Content-Type"] = content_type
        if isinstance(body, bytes):
            fields["Content-Length"] = str(len(body))
        elif body is not None:
            fields["Transfer-Encoding"] = "chunked"
        elif method not in ("GET", "HEAD"):
            fields["Content-Length"] = "0"
        fields.update(headers or {})
        for name, value in fields.items():
            if any(c < " " or c > "~" for c in value):
                raise ConfigurationError(f"The value of the header {name} holds characters that cannot be sent.")
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
        return "\r\n".join(lines).encode("ascii")

    def _converse(
        self,
        sock: socket.socket,
        method: str,
        head: bytes,
        body: bytes | Iterable[bytes | memoryview] | None,
        clock: Clock,
    ) -> tuple[http.client.HTTPResponse, bool]:
        whole = True
        try:
            if isinstance(body, bytes) and len(body) <= _SEND_PIECE:
                _send(sock, head + body, clock)
            else:
                _send(sock, head, clock)
                if isinstance(body, bytes):
                    whole = _send_sized(sock, body, clock)
                elif body is not None:
                    whole = _send_chunked(sock, body, clock)
        except OSError:
            # The service may have answered before it had read everything, and closed: that answer is worth more
            # than the broken pipe.
            early = Clock(total=_EARLY_ANSWER_SECONDS, silence=_EARLY_ANSWER_SECONDS)
            try:
                return _read_head(sock, method, early), False
            except (OSError, http.client.HTTPException, ValueError):
                pass
            raise
        return _read_head(sock, method, clock), whole

    def _json(self, exchange: Exchange, raw: bytes) -> dict[str, Any]:
        try:
            data: Any = json.loads(raw)
        except (ValueError, RecursionError):
            data = None
        if not isinstance(data, dict):
            raise InvalidResponseError(
                "The answer is not a JSON object.",
                status=exchange.status,
                hint="Check that base_url is the address of a Mainbrella service.",
                request_id=exchange.request_id,
                ambiguous=True,
            )
        return data  # pyright: ignore[reportUnknownVariableType]

    def _refused(self, exchange: Exchange, idempotency_key: str | None) -> MainbrellaError:
        if 300 <= exchange.status < 400:
            exchange.close()
            return RedirectRefusedError(
                "The service answered with a redirect, which was not followed.",
                status=exchange.status,
                hint="Set base_url to the final address; the API key is sent nowhere else.",
                request_id=exchange.request_id,
                idempotency_key=idempotency_key,
            )
        body: dict[str, Any] | None = None
        try:
            body = self._json(exchange, exchange.read_all(_ERROR_BODY_MAX))
        except TransportError:
            exchange.close()
        return api_error(
            exchange.status,
            body,
            request_id=exchange.request_id,
            retry_after=_seconds(exchange.headers.get("Retry-After")),
            idempotency_key=idempotency_key,
        )

    def _not_connected(self, error: BaseException, request_id: str, key: str | None) -> MainbrellaError:
        if isinstance(error, ssl.SSLError):
            return TransportError(
                f"No secure connection to {self.address} could be made.",
                code="tls_failed",
                hint="Check the certificate of the service, or pass ssl_context with its authority.",
                request_id=request_id,
                idempotency_key=key,
            )
        return TransportError(
            f"No connection to {self.address} could be made.",
            code="connection_failed",
            hint="Check that the service is running and that base_url or MAINBRELLA_API_URL is right.",
            request_id=request_id,
            retryable=True,
            idempotency_key=key,
        )

    def _lost(self, error: BaseException, request_id: str, key: str | None) -> MainbrellaError:
        if _as_timeout(error):
            return CallerStoppedWaitingError(
                "No answer came in the time this client waits.",
                hint="What was asked may go on; inspect before repeating it.",
                request_id=request_id,
                ambiguous=True,
                idempotency_key=key,
            )
        if isinstance(error, OSError) and not isinstance(error, http.client.HTTPException):
            return TransportError(
                "The connection was lost before an answer came.",
                hint="The request may have been carried out; inspect before repeating it.",
                request_id=request_id,
                ambiguous=True,
                idempotency_key=key,
            )
        return InvalidResponseError(
            "The answer is not HTTP.",
            hint="Check that base_url is the address of a Mainbrella service.",
            request_id=request_id,
            ambiguous=True,
            idempotency_key=key,
        )


class _BodyFailedError(Exception):
    """The caller's own body raised."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__()
        self.cause = cause


def _read_head(sock: socket.socket, method: str, clock: Clock) -> http.client.HTTPResponse:
    answer = http.client.HTTPResponse(_ClockedSocket(sock, clock), method=method)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    try:
        answer.begin()
    except BaseException:
        answer.close()
        raise
    return answer


def _send(sock: socket.socket, data: bytes | memoryview, clock: Clock) -> None:
    sock.settimeout(clock.next_wait())
    sock.sendall(data)


def _send_sized(sock: socket.socket, body: bytes, clock: Clock) -> bool:
    view = memoryview(body)
    for start in range(0, len(view), _SEND_PIECE):
        if _readable_now(sock):
            return False
        _send(sock, view[start : start + _SEND_PIECE], clock)
    return True


def _send_chunked(sock: socket.socket, pieces: Iterable[bytes | memoryview], clock: Clock) -> bool:
    """Sends a body of unknown length. False: the service answered before the end, the rest was not sent."""
    iterator = iter(pieces)
    while True:
        try:
            piece = next(iterator, None)
        except BaseException as error:
            raise _BodyFailedError(error) from error
        if piece is None:
            _send(sock, b"0\r\n\r\n", clock)
            return True
        view = memoryview(piece)
        for start in range(0, len(view), _SEND_PIECE):
            if _readable_now(sock):
                return False
            part = view[start : start + _SEND_PIECE]
            _send(sock, f"{len(part):x}\r\n".encode("ascii"), clock)
            _send(sock, part, clock)
            _send(sock, b"\r\n", clock)


def _seconds(text: str | None) -> float | None:
    """The seconds of a ``Retry-After`` header; its date form is not used by this API."""
    return float(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 7 else None
