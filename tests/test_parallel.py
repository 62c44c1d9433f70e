"""Jobs at once: results in order, the first failure ends it, nobody waits for what hangs."""

from __future__ import annotations

import os
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
        done.append(stop.wait(30))

    begun = time.monotonic()
    with pytest.raises(KeyError):
        run_all([wait, fail, *[wait] * 50], 2, stop=stop, patience=30)
    assert time.monotonic() - begun < 15
    assert done == [True]


def test_a_job_that_hangs_is_not_waited_for() -> None:
    hang = threading.Event()

    def fail() -> None:
        raise KeyError("x")

    begun = time.monotonic()
    jobs: list[Callable[[], object]] = [hang.wait, fail]
    with pytest.raises(KeyError):
        run_all(jobs, 2, patience=0.05)
    assert time.monotonic() - begun < 15
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


def test_a_thread_takes_the_next_job() -> None:
    first = begin(threading.get_ident).result()
    deadline = time.monotonic() + 5
    found: set[int] = set()
    while first not in found and time.monotonic() < deadline:
        found.add(begin(threading.get_ident).result())
    assert first in found


def test_a_job_never_waits_behind_one_that_hangs() -> None:
    hang = threading.Event()
    try:
        waiting = [begin(hang.wait) for _ in range(20)]
        assert run_all([lambda: 1] * 100, 20) == [1] * 100
        assert not any(future.done() for future in waiting)
    finally:
        hang.set()
    assert all(future.result(5) for future in waiting)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_fork_has_threads_of_its_own() -> None:
    assert begin(lambda: 1).result() == 1
    time.sleep(0.01)  # the thread waits for another job now
    child = os.fork()
    if child == 0:
        os._exit(begin(lambda: 7).result(5))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
