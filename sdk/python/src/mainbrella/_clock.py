"""When to give up."""

from __future__ import annotations

import time

__all__ = ["Backoff", "Clock"]


class Clock:
    """Gives up at a fixed moment, or after so long a silence. Seconds."""

    def __init__(self, *, total: float | None, silence: float) -> None:
        self._at = None if total is None else time.monotonic() + total
        self._silence = silence

    def next_wait(self) -> float:
        """Seconds the next operation of the network may take. Raises ``TimeoutError`` when there are none left."""
        if self._at is None:
            return self._silence
        left = self._at - time.monotonic()
        if left <= 0:
            raise TimeoutError("deadline passed")
        return min(left, self._silence)


class Backoff:
    """Pauses between attempts that grow up to a limit, and the moment after which no more is tried. Seconds."""

    def __init__(self, *, first: float, longest: float, give_up: float) -> None:
        self._first = first
        self._longest = longest
        self._give_up = give_up
        self._failures = 0
        self._since: float | None = None

    def progress(self) -> None:
        """Something came: the next failure is the first one again."""
        self._failures = 0
        self._since = None

    def next_pause(self, asked: float | None = None) -> float | None:
        """How long to wait after another failure; ``None``: it has gone on too long. ``asked``: the service's wish."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        pause = max(min(self._first * 2.0 ** min(self._failures, 30), self._longest), asked or 0.0)
        self._failures += 1
        return None if now + pause > self._since + self._give_up else pause
