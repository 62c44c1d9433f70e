#!/usr/bin/env python3
"""Fail, or kill, an installing process at each of its system calls in turn (R2, R6).

One clean install is traced and its system calls are counted; then each of them fails once with ENOSPC, EIO and EACCES,
and kills the process once. What may happen: the build is stored all the same, or a typed error is raised; never an
unexpected exception, never a torn build, and the next run succeeds and leaves nothing behind.

    python tests/faults/syscalls.py                       every call
    python tests/faults/syscalls.py --sample 200 --seed 1

Needs strace, and the right to trace.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from scene import Nursery, Outcome, problems, report, scene

CALLS = (
    "openat", "read", "write", "pwrite64", "close", "fsync", "flock", "ftruncate", "mkdir", "rmdir", "rename",
    "unlink", "unlinkat", "chmod", "fchmod", "newfstatat", "fstat", "statfs", "statvfs", "getdents64", "access",
    "utimensat", "lseek", "readlink", "ioctl", "getcwd",
)  # fmt: skip
IMPATIENT = {
    "KERNELHUB_RETRIES": "3",
    "KERNELHUB_DEADLINE": "2",
}  # strace counts anew in each thread, so tries fail too
FAULTS = {name: f"error={name}" for name in ("ENOSPC", "EIO", "EACCES")} | {"KILL": "signal=KILL"}

_LONGEST = 30.0  # seconds after which a process counts as hung


class Fault(NamedTuple):
    """The ``number``-th ``call`` of any thread fails in this way."""

    call: str
    number: int
    kind: str


class Figures(NamedTuple):
    calls: int
    outcomes: Counter[str]
    failures: list[str]


def run(sample: int | None, seed: int) -> Figures:
    """Inject every fault, or a sample of them."""
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    with scene() as (folder, hub), Nursery(**IMPATIENT) as nursery:
        counts = _count(nursery, folder / "counted", hub.url)
        faults = [
            Fault(call, number, kind)
            for call, most in counts.items()
            for number in range(1, most + 1)
            for kind in FAULTS
        ]
        if sample is not None:
            faults = random.Random(seed).sample(faults, min(sample, len(faults)))
        for index, fault in enumerate(faults):
            store = folder / f"store-{index}"
            inject = f"inject={fault.call}:{FAULTS[fault.kind]}:when={fault.number}"
            outcome = trace(nursery, store, hub.url, ["-e", f"trace={fault.call}", "-e", inject, "-o", os.devnull])
            outcomes[_kind(outcome)] += 1
            found = [] if outcome.status in (0, 3, -signal.SIGKILL) else [f"unexpected: {outcome.said[-600:]}"]
            found += problems(store, hub.url, after_recovery=False)
            recovered = nursery.run(store, hub.url, "load")
            if recovered.status:
                found.append(f"the next run failed: {recovered.said}")
            nursery.run(store, hub.url)
            found += problems(store, hub.url, after_recovery=True)
            failures += [f"{fault.kind} at {fault.call} {fault.number}: {problem}" for problem in found]
            shutil.rmtree(store, ignore_errors=True)
            hub.clear()
    return Figures(sum(counts.values()), outcomes, failures)


def _kind(outcome: Outcome) -> str:
    if outcome.status == 3:
        return outcome.said.rpartition("\n")[2].partition(":")[0]
    return {0: "stored", -signal.SIGKILL: "killed"}.get(outcome.status, "unexpected")


def _count(nursery: Nursery, store: Path, endpoint: str) -> dict[str, int]:
    """How often any one thread makes each call in a clean install: strace counts for each thread on its own."""
    with tempfile.NamedTemporaryFile("r") as log:
        outcome = trace(
            nursery, store, endpoint, ["-e", f"trace={','.join(f'?{call}' for call in CALLS)}", "-o", log.name]
        )
        assert outcome.status == 0, outcome
        calls = Counter(re.findall(r"^(\d+) +([a-z0-9_]+)\(", log.read(), re.MULTILINE))
    return {call: max((count for (_, name), count in calls.items() if name == call), default=0) for call in CALLS}


def trace(nursery: Nursery, store: Path, endpoint: str, options: list[str], *words: str) -> Outcome:
    """One install under strace."""
    [child] = nursery.start(store, endpoint, "stopped", *words)
    while Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)
    command = ["strace", "-f", "-p", str(child), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr is not None
        line = tracer.stderr.readline()
        if "attached" not in line:
            raise SystemExit(f"strace cannot attach: {line}")
        os.kill(child, signal.SIGCONT)
        alarm = threading.Timer(_LONGEST, os.kill, (child, signal.SIGTERM))
        alarm.start()
        outcome = nursery.outcomes()[0]
        alarm.cancel()
        tracer.stderr.read()
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, help="inject only so many faults")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    figures = run(arguments.sample, arguments.seed)
    facts: dict[str, object] = {"calls": figures.calls, "faults": sum(figures.outcomes.values()), **figures.outcomes}
    return report(f"system calls, seed {arguments.seed}", facts, figures.failures)


if __name__ == "__main__":
    sys.exit(main())
