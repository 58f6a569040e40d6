"""The way in: ``AsyncMainbrella(api_key)``."""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any
from urllib.parse import quote

from .._address import DEFAULT_BASE_URL, parse_base_url
from .._wire import check_key, check_on_idle
from ..egresstypes import Policy, wire_policy
from ..errors import (
    ConfigurationError,
    InvalidResponseError,
    MachineNotRunningError,
    MainbrellaError,
    UnsupportedError,
)
from ..models import Fields, MachineInfo, drop_none, parse_machine
from ..secrettypes import Secret, check_secrets
from .sandbox import AsyncSandbox
from .snapshots import AsyncSnapshots
from .templates import AsyncBuilds, AsyncTemplates
from .transport import AsyncTransport

__all__ = ["AsyncMainbrella"]

_TIMEOUT_SECONDS = 60.0
_CREATE_TIMEOUT_SECONDS = 600.0


class AsyncMainbrella:
    """A client of one Mainbrella service. Safe to share between threads, or between the tasks of an event loop.

    Args:
        api_key: ``mb_…``; default ``MAINBRELLA_API_KEY``. Keep it in the environment or a secret manager.
        base_url: the service; default ``MAINBRELLA_API_URL``, else http://127.0.0.1:8787. HTTPS is required unless it
            names this machine.
        timeout: seconds to wait for an answer. For a command this comes on top of its own ``timeout_ms``; for a file
            transfer it is how long it may stand still.
        ssl_context: for a private certificate authority.
    """

    workspaces: AsyncSnapshots
    """Saved workspaces: files of machines."""
    snapshots: AsyncSnapshots
    """Everything that was saved of machines, workspaces included."""
    templates: AsyncTemplates
    """What machines start from: built, tagged, removed; called, it lists them."""
    builds: AsyncBuilds
    """Builds of templates, and their logs."""

    def __init__(
        self,
        api_key: str | None = None,
        *,
        base_url: str | None = None,
        timeout: float = _TIMEOUT_SECONDS,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        if api_key is None:
            api_key = os.environ.get("MAINBRELLA_API_KEY", "")
        if not api_key or not api_key.isascii() or any(c <= " " or c > "~" for c in api_key):
            raise ConfigurationError(
                "api_key must be a key such as mb_…, without spaces or line breaks.",
                hint="`mainbrella key create` makes one; give it, or set MAINBRELLA_API_KEY.",
            )
        if not timeout > 0:
            raise ConfigurationError("timeout must be a positive number of seconds.")
        address = parse_base_url(base_url or os.environ.get("MAINBRELLA_API_URL") or DEFAULT_BASE_URL)
        self._transport = AsyncTransport(address, api_key, timeout=float(timeout), ssl_context=ssl_context)
        self.workspaces = AsyncSnapshots(self._transport, "workspace")
        self.snapshots = AsyncSnapshots(self._transport, None)
        self.builds = AsyncBuilds(self._transport)
        self.templates = AsyncTemplates(self._transport, self.builds)

    @property
    def base_url(self) -> str:
        """Where the service is."""
        return str(self._transport.address)

    async def capabilities(self) -> dict[str, Any]:
        """What the service on this host can really do, e.g. ``["networking"]["internetControl"]``."""
        return await self._transport.call("GET", "/v1/capabilities")

    async def create(
        self,
        catalog_id: str = "python",
        *,
        size: str = "small",
        internet: bool | None = None,
        egress: Policy | None = None,
        slot: str | None = None,
        ttl_seconds: int = 3600,
        idle_timeout_seconds: int | None = None,
        on_idle: str = "stop",
        auto_resume: bool | None = None,
        metadata: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Iterable[Secret] | None = None,
        persistent: bool = False,
        idempotency_key: str | None = None,
        timeout: float = _CREATE_TIMEOUT_SECONDS,
    ) -> AsyncSandbox:
        """Creates a machine and waits until it answers. Use it in a ``with`` block to have it stopped at the end.

        All attempts of one call carry one idempotency key, so at most one machine is made, whatever the network does.
        An error whose ``ambiguous`` is true leaves open whether there is one: call again with the same arguments and
        ``idempotency_key=error.idempotency_key``.

        Args:
            catalog_id: the template.
            size: ``micro``, ``small``, ``medium`` or ``large``.
            internet: ``False`` for none, for ever; fails if the host cannot enforce it. ``None``: the host's default.
            egress: what it may reach: the rules of an allow-list, e.g. ``["packages.example", "*.files.example"]``, an
                ``EgressPolicy``, ``"open"`` or ``"off"``. ``None``: public addresses with internet, nothing without.
            slot: a name of your own; it can be used again when the machine in it has ended.
            ttl_seconds: the machine ends after so long, whatever it does.
            idle_timeout_seconds: it ends when nobody uses it for so long.
            on_idle: ``"stop"``, or ``"pause"``: then it is paused instead. Needs ``idle_timeout_seconds``.
            auto_resume: whether the next use resumes it when it is paused. ``None``: with ``on_idle="pause"``.
            metadata: labels to find it by.
            env: environment of every command. The machine can read it: no place for protected secrets.
            secrets: credentials that its requests carry and that it never sees, set in this order once it is there.
                When one cannot be set, exactly this machine is stopped and the error raised.
            persistent: no idle timeout unless one is given.
            idempotency_key: generated when not given.
            timeout: seconds for all attempts together.
        """
        key = check_key(idempotency_key)
        wanted = check_secrets(secrets)
        if internet is not None:
            await self._check_internet(internet)
        body = drop_none(
            {
                "catalogId": catalog_id,
                "size": size,
                "slot": slot,
                "ttlSeconds": ttl_seconds,
                "idleTimeoutSeconds": idle_timeout_seconds,
                "onIdle": None if on_idle == "stop" else check_on_idle(on_idle),
                "autoResume": auto_resume,
                "internet": internet,
                "egress": None if egress is None else wire_policy(egress),
                "persistent": persistent,
                "metadata": dict(metadata) if metadata else None,
                "env": dict(env) if env else None,
            }
        )
        info = await self._transport.keyed("/v1/machines", body, parse_machine, key=key, timeout=timeout)
        sandbox = AsyncSandbox(self._transport, info, owned=True)
        if internet is not None and info.internet is not internet:
            with suppress(MainbrellaError):
                await sandbox.kill()
            raise UnsupportedError(
                f"The service did not confirm internet={internet}; the machine was stopped.",
                code="unsupported",
                hint="See client.capabilities()['networking'].",
                idempotency_key=key,
            )
        try:
            for secret in wanted:
                await sandbox.secrets._put(secret)  # pyright: ignore[reportPrivateUsage]
        except BaseException as error:
            # As at the end of a `with` block: exactly this generation is stopped, and a failure of that is a note.
            await sandbox.__aexit__(type(error), error, error.__traceback__)
            raise
        return sandbox

    async def create_or_reconcile(
        self, catalog_id: str = "python", *, idempotency_key: str, **spec: Any
    ) -> AsyncSandbox:
        """``create`` under a key the caller has kept: the same key and arguments always give the same machine."""
        return await self.create(catalog_id, idempotency_key=idempotency_key, **spec)

    async def connect(self, id: str, created_at: str) -> AsyncSandbox:
        """Attaches to a running generation. Never makes a machine, and never stops this one by itself."""
        sandbox = await self.get(id, created_at)
        if sandbox.state != "running":
            reason = sandbox.info.reason
            why = f": {reason.message.rstrip('.')}" if reason else ""
            raise MachineNotRunningError(
                f"Machine {id} is {sandbox.state}{why}.",
                code="machine_not_running",
                hint="Create another one if it has ended.",
            )
        return sandbox

    async def get(self, id: str, created_at: str | None = None) -> AsyncSandbox:
        """A machine in whatever state it is. Without ``created_at``: the newest generation in the slot."""
        query = None if created_at is None else {"createdAt": created_at}
        data = await self._transport.call("GET", f"/v1/machines/{quote(_slot(id), safe='')}", query=query)
        info = parse_machine(data)
        if info.id != id:
            raise InvalidResponseError("The service answered about another machine.")
        return AsyncSandbox(self._transport, info, owned=False)

    async def list(
        self, *, state: str | None = None, metadata: Mapping[str, str] | None = None, page_size: int | None = None
    ) -> AsyncIterator[AsyncSandbox]:
        """Machines, newest first, fetched page by page as they are used.

        Args:
            state: only those in this state.
            metadata: only those with all of these labels.
            page_size: machines asked for at once.
        """
        query = {f"metadata.{key}": value for key, value in (metadata or {}).items()}
        if state is not None:
            query["state"] = state
        if page_size is not None:
            query["limit"] = str(page_size)
        seen: set[str] = set()
        while True:
            data = await self._transport.call("GET", "/v1/machines", query=query, limit=16 * 1024 * 1024)
            page = Fields(data, "list")
            infos: list[MachineInfo] = [parse_machine(entry) for entry in page.objects("machines")]
            for info in infos:
                yield AsyncSandbox(self._transport, info, owned=False)
            cursor = page.text_or_none("nextCursor")
            if cursor is None:
                return
            if cursor in seen:
                raise InvalidResponseError("The service repeated a page of the list.")
            seen.add(cursor)
            query["cursor"] = cursor

    async def close(self) -> None:
        """Closes kept connections. Machines are not touched."""
        self._transport.close()

    async def __aenter__(self) -> AsyncMainbrella:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncMainbrella(base_url={self.base_url!r})"

    def __reduce__(self) -> Any:
        raise TypeError("A Mainbrella client holds an API key and open connections and cannot be pickled.")

    async def _check_internet(self, wanted: bool) -> None:
        networking = Fields(await self.capabilities(), "capabilities").object("networking")
        if not networking.flag("internet" if wanted else "internetControl"):
            raise UnsupportedError(
                "This host cannot give machines a way to the internet."
                if wanted
                else "This host cannot enforce that a machine has no way to the internet.",
                code="unsupported",
                hint="See client.capabilities()['networking'].",
            )


def _slot(id: str) -> str:
    if not id:
        raise ConfigurationError("id must not be empty.")
    return id
