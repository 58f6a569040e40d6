"""What a sandbox saves of itself: snapshots, and its workspace as one archive."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from .. import _tar
from .._paths import ReadableBinary, WritableBinary, as_pieces
from .._wire import check_key
from ..errors import PayloadTooLargeError
from ..filetypes import UploadedTree
from ..models import Fields, drop_none
from ..snapshottypes import Snapshot, parse_snapshot
from . import net
from .api import AsyncApi
from .files import AsyncRemoteFile

if TYPE_CHECKING:
    from .sandbox import AsyncSandbox

__all__ = ["export", "export_to", "import_archive", "open_export", "save"]

_SAVE_WAIT_SECONDS = 600.0
_EXPORT_MAX = 16 * 1024 * 1024
_PIECE = 1024 * 1024


async def save(
    sandbox: AsyncSandbox, kind: str, name: str, *, stop: bool, ttl_seconds: int | None, idempotency_key: str | None
) -> Snapshot:
    """Saves a machine under one idempotency key."""
    api = sandbox.api
    return await api.transport.keyed(
        api.path + "/snapshots",
        drop_none({"name": name, "kind": kind, "stop": stop, "ttlSeconds": ttl_seconds}),
        parse_snapshot,
        query={"createdAt": api.created_at},
        key=check_key(idempotency_key),
        timeout=max(_SAVE_WAIT_SECONDS, api.transport.timeout),
    )


async def open_export(api: AsyncApi) -> AsyncRemoteFile:
    """Opens the archive of a workspace for reading."""
    exchange = await api.open("GET", "/workspace", query={}, accept="application/gzip")
    return AsyncRemoteFile(exchange, whole=False)


async def export(api: AsyncApi) -> bytes:
    """The archive of a workspace, where it is small enough for memory."""
    pieces: list[bytes] = []
    size = 0
    async with await open_export(api) as remote:
        while piece := await remote.some(_PIECE):
            size += len(piece)
            if size > _EXPORT_MAX:
                raise PayloadTooLargeError(
                    "The workspace is larger than 16 MiB, compressed.",
                    code="payload_too_large",
                    hint="Copy it into a file with export_workspace_to(path), or read open_workspace() piece by piece.",
                )
            pieces.append(piece)
    return b"".join(pieces)


async def export_to(api: AsyncApi, target: str | os.PathLike[str] | WritableBinary) -> int:
    """Copies the archive of a workspace into a file."""
    if not isinstance(target, (str, os.PathLike)):
        return await _copy(api, target)
    place = os.fspath(target)
    half = f"{place}.part"
    try:
        file = cast("BinaryIO", await net.in_thread(partial(open, half, "wb")))
        try:
            size = await _copy(api, file)
        finally:
            await net.in_thread(file.close)
        await net.in_thread(partial(os.replace, half, place))
    except BaseException:
        # A half-received archive does not stand where a whole one belongs.
        if os.path.exists(half):
            os.unlink(half)
        raise
    return size


async def _copy(api: AsyncApi, target: WritableBinary) -> int:
    total = 0
    async with await open_export(api) as remote:
        async for piece in remote:
            await net.in_thread(partial(target.write, piece))
            total += len(piece)
    return total


async def import_archive(
    sandbox: AsyncSandbox, source: str | os.PathLike[str] | bytes | ReadableBinary | net.Pieces
) -> UploadedTree:
    """Unpacks an archive, or the contents of a folder, into the workspace."""
    if isinstance(source, (str, os.PathLike)) and not os.path.isdir(source):
        file = cast("BinaryIO", await net.in_thread(partial(open, source, "rb")))
        try:
            return await import_archive(sandbox, file)
        finally:
            await net.in_thread(file.close)
    body: Any = _tar.pack(source) if isinstance(source, (str, os.PathLike)) else as_pieces(source, is_async=net.ASYNC)
    exchange = await sandbox.api.open("PUT", "/workspace", query={}, body=body, content_type="application/gzip")
    reply = Fields(await sandbox.api.json(exchange), "unpacked")
    return UploadedTree(reply.number("entries"), reply.number("bytes"), reply.number_or_none("skipped") or 0)
