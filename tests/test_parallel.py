"""Jobs at once: results in order, the first failure ends it, nobody waits for what hangs."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from kernelhub.parallel import begin, run_all

if TYPE_CHECKING:
    from collections.abc import Callable


def test_results_come_in_the_order_of_the_jobs() -> None:
    assert run_all([lambda number=number: number for number in range(50)], 4) == list(range(50))  # type: ignore[misc]
    assert run_all([], 4) == []


def test_no_more_jobs_run_at_once_than_allowed() -> None:
    lock, running, most = threading.Lock(), 0, 0

    def job() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.005)
        with lock:
            running -= 1

    run_all([job] * 20, 3)
    assert most == 3


def test_the_first_failure_is_raised_and_stops_the_rest() -> None:
    stop, done = threading.Event(), []

    def fail() -> None:
        raise KeyError("x")

    def wait() -> None:
        done.append(stop.wait(5))

    begun = time.monotonic()
    with pytest.raises(KeyError):
        run_all([wait, fail, *[wait] * 50], 2, stop=stop, patience=5)
    assert time.monotonic() - begun < 2
    assert done == [True]


def test_a_job_that_hangs_is_not_waited_for() -> None:
    hang = threading.Event()

    def fail() -> None:
        raise KeyError("x")

    begun = time.monotonic()
    jobs: list[Callable[[], object]] = [hang.wait, fail]
    with pytest.raises(KeyError):
        run_all(jobs, 2, patience=0.05)
    assert time.monotonic() - begun < 2
    hang.set()


def test_a_begun_job_gives_its_result_or_its_exception() -> None:
    assert begin(lambda: 1).result(5) == 1
    with pytest.raises(ZeroDivisionError):
        begin(lambda: 1 / 0).result(5)


def test_the_end_of_the_process_does_not_wait_for_jobs() -> None:
    code = "import time; from kernelhub.parallel import begin; begin(lambda: time.sleep(60)); print('end', flush=True)"
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert time.monotonic() - begun < 20
