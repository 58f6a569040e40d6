"""What a machine may reach: changing it, asking about it, and what was denied."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from ..egresstypes import (
    EgressEvent,
    EgressExplanation,
    EgressLogPage,
    EgressPolicy,
    Policy,
    parse_explanation,
    parse_log,
    wire_policy,
)
from ..errors import ConfigurationError
from ..models import MachineInfo, parse_machine

if TYPE_CHECKING:
    from .sandbox import AsyncSandbox

__all__ = ["AsyncEgress"]

_SLOW_SECONDS = 30.0


class AsyncEgress:
    """The egress policy of one machine."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        self._sandbox = sandbox

    @property
    def policy(self) -> EgressPolicy:
        """The policy as last heard; ``sandbox.inspect()`` asks again."""
        return self._sandbox.info.egress

    async def set(self, policy: Policy) -> MachineInfo:
        """Changes what the machine may reach, at once; connections made under the former policy end.

        Args:
            policy: an ``EgressPolicy``, ``"open"``, a list of rules, or ``"off"``, which holds for the rest of its life.

        Raises:
            EgressLockedError: the machine has no internet and never gets it.
        """
        body = wire_policy(policy)
        reply = await self._sandbox.api.post("/egress", body, method="PUT", extra_wait=_SLOW_SECONDS)
        return self._sandbox._learn(parse_machine(reply))  # pyright: ignore[reportPrivateUsage]

    async def explain(self, host: str, port: int = 443) -> EgressExplanation:
        """Says what would become of a connection from inside, and why. Nothing is connected."""
        query = {"host": host, "port": str(port)}
        return parse_explanation(await self._sandbox.api.get("/egress/explain", query, extra_wait=_SLOW_SECONDS))

    async def log(self, *, cursor: int = 0, limit: int | None = None) -> EgressLogPage:
        """One page of denied connections and lookups, oldest first; also of a machine that has ended.

        Args:
            cursor: ``next_cursor`` of the page before.
            limit: most events of the page.
        """
        if cursor < 0:
            raise ConfigurationError("cursor must not be negative.")
        query = {"cursor": str(cursor)}
        if limit is not None:
            query["limit"] = str(limit)
        return parse_log(await self._sandbox.api.get("/egress/log", query))

    async def events(self) -> AsyncIterator[EgressEvent]:
        """All denials that are kept now, oldest first, fetched page by page as they are used."""
        cursor = 0
        while True:
            page = await self.log(cursor=cursor, limit=500)
            for event in page.events:
                yield event
            if not page.has_more:
                return
            cursor = page.next_cursor
