"""Parallel: jobs in threads that nobody has to wait for.

The threads of ``concurrent.futures`` are joined when the interpreter ends, so a socket that says nothing would hold up
Ctrl-C and ``sys.exit``. These are daemons: the first failure, or an interrupt, ends the wait for all of them.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

_Waiting = queue.SimpleQueue[tuple["Future[Any]", "Callable[[], Any]"]]


def run_all(
    jobs: Sequence[Callable[[], T]], at_once: int, *, stop: threading.Event | None = None, patience: float = 0.0
) -> list[T]:
    """The results of all jobs in their order, ``at_once`` at a time.

    The first exception of a job is raised, and no further job is begun then; so too when the caller is interrupted.
    Jobs that run at that time are told by ``stop`` and get ``patience`` seconds to end.
    """
    futures: list[Future[T]] = [Future() for _ in jobs]
    waiting: _Waiting = queue.SimpleQueue()
    for future, job in zip(futures, jobs, strict=True):
        waiting.put((future, job))
    try:
        for _ in range(min(at_once, len(futures))):
            threading.Thread(target=_work, args=(waiting,), name="kernelhub-parallel", daemon=True).start()
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        return [future.result() for future in futures]
    finally:
        begun = [future for future in futures if not future.cancel()]
        if stop is not None:
            stop.set()
        wait(begun, patience)


def begin(job: Callable[[], T]) -> Future[T]:
    """Start a job in a daemon thread; its result, or its exception, is in the future."""
    future: Future[T] = Future()
    threading.Thread(target=_run, args=(future, job), name="kernelhub-ahead", daemon=True).start()
    return future


def _work(waiting: _Waiting) -> None:
    while True:
        try:
            future, job = waiting.get_nowait()
        except queue.Empty:
            return
        if future.set_running_or_notify_cancel():
            _run(future, job)
            if future.exception() is not None:
                return


def _run(future: Future[Any], job: Callable[[], Any]) -> None:
    try:
        future.set_result(job())
    except BaseException as error:  # whatever it is, it belongs to who asked for the result
        future.set_exception(error)
