"""Files inside a machine: binary safe, any size, never more than a buffer in memory when streamed."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from functools import partial
from types import TracebackType
from typing import Any, BinaryIO, cast

from .. import _tar
from .._paths import ReadableBinary, WritableBinary, as_pieces, check_mode, check_mutable, check_path, number_in
from ..errors import ConfigurationError, InvalidResponseError, PartlyRemovedError
from ..filetypes import (
    DownloadedTree,
    FileEntry,
    FilePage,
    SignedUrl,
    UploadedTree,
    parse_entry,
    parse_page,
    parse_signed,
)
from ..models import Fields, drop_none
from . import net
from .api import AsyncApi
from .transport import AsyncExchange
from .watch import AsyncFileWatch

__all__ = ["AsyncFiles", "AsyncReadFiles", "AsyncRemoteFile"]

_PIECE = 1024 * 1024
_PAGE_MAX = 16 * 1024 * 1024


class AsyncRemoteFile:
    """A file of a machine that is being read. Iterate over it, call ``read(size)``, and close it or use ``with``.

    Attributes:
        size: bytes the file had when it was opened; ``None`` when the machine did not say.
        mode: permission bits; ``None`` when the machine did not say.
        mtime: time of the last change as the machine reported it.
    """

    def __init__(self, exchange: AsyncExchange, *, whole: bool) -> None:
        self._exchange = exchange
        self._got = 0
        self._done = False
        self.size = number_in(exchange.headers.get("x-mainbrella-size"), 10)
        self.mode = number_in(exchange.headers.get("x-mainbrella-mode"), 8)
        self.mtime = exchange.headers.get("x-mainbrella-mtime")
        # An answer that only ends with its connection cannot tell an end from a cut: then the size decides.
        self._expected = self.size if whole and not exchange.framed else None

    async def read(self, size: int = -1) -> bytes:
        """Exactly ``size`` bytes, fewer only at the end; or all the rest. A cut connection is an error, not an end."""
        pieces: list[bytes] = []
        while size != 0:
            piece = await self.some(_PIECE if size < 0 else min(size, _PIECE))
            if not piece:
                break
            pieces.append(piece)
            size -= len(piece) if size > 0 else 0
        return b"".join(pieces)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while piece := await self.some(_PIECE):
            yield piece

    async def close(self) -> None:
        """Ends the reading, wherever it is."""
        self._done = True
        self._exchange.close()

    async def __aenter__(self) -> AsyncRemoteFile:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def some(self, limit: int) -> bytes:
        """What has come, at most ``limit`` bytes, waiting for something; ``b""`` at the end."""
        if self._done:
            return b""
        piece = await self._exchange.read(limit)
        self._got += len(piece)
        if not piece:
            self._done = True
            if self._expected is not None and self._got < self._expected:
                raise InvalidResponseError("The connection was lost before the file was complete.", ambiguous=True)
        return piece


class AsyncReadFiles:
    """Files to be read: those of a machine, or ``client.workspaces.files(id)``. Paths are absolute UTF-8."""

    def __init__(self, api: AsyncApi) -> None:
        self._api = api

    async def read(self, path: str, *, offset: int | None = None, length: int | None = None) -> bytes:
        """The bytes of a file, or ``length`` of them from ``offset``. Use ``read_to`` for what memory cannot hold."""
        async with await self.open_read(path, offset=offset, length=length) as remote:
            return await remote.read()

    async def read_text(self, path: str, *, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The text of a file; ``encoding`` and ``errors`` as those of ``bytes.decode``."""
        return (await self.read(path)).decode(encoding, errors)

    async def open_read(self, path: str, *, offset: int | None = None, length: int | None = None) -> AsyncRemoteFile:
        """Opens a file for reading piece by piece. Give up is after a silence of the client's ``timeout``."""
        query = {"path": check_path(path)}
        for name, value in (("offset", offset), ("length", length)):
            if value is not None:
                if value < 0:
                    raise ConfigurationError(f"{name} must be a number of bytes.")
                query[name] = str(value)
        exchange = await self._api.open("GET", "/files/content", query=query)
        return AsyncRemoteFile(exchange, whole=len(query) == 1)

    async def read_to(self, path: str, target: WritableBinary) -> int:
        """Copies a file into ``target``, an open binary file. Returns the number of bytes.

        When it raises, ``target`` holds the part that came.
        """
        async with await self.open_read(path) as remote:
            return await _copy(remote, target)

    async def list(self, path: str, *, limit: int | None = None, offset: int | None = None) -> FilePage:
        """One page of a directory, one level deep, sorted by the bytes of the names.

        Each page looks afresh: changes in between can repeat or leave out entries.

        Args:
            path: the directory.
            limit: entries on this page, at most 1,000; default 100.
            offset: entries to pass over: ``page["nextOffset"]`` of the page before.
        """
        query = {"path": check_path(path)}
        for name, value in (("limit", limit), ("offset", offset)):
            if value is not None:
                query[name] = str(value)
        return parse_page(await self._api.get("/files/list", query, limit=_PAGE_MAX))

    async def stat(self, path: str, *, follow_symlinks: bool = False) -> FileEntry:
        """What a path is. Of a link: the link itself, unless ``follow_symlinks``."""
        query = {"path": check_path(path), "followSymlinks": "true" if follow_symlinks else "false"}
        return parse_entry(await self._api.get("/files/stat", query))

    async def open_tree(self, path: str) -> AsyncRemoteFile:
        """Opens a tree for reading as a tar archive, piece by piece."""
        exchange = await self._api.open(
            "GET", "/files/tree", query={"path": check_path(path)}, accept="application/x-tar"
        )
        return AsyncRemoteFile(exchange, whole=False)

    async def download_tree(self, path: str, target: str | os.PathLike[str] | WritableBinary) -> DownloadedTree:
        """Copies a tree out of the machine, in flat memory.

        What a machine sends is not trusted: nothing is written outside ``target``, links that lead out of it and
        special files are skipped and named in the result, owners and set-user-id bits are not taken over.

        Args:
            path: the directory, or a single file.
            target: a folder, made when it is missing; or an open binary file, which then gets the tar archive.
        """
        folder = _tar.check_target(target)
        async with await self.open_tree(path) as remote:
            if folder is None:
                size = await _copy(remote, cast("WritableBinary", target))
                return DownloadedTree(0, size, ())
            source = cast("BinaryIO", net.reading(remote.some))
            return await net.in_thread(lambda: _tar.unpack(source, folder))


