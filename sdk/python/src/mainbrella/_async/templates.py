"""``client.templates`` and ``client.builds``: what machines start from, and how it is built from recipes."""

from __future__ import annotations

import builtins
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from .. import _tar
from .._clock import Clock
from ..egresstypes import Policy, wire_policy
from ..errors import BuildFailedError, ConfigurationError, InvalidResponseError, MainbrellaError
from ..models import Fields, drop_none
from . import net
from .transport import AsyncTransport

__all__ = ["AsyncBuilds", "AsyncTemplates"]

_PAGE = "200"
_PAGE_BYTES = 16 * 1024 * 1024
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0
_SNAPSHOT_SECONDS = 360.0


class AsyncBuilds:
    """Builds of templates that the service remembers."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(self) -> builtins.list[dict[str, Any]]:
        """The builds, newest first, as the service describes them."""
        data = await self._transport.call("GET", "/v1/builds", limit=_PAGE_BYTES)
        return [Fields(entry, "build").all() for entry in Fields(data, "list").objects("builds")]

    async def get(self, id: str) -> dict[str, Any]:
        """A build as it is now: ``["state"]`` is ``awaiting-context``, ``queued``, ``running``, ``succeeded``,
        ``failed`` or ``cancelled``."""
        return _build(await self._transport.call("GET", _build_path(id)))

    async def cancel(self, id: str) -> dict[str, Any]:
        """Cancels a build. One that is over stays as it is; one that is carried out ends in a moment."""
        return _build(await self._transport.call("POST", _build_path(id) + "/cancel"))

    async def events(self, id: str, cursor: int = 0) -> AsyncIterator[dict[str, Any]]:
        """The log of a build after event ``cursor``, as it comes, to its end: ``["kind"]`` is ``step``, ``output``,
        ``notice`` or, the last one, ``done``. Whatever breaks in between, nothing is lost or comes twice."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            query = {"cursor": str(cursor), "limit": _PAGE}
            data = await self._transport.call("GET", _build_path(id) + "/events", query=query, limit=_PAGE_BYTES)
            events = [Fields(event, "event") for event in Fields(data, "page").objects("events")]
            for event in events:
                sequence = event.number("sequence")
                if sequence != cursor + 1:
                    raise InvalidResponseError("The service told an event twice, or left one out.")
                cursor = sequence
                yield event.all()
                if event.text("kind") == "done":
                    return
            if events:
                pause = _FIRST_PAUSE_SECONDS
            else:
                await net.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)


