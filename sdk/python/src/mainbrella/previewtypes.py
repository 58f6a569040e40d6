"""What the service says of previews, as dictionaries: ``preview["url"]``."""

from __future__ import annotations

from typing import Any, TypedDict

from .models import Fields

__all__ = ["IssuedPreview", "Preview", "PreviewPage", "parse_issued", "parse_preview", "parse_previews"]


class Preview(TypedDict):
    """A preview without its URLs.

    Attributes:
        id: to renew or revoke it; no secret.
        port: where it leads.
        createdAtMs: when it was made, Unix milliseconds.
        expiresAt: when it ends, Unix milliseconds.
    """

    id: str
    port: int
    createdAtMs: int
    expiresAt: int


class IssuedPreview(Preview):
    """A preview as its maker is told of it.

    Attributes:
        url: where it is, with a host name of its own: for browsers. A secret.
        pathUrl: the same below a path, for clients that cannot resolve such host names. A secret.
    """

    url: str
    pathUrl: str


class PreviewPage(TypedDict):
    """What ``previews.list()`` gives."""

    previews: list[Preview]


def parse_preview(data: dict[str, Any]) -> Preview:
    """A preview."""
    fields = Fields(data, "preview")
    return {
        "id": fields.text("id"),
        "port": fields.number("port"),
        "createdAtMs": fields.number("createdAtMs"),
        "expiresAt": fields.number("expiresAt"),
    }


def parse_issued(data: dict[str, Any]) -> IssuedPreview:
    """A preview with its URLs."""
    fields = Fields(data, "preview")
    return {**parse_preview(data), "url": fields.text("url"), "pathUrl": fields.text("pathUrl")}


def parse_previews(data: dict[str, Any]) -> PreviewPage:
    """A list of previews."""
    return {"previews": [parse_preview(one) for one in Fields(data, "previews").objects("previews")]}
