#!/usr/bin/env python3
"""Many processes that start at once on an empty store: requests, downloads of each file, and time.

The time is compared with one process on an empty store, and with that many processes which only start and import what
a load needs: what is left over is what waiting for each other costs. The peer (`kernels`) does the same on its own
empty cache; --peer-python names its interpreter.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from kernelhub.serve import LocalHub

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from kernel_repository import trust, write_build

REPO = "acme/relu"
FILES: dict[str, str | bytes] = {
    "__init__.py": "from .layers import relu\n",
    "layers.py": "def relu(x):\n    return x.clamp(min=0)\n",
    "table.bin": bytes(range(256)) * 40_000,
}
# Without torch, whose import takes longer than everything else: the machine is described instead of detected.
IMPORTS = """
from pathlib import Path
import kernelhub.hub, kernelhub.loader
from kernelhub.api import load_kernel
from kernelhub.environment import Environment
from kernelhub.session import Session
"""
OURS = f"""{IMPORTS}
session = Session(token=False, environment=Environment.parse("torch=2.13,cpu=x86_64,os=linux,python=3.11"))
load_kernel("{REPO}@v1", session=session)
"""
PEER = f"import kernels\nkernels.get_kernel('{REPO}', version=1)\n"


def _run(python: str, code: str, count: int, home: Path, hub: LocalHub) -> tuple[float, int, list[str]]:
    """Seconds until all are done, how many failed, and the requests they made."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "KERNEL"))}
    environment = {**kept, "HF_HOME": str(home), "HF_ENDPOINT": hub.url, "OMP_NUM_THREADS": "1"}
    hub.clear()
    begun = time.perf_counter()
    started = [subprocess.Popen([python, "-c", code], env=environment, stderr=subprocess.DEVNULL) for _ in range(count)]
    failed = sum(process.wait() != 0 for process in started)
    seconds = time.perf_counter() - begun
    return seconds, failed, [request.path for request in hub.requests if "agent-harnesses" not in request.path]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="interpreter that has the package `kernels`; default: without the peer")
    parser.add_argument("--processes", type=int, default=32)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    count = arguments.processes
    with tempfile.TemporaryDirectory(prefix="kernelhub-processes-") as name:
        folder = Path(name)
        trust(folder / "hub", "acme")
        write_build(folder / "hub", REPO, "v1", "torch-cpu", FILES)
        with LocalHub(folder / "hub") as hub:
            _run(sys.executable, IMPORTS, 1, folder / "none", hub)
            start_one, start_all, one, seconds = [], [], [], []
            for number in range(arguments.runs):
                start_one.append(_run(sys.executable, IMPORTS, 1, folder / "none", hub)[0])
                start_all.append(_run(sys.executable, IMPORTS, count, folder / "none", hub)[0])
                took, _, alone = _run(sys.executable, OURS, 1, folder / f"one-{number}", hub)
                one.append(took)
                took, failed, requests = _run(sys.executable, OURS, count, folder / f"all-{number}", hub)
                seconds.append(took)
                _tell("kernelhub", count, took, failed, requests)
            first, start, every = (statistics.median(times) for times in (one, start_all, seconds))
            starting = statistics.median(start_one)
            print(f"one process: {len(alone)} requests, {first:.2f} s, of it {starting:.2f} s to start")
            goal = f"goal 1.5 x {first - starting:.2f} + {start:.2f} = {1.5 * (first - starting) + start:.2f} s"
            print(f"{count} processes: {every:.2f} s, of it {start:.2f} s to start; {goal}")
            if arguments.peer_python:
                _tell("kernels", count, *_run(arguments.peer_python, PEER, count, folder / "peer", hub))
    return 0


def _tell(who: str, count: int, seconds: float, failed: int, requests: list[str]) -> None:
    bodies = Counter(path for path in requests if "/resolve/" in path)
    most = max(bodies.values(), default=0)
    facts = f"{len(requests)} requests, each file at most {most} x, {failed} failed, {seconds:.2f} s"
    print(f"{who}, {count} processes: {facts}")


if __name__ == "__main__":
    sys.exit(main())
