"""Watching files of a machine."""

from __future__ import annotations

from collections import deque
from types import TracebackType

from .._sse import Sse
from ..errors import MainbrellaError
from ..filetypes import FileWatchEvent, parse_watch
from ..models import told_error
from . import net
from .api import AsyncApi
from .sse import AsyncSseSource, backoff, event_fields, open_sse, pause_after

__all__ = ["AsyncFileWatch"]

_RECONNECT_SECONDS = 120.0
_KINDS = frozenset({"created", "modified", "removed", "renamed", "attributes", "overflow"})


class AsyncFileWatch:
    """The changes of a tree. Iterate over it; ``aclose()`` it, use it in a ``with`` block, or let go of it.

    It ends by itself when the watched directory is gone, and raises when its machine ends. A lost connection is made
    again; since what happened meanwhile is not known, an event of type ``overflow`` then says so.
    """

    def __init__(self, api: AsyncApi, path: str, recursive: bool) -> None:
        self._api = api
        self._query = {"path": path, "recursive": "true" if recursive else "false"}
        self._source: AsyncSseSource | None = None
        self._waiting: deque[Sse | FileWatchEvent] = deque()
        self._tries = backoff(_RECONNECT_SECONDS)
        self._begun = False
        self._over = False

    async def start(self) -> None:
        """Begins to watch: when this returns, every later change will be told. Raises when the path is not there."""
        if self._source is not None or self._over:
            return
        try:
            self._source = await open_sse(self._api, "GET", "/files/watch", query=self._query)
            received = await self._source.receive()
            while not received:
                received = await self._source.receive()
            if _kind(received[0]) == "ready":
                del received[0]
            elif _kind(received[0]) == "error":
                raise told_error(event_fields(received[0].data))
            if self._begun:
                self._waiting.append(FileWatchEvent("overflow", self._query["path"]))
            self._begun = True
            self._waiting.extend(received)
        except BaseException:
            self._drop()
            raise

    def __aiter__(self) -> AsyncFileWatch:
        return self

    async def __anext__(self) -> FileWatchEvent:
        while True:
            try:
                while self._waiting:
                    event = self._take(self._waiting.popleft())
                    if event is not None:
                        return event
                if self._over:
                    break
                if self._source is None:
                    await self.start()
                else:
                    self._waiting.extend(await self._source.receive())
                    self._tries.progress()
            except MainbrellaError as error:
                self._drop()
                if not self._over:
                    if not self._begun:
                        raise
                    await net.sleep(pause_after(error, self._tries))
        self._drop()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stops watching."""
        self._over = True
        self._waiting.clear()
        self._drop()

    async def __aenter__(self) -> AsyncFileWatch:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _drop(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def _take(self, event: Sse | FileWatchEvent) -> FileWatchEvent | None:
        """An event to give out; ``None`` for the end, and for a kind this version does not know."""
        if isinstance(event, FileWatchEvent):
            return event
        kind, fields = _kind(event), event_fields(event.data)
        if kind == "error":
            raise told_error(fields)
        if kind == "ended":
            self._over = True
        return parse_watch(kind, fields) if kind in _KINDS else None


def _kind(event: Sse) -> str:
    return event_fields(event.data).text_or_none("type") or event.event