class AsyncFiles(AsyncReadFiles):
    """``sandbox.files``. Paths are absolute UTF-8, as the machine sees them.

    Four file operations run at once on one machine; further ones wait their turn. Changes are never repeated
    automatically: after an error whose ``ambiguous`` is true, look before trying again.
    """

    async def write(
        self,
        path: str,
        data: bytes | bytearray | memoryview | str | ReadableBinary | net.Pieces,
        *,
        mode: str | int | None = None,
        create_parents: bool = True,
        exclusive: bool = False,
    ) -> int:
        """Writes a file and returns its size. It is never repeated automatically.

        Args:
            path: absolute path inside the machine.
            data: bytes; text, sent as UTF-8; a file object opened in binary mode; or an iterable of bytes. The last
                two are sent piece by piece, whatever their size. If ``data`` raises, the file is not put in place.
            mode: permission bits, ``"0644"`` or ``0o644``.
            create_parents: make missing directories above it.
            exclusive: fail when the path exists.
        """
        query = {
            "path": check_path(path),
            "createParents": "true" if create_parents else "false",
            "exclusive": "true" if exclusive else "false",
        }
        if mode is not None:
            query["mode"] = check_mode(mode)
        body: Any = as_pieces(data, is_async=net.ASYNC)
        exchange = await self._api.open(
            "PUT", "/files/content", query=query, body=body, content_type="application/octet-stream"
        )
        return Fields(await self._api.json(exchange), "written").number("size")

    async def mkdir(self, path: str, *, recursive: bool = False, mode: str | int | None = None) -> FileEntry:
        """Makes a directory.

        Args:
            path: the directory to make.
            recursive: make missing directories above it too, and do not mind that it is there already.
            mode: permission bits, ``"0755"`` or ``0o755``.
        """
        body = {
            "path": check_mutable(path),
            "recursive": recursive,
            "mode": None if mode is None else check_mode(mode),
        }
        return parse_entry(await self._api.post("/files/mkdir", drop_none(body)))

    async def move(self, source: str, destination: str) -> FileEntry:
        """Moves or renames. Never overwrites: fails when ``destination`` exists."""
        body = {"source": check_mutable(source), "destination": check_mutable(destination)}
        return parse_entry(await self._api.post("/files/move", body))

    async def chmod(self, path: str, mode: str | int) -> FileEntry:
        """Sets permission bits, ``"0640"`` or ``0o640``."""
        body = {"path": check_mutable(path), "mode": check_mode(mode)}
        return parse_entry(await self._api.post("/files/chmod", body))

    async def remove(self, path: str, *, recursive: bool = False) -> int:
        """Removes a file, an empty directory, or a link itself. Returns how many entries are gone.

        ``recursive``: a directory and everything in it. When only a part of that could be removed, it raises
        ``PartlyRemovedError``, which says what is left.
        """
        body = {"path": check_mutable(path), "recursive": recursive}
        reply = Fields(await self._api.post("/files/remove", body), "removed")
        removed, left = reply.number("removed"), reply.number_or_none("remainingCount") or 0
        if left > 0:
            reason = reply.text_or_none("reason")
            error = PartlyRemovedError(
                f"{removed} entries of {path!r} were removed, {left} are left{f': {reason}' if reason else ''}.",
                hint="Look at error.remaining, and inspect before trying again.",
            )
            error.removed, error.remaining, error.remaining_count = removed, tuple(reply.texts("remaining")), left
            raise error
        return removed

    def watch(self, path: str, *, recursive: bool = True) -> AsyncFileWatch:
        """Watches a file or a tree: iterate over what changes. Close it, use it in a ``with`` block, or let go of it.

        Watching begins at the ``with``, or at the first step of the iteration. Changes the machine or this side could
        not keep up with, or that fell into a lost connection, are told as one event of type ``overflow``.
        """
        return AsyncFileWatch(self._api, check_path(path), recursive)

    async def upload_tree(
        self, source: str | os.PathLike[str] | bytes | ReadableBinary | net.Pieces, path: str
    ) -> UploadedTree:
        """Copies a tree into the machine, in flat memory; what is there already is kept or replaced name by name.

        Args:
            source: a local folder, whose contents are sent; or a tar archive as bytes, an open file or pieces.
            path: the directory in the machine to unpack into; it is made when it is missing.
        """
        body: Any = (
            _tar.pack(source) if isinstance(source, (str, os.PathLike)) else as_pieces(source, is_async=net.ASYNC)
        )
        exchange = await self._api.open(
            "PUT", "/files/tree", query={"path": check_mutable(path)}, body=body, content_type="application/x-tar"
        )
        reply = Fields(await self._api.json(exchange), "unpacked")
        return UploadedTree(reply.number("entries"), reply.number("bytes"), reply.number_or_none("skipped") or 0)

    async def signed_url(
        self, path: str, *, method: str = "GET", expires_in_seconds: int = 900, max_bytes: int | None = None
    ) -> SignedUrl:
        """A link that reads or writes one file without a key, until it expires. Treat it as a password.

        Args:
            path: the file.
            method: ``GET`` to read it, ``PUT`` to write it.
            expires_in_seconds: 10 to 3600.
            max_bytes: most bytes that may be written through it.
        """
        if method not in ("GET", "PUT"):
            raise ConfigurationError("method must be 'GET' or 'PUT'.")
        body = {
            "path": check_path(path),
            "method": method,
            "expiresInSeconds": expires_in_seconds,
            "maxBytes": max_bytes,
        }
        return parse_signed(await self._api.post("/files/urls", drop_none(body)))


async def _copy(remote: AsyncRemoteFile, target: WritableBinary) -> int:
    total = 0
    async for piece in remote:
        await net.in_thread(partial(target.write, piece))
        total += len(piece)
    return total