class AsyncTemplates:
    """Templates of the service. ``client.templates()`` lists them as ``client.templates.list()`` does."""

    def __init__(self, transport: AsyncTransport, builds: AsyncBuilds) -> None:
        self._transport = transport
        self._builds = builds

    async def __call__(self) -> builtins.list[dict[str, Any]]:
        """See ``list``."""
        return await self.list()

    async def list(self) -> builtins.list[dict[str, Any]]:
        """The templates of this host, as the service describes them; ``["name"]`` is what ``create`` takes."""
        data = await self._transport.call("GET", "/v1/templates", limit=_PAGE_BYTES)
        return [Fields(entry, "template").all() for entry in Fields(data, "list").objects("templates")]

    async def get(self, name: str) -> dict[str, Any]:
        """All that is known of a template, a version (``app:v3``), or what a tag (``app:stable``) means now."""
        return _template(await self._transport.call("GET", _path(name), limit=_PAGE_BYTES))

    async def build(
        self,
        name: str,
        *,
        context: str | os.PathLike[str] | None = None,
        recipe: str | None = None,
        recipe_path: str = "Dockerfile",
        arguments: Mapping[str, str] | None = None,
        tags: Iterable[str] = (),
        size: str | None = None,
        no_cache: bool = False,
        pull: bool = False,
        internet: bool | None = None,
        egress: Policy | None = None,
        timeout_seconds: int | None = None,
        on_log: Callable[[dict[str, Any]], object] | None = None,
    ) -> dict[str, Any]:
        """Builds a template from a recipe, in the syntax of Dockerfiles, and waits for it. Needs an admin key.

        What is built becomes the next version of ``name``, which then means it. When this is left early, by an
        exception or by being cancelled, the build is cancelled.

        Args:
            name: the template, without a label.
            context: a local folder with the files that the recipe may copy; its ``.dockerignore`` is honoured.
            recipe: the text of the recipe; else it is a file of the context.
            recipe_path: which.
            arguments: build arguments. They stay visible in what is built: no place for secrets.
            tags: labels that are to mean it, too, e.g. ``["stable"]``.
            size: the size it is built and made ready in; default: that of its base, or ``small``.
            no_cache: do every step anew.
            pull: fetch an image that ``FROM`` names anew.
            internet: whether the machine it is built in may reach the internet. ``None``: where the host can.
            egress: what that machine may reach.
            timeout_seconds: the longest it may take.
            on_log: called with each event of the log, see ``client.builds.events``.

        Returns:
            the template, as ``get`` does.

        Raises:
            BuildFailedError: it did not become a template; ``reason``, ``line`` and ``instruction`` say where and why.
        """
        if context is None and recipe is None:
            raise ConfigurationError("Give a context, a recipe or both.")
        body = drop_none(
            {
                "name": name,
                "tags": list_of(tags) or None,
                "recipe": recipe,
                "recipePath": recipe_path,
                "arguments": dict(arguments) if arguments else None,
                "size": size,
                "noCache": no_cache or None,
                "pull": pull or None,
                "internet": internet,
                "egress": None if egress is None else wire_policy(egress),
                "timeoutSeconds": timeout_seconds,
            }
        )
        archive: Any = b"\0" * 1024 if context is None else _tar.pack(context)
        id = Fields(await self._transport.call("POST", "/v1/builds", json_body=body), "build").text("id")
        try:
            exchange = await self._transport.open(
                "PUT",
                _build_path(id) + "/context",
                body=archive,
                content_type="application/x-tar",
                clock=Clock(total=None, silence=self._transport.timeout),
            )
            await self._transport.parse(exchange, _PAGE_BYTES)
            last: dict[str, Any] = {}
            async for event in self._builds.events(id):
                last = event
                if on_log is not None:
                    on_log(event)
        except BaseException:
            with suppress(MainbrellaError):
                await self._builds.cancel(id)
            raise
        done = Fields(last, "event")
        if done.text("state") == "succeeded":
            return await self.get(done.text("template"))
        raise _failed(id, last)

    async def tag(self, source: str, tag: str) -> dict[str, Any]:
        """Lets the name ``tag`` (``app``, ``app:stable``) mean what ``source`` means now. Needs an admin key."""
        return _template(await self._transport.call("PUT", _path(tag), json_body={"source": source}))

    async def remove(self, name: str, *, all: bool = False) -> dict[str, Any]:
        """Removes a version, or a tag whose version stays; with ``all`` everything of a name. Needs an admin key.

        Machines that were made of it go on.
        """
        query = {"all": "true"} if all else None
        return Fields(await self._transport.call("DELETE", _path(name), query=query), "removed").all()

    async def from_snapshot(self, name: str, snapshot_id: str, *, tags: Iterable[str] = ()) -> dict[str, Any]:
        """Makes a template of a full snapshot: its machines begin where the saved one was. Needs an admin key."""
        body = drop_none({"name": name, "snapshotId": snapshot_id, "tags": list_of(tags) or None})
        made = await self._transport.call("POST", "/v1/templates", json_body=body, wait=_SNAPSHOT_SECONDS)
        return _template(made)


def list_of(tags: Iterable[str]) -> list[str]:
    """Labels as they are sent; one alone would be taken for its letters."""
    if isinstance(tags, str):
        raise ConfigurationError("tags must be several labels, e.g. ['stable'].")
    return [*tags]


def _failed(id: str, event: Mapping[str, Any]) -> BuildFailedError:
    if event.get("state") == "cancelled":
        return BuildFailedError(f"Build {id} was cancelled.", build=id, reason="cancelled")
    failure = Fields(event.get("failure") or {}, "failure")
    line, instruction = failure.number_or_none("line"), failure.text_or_none("instruction")
    place = (f"line {line}: " if line else "") + (f"{instruction}: " if instruction else "")
    return BuildFailedError(
        place + failure.text("message"), build=id, reason=failure.text("reason"), line=line, instruction=instruction
    )


def _build(data: dict[str, Any]) -> dict[str, Any]:
    fields = Fields(data, "build")
    fields.text("id")
    fields.text("state")
    return fields.all()


def _template(data: dict[str, Any]) -> dict[str, Any]:
    fields = Fields(data, "template")
    fields.text("name")
    return fields.all()


def _build_path(id: str) -> str:
    if not id:
        raise ConfigurationError("id must not be empty.")
    return f"/v1/builds/{quote(id, safe='')}"


def _path(name: str) -> str:
    if not name:
        raise ConfigurationError("name must not be empty.")
    return f"/v1/templates/{quote(name, safe=':')}"
