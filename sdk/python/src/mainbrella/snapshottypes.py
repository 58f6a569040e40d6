"""What the service says of snapshots, as dictionaries: ``saved["id"]``."""

from __future__ import annotations

from typing import Any, TypedDict, cast

from .models import Fields

__all__ = ["Snapshot", "SnapshotPage", "parse_snapshot", "parse_snapshots"]


class Snapshot(TypedDict, total=False):
    """What was saved of a machine.

    Attributes:
        id: names it, to restore, change or delete it.
        name: what it was called.
        kind: ``workspace`` for the files, ``full`` with memory and processes.
        source: the machine it was saved from, ``ID@CREATED_AT``.
        catalogId: the template of that machine.
        templateDigest: digest of the template's image; ``None`` where it was not known any more.
        size: the size of that machine.
        internet: whether that machine might reach the internet.
        egress: what that machine might reach.
        bytes: what it takes on its host beside the template.
        createdAtMs: when it was asked for, Unix milliseconds.
        expiresAtMs: when it is removed; ``None``: when somebody deletes it.
        archived: put aside; it can be restored and counts as before.
        stopOutcome: what became of the machine, in the answer to a save that was to stop it.
    """

    id: str
    name: str
    kind: str
    source: str
    catalogId: str
    templateDigest: str | None
    size: str
    internet: bool
    egress: dict[str, Any]
    bytes: int
    createdAtMs: int
    expiresAtMs: int | None
    archived: bool
    stopOutcome: str


class SnapshotPage(TypedDict):
    """A page of snapshots."""

    snapshots: list[Snapshot]
    nextCursor: str | None


def parse_snapshot(data: Any) -> Snapshot:
    """A snapshot, with everything the service says of it."""
    fields = Fields(data, "snapshot")
    for name in ("id", "name", "kind", "source", "catalogId", "size"):
        fields.text(name)
    fields.number("createdAtMs")
    fields.flag("archived")
    return cast("Snapshot", fields.all())


def parse_snapshots(data: Any) -> SnapshotPage:
    """A page of snapshots."""
    page = Fields(data, "list")
    snapshots = [parse_snapshot(entry) for entry in page.objects("snapshots")]
    return {"snapshots": snapshots, "nextCursor": page.text_or_none("nextCursor")}
