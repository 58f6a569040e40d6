"""What a request looks like on the wire, and which error a failure is. Shared by both transports; does no I/O."""

from __future__ import annotations

import json
import ssl
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from ._address import Address
from ._http1 import CutShortError, NotHttpError
from ._version import __version__
from .errors import (
    CallerStoppedWaitingError,
    ConfigurationError,
    InvalidResponseError,
    MainbrellaError,
    RedirectRefusedError,
    TransportError,
    api_error,
)

__all__ = [
    "ERROR_BODY_MAX",
    "check_key",
    "cut",
    "head",
    "json_bytes",
    "lost",
    "not_connected",
    "parse_json",
    "refused",
    "too_long",
]

_KEY_MAX = 255

ERROR_BODY_MAX = 256 * 1024
"""Most bytes read of an answer that is an error."""


def head(
    address: Address,
    method: str,
    path: str,
    *,
    query: Mapping[str, str] | None,
    authorization: str,
    request_id: str,
    length: int | None,
    chunked: bool,
    headers: Mapping[str, str],
) -> bytes:
    """A request up to its body. ``length``: of the body, where it is known."""
    target = address.prefix + path
    if query:
        target += "?" + "&".join(f"{quote(k, safe='')}={quote(v, safe='')}" for k, v in query.items())
    fields = {
        "Host": address.authority,
        "Authorization": authorization,
        "User-Agent": f"mainbrella-python/{__version__}",
        "Accept": "application/json",
        "X-Request-Id": request_id,
    }
    if chunked:
        fields["Transfer-Encoding"] = "chunked"
    elif length is not None:
        fields["Content-Length"] = str(length)
    elif method not in ("GET", "HEAD"):
        fields["Content-Length"] = "0"
    fields.update(headers)
    for name, value in fields.items():
        if any(c < " " or c > "~" for c in value):
            raise ConfigurationError(f"The value of the header {name} holds characters that cannot be sent.")
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode("ascii")


def check_key(key: str | None) -> str:
    """An idempotency key that can be sent; a fresh one when none was given."""
    if key is None:
        return str(uuid.uuid4())
    if not 1 <= len(key) <= _KEY_MAX or any(c < "!" or c > "~" for c in key):
        raise ConfigurationError("idempotency_key must be 1 to 255 visible ASCII characters.")
    return key


def check_on_idle(value: str) -> str:
    """What becomes of a machine that nobody uses."""
    if value not in ("stop", "pause"):
        raise ConfigurationError('on_idle must be "stop" or "pause".')
    return value


def json_bytes(data: Mapping[str, Any]) -> bytes:
    """A JSON body. Text that is not valid Unicode is refused here."""
    try:
        return json.dumps(data, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigurationError("An argument holds text that is not valid Unicode (a lone surrogate).") from error
    except (TypeError, ValueError) as error:
        raise ConfigurationError("An argument cannot be sent as JSON.") from error


def parse_json(raw: bytes, *, status: int, request_id: str) -> dict[str, Any]:
    """An answer that must be a JSON object."""
    try:
        data: Any = json.loads(raw)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise InvalidResponseError(
            "The answer is not a JSON object.",
            status=status,
            hint="Check that base_url is the address of a Mainbrella service.",
            request_id=request_id,
            ambiguous=True,
        )
    return data  # pyright: ignore[reportUnknownVariableType]


def refused(
    status: int, headers: Mapping[str, str], body: bytes | None, *, request_id: str, key: str | None
) -> MainbrellaError:
    """The error for an answer that is not a success. ``body`` is ``None`` when it could not be read."""
    if 300 <= status < 400:
        return RedirectRefusedError(
            "The service answered with a redirect, which was not followed.",
            status=status,
            hint="Set base_url to the final address; the API key is sent nowhere else.",
            request_id=request_id,
            idempotency_key=key,
        )
    data: dict[str, Any] | None = None
    if body is not None:
        try:
            data = parse_json(body, status=status, request_id=request_id)
        except InvalidResponseError:
            pass
    return api_error(
        status, data, request_id=request_id, retry_after=_seconds(headers.get("retry-after")), idempotency_key=key
    )


def not_connected(error: BaseException, address: Address, request_id: str, key: str | None) -> MainbrellaError:
    """No connection could be made: nothing was sent."""
    if isinstance(error, ssl.SSLError):
        return TransportError(
            f"No secure connection to {address} could be made.",
            code="tls_failed",
            hint="Check the certificate of the service, or pass ssl_context with its authority.",
            request_id=request_id,
            idempotency_key=key,
        )
    return TransportError(
        f"No connection to {address} could be made.",
        code="connection_failed",
        hint="Check that the service is running and that base_url or MAINBRELLA_API_URL is right.",
        request_id=request_id,
        retryable=True,
        idempotency_key=key,
    )


def lost(error: BaseException, request_id: str, key: str | None) -> MainbrellaError:
    """The exchange failed before the head of an answer was there."""
    if isinstance(error, TimeoutError):
        return CallerStoppedWaitingError(
            "No answer came in the time this client waits.",
            hint="What was asked may go on; inspect before repeating it.",
            request_id=request_id,
            ambiguous=True,
            idempotency_key=key,
        )
    if isinstance(error, NotHttpError) or (isinstance(error, CutShortError) and not error.silent):
        return InvalidResponseError(
            "The answer is not HTTP." if isinstance(error, NotHttpError) else "The answer was cut short.",
            hint="Check that base_url is the address of a Mainbrella service.",
            request_id=request_id,
            ambiguous=True,
            idempotency_key=key,
        )
    return TransportError(
        "The connection was lost before an answer came.",
        hint="The request may have been carried out; inspect before repeating it.",
        request_id=request_id,
        ambiguous=True,
        idempotency_key=key,
    )


def cut(error: BaseException | None, *, status: int, request_id: str) -> MainbrellaError:
    """The body of an answer did not come to its end."""
    if isinstance(error, TimeoutError):
        return CallerStoppedWaitingError("The answer stopped coming.", request_id=request_id, ambiguous=True)
    return InvalidResponseError(
        "The connection was lost before the answer was complete.", status=status, request_id=request_id, ambiguous=True
    )


def too_long(limit: int, *, status: int, request_id: str) -> MainbrellaError:
    """The body of an answer is longer than any that makes sense."""
    return InvalidResponseError(
        f"The answer is longer than {limit} bytes.", status=status, request_id=request_id, ambiguous=True
    )


def _seconds(text: str | None) -> float | None:
    """The seconds of a ``Retry-After`` header; its date form is not used by this API."""
    return float(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 7 else None
