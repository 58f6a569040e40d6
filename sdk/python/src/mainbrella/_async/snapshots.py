"""``client.workspaces`` and ``client.snapshots``: what was saved of machines, and machines from it."""

from __future__ import annotations

import builtins
import os
from collections.abc import Mapping
from urllib.parse import quote

from .._paths import WritableBinary
from .._wire import check_key, check_on_idle
from ..egresstypes import Policy, wire_policy
from ..errors import ConfigurationError, InvalidResponseError
from ..models import drop_none, parse_machine
from ..snapshottypes import Snapshot, parse_snapshot, parse_snapshots
from . import saving
from .api import AsyncApi
from .files import AsyncReadFiles, AsyncRemoteFile
from .sandbox import AsyncSandbox
from .transport import AsyncTransport

__all__ = ["AsyncSnapshotFiles", "AsyncSnapshots"]

_RESTORE_TIMEOUT_SECONDS = 600.0
_OPENS_SECONDS = 330.0


class AsyncSnapshotFiles(AsyncReadFiles):
    """``client.workspaces.files(id)``: the files of a snapshot, to be read. No machine of yours is started for it.

    The first read of a snapshot takes as long as a start of a machine from it; the service keeps what reads it for a
    minute after the last read. Four operations run at once on one snapshot; further ones wait their turn.
    """

    async def export_workspace(self) -> bytes:
        """What is in its ``/workspace``, as a tar archive packed with gzip, of at most 16 MiB.

        Raises ``PayloadTooLargeError`` where it is larger; ``export_workspace_to`` copies one of any size.
        """
        return await saving.export(self._api)

    async def export_workspace_to(self, target: str | os.PathLike[str] | WritableBinary) -> int:
        """Copies the archive of ``/workspace`` into a file, by path or open; returns its size. In flat memory."""
        return await saving.export_to(self._api, target)

    async def open_workspace(self) -> AsyncRemoteFile:
        """Opens the archive of ``/workspace`` for reading, piece by piece."""
        return await saving.open_export(self._api)


class AsyncSnapshots:
    """Snapshots of the project: as ``client.workspaces`` those of files, as ``client.snapshots`` all of them."""

    def __init__(self, transport: AsyncTransport, kind: str | None) -> None:
        self._transport = transport
        self._kind = kind

    async def restore(
        self,
        id: str,
        *,
        slot: str | None = None,
        ttl_seconds: int = 3600,
        idle_timeout_seconds: int | None = None,
        on_idle: str = "stop",
        auto_resume: bool | None = None,
        persistent: bool = False,
        metadata: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        catalog_id: str | None = None,
        template_digest: str | None = None,
        size: str | None = None,
        internet: bool | None = None,
        egress: Policy | None = None,
        idempotency_key: str | None = None,
        timeout: float = _RESTORE_TIMEOUT_SECONDS,
    ) -> AsyncSandbox:
        """Starts a new machine from a snapshot and waits until it answers; it owns its clean-up as after ``create``.

        It has the template, size and internet policy that were saved; to name one of them is to check it. Of a
        workspace files come back, of a full snapshot also memory, processes and jobs. Previews, secrets and labels do
        not. All attempts of one call carry one idempotency key; after an ambiguous error call again with the same
        arguments and ``idempotency_key=error.idempotency_key``.

        Args:
            id: the snapshot.
            slot: a name of your own; it can be used again when the machine in it has ended.
            ttl_seconds: the machine ends after so long, whatever it does.
            idle_timeout_seconds: it ends when nobody uses it for so long.
            on_idle: ``"stop"``, or ``"pause"``: then it is paused instead. Needs ``idle_timeout_seconds``.
            auto_resume: whether the next use resumes it when it is paused. ``None``: with ``on_idle="pause"``.
            persistent: no idle timeout unless one is given.
            metadata: labels to find it by.
            env: environment of every command, over what was saved.
            catalog_id: the template that is expected.
            template_digest: the digest of its image that is expected.
            size: the size that is expected.
            internet: whether internet is expected.
            egress: the egress policy that is expected.
            idempotency_key: generated when not given.
            timeout: seconds for all attempts together.

        Raises:
            SnapshotMismatchError: something else was saved than is expected.
            SnapshotDamagedError: what was saved is not there any more as it was written.
            NotFoundError: it was deleted or has expired.
        """
        body = drop_none(
            {
                "slot": slot,
                "ttlSeconds": ttl_seconds,
                "idleTimeoutSeconds": idle_timeout_seconds,
                "onIdle": None if on_idle == "stop" else check_on_idle(on_idle),
                "autoResume": auto_resume,
                "persistent": persistent,
                "metadata": dict(metadata) if metadata else None,
                "env": dict(env) if env else None,
                "catalogId": catalog_id,
                "templateDigest": template_digest,
                "size": size,
                "internet": internet,
                "egress": None if egress is None else wire_policy(egress),
            }
        )
        key = check_key(idempotency_key)
        info = await self._transport.keyed(_path(id) + "/restore", body, parse_machine, key=key, timeout=timeout)
        return AsyncSandbox(self._transport, info, owned=True)

    async def list(self, *, archived: bool | None = None, name: str | None = None) -> builtins.list[Snapshot]:
        """The snapshots, newest first.

        Args:
            archived: only those that were put aside, or only the others.
            name: only those of exactly this name.
        """
        flag = None if archived is None else str(archived).lower()
        query = drop_none({"kind": self._kind, "archived": flag, "name": name, "limit": "1000"})
        found: builtins.list[Snapshot] = []
        seen: set[str] = set()
        while True:
            data = await self._transport.call("GET", "/v1/snapshots", query=query, limit=16 * 1024 * 1024)
            page = parse_snapshots(data)
            found.extend(page["snapshots"])
            cursor = page["nextCursor"]
            if cursor is None:
                return found
            if cursor in seen:
                raise InvalidResponseError("The service repeated a page of the list.")
            seen.add(cursor)
            query["cursor"] = cursor

    async def get(self, id: str) -> Snapshot:
        """One snapshot."""
        return parse_snapshot(await self._transport.call("GET", _path(id)))

    def files(self, id: str) -> AsyncSnapshotFiles:
        """The files of a snapshot, to be read without a machine: ``read``, ``list``, ``stat``, ``download_tree``, …"""
        return AsyncSnapshotFiles(AsyncApi(self._transport, _path(id), patience=_OPENS_SECONDS))

    async def update(self, id: str, *, name: str | None = None, archived: bool | None = None) -> Snapshot:
        """Renames a snapshot, or puts it aside. An archived one can be restored and counts as before."""
        if name is None and archived is None:
            raise ConfigurationError("Say name, archived or both.")
        body = drop_none({"name": name, "archived": archived})
        return parse_snapshot(await self._transport.call("PATCH", _path(id), json_body=body))

    async def delete(self, id: str) -> None:
        """Deletes a snapshot: nothing is started from it any more. Machines that were started from it go on."""
        await self._transport.call("DELETE", _path(id))


def _path(id: str) -> str:
    if not id:
        raise ConfigurationError("id must not be empty.")
    return f"/v1/snapshots/{quote(id, safe='')}"
