"""Parallel: jobs in threads that nobody has to wait for.

The threads of ``concurrent.futures`` are joined when the interpreter ends, so a socket that says nothing would hold up
Ctrl-C and ``sys.exit``. These are daemons: the first failure, or an interrupt, ends the wait for all of them. A thread
whose job is done takes the next one, and ends when there is none for a moment.
"""

from __future__ import annotations

import os
import queue
import threading
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WORKING = "kernelhub-working"
"""The name of a thread while it has a job."""

T = TypeVar("T")

_IDLE = 0.25  # seconds that a thread waits for another job

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
            start(partial(_work, waiting))
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
    start(partial(_run, future, job))
    return future


def start(job: Callable[[], None]) -> None:
    """Run a job, which raises nothing, in a daemon thread."""
    with _lock:
        thread = _idle.pop() if _idle else None
    if thread is None:
        _Thread(job).start()
    else:
        thread.jobs.put(job)


class _Thread(threading.Thread):
    """Does one job after another; its name tells whether it has one."""

    def __init__(self, job: Callable[[], None]) -> None:
        super().__init__(name=WORKING, daemon=True)
        self.jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.jobs.put(job)

    def run(self) -> None:
        job: Callable[[], None] | None = self.jobs.get()
        while job is not None:
            self.name = WORKING
            job()
            self.name, job = "kernelhub-idle", None  # what the job holds must not live on while this thread waits
            job = self._next()

    def _next(self) -> Callable[[], None] | None:
        with _lock:
            _idle.append(self)
        try:
            return self.jobs.get(timeout=_IDLE)
        except queue.Empty:
            with _lock:
                if self in _idle:
                    _idle.remove(self)
                    return None
        return self.jobs.get()  # somebody has just chosen this thread


def _forget_threads() -> None:
    """A forked process has none of them, and nobody who would give the lock back."""
    global _lock
    _lock = threading.Lock()
    _idle.clear()


_idle: list[_Thread] = []
_lock = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


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
