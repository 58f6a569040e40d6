"""What a machine may reach, as plain immutable values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import ConfigurationError
from .models import EgressPolicy, Fields, malformed

__all__ = ["EgressEvent", "EgressExplanation", "EgressLogPage", "EgressPolicy", "ResolvedAddress"]

Policy = EgressPolicy | str | Sequence[str]
"""A policy in any form ``create`` takes: an ``EgressPolicy``, ``"off"``, ``"open"``, or the rules of an allow-list."""


@dataclass(frozen=True)
class ResolvedAddress:
    """One address of a name. ``reserved``: what kind it is, when no machine may reach it; it is then left out."""

    address: str
    reserved: str | None


@dataclass(frozen=True)
class EgressExplanation:
    """What would become of a connection from inside the machine, and why."""

    host: str
    port: int
    outcome: str
    """``allowed``, ``denied``, or ``would-deny``: made only because the policy is a dry run."""
    allowed_by: str | None
    """The rule of the allow-list that allows it."""
    denied_by: str | None
    """``off reserved no-rule port name-mismatch no-name protocol``."""
    reason: str
    """One sentence."""
    addresses: tuple[ResolvedAddress, ...]
    """Addresses of the name as the host resolves it now."""

    @property
    def allowed(self) -> bool:
        """The connection would be made."""
        return self.outcome != "denied"


@dataclass(frozen=True)
class EgressEvent:
    """One connection or lookup that was denied, or would have been."""

    sequence: int
    """Its number, from 1; numbers that are missing were counted and not kept."""
    time_ms: int
    outcome: str
    """``denied`` or ``would-deny``."""
    name: str | None
    address: str | None
    port: int
    """53 for a lookup, 0 for what has none."""
    rule: str
    reason: str


@dataclass(frozen=True)
class EgressLogPage:
    """One page of what a machine was not let through to, oldest first."""

    events: tuple[EgressEvent, ...]
    has_more: bool
    next_cursor: int
    denied: int
    """How many were denied in all, kept or not."""
    would_deny: int
    """How many would have been, but for a dry run."""


def wire_policy(policy: Policy) -> dict[str, Any]:
    """A policy as the service takes it."""
    if isinstance(policy, str):
        if policy not in ("off", "open"):
            raise ConfigurationError(
                f"{policy!r} is no egress policy: give 'off', 'open', a list of rules or an EgressPolicy."
            )
        policy = EgressPolicy(policy)
    elif not isinstance(policy, EgressPolicy):
        policy = EgressPolicy.allow(*policy)
    return policy.wire()


def parse_explanation(data: Any) -> EgressExplanation:
    """An ``EgressExplanation`` of the wire."""
    f = Fields(data, "explanation")
    entries = [Fields(entry, "address") for entry in f.objects("addresses")]
    return EgressExplanation(
        host=f.text("host"),
        port=f.number("port"),
        outcome=f.text("outcome"),
        allowed_by=f.text_or_none("allowedBy"),
        denied_by=f.text_or_none("deniedBy"),
        reason=f.text("reason"),
        addresses=tuple(ResolvedAddress(e.text("address"), e.text_or_none("reserved")) for e in entries),
    )


def parse_log(data: Any) -> EgressLogPage:
    """An ``EgressLog`` of the wire."""
    f = Fields(data, "log")
    page = EgressLogPage(
        events=tuple(_event(entry) for entry in f.objects("events")),
        has_more=f.flag("hasMore"),
        next_cursor=f.number("nextCursor"),
        denied=f.number("denied"),
        would_deny=f.number("wouldDeny"),
    )
    if page.has_more and not page.events:
        raise malformed("log.events")
    return page


def _event(data: Any) -> EgressEvent:
    f = Fields(data, "event")
    return EgressEvent(
        sequence=f.number("sequence"),
        time_ms=f.number("timeMs"),
        outcome=f.text("outcome"),
        name=f.text_or_none("name"),
        address=f.text_or_none("address"),
        port=f.number("port"),
        rule=f.text("rule"),
        reason=f.text("reason"),
    )
