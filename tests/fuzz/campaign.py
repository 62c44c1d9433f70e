"""A campaign: many inputs for one target, in child processes that the kernel stops at the limits.

Each child is forked from a process that has imported everything, and reads a batch of inputs. A second of processor
time for one input, or a minute that it sleeps, ends the child by a signal; more than 256 MiB of new memory is refused
by the system. The parent knows from shared memory which input it was, notes it, and goes on behind it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import resource
import signal
import struct
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from target import Target

SECONDS = 1.0  # of processor time, for one input
ASLEEP = 60.0  # of any time: a busy machine is slow, not wrong
MEMORY = 256 << 20  # bytes above what the process had

_ASLEEP = f"more than {ASLEEP:.0f} s"
_BATCH = 20_000
_NUMBER = struct.Struct("<Q")


@dataclass
class Outcome:
    """What a campaign, or a part of it, found; ``failures`` maps the number of an input to what went wrong."""

    executions: int = 0
    accepted: int = 0
    slowest: float = 0.0
    slowest_number: int = -1
    memory: int = 0
    failures: dict[int, str] = field(default_factory=dict)

    def add(self, other: Outcome) -> None:
        self.executions += other.executions
        self.accepted += other.accepted
        self.memory = max(self.memory, other.memory)
        self.failures |= other.failures
        if other.slowest > self.slowest:
            self.slowest, self.slowest_number = other.slowest, other.slowest_number


def run(target: Target, seed: int, executions: int, *, first: int = 0) -> Outcome:
    """Feed ``target`` with the inputs ``first`` to ``first + executions``."""
    total, place, end, paused = Outcome(), first, first + executions, -1
    with mmap.mmap(-1, _NUMBER.size) as shared:
        while place < end:
            part, place = _batch(target, seed, range(place, min(place + _BATCH, end)), shared)
            if part.failures.get(place - 1) == _ASLEEP and paused != place - 1:
                paused = place = place - 1  # the machine may have been asleep, not the reader: once more
                part.executions, part.failures = part.executions - 1, {}
            total.add(part)
    return total


def _batch(target: Target, seed: int, numbers: range, shared: mmap.mmap) -> tuple[Outcome, int]:
    """What one child found, and the number to go on with."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        status = 1
        with contextlib.suppress(BaseException), os.fdopen(writing, "wb") as pipe:
            pickle.dump(_read_all(target, seed, numbers, shared), pipe)
            status = 0
        os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 0:
        outcome: Outcome = pickle.loads(told)
        return outcome, numbers.stop
    stopped = _NUMBER.unpack_from(shared)[0]
    return Outcome(stopped + 1 - numbers.start, failures={stopped: _ended(code)}), stopped + 1


def _ended(code: int) -> str:
    if code == -signal.SIGPROF:
        return f"more than {SECONDS:.0f} s of processor time"
    if code == -signal.SIGALRM:
        return _ASLEEP
    return f"the process ended with {code}"


def _read_all(target: Target, seed: int, numbers: range, shared: mmap.mmap) -> Outcome:
    outcome = Outcome()
    _limit_memory()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in numbers:
        _NUMBER.pack_into(shared, 0, number)
        data = target.mutator.make(seed, number)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.setitimer(signal.ITIMER_REAL, ASLEEP)
        start = time.process_time()
        try:
            outcome.accepted += target.read(data)
        except Exception:  # what is not declared
            outcome.failures[number] = traceback.format_exc(limit=-3)
        spent = time.process_time() - start
        outcome.executions += 1
        if spent > outcome.slowest:
            outcome.slowest, outcome.slowest_number = spent, number
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    outcome.memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    return outcome


def _limit_memory() -> None:
    """Refuse more than ``MEMORY`` bytes beyond what is mapped now; the default actions of the timers' signals kill."""
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
