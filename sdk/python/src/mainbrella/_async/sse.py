"""Streams of events from the service, and when it is worth asking for one again."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

from .._clock import Backoff
from .._sse import Sse, SseParser, SseTooLongError
from ..errors import InvalidResponseError, MainbrellaError, RateLimitedError, TransportError, UnavailableError
from ..models import Fields
from .api import AsyncMachineApi
from .transport import AsyncExchange

__all__ = ["AsyncSseSource", "StreamEndedError", "backoff", "event_fields", "open_sse", "pause_after"]

_PAUSE_FIRST = 0.01
_PAUSE_LONGEST = 2.0
# The service sends a sign of life every 10 seconds.
_SILENCE_SECONDS = 35.0
_LASTING_SECONDS = 5.0


class StreamEndedError(InvalidResponseError):
    """The service ended a stream of events properly."""


class AsyncSseSource:
    """One connection that carries events."""

    def __init__(self, exchange: AsyncExchange) -> None:
        self._exchange = exchange
        self._parser = SseParser()
        self._since = time.monotonic()

    @property
    def lasting(self) -> bool:
        """It has been open for some seconds: a sign of life on it means more than that it could be opened."""
        return time.monotonic() - self._since > _LASTING_SECONDS

    async def receive(self) -> list[Sse]:
        """The events that became complete with what came next; none for a mere sign of life. Its end is an error."""
        heard = self._parser.heard
        while self._parser.heard == heard:
            piece = await self._exchange.read()
            if not piece:
                raise StreamEndedError("The stream of events ended early.", request_id=self._exchange.request_id)
            try:
                received = self._parser.feed(piece)
            except SseTooLongError as error:
                raise InvalidResponseError("The service sent an event that is too long.") from error
            if received:
                return received
        return []

    def close(self) -> None:
        """Gives the connection up."""
        self._exchange.close()


async def open_sse(
    api: AsyncMachineApi,
    method: str,
    verb: str,
    *,
    query: Mapping[str, str],
    body: bytes | None = None,
    total: float | None = None,
) -> AsyncSseSource:
    """Asks for a stream, once. ``total``: seconds it may last; default: as long as there are signs of life."""
    exchange = await api.open(
        method,
        verb,
        query=query,
        body=body,
        content_type=None if body is None else "application/json",
        accept="text/event-stream",
        total=total,
        silence=_SILENCE_SECONDS,
        attempts=1,
    )
    if not exchange.headers.get("content-type", "").startswith("text/event-stream"):
        exchange.close()
        raise InvalidResponseError("The service did not answer with a stream of events.", status=exchange.status)
    return AsyncSseSource(exchange)


def event_fields(text: str) -> Fields:
    """The JSON of one event."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = None
    return Fields(data, "event")


def backoff(give_up: float) -> Backoff:
    """For asking again and again, for at most ``give_up`` seconds without a sign of life."""
    return Backoff(first=_PAUSE_FIRST, longest=_PAUSE_LONGEST, give_up=give_up)


def pause_after(error: MainbrellaError, tries: Backoff) -> float:
    """Seconds to wait before asking again after ``error``; raises it when that would not help."""
    passing = isinstance(error, (TransportError, UnavailableError, RateLimitedError)) or error.code.startswith("http_5")
    pause = tries.next_pause(error.retry_after) if passing and error.code != "tls_failed" else None
    if pause is None:
        raise error
    return pause
