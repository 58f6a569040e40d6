"""The way in: ``Mainbrella(api_key)``."""

from __future__ import annotations

import os
import ssl
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any
from urllib.parse import quote

from ._address import DEFAULT_BASE_URL, parse_base_url
from ._transport import Exchange, Transport
from .errors import ConfigurationError, InvalidResponseError, MachineNotRunningError, MainbrellaError, UnsupportedError
from .models import Fields, MachineInfo, drop_none, parse_machine
from .sandbox import Sandbox

__all__ = ["Mainbrella"]

_TIMEOUT_SECONDS = 60.0
_CREATE_TIMEOUT_SECONDS = 600.0
_CREATE_ATTEMPT_SECONDS = 180.0
_CREATE_ATTEMPTS = 5
_BACKOFF_SECONDS = 0.25
_BACKOFF_MAX_SECONDS = 15.0
_KEY_MAX = 255


class Mainbrella:
    """A client of one Mainbrella service. Safe to share between threads.

    Args:
        api_key: ``mb_…``. Keep it in the environment or a secret manager.
        base_url: the service; default ``MAINBRELLA_API_URL``, else http://127.0.0.1:8787. HTTPS is required unless it
            names this machine.
        timeout: seconds to wait for an answer. For a command this comes on top of its own ``timeout_ms``; for a file
            transfer it is how long it may stand still.
        ssl_context: for a private certificate authority.
    """

    def __init__(
        self,
        api_key: str,
        *,
        base_url: str | None = None,
        timeout: float = _TIMEOUT_SECONDS,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        if not api_key or not api_key.isascii() or any(c <= " " or c > "~" for c in api_key):
            raise ConfigurationError(
                "api_key must be a key such as mb_…, without spaces or line breaks.",
                hint="`mainbrella key create` makes one; read it from the environment or a secret manager.",
            )
        if not timeout > 0:
            raise ConfigurationError("timeout must be a positive number of seconds.")
        address = parse_base_url(base_url or os.environ.get("MAINBRELLA_API_URL") or DEFAULT_BASE_URL)
        self._transport = Transport(address, api_key, timeout=float(timeout), ssl_context=ssl_context)

    @property
    def base_url(self) -> str:
        """Where the service is."""
        return str(self._transport.address)

    def capabilities(self) -> dict[str, Any]:
        """What the service on this host can really do, e.g. ``["networking"]["internetControl"]``."""
        data, _ = self._transport.call("GET", "/v1/capabilities")
        return data

    def create(
        self,
        catalog_id: str = "python",
        *,
        size: str = "small",
        internet: bool | None = None,
        slot: str | None = None,
        ttl_seconds: int = 3600,
        idle_timeout_seconds: int | None = None,
        metadata: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        persistent: bool = False,
        idempotency_key: str | None = None,
        timeout: float = _CREATE_TIMEOUT_SECONDS,
    ) -> Sandbox:
        """Creates a machine and waits until it answers. Use it in a ``with`` statement to have it stopped at the end.

        All attempts of one call carry one idempotency key, so at most one machine is made, whatever the network does.
        An error whose ``ambiguous`` is true leaves open whether there is one: call again with the same arguments and
        ``idempotency_key=error.idempotency_key``.

        Args:
            catalog_id: the template.
            size: ``micro``, ``small``, ``medium`` or ``large``.
            internet: ``False`` for none, for ever; fails if the host cannot enforce it. ``None``: the host's default.
            slot: a name of your own; it can be used again when the machine in it has ended.
            ttl_seconds: the machine ends after so long, whatever it does.
            idle_timeout_seconds: it ends when nobody uses it for so long.
            metadata: labels to find it by.
            env: environment of every command. The machine can read it: no place for protected secrets.
            persistent: no idle timeout unless one is given.
            idempotency_key: generated when not given.
            timeout: seconds for all attempts together.
        """
        key = str(uuid.uuid4()) if idempotency_key is None else idempotency_key
        if not 1 <= len(key) <= _KEY_MAX or any(c < "!" or c > "~" for c in key):
            raise ConfigurationError("idempotency_key must be 1 to 255 visible ASCII characters.")
        if internet is not None:
            self._check_internet(internet)
        body = drop_none(
            {
                "catalogId": catalog_id,
                "size": size,
                "slot": slot,
                "ttlSeconds": ttl_seconds,
                "idleTimeoutSeconds": idle_timeout_seconds,
                "internet": internet,
                "persistent": persistent,
                "metadata": dict(metadata) if metadata else None,
                "env": dict(env) if env else None,
            }
        )
        info = self._create(body, key, timeout)
        sandbox = Sandbox(self._transport, info, owned=True)
        if internet is not None and info.internet is not internet:
            with suppress(MainbrellaError):
                sandbox.kill()
            raise UnsupportedError(
                f"The service did not confirm internet={internet}; the machine was stopped.",
                code="unsupported",
                hint="See client.capabilities()['networking'].",
                idempotency_key=key,
            )
        return sandbox

    def create_or_reconcile(self, catalog_id: str = "python", *, idempotency_key: str, **spec: Any) -> Sandbox:
        """``create`` under a key the caller has kept: the same key and arguments always give the same machine."""
        return self.create(catalog_id, idempotency_key=idempotency_key, **spec)

    def connect(self, id: str, created_at: str) -> Sandbox:
        """Attaches to a running generation. Never makes a machine, and never stops this one by itself."""
        sandbox = self.get(id, created_at)
        if sandbox.state != "running":
            reason = sandbox.info.reason
            raise MachineNotRunningError(
                f"Machine {id} is {sandbox.state}{f': {reason.message}' if reason else ''}.",
                code="machine_not_running",
                hint="Create another one if it has ended.",
            )
        return sandbox

    def get(self, id: str, created_at: str | None = None) -> Sandbox:
        """A machine in whatever state it is. Without ``created_at``: the newest generation in the slot."""
        query = None if created_at is None else {"createdAt": created_at}
        data, _ = self._transport.call("GET", f"/v1/machines/{quote(_slot(id), safe='')}", query=query)
        info = parse_machine(data)
        if info.id != id:
            raise InvalidResponseError("The service answered about another machine.")
        return Sandbox(self._transport, info, owned=False)

    def list(
        self, *, state: str | None = None, metadata: Mapping[str, str] | None = None, page_size: int | None = None
    ) -> Iterator[Sandbox]:
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
            data, _ = self._transport.call("GET", "/v1/machines", query=query, limit=16 * 1024 * 1024)
            page = Fields(data, "list")
            infos: list[MachineInfo] = [parse_machine(entry) for entry in page.objects("machines")]
            for info in infos:
                yield Sandbox(self._transport, info, owned=False)
            cursor = page.text_or_none("nextCursor")
            if cursor is None:
                return
            if cursor in seen:
                raise InvalidResponseError("The service repeated a page of the list.")
            seen.add(cursor)
            query["cursor"] = cursor

    def close(self) -> None:
        """Closes kept connections. Machines are not touched."""
        self._transport.close()

    def __enter__(self) -> Mainbrella:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Mainbrella(base_url={self.base_url!r})"

    def __reduce__(self) -> Any:
        raise TypeError("A Mainbrella client holds an API key and open connections and cannot be pickled.")

    def _check_internet(self, wanted: bool) -> None:
        networking = Fields(self.capabilities(), "capabilities").object("networking")
        if not networking.flag("internet" if wanted else "internetControl"):
            raise UnsupportedError(
                "This host cannot give machines a way to the internet."
                if wanted
                else "This host cannot enforce that a machine has no way to the internet.",
                code="unsupported",
                hint="See client.capabilities()['networking'].",
            )

    def _create(self, body: dict[str, Any], key: str, timeout: float) -> MachineInfo:
        end = time.monotonic() + timeout
        attempt = 0
        uncertain = False
        while True:
            attempt += 1
            left = end - time.monotonic()
            try:
                data, exchange = self._transport.call(
                    "POST",
                    "/v1/machines",
                    json_body=body,
                    idempotency_key=key,
                    wait=max(0.001, min(left, _CREATE_ATTEMPT_SECONDS)),
                )
                return _created(data, exchange)
            except MainbrellaError as error:
                error.idempotency_key = key
                # Once one attempt's fate is unknown, a later plain failure does not settle it.
                uncertain = uncertain or error.ambiguous
                pause = error.retry_after if error.retry_after is not None else _BACKOFF_SECONDS * 2 ** (attempt - 1)
                again = error.retryable or error.ambiguous
                late = time.monotonic() + pause >= end
                if not again or late or attempt >= _CREATE_ATTEMPTS or pause > _BACKOFF_MAX_SECONDS:
                    error.ambiguous = error.ambiguous or (uncertain and again)
                    raise
            time.sleep(pause)


def _created(data: dict[str, Any], exchange: Exchange) -> MachineInfo:
    try:
        return parse_machine(data)
    except InvalidResponseError as error:
        error.request_id = exchange.request_id
        error.status = exchange.status
        raise


def _slot(id: str) -> str:
    if not id:
        raise ConfigurationError("id must not be empty.")
    return id
