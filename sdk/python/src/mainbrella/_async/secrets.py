"""``sandbox.secrets``: credentials that requests of a machine carry and that the machine never sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..models import Fields
from ..secrettypes import Secret, SecretInfo, parse_secret, parse_secrets, secret_path

if TYPE_CHECKING:
    from .sandbox import AsyncSandbox

__all__ = ["AsyncSecrets"]


class AsyncSecrets:
    """Secrets of one generation. They end with ``remove`` and with the machine."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        self._sandbox = sandbox

    async def set(
        self,
        name: str,
        *,
        host: str,
        header: str | None = None,
        username: str | None = None,
        value: str,
        port: int = 443,
        on_fork: str = "drop",
    ) -> SecretInfo:
        """Has a credential added, outside the machine, to what it sends to one host over TLS.

        Sent once; a secret of the same name is replaced, so repeating it does no harm. Under an allow-list a rule must
        allow the host.

        Args:
            name: 1 to 64 of ``a-z``, ``0-9``, ``-`` and ``_``, a letter or digit first.
            host: the one host that is sent the value, by its exact name.
            header: the header whose whole value it is, e.g. ``Authorization``; this or ``username``.
            username: the user whose password it is, sent as HTTP basic credentials.
            value: 1 to 8192 visible ASCII characters, with spaces only inside. It is never told again.
            port: TLS is spoken there.
            on_fork: what copies of the machine get of it: nothing, or with ``"inherit"`` the same value.

        Raises:
            SecretLimitError: the machine has as many as it may.
            EgressLockedError: the machine has no internet and never gets it.
            UnsupportedError: this host gives machines no network.
        """
        secret = Secret(name, host=host, header=header, username=username, value=value, port=port, on_fork=on_fork)
        return await self._put(secret)

    async def list(self) -> Sequence[SecretInfo]:
        """The secrets of the machine by name, without their values."""
        return parse_secrets(await self._sandbox.api.get("/secrets"))

    async def remove(self, name: str) -> bool:
        """Removes a secret; requests that begin later go without it. ``False``: there was none of that name."""
        reply = await self._sandbox.api.post(secret_path(name), method="DELETE")
        return Fields(reply, "answer").flag("removed")

    async def _put(self, secret: Secret) -> SecretInfo:
        return parse_secret(await self._sandbox.api.post(secret_path(secret.name), secret.wire(), method="PUT"))
