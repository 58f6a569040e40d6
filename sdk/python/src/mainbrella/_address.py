"""Where the service is, and which addresses the API key may be sent to."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from .errors import ConfigurationError

DEFAULT_BASE_URL = "http://127.0.0.1:8787"


@dataclass(frozen=True)
class Address:
    """A checked base URL."""

    secure: bool
    host: str
    port: int
    prefix: str
    """Path in front of ``/v1``, without a final slash."""

    @property
    def authority(self) -> str:
        """The value of the ``Host`` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.secure else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.secure else 'http'}://{self.authority}{self.prefix}"


def is_loopback(host: str) -> bool:
    """Whether ``host`` can only mean this machine."""
    if host.rstrip(".").lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_base_url(text: str) -> Address:
    """Checks a base URL: ``https``, or ``http`` to this machine only; no user, query or fragment."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = None, None, None
    if parts is None or parts.scheme not in ("http", "https") or not host or any(c <= " " or c > "~" for c in text):
        raise ConfigurationError(
            "base_url is not a URL of the service.",
            hint=f"Use a form such as https://mainbrella.example or {DEFAULT_BASE_URL}.",
        )
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ConfigurationError(
            "base_url must not hold a user name, password, query or fragment.", hint="The API key is given separately."
        )
    secure = parts.scheme == "https"
    if not secure and not is_loopback(host):
        raise ConfigurationError(
            "base_url must begin with https:// unless it names this machine.",
            hint="Plain HTTP would show the API key to the network; put TLS in front of the service, or use a tunnel.",
        )
    return Address(
        secure=secure,
        host=host,
        port=port if port is not None else (443 if secure else 80),
        prefix=parts.path.rstrip("/"),
    )
