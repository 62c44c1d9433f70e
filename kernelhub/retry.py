"""Retry: one policy for every request: which failures are worth another try, how long to wait, when to give up.

It knows no HTTP library: a try that failed is described by a `Failure`, and time comes from a `Clock`.
"""

from __future__ import annotations

import random
import re
import time
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, NamedTuple

from kernelhub import setting

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})

FIRST_PAUSE = 1.0  # seconds; the longest pause before the second try, doubled for each one after it
_LONGEST_PAUSE = 30.0
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?", re.ASCII)
_RATE_LIMIT = re.compile(r'"[^"]*";r=0;t=([0-9]{1,9})', re.ASCII)


class Clock(NamedTuple):
    """Where time and chance come from; a test hands in its own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[float, float], float] = random.uniform


class Failure(Exception):
    """One try failed, and another one may succeed.

    ``cause`` is one line. ``most_tries`` limits the tries where more of them promise nothing (a name that does not
    resolve). ``wait`` is what the server asks for, in seconds. ``unreached`` says that there was no connection at all.
    """

    def __init__(
        self, cause: str, *, most_tries: int | None = None, wait: float | None = None, unreached: bool = False
    ) -> None:
        super().__init__(cause)
        self.cause = cause
        self.most_tries = most_tries
        self.wait = wait
        self.unreached = unreached


class GivenUp(Exception):
    """No try is left; ``cause`` is the last failure in one line, with what was tried."""

    def __init__(self, cause: str, *, unreached: bool = False) -> None:
        super().__init__(cause)
        self.cause = cause
        self.unreached = unreached


@dataclass(frozen=True)
class RetryPolicy:
    """How often a request is tried (``tries``), for how long (``deadline``), and how long a server may make it wait.

    ``retry_after_cap`` is the longest Retry-After that is honoured. All times are in seconds.
    """

    tries: int = 5
    deadline: float = 120.0
    retry_after_cap: float = 60.0
    clock: Clock = field(default_factory=Clock)

    @classmethod
    def from_settings(cls) -> RetryPolicy:
        """The policy that KERNELHUB_RETRIES, KERNELHUB_DEADLINE and KERNELHUB_RETRY_AFTER_CAP describe.

        Raises:
            InvalidConfig: one of them is not a number in its range.
        """
        return cls(
            setting.count("KERNELHUB_RETRIES", cls.tries, 1, 100),
            setting.seconds("KERNELHUB_DEADLINE", cls.deadline),
            setting.seconds("KERNELHUB_RETRY_AFTER_CAP", cls.retry_after_cap),
        )

    def attempts(self, tries: int | None = None) -> Attempts:
        """The state of a new request, with at most that many tries."""
        return Attempts(self, tries or self.tries)


class Attempts:
    """The tries of one request so far."""

    def __init__(self, policy: RetryPolicy, tries: int) -> None:
        self._policy = policy
        self._tries = tries
        self._failed = 0
        self._started = policy.clock.now()

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self._started + self._policy.deadline - self._policy.clock.now()

    def progressed(self) -> None:
        """A try brought something that is kept: tries and deadline count from here on."""
        self._failed = 0
        self._started = self._policy.clock.now()

    def failed(self, failure: Failure) -> None:
        """Wait until it is time for the next try.

        Raises:
            GivenUp: there is none: all tries are used up, the deadline is near, or the server asks for too long a wait.
        """
        self._failed += 1
        cap = self._policy.retry_after_cap
        if failure.wait is not None and failure.wait > cap:
            limit = f"more than the {cap:g} s that KERNELHUB_RETRY_AFTER_CAP allows"
            raise self._given_up(failure, f"the server asks to wait {failure.wait:g} s, {limit}")
        if self._failed >= min(self._tries, failure.most_tries or self._tries):
            raise self._given_up(failure, "1 try" if self._failed == 1 else f"{self._failed} tries")
        pause = self._pause() if failure.wait is None else failure.wait
        if pause >= self.left:
            raise self._given_up(failure, f"{self._failed} tries, {self._policy.deadline:g} s allowed")
        self._policy.clock.sleep(pause)

    def _pause(self) -> float:
        """Exponential back-off with full jitter: clients that failed together do not come back together."""
        return self._policy.clock.jitter(0.0, min(_LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (self._failed - 1)))

    def _given_up(self, failure: Failure, why: str) -> GivenUp:
        return GivenUp(f"{failure.cause} ({why})", unreached=failure.unreached)


def requested_wait(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """The seconds that a server asks to wait: Retry-After in seconds or as a date, else the Hub's RateLimit.

    None when it asks for nothing that makes sense: a negative number, a date that is past, anything else. ``now`` is
    the wall clock to compare dates with; without it the server's own Date counts, so that a wrong clock here does not.
    """
    value = headers.get("Retry-After", "").strip()
    if _SECONDS.fullmatch(value):
        return float(value)
    asked = _timestamp(value)
    if asked is not None:
        base = now if now is not None else _timestamp(headers.get("Date", ""))
        wait = asked - (time.time() if base is None else base)
        return wait if wait >= 0 else None
    limit = _RATE_LIMIT.search(headers.get("RateLimit", "").replace(" ", ""))
    return float(limit[1]) if limit else None


def _timestamp(value: str) -> float | None:
    try:
        return parsedate_to_datetime(value).timestamp()
    except (TypeError, ValueError, OverflowError, IndexError):
        return None
