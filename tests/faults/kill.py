#!/usr/bin/env python3
"""Kill an installing process at a random moment, again and again (R1, R27).

After each kill the store is inspected (nothing torn), the next run has to succeed, and it has to leave nothing behind.
Every fourth trial kills one of three processes that install at the same time; the others have to succeed.

    python tests/faults/kill.py --trials 500 --seed 1
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

from scene import Nursery, problems, report, scene

if TYPE_CHECKING:
    from pathlib import Path


class Figures(NamedTuple):
    killed: int
    finished_before: int
    failures: list[str]


def run(trials: int, seed: int) -> Figures:
    """Kill ``trials`` processes before they are done; how many were done too early, and what went wrong."""
    dice = random.Random(seed)
    killed = finished = 0
    failures: list[str] = []
    with scene() as (folder, hub), Nursery() as nursery:
        usual = statistics.median(_seconds(nursery, folder / f"measured-{number}", hub.url) for number in range(7))
        while killed < trials:
            trial = killed + finished
            store = folder / f"store-{trial}"
            victim, *_ = nursery.start(store, hub.url, count=3 if trial % 4 == 0 else 1)
            time.sleep(dice.uniform(0, 0.9 * usual))
            os.kill(victim, signal.SIGKILL)
            first, *rest = nursery.outcomes()
            killed += first.status == -signal.SIGKILL
            finished += first.status == 0
            failures += [f"trial {trial}: bystander: {outcome}" for outcome in rest if outcome.status]
            failures += [f"trial {trial}: {problem}" for problem in problems(store, hub.url, after_recovery=False)]
            recovered = nursery.run(store, hub.url, "load")
            if recovered.status:
                failures.append(f"trial {trial}: the next run failed: {recovered.said}")
            nursery.run(store, hub.url)
            failures += [f"trial {trial}: {problem}" for problem in problems(store, hub.url, after_recovery=True)]
            hub.clear()
            shutil.rmtree(store)
    return Figures(killed, finished, failures)


def _seconds(nursery: Nursery, store: Path, endpoint: str) -> float:
    begun = time.monotonic()
    nursery.run(store, endpoint)
    return time.monotonic() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    figures = run(arguments.trials, arguments.seed)
    kinds = {kind: sum(f": {kind}" in failure for failure in figures.failures) for kind in ("torn", "lost", "leftover")}
    facts: dict[str, object] = {"killed": figures.killed, "done before the kill": figures.finished_before, **kinds}
    return report(f"kill -9, seed {arguments.seed}", facts, figures.failures)


if __name__ == "__main__":
    sys.exit(main())
