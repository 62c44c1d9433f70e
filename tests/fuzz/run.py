#!/usr/bin/env python3
"""Feed one reader with damaged inputs: no exception but the declared ones, below 1 s and 256 MiB an input.

    python tests/fuzz/run.py metadata --executions 1000000 --seed 1
    python tests/fuzz/run.py elf --seed 1 --only 1234          that input again, with its traceback
    python tests/fuzz/run.py elf --seed 1 --only 1234 --show   its bytes

Linux only: the limits are the system's.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import campaign
from target import TARGETS

_STEP = 100_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--executions", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="the number of one input")
    parser.add_argument("--show", action="store_true", help="with --only: write its bytes and do nothing else")
    arguments = parser.parse_args()
    target = TARGETS[arguments.target]
    if arguments.only is not None and arguments.show:
        sys.stdout.buffer.write(target.mutator.make(arguments.seed, arguments.only))
        return 0
    if arguments.only is not None:
        outcome = campaign.run(target, arguments.seed, 1, first=arguments.only)
    else:
        outcome = _all(arguments.target, arguments.seed, arguments.executions)
    _report(arguments.target, arguments.seed, outcome)
    return 1 if outcome.failures else 0


def _all(name: str, seed: int, executions: int) -> campaign.Outcome:
    outcome, start = campaign.Outcome(), time.monotonic()
    for first in range(0, executions, _STEP):
        outcome.add(campaign.run(TARGETS[name], seed, min(_STEP, executions - first), first=first))
        speed = outcome.executions / (time.monotonic() - start)
        print(f"{outcome.executions} done, {len(outcome.failures)} failed, {speed:.0f} a second", flush=True)
    return outcome


def _report(name: str, seed: int, outcome: campaign.Outcome) -> None:
    for number, problem in list(outcome.failures.items())[:20]:
        print(f"--- input {number}: {problem}")
    print(
        f"{name}, seed {seed}: {outcome.executions} executions, {outcome.accepted} accepted, "
        f"{len(outcome.failures)} failed; slowest {outcome.slowest * 1e3:.0f} ms of processor time "
        f"(input {outcome.slowest_number}); {outcome.memory / (1 << 20):.1f} MiB more memory at most"
    )


if __name__ == "__main__":
    sys.exit(main())
