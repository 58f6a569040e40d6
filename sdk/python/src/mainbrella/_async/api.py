"""Calls that are bound to one generation of a machine, or to one snapshot: what namespaces are built on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from .._clock import Clock
from ..errors import CallerStoppedWaitingError, TransportError
from . import net
from .transport import AsyncExchange, AsyncTransport

__all__ = ["AsyncApi", "AsyncMachineApi"]

_JSON_MAX = 4 * 1024 * 1024
_OPEN_ATTEMPTS = 3


class AsyncApi:
    """Sends verbs about the thing at ``path``. ``patience``: seconds that reading may take over the client's ``timeout``."""

    def __init__(
        self, transport: AsyncTransport, path: str, bound: Mapping[str, str] | None = None, *, patience: float = 0.0
    ) -> None:
        self.transport = transport
        self.path = path
        self._bound = dict(bound or {})
        self._patience = patience

    async def get(
        self, verb: str, query: Mapping[str, str] | None = None, *, extra_wait: float = 0.0, limit: int = _JSON_MAX
    ) -> dict[str, Any]:
        """Asks something; asked again when the network fails. ``extra_wait``: seconds over the client's ``timeout``."""
        return await self.transport.call(
            "GET",
            self.path + verb,
            query={**self._bound, **(query or {})},
            wait=self.transport.timeout + self._patience + extra_wait,
            limit=limit,
        )

    async def post(
        self,
        verb: str,
        body: Mapping[str, Any] | None = None,
        *,
        method: str = "POST",
        extra_wait: float = 0.0,
        limit: int = _JSON_MAX,
    ) -> dict[str, Any]:
        """Orders something, once."""
        return await self.transport.call(
            method,
            self.path + verb,
            query=self._bound,
            json_body=body,
            wait=self.transport.timeout + extra_wait,
            limit=limit,
        )

    async def open(
        self,
        method: str,
        verb: str,
        *,
        query: Mapping[str, str],
        body: bytes | net.Pieces | None = None,
        content_type: str | None = None,
        accept: str | None = None,
        total: float | None = None,
        silence: float | None = None,
        attempts: int = _OPEN_ATTEMPTS,
    ) -> AsyncExchange:
        """Opens a transfer. It may take as long as bytes keep moving, or ``total`` seconds where that is given.

        ``silence``: seconds without a byte after which it is given up. A ``GET`` whose answer never began is sent
        again, up to ``attempts`` in all; anything else is sent once.
        """
        attempt = 0
        silence = self.transport.timeout + self._patience if silence is None else silence
        while True:
            attempt += 1
            try:
                return await self.transport.open(
                    method,
                    self.path + verb,
                    query={**self._bound, **query},
                    body=body,
                    content_type=content_type,
                    headers=None if accept is None else {"Accept": accept},
                    clock=Clock(total=total, silence=silence),
                )
            except TransportError as error:
                again = method == "GET" and attempt < attempts
                if not again or isinstance(error, CallerStoppedWaitingError):
                    raise
            await net.sleep(0.05 * 4 ** (attempt - 1))

    async def json(self, exchange: AsyncExchange) -> dict[str, Any]:
        """The JSON answer of a transfer."""
        return await self.transport.parse(exchange, _JSON_MAX)


class AsyncMachineApi(AsyncApi):
    """Sends verbs about ``(id, created_at)``; the service refuses them when the slot holds another generation."""

    def __init__(self, transport: AsyncTransport, id: str, created_at: str) -> None:
        super().__init__(transport, f"/v1/machines/{quote(id, safe='')}", {"createdAt": created_at})
        self.id = id
        self.created_at = created_at
