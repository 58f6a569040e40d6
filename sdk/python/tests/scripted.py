"""A small HTTP server that does exactly what a test tells it, faults included."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

CREATED_AT = "2026-10-08T12:00:00.000Z"


@dataclass
class Request:
    """One request as it came, and the socket it came on."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    sock: socket.socket
    connection: int
    complete: bool = True
    """The body came to its proper end."""

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    @property
    def query(self) -> dict[str, str]:
        return {k: v[0] for k, v in parse_qs(urlsplit(self.target).query, keep_blank_values=True).items()}

    def json(self) -> Any:
        return json.loads(self.body)

    def raw(self, data: bytes) -> None:
        self.sock.sendall(data)

    def reply(self, status: int, body: Any = None, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        lines = [f"HTTP/1.1 {status} Something", f"Content-Length: {len(data)}"]
        lines += [f"{k}: {v}" for k, v in (headers or {}).items()]
        self.raw("\r\n".join([*lines, "", ""]).encode() + data)

    def error(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        body = {"code": code, "message": f"It is {code}.", "hint": "Do something.", "requestId": "r-1"}
        self.reply(status, body, headers)

    def cut(self) -> None:
        """Ends the connection without another word."""
        self.sock.shutdown(socket.SHUT_RDWR)


Handler = Callable[[Request], None]


@dataclass
class Server:
    """Serves the handlers in their order, one request each; the last one serves all further requests."""

    handlers: list[Handler]
    requests: list[Request] = field(default_factory=list[Request])
    read_body: bool = True
    port: int = 0
    tls: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.failures: list[BaseException] = []
        accept = threading.Thread(target=self._accept, daemon=True)
        accept.start()
        self._threads.append(accept)

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def connections(self) -> int:
        return len(self._sockets)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has been closed before
        self._listener.close()
        for sock in self._sockets:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(10)
        for sock in self._sockets:
            sock.close()
        if self.failures:
            raise self.failures[0]

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._sockets.append(sock)
                number = len(self._sockets)
            thread = threading.Thread(target=self._serve, args=(sock, number), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket, number: int) -> None:
        if self.tls is not None:
            try:
                sock = self.tls.wrap_socket(sock, server_side=True)
            except OSError:
                sock.close()
                return
            with self._lock:
                self._sockets[number - 1] = sock
        reader = sock.makefile("rb")
        try:
            while True:
                request = self._read(reader, sock, number)
                if request is None:
                    return
                with self._lock:
                    index = min(len(self.requests), len(self.handlers) - 1)
                    self.requests.append(request)
                self.handlers[index](request)
        except OSError:
            return
        except BaseException as error:
            self.failures.append(error)
            sock.shutdown(socket.SHUT_RDWR)
        finally:
            reader.close()

    def _read(self, reader: Any, sock: socket.socket, number: int) -> Request | None:
        line = reader.readline()
        if not line:
            return None
        method, target, _ = line.decode("ascii").split(" ", 2)
        headers: dict[str, str] = {}
        while (line := reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        request = Request(method, target, headers, b"", sock, number)
        if self.read_body:
            if headers.get("transfer-encoding") == "chunked":
                request.body, request.complete = _chunked(reader)
            else:
                length = int(headers.get("content-length", "0"))
                request.body = reader.read(length)
                request.complete = len(request.body) == length
        return request


def _chunked(reader: Any) -> tuple[bytes, bool]:
    body = bytearray()
    while True:
        line = reader.readline()
        if not line:
            return bytes(body), False
        size = int(line, 16)
        body += reader.read(size)
        reader.readline()
        if size == 0:
            return bytes(body), True


def machine(**changes: Any) -> dict[str, Any]:
    """A machine of the wire."""
    return {
        "id": "m-1",
        "createdAt": CREATED_AT,
        "state": "running",
        "catalogId": "python",
        "size": "small",
        "internet": True,
        "metadata": {},
        "isolation": "emulated",
        "limits": {"memoryMib": 1024, "vcpus": 1, "diskMib": 8192},
        "hardDeadlineMs": 1_800_000_000_000,
        "idleTimeoutSeconds": None,
        "idleDeadlineMs": None,
        "startedAtMs": 1_790_000_000_000,
        "endedAtMs": None,
        "reason": None,
        "capabilities": {"commands": True, "files": True},
        "somethingNewer": 1,
        **changes,
    }


def stopped(**changes: Any) -> dict[str, Any]:
    """The reply to a stop."""
    return {"outcome": "stopped", "machine": machine(state="stopped", **changes)}


def result(**changes: Any) -> dict[str, Any]:
    """The reply to a command."""
    return {
        "exitCode": 0,
        "signal": None,
        "timedOut": False,
        "stdoutBase64": "aGkK",
        "stderrBase64": "",
        "stdoutBytes": 3,
        "stderrBytes": 0,
        "stdoutOmitted": None,
        "stderrOmitted": None,
        "durationMs": 5,
        **changes,
    }
