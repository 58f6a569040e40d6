"""Watching files of a machine."""

from __future__ import annotations

from collections import deque
from types import TracebackType

from .._sse import Sse
from ..errors import MainbrellaError
from ..filetypes import FileWatchEvent, parse_watch
from . import net
from .api import AsyncMachineApi
from .sse import AsyncSseSource, backoff, event_fields, open_sse, pause_after

__all__ = ["AsyncFileWatch"]

_RECONNECT_SECONDS = 120.0


class AsyncFileWatch:
    """The changes of a tree. Iterate over it; ``aclose()`` it, use it in a ``with`` block, or let go of it.

    It ends by itself when the machine ends or the watched path is gone. A lost connection is made again; since what
    happened meanwhile is not known, an event of type ``overflow`` then says so.
    """

    def __init__(self, api: AsyncMachineApi, path: str, recursive: bool) -> None:
        self._api = api
        self._query = {"path": path, "recursive": "true" if recursive else "false"}
        self._source: AsyncSseSource | None = None
        self._waiting: deque[FileWatchEvent] = deque()
        self._tries = backoff(_RECONNECT_SECONDS)
        self._begun = False
        self._over = False

    async def start(self) -> None:
        """Begins to watch: when this returns, every later change will be told. Raises when the path is not there."""
        while self._source is None and not self._over:
            self._source = await open_sse(self._api, "GET", "/files/watch", query=self._query)
            ready = False
            while not ready and not self._over:
                for event in await self._source.receive():
                    ready = self._take(event) or ready
            if self._begun:
                self._waiting.append(FileWatchEvent("overflow", self._query["path"]))
            self._begun = True

    def __aiter__(self) -> AsyncFileWatch:
        return self

    async def __anext__(self) -> FileWatchEvent:
        while True:
            if self._waiting:
                return self._waiting.popleft()
            if self._over:
                self._drop()
                raise StopAsyncIteration
            try:
                if self._source is None:
                    await self.start()
                else:
                    for event in await self._source.receive():
                        self._take(event)
                    self._tries.progress()
            except MainbrellaError as error:
                self._drop()
                if not self._over:
                    if not self._begun:
                        raise
                    await net.sleep(pause_after(error, self._tries))

    async def aclose(self) -> None:
        """Stops watching."""
        self._over = True
        self._waiting.clear()
        self._drop()

    async def __aenter__(self) -> AsyncFileWatch:
        try:
            await self.start()
        except BaseException:
            self._drop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _drop(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def _take(self, event: Sse) -> bool:
        """Keeps an event to give out. ``True``: it was the sign that watching has begun."""
        fields = event_fields(event.data)
        kind = fields.text_or_none("type") or event.event
        if kind == "ended":
            self._over = True
        elif kind != "ready":
            self._waiting.append(parse_watch(kind, fields))
        return kind == "ready"
