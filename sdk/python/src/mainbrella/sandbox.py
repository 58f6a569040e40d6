"""One generation of a machine, and everything that can be done with it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any
from urllib.parse import quote

from ._transport import Clock, Exchange, Transport
from .commands import Commands
from .errors import (
    CallerStoppedWaitingError,
    CleanupUncertainError,
    ConfigurationError,
    GenerationMismatchError,
    MainbrellaError,
    NotFoundError,
    TransportError,
    UnavailableError,
)
from .files import Files
from .models import MachineInfo, StopResult, drop_none, parse_machine, parse_stop

__all__ = ["Sandbox"]

_JSON_MAX = 4 * 1024 * 1024
_STOP_ATTEMPTS = 4
_OPEN_ATTEMPTS = 3
_STOP_WAIT_SECONDS = 120.0


class Sandbox:
    """A machine, named by the pair ``(id, created_at)``: every call acts on that generation or fails.

    Made by ``client.create``, it owns its clean-up: leaving its ``with`` block stops that generation and no other.
    Made by ``connect``, ``get`` or ``list``, leaving a ``with`` block does nothing.
    """

    commands: Commands
    """Runs commands."""
    files: Files
    """Reads and writes files."""

    def __init__(self, transport: Transport, info: MachineInfo, *, owned: bool) -> None:
        self._transport = transport
        self._info = info
        self._owned = owned
        self._path = f"/v1/machines/{quote(info.id, safe='')}"
        self.commands = Commands(self)
        self.files = Files(self)

    @property
    def id(self) -> str:
        """The slot."""
        return self._info.id

    @property
    def created_at(self) -> str:
        """When this generation was created, RFC 3339."""
        return self._info.created_at

    @property
    def info(self) -> MachineInfo:
        """What the service last said of it; ``inspect()`` asks again."""
        return self._info

    @property
    def state(self) -> str:
        """Its state as last heard; ``inspect()`` asks again."""
        return self._info.state

    def inspect(self) -> MachineInfo:
        """Asks the service what this generation is doing. This does not count as use of the machine."""
        data, _ = self._transport.call("GET", self._path, query={"createdAt": self.created_at})
        return self._learn(parse_machine(data))

    refresh = inspect

    def extend(self, *, ttl_seconds: int | None = None, idle_timeout_seconds: int | None = None) -> MachineInfo:
        """Changes the lease.

        Args:
            ttl_seconds: the machine may live at least so long from now; never shortens what it already has.
            idle_timeout_seconds: it ends when nobody uses it for so long, counted from now.
        """
        if ttl_seconds is None and idle_timeout_seconds is None:
            raise ConfigurationError("Say ttl_seconds, idle_timeout_seconds or both.")
        body = drop_none({"ttlSeconds": ttl_seconds, "idleTimeoutSeconds": idle_timeout_seconds})
        return self._learn(parse_machine(self.post("/extend", body)))

    def kill(self) -> StopResult:
        """Stops exactly this generation; files in it are lost. Safe to repeat, also after it has ended.

        Raises ``GenerationMismatchError`` when the slot has passed to a newer machine: this one has ended then.

        A stop is fenced by the generation and idempotent, so it is the one change that is sent again by itself when
        the network fails.
        """
        attempt = 0
        while True:
            attempt += 1
            try:
                data = self.post("/stop", None, extra_wait=_STOP_WAIT_SECONDS)
                result = parse_stop(data)
            except (TransportError, UnavailableError) as error:
                if attempt >= _STOP_ATTEMPTS or isinstance(error, CallerStoppedWaitingError):
                    raise
            else:
                self._learn(result.info)
                if result.stopped or attempt >= _STOP_ATTEMPTS:
                    return result
            time.sleep(0.2 * 2 ** (attempt - 1))

    stop = kill

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._owned:
            return
        try:
            result = self.kill()
            if result.stopped:
                return
            trouble: MainbrellaError = CleanupUncertainError(
                f"Machine {self.id} was stopped, but its clean-up is not confirmed.",
                hint="The service goes on with it; kill() again to see the outcome.",
            )
        except (NotFoundError, GenerationMismatchError):
            # This generation is gone: what is in the slot now, if anything, is not ours.
            return
        except MainbrellaError as failure:
            trouble = failure
        if error is None:
            raise trouble
        note = getattr(error, "add_note", None)
        if note is not None:
            note(f"mainbrella: stopping machine {self.id}@{self.created_at} also failed: {trouble}")

    def __repr__(self) -> str:
        return f"Sandbox(id={self.id!r}, created_at={self.created_at!r}, state={self.state!r})"

    # What the namespaces (`commands`, `files`) are built on.

    def post(
        self, verb: str, body: Mapping[str, Any] | None, *, extra_wait: float = 0.0, limit: int = _JSON_MAX
    ) -> dict[str, Any]:
        """Sends one generation-bound verb, once."""
        data, _ = self._transport.call(
            "POST",
            self._path + verb,
            query={"createdAt": self.created_at},
            json_body=body,
            wait=self._transport.timeout + extra_wait,
            limit=limit,
        )
        return data

    def open(
        self,
        method: str,
        verb: str,
        *,
        query: Mapping[str, str],
        body: bytes | Iterable[bytes | memoryview] | None = None,
        content_type: str | None = None,
    ) -> Exchange:
        """Opens one generation-bound transfer. It may take as long as bytes keep moving.

        A ``GET`` whose answer never began is sent again; anything else is sent once.
        """
        attempt = 0
        while True:
            attempt += 1
            try:
                return self._transport.open(
                    method,
                    self._path + verb,
                    query={"createdAt": self.created_at, **query},
                    body=body,
                    content_type=content_type,
                    clock=Clock(total=None, silence=self._transport.timeout),
                )
            except TransportError as error:
                again = method == "GET" and attempt < _OPEN_ATTEMPTS
                if not again or isinstance(error, CallerStoppedWaitingError):
                    raise
            time.sleep(0.05 * 4 ** (attempt - 1))

    def json(self, exchange: Exchange) -> dict[str, Any]:
        """The JSON answer of a transfer."""
        return self._transport.parse(exchange, _JSON_MAX)

    def _learn(self, info: MachineInfo) -> MachineInfo:
        if (info.id, info.created_at) != (self.id, self.created_at):
            raise GenerationMismatchError(
                "The service answered about another generation.",
                code="generation_mismatch",
                hint="Report this: an answer must never be about a machine that was not named.",
            )
        self._info = info
        return info
