"""What the service says of files, as it sends it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypedDict, cast

from .models import Fields, malformed

__all__ = ["DownloadedTree", "FileEntry", "FilePage", "FileWatchEvent", "SignedUrl", "UploadedTree"]


class FileEntry(TypedDict):
    """One file, directory or link."""

    name: str
    path: str
    nameBase64: str | None
    """The bytes of its name when they are not UTF-8; ``name`` and ``path`` are then only for people."""
    type: Literal["file", "directory", "symlink", "other"]
    size: int
    """Bytes."""
    mode: str
    """Permission bits, octal, e.g. ``0644``."""
    uid: int
    gid: int
    mtime: int
    """Last change, Unix seconds."""
    symlinkTarget: str | None


class FilePage(TypedDict):
    """One page of a directory."""

    entries: list[FileEntry]
    nextOffset: int | None
    """Pass it as ``offset`` for the next page; ``None``: this was the last."""


class SignedUrl(TypedDict):
    """A link to one file that works without a key, for one method, until it expires. Treat it as a password."""

    url: str
    expiresAt: str
    """RFC 3339."""
    method: str


@dataclass(frozen=True)
class FileWatchEvent:
    """Something happened to a path.

    ``type`` is ``created``, ``modified``, ``removed``, ``renamed`` (then ``new_path`` is set), ``attributes``, or
    ``overflow``: some changes were missed, so look at the tree again.
    """

    type: str
    path: str
    new_path: str | None = None


@dataclass(frozen=True)
class UploadedTree:
    """What was unpacked in the machine."""

    entries: int
    bytes: int
    skipped: int = 0
    """Entries that were left out: devices and pipes."""


@dataclass(frozen=True)
class DownloadedTree:
    """What was unpacked here.

    ``skipped`` names what was left out: links that lead out of the folder, and devices, sockets and the like.
    """

    entries: int
    bytes: int
    skipped: tuple[str, ...]


def parse_entry(data: Any) -> FileEntry:
    """A ``FileEntry`` of the wire."""
    f = Fields(data, "entry")
    for name in ("name", "path", "type", "mode"):
        f.text(name)
    for name in ("size", "uid", "gid", "mtime"):
        f.number(name)
    return cast("FileEntry", {"nameBase64": None, "symlinkTarget": None, **data})


def parse_page(data: Any) -> FilePage:
    """One page of a directory."""
    page = Fields(data, "list")
    return {
        "entries": [parse_entry(e) for e in page.objects("entries")],
        "nextOffset": page.number_or_none("nextOffset"),
    }


def parse_signed(data: Any) -> SignedUrl:
    """The reply to a request for a signed URL."""
    f = Fields(data, "link")
    if not isinstance(f.raw("expiresAt"), (str, int)):
        raise malformed("link.expiresAt")
    return cast("SignedUrl", {**data, "url": f.text("url"), "method": f.text("method")})


def parse_watch(kind: str, f: Fields) -> FileWatchEvent:
    """An event of a watch."""
    return FileWatchEvent(kind, f.text_or_none("path") or "", f.text_or_none("newPath"))
