"""Trees as tar streams: packed piece by piece, and unpacked without ever leaving the target folder."""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from .errors import ConfigurationError, InvalidResponseError, UnsafeArchiveError, UnsupportedError
from .filetypes import DownloadedTree

__all__ = ["check_target", "pack", "unpack"]

_PIECE = 1024 * 1024
_BLOCK = 512


def pack(folder: str | os.PathLike[str]) -> Iterator[bytes]:
    """The contents of ``folder`` as a tar stream, in the order of their names, in flat memory.

    Links are packed as links. Sockets, devices and pipes have no contents to send and are left out.
    """
    root = os.fspath(folder)
    if not os.path.isdir(root):
        raise ConfigurationError(f"{root!r} is not a folder.", hint="Use files.write for a single file.")
    return _pack(root)


def _pack(root: str) -> Iterator[bytes]:
    waiting: list[tuple[str, str]] = [(root, ".")]
    while waiting:
        path, name = waiting.pop()
        info = os.lstat(path)
        if stat.S_ISREG(info.st_mode):
            yield from _file(path, name)
            continue
        entry = _entry(name, info)
        if stat.S_ISDIR(info.st_mode):
            entry.type = tarfile.DIRTYPE
            names = sorted((os.fsencode(n) for n in os.listdir(path)), reverse=True)
            waiting += [(os.path.join(path, os.fsdecode(n)), f"{name}/{os.fsdecode(n)}") for n in names]
        elif stat.S_ISLNK(info.st_mode):
            entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(path)
        else:
            continue
        yield _header(entry)
    yield bytes(2 * _BLOCK)


def _file(path: str, name: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        info = os.fstat(file.fileno())
        entry = _entry(name, info)
        entry.size = left = info.st_size
        yield _header(entry)
        while left:
            piece = file.read(min(left, _PIECE))
            if not piece:
                raise ConfigurationError(f"{path!r} became shorter while it was being sent.")
            left -= len(piece)
            yield piece
        yield bytes(-info.st_size % _BLOCK)


def _entry(name: str, info: os.stat_result) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.mode = stat.S_IMODE(info.st_mode)
    entry.mtime = int(info.st_mtime)
    return entry


def _header(entry: tarfile.TarInfo) -> bytes:
    return entry.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def unpack(source: IO[bytes], target: str | os.PathLike[str]) -> DownloadedTree:
    """Unpacks a tar stream into the folder ``target``, which is made when it is missing.

    Nothing is written outside it: names that lead out raise ``UnsafeArchiveError``, links that lead out and special
    files are skipped and named in the result. Owners and set-user-id bits are not taken over.
    """
    if not hasattr(tarfile, "data_filter"):
        raise UnsupportedError(
            "This Python cannot unpack archives safely.",
            code="unsupported",
            hint="Use 3.10.12, 3.11.4 or newer; or give download_tree an open file, to keep the archive itself.",
        )
    root = Path(target)
    root.mkdir(parents=True, exist_ok=True)
    entries = size = 0
    skipped: list[str] = []
    folders: list[tuple[str, tarfile.TarInfo]] = []
    try:
        with tarfile.open(
            fileobj=source, mode="r|", bufsize=_PIECE, encoding="utf-8", errors="surrogateescape"
        ) as archive:
            for member in archive:
                try:
                    safe = tarfile.data_filter(member, str(root))
                except (tarfile.AbsoluteLinkError, tarfile.LinkOutsideDestinationError, tarfile.SpecialFileError):
                    skipped.append(member.name)
                    continue
                except tarfile.FilterError as error:
                    raise UnsafeArchiveError(
                        f"The tree holds the name {member.name!r}, which leads out of it."
                    ) from error
                entries += 1
                size += member.size if member.isreg() else 0
                if safe.isdir():
                    # Its mode may forbid writing into it, and writing changes its time: they come last.
                    folders.append((os.path.join(root, safe.name), member))
                try:
                    archive.extract(safe, str(root), filter="fully_trusted")
                except KeyError:
                    skipped.append(member.name)  # a hard link to something that was skipped
        while source.read(_PIECE):
            pass  # to the end, where a connection that was cut shows
    except tarfile.TarError as error:
        raise InvalidResponseError("The service did not send a whole tar archive.", ambiguous=True) from error
    for path, folder in reversed(folders):
        os.chmod(path, folder.mode & 0o777 | 0o700)
        os.utime(path, (folder.mtime, folder.mtime))
    return DownloadedTree(entries, size, tuple(skipped))


def check_target(target: object) -> str | os.PathLike[str] | None:
    """A folder to unpack into; ``None`` when ``target`` is an open file."""
    if hasattr(target, "write"):
        return None
    if isinstance(target, (str, os.PathLike)):
        return cast("str | os.PathLike[str]", target)
    raise ConfigurationError("target must be a folder, or a file opened in binary mode.")
