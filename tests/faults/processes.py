#!/usr/bin/env python3
"""Many processes that start at once on an empty store (R24, R30): none fails, nothing is corrupt, each file comes once.

With --no-locks, a preloaded library makes flock succeed for everybody, as some cluster file systems do: then files may
come more than once, and still nothing may fail or be corrupt.

    python tests/faults/processes.py --processes 64 --rounds 20
    python tests/faults/processes.py --processes 16 --rounds 20 --no-locks
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from scene import FILES, Nursery, problems, report, scene

if TYPE_CHECKING:
    from collections.abc import Iterator

FAKE_FLOCK = "int flock(int handle, int operation) { (void)handle; (void)operation; return 0; }\n"


class Figures(NamedTuple):
    failed: int
    most_requests: int
    most_downloads: int
    failures: list[str]


def run(processes: int, rounds: int, *, locks: bool) -> Figures:
    """Start ``processes`` at once, ``rounds`` times, each time on an empty store."""
    failed = most_requests = most_downloads = 0
    failures: list[str] = []
    with contextlib.ExitStack() as stack:
        folder, hub = stack.enter_context(scene())
        settings = {} if locks else {"LD_PRELOAD": str(stack.enter_context(_fake_flock()))}
        nursery = stack.enter_context(Nursery(**settings))
        for number in range(rounds):
            nursery.run(folder / f"warm-up-{number}", hub.url) if number == 0 else None
            hub.clear()
            store = folder / f"store-{number}"
            nursery.start(store, hub.url, "load", count=processes)
            outcomes = nursery.outcomes()
            bad = [outcome for outcome in outcomes if outcome.status]
            failed += len(bad)
            failures += [f"round {number}: {outcome}" for outcome in bad]
            failures += [f"round {number}: {problem}" for problem in problems(store, hub.url, after_recovery=True)]
            paths = [request.path for request in hub.requests if "agent-harnesses" not in request.path]
            downloads = Counter(path for path in paths if "/resolve/" in path)
            most_requests = max(most_requests, len(paths))
            most_downloads = max(most_downloads, *downloads.values())
            if locks and (len(downloads) != len(FILES) + 1 or set(downloads.values()) != {1}):
                failures.append(f"round {number}: downloads {dict(downloads)}")
    return Figures(failed, most_requests, most_downloads, failures)


@contextlib.contextmanager
def _fake_flock() -> Iterator[Path]:
    """A library whose flock does nothing."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "flock.c", Path(folder) / "flock.so"
        source.write_text(FAKE_FLOCK)
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
        yield library


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-locks", action="store_true", help="flock succeeds for everybody")
    arguments = parser.parse_args()
    figures = run(arguments.processes, arguments.rounds, locks=not arguments.no_locks)
    facts: dict[str, object] = {
        "processes": arguments.processes,
        "rounds": arguments.rounds,
        "failed": figures.failed,
        "requests at most in a round": figures.most_requests,
        "downloads at most of one file in a round": figures.most_downloads,
    }
    return report("processes without locks" if arguments.no_locks else "processes", facts, figures.failures)


if __name__ == "__main__":
    sys.exit(main())
