"""``sandbox.previews``: ports of a machine, reachable from outside for a while."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from .._wire import check_key
from ..models import drop_none
from ..previewtypes import IssuedPreview, Preview, PreviewPage, parse_issued, parse_preview, parse_previews

if TYPE_CHECKING:
    from .sandbox import AsyncSandbox

__all__ = ["AsyncPreviews"]

_TTL_SECONDS = 900
_ISSUE_WAIT_SECONDS = 60.0


class AsyncPreviews:
    """Previews of one generation. They end with their time, with ``revoke``, and with the machine."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        self._sandbox = sandbox

    async def create(
        self, port: int, ttl_seconds: int = _TTL_SECONDS, *, idempotency_key: str | None = None
    ) -> IssuedPreview:
        """Makes a port reachable: ``preview["url"]``, for browsers, and ``preview["pathUrl"]``, for other clients.

        Whoever has one of them reaches the port, and nothing else: keep them out of logs. They are told only here.
        The server may listen on the machine's loopback addresses alone, and may be started later.

        All attempts of one call carry one idempotency key, so at most one preview is made. An error whose
        ``ambiguous`` is true leaves open whether there is one: within a day, call again with the same arguments and
        ``idempotency_key=error.idempotency_key``.

        Args:
            port: 1024 to 65535.
            ttl_seconds: 60 to 3600; never beyond the hard deadline of the machine.
            idempotency_key: generated when not given; kept for a day.

        Raises:
            PreviewReconciliationRequiredError: there is a preview whose URL cannot be told;
                ``previews.revoke(error.preview_id)``.
            PreviewLimitError: eight are active.
        """
        api = self._sandbox.api
        return await api.transport.keyed(
            api.path + "/previews",
            {"port": port, "ttlSeconds": ttl_seconds},
            parse_issued,
            query={"createdAt": api.created_at},
            key=check_key(idempotency_key),
            timeout=max(_ISSUE_WAIT_SECONDS, api.transport.timeout),
        )

    async def list(self) -> PreviewPage:
        """``{"previews": […]}``: the active ones, without their URLs; the one that ends first comes first."""
        return parse_previews(await self._sandbox.api.get("/previews"))

    async def renew(self, id: str, ttl_seconds: int | None = None) -> Preview:
        """Moves the end to ``ttl_seconds`` from now (900 by default) where that is later. The URL stays the same."""
        body: dict[str, Any] = drop_none({"ttlSeconds": ttl_seconds})
        return parse_preview(await self._sandbox.api.post(f"/previews/{quote(id, safe='')}/renew", body))

    async def revoke(self, id: str) -> None:
        """Ends a preview and closes what is open over it. Harmless when it has ended."""
        await self._sandbox.api.post(f"/previews/{quote(id, safe='')}", method="DELETE")
