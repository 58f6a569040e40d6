"""Secrets outside the guest, as plain immutable values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, cast

from .errors import ConfigurationError
from .models import Fields, drop_none

__all__ = ["Secret", "SecretInfo"]

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


@dataclass(frozen=True)
class Secret:
    """A credential that is added, outside the machine, to what it sends to one host over TLS. ``repr`` hides the value.

    ``client.create(secrets=[Secret("github", host="api.github.com", header="Authorization", value="Bearer …")])``
    """

    name: str
    """1 to 64 of ``a-z``, ``0-9``, ``-`` and ``_``, a letter or digit first."""
    _: KW_ONLY
    host: str
    """The one host that is sent the value, by its exact name."""
    header: str | None = None
    """The header whose whole value it is; this or ``username``."""
    username: str | None = None
    """The user whose password it is, sent as HTTP basic credentials."""
    value: str = field(repr=False)
    """1 to 8192 visible ASCII characters, with spaces only inside."""
    port: int = 443
    on_fork: str = "drop"
    """What copies of the machine get of it: nothing, or with ``"inherit"`` the same value."""

    def __post_init__(self) -> None:
        # What is wrong is said before a machine is made for it. The value is in no message.
        given: dict[str, Any] = self.__dict__
        if not isinstance(given["name"], str) or not _NAME.fullmatch(self.name):
            raise ConfigurationError(
                "The name of a secret is 1 to 64 of a-z, 0-9, '-' and '_', and begins with a letter or digit."
            )
        if not isinstance(given["host"], str) or not self.host:
            raise ConfigurationError(f"host of the secret {self.name} must be the name of a host.")
        if (self.header is None) == (self.username is None):
            raise ConfigurationError(f"Give exactly one of header and username for the secret {self.name}.")
        if not isinstance(given["value"], str) or not self.value or any(c < " " or c > "~" for c in self.value):
            raise ConfigurationError(
                f"value of the secret {self.name} must be a str of visible ASCII characters.",
                hint="A line break at the end of a file is none of its value: text.strip().",
            )

        if self.on_fork not in ("drop", "inherit"):
            raise ConfigurationError(f'on_fork of the secret {self.name} must be "drop" or "inherit".')

    def wire(self) -> dict[str, Any]:
        """As the service takes it, with the value."""
        return drop_none(
            {
                "host": self.host,
                "port": self.port,
                "header": self.header,
                "username": self.username,
                "value": self.value,
                "onFork": None if self.on_fork == "drop" else self.on_fork,
            }
        )


@dataclass(frozen=True)
class SecretInfo:
    """A secret as the service tells of it: without its value."""

    name: str
    host: str
    port: int
    header: str | None
    """The header whose whole value it is."""
    username: str | None
    """The user whose password it is, in HTTP basic credentials."""
    created_at: str
    """When it was set, RFC 3339."""
    on_fork: str = "drop"
    """What copies of the machine get of it: ``drop`` for nothing, ``inherit`` for the same value."""


def check_secrets(secrets: Iterable[Secret] | None) -> tuple[Secret, ...]:
    """The secrets of a create."""
    given: tuple[Any, ...] = () if secrets is None else tuple(secrets)
    if not all(isinstance(secret, Secret) for secret in given):
        raise ConfigurationError("secrets must be a list of Secret.")
    return given


def check_handed_on(secrets: Mapping[str, str | Mapping[str, str]] | None) -> dict[str, Any] | None:
    """What the children of a fork get of secrets, as the service takes it. No value is in any message."""
    wishes: dict[str, Any] = {}
    given: dict[Any, Any] = dict(secrets or {})
    for name, wish in given.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigurationError(f"{name!r} is no name of a secret.")
        if isinstance(wish, str) and wish in ("drop", "inherit"):
            wishes[name] = wish
            continue
        fields: dict[Any, Any] = dict(cast("Mapping[Any, Any]", wish)) if isinstance(wish, Mapping) else {}
        if list(fields) != ["reissue"] or not isinstance(fields["reissue"], str) or not fields["reissue"]:
            raise ConfigurationError(
                f"What a fork does with the secret {name} must be \"drop\", \"inherit\" or {{\"reissue\": value}}."
            )
        wishes[name] = fields
    return wishes or None


def secret_path(name: str) -> str:
    """Where a secret is, below its machine."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"{name!r} is no name of a secret.")
    return f"/secrets/{name}"


def parse_secret(data: Any) -> SecretInfo:
    """A ``Secret`` of the wire."""
    f = Fields(data, "secret")
    return SecretInfo(
        name=f.text("name"),
        host=f.text("host"),
        port=f.number("port"),
        header=f.text_or_none("header"),
        username=f.text_or_none("username"),
        created_at=f.text("createdAt"),
        on_fork="drop" if f.raw("onFork") is None else f.text("onFork"),
    )


def parse_secrets(data: Any) -> list[SecretInfo]:
    """A ``SecretList`` of the wire."""
    return [parse_secret(entry) for entry in Fields(data, "secrets").objects("secrets")]
