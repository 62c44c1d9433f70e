"""When a request is tried again, after what pause, and when that ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from email.utils import formatdate
from typing import TYPE_CHECKING

import pytest

from kernelhub import retry
from kernelhub.errors import InvalidConfig
from kernelhub.retry import Clock, Failure, GivenUp, RetryPolicy, requested_wait

if TYPE_CHECKING:
    from collections.abc import Callable

NOW = 1_800_000_000.0


class Time:
    """A clock that only moves when somebody sleeps; jitter is always as large as it may be."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.now, self.sleep, lambda low, high: high)


@pytest.fixture
def one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE", 1.0)


def exhausted(policy: RetryPolicy, failure: Failure) -> GivenUp:
    attempts = policy.attempts()
    for _ in range(1000):
        try:
            attempts.failed(failure)
        except GivenUp as error:
            return error
    raise AssertionError("it never gave up")


@pytest.mark.usefixtures("one_second")
def test_r_18_there_are_five_tries_with_growing_pauses_up_to_the_longest() -> None:
    time = Time()
    assert exhausted(RetryPolicy(clock=time.clock), Failure("HTTP 503")).cause == "HTTP 503 (5 tries)"
    assert time.slept == [1, 2, 4, 8]
    time.slept.clear()
    exhausted(RetryPolicy(tries=9, deadline=1e6, clock=time.clock), Failure("HTTP 503"))
    assert time.slept == [1, 2, 4, 8, 16, 30, 30, 30]


@pytest.mark.usefixtures("one_second")
def test_r_18_the_jitter_is_a_full_one() -> None:
    asked: list[tuple[float, float]] = []
    time = Time()
    clock = time.clock._replace(jitter=lambda low, high: asked.append((low, high)) or 0.0)  # type: ignore[func-returns-value]
    exhausted(RetryPolicy(clock=clock), Failure("HTTP 503"))
    assert asked == [(0, 1), (0, 2), (0, 4), (0, 8)]


@pytest.mark.usefixtures("one_second")
def test_r_18_no_pause_goes_beyond_the_deadline() -> None:
    time = Time()
    given_up = exhausted(RetryPolicy(tries=50, deadline=20, clock=time.clock), Failure("HTTP 500"))
    assert given_up.cause == "HTTP 500 (5 tries, 20 s allowed)"
    assert time.now == 15


def test_progress_counts_tries_and_time_anew() -> None:
    time = Time()
    attempts = RetryPolicy(tries=2, deadline=10, clock=time.clock).attempts()
    for _ in range(50):
        attempts.failed(Failure("reset"))
        time.now += 9
        attempts.progressed()
        assert attempts.left == pytest.approx(10)
    attempts.failed(Failure("reset"))
    with pytest.raises(GivenUp):
        attempts.failed(Failure("reset"))


def test_a_host_that_cannot_be_reached_is_tried_less_often() -> None:
    given_up = exhausted(RetryPolicy(clock=Time().clock), Failure("DNS", most_tries=2, unreached=True))
    assert (given_up.cause, given_up.unreached) == ("DNS (2 tries)", True)
    assert exhausted(RetryPolicy(clock=Time().clock), Failure("TLS", most_tries=1)).cause == "TLS (1 try)"


def test_r_16_a_requested_wait_takes_the_place_of_the_pause() -> None:
    time = Time()
    RetryPolicy(clock=time.clock).attempts().failed(Failure("HTTP 429", wait=1.0))
    assert time.slept == [1.0]


def test_r_17_a_wait_above_the_cap_is_an_error_that_tells_the_demand() -> None:
    time = Time()
    RetryPolicy(clock=time.clock).attempts().failed(Failure("HTTP 429", wait=60.0))
    with pytest.raises(GivenUp) as caught:
        RetryPolicy(clock=time.clock).attempts().failed(Failure("HTTP 429", wait=100_000.0))
    assert caught.value.cause == (
        "HTTP 429 (the server asks to wait 100000 s, more than the 60 s that KERNELHUB_RETRY_AFTER_CAP allows)"
    )


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0.0),
        ("7", 7.0),
        (" 7 ", 7.0),
        ("1.5", 1.5),
        (formatdate(NOW + 30, usegmt=True), 30.0),
        (formatdate(NOW - 30, usegmt=True), None),
        ("-5", None),
        ("", None),
        ("soon", None),
        ("1e9", None),
        ("nan", None),
        ("٣", None),
        ("9" * 400, None),
        ("Mon, 99 Foo 2026 99:99:99 GMT", None),
    ],
)
def test_r_17_retry_after_is_seconds_or_a_date_or_ignored(value: str, seconds: float | None) -> None:
    assert requested_wait({"Retry-After": value}, NOW) == seconds


def test_a_date_is_compared_with_the_servers_own_clock() -> None:
    headers = {"Retry-After": formatdate(NOW + 30, usegmt=True), "Date": formatdate(NOW, usegmt=True)}
    assert requested_wait(headers) == 30
    del headers["Date"]
    headers["Retry-After"] = formatdate(time.time() + 1000, usegmt=True)
    assert 990 < (requested_wait(headers) or 0) <= 1000


@pytest.mark.parametrize(
    ("value", "seconds"), [('"api";r=0;t=113', 113.0), ('"api"; r=0; t=5', 5.0), ('"api";r=3;t=113', None), ("", None)]
)
def test_the_hubs_own_header_tells_a_wait_too(value: str, seconds: float | None) -> None:
    assert requested_wait({"RateLimit": value}) == seconds


def test_the_policy_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = RetryPolicy.from_settings()
    assert (policy.tries, policy.deadline, policy.retry_after_cap) == (5, 120, 60)
    for name, value in [("RETRIES", "2"), ("DEADLINE", "3.5"), ("RETRY_AFTER_CAP", "7")]:
        monkeypatch.setenv(f"KERNELHUB_{name}", value)
    policy = RetryPolicy.from_settings()
    assert (policy.tries, policy.deadline, policy.retry_after_cap) == (2, 3.5, 7)


@pytest.mark.parametrize("value", ["0", "-1", "101", "many", "", "2.5", "٣", "9" * 5000])
def test_r_46_a_number_of_tries_outside_its_range_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELHUB_RETRIES", value)
    with pytest.raises(InvalidConfig, match=r"KERNELHUB_RETRIES.*a whole number from 1 to 100"):
        RetryPolicy.from_settings()


def test_r_46_wrong_settings_are_told_when_they_are_used_not_at_import() -> None:
    code = "import kernelhub, kernelhub.hub as hub\ntry: hub.HubIndex()\nexcept kernelhub.KernelHubError as e: print(e)"
    environment = {**os.environ, "KERNELHUB_DEADLINE": "soon"}
    command = [sys.executable, "-c", code]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert "KERNELHUB_DEADLINE" in output


def test_a_pause_is_slept_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE", 1e-4)
    policy: Callable[[], RetryPolicy] = RetryPolicy
    policy().attempts().failed(Failure("HTTP 503"))
