#!/usr/bin/env python3
"""What the first load of a kernel costs, against ``kernels`` (the peer): requests, and time when each request is slow.

    .venv/bin/python benchmarks/first_load.py --peer-python PYTHON

Both load the same build from the same Hub on this machine, each run in a new process with an empty store. The process
has loaded another kernel before, so that imports are not measured; the time is that of the one call. huggingface_hub
may ask for /api/agent-harnesses on its own account, once a day: those requests are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from kernel_repository import trust, write_build

from kernelhub.serve import LocalHub

if TYPE_CHECKING:
    from starlette.requests import Request

LOAD = """
import sys, time
{imports}
load("other/warm-up")
print("ready", flush=True)
sys.stdin.readline()
begun = time.perf_counter()
load("acme/relu")
print(time.perf_counter() - begun, flush=True)
"""
OURS = LOAD.format(imports="from kernelhub import load_kernel\nload = lambda name: load_kernel(f'{name}@v1')")
PEERS = LOAD.format(imports="from kernels import get_kernel\nload = lambda name: get_kernel(name, version=1)")


class Run(NamedTuple):
    """One first load: seconds, and the requests that it made."""

    seconds: float
    requests: list[str]


class Slow:
    """Adds a delay to each request."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def __call__(self, request: Request) -> None:
        if "agent-harnesses" not in request.url.path:
            await asyncio.sleep(self.seconds)


def run(python: str, code: str, hub: LocalHub, slow: Slow, delay: float) -> Run:
    with tempfile.TemporaryDirectory(prefix="kernelhub-first-load-") as home:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "KERNEL"))}
        environment = kept | {"HF_HOME": home, "HF_ENDPOINT": hub.url, "XDG_CONFIG_HOME": home}
        command = [python, "-c", code]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        with subprocess.Popen(command, env=environment, cwd=home, **pipes) as process:  # type: ignore[call-overload]
            if process.stdout.readline() != "ready\n":
                raise SystemExit(f"{python} could not load the kernel")
            hub.clear()
            slow.seconds = delay
            process.stdin.write("\n")
            process.stdin.flush()
            seconds = float(process.stdout.readline())
            slow.seconds = 0.0
        asked = [f"{record.method} {record.path}" for record in hub.requests if "agent-harnesses" not in record.path]
        return Run(seconds, asked)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has the package `kernels`")
    parser.add_argument("--runs", type=int, default=5, help="processes per case")
    parser.add_argument("--delay", type=float, default=50.0, help="milliseconds added to each request")
    parser.add_argument("--files", type=int, default=5, help="files of the build, metadata.json included")
    parser.add_argument("--list", action="store_true", help="list the requests of one run each")
    arguments = parser.parse_args()
    cases = {"kernelhub": (sys.executable, OURS), "kernels": (arguments.peer_python, PEERS)}
    with tempfile.TemporaryDirectory(prefix="kernelhub-first-load-") as folder:
        root = Path(folder)
        for name in ("other/warm-up", "acme/relu"):
            trust(root, name.partition("/")[0])
            parts = {f"part{i}.py": f"PART = {i}, {name!r}\n" for i in range(arguments.files - 2)}
            write_build(root, name, "v1", "torch-cpu", {"__init__.py": f"NAME = {name!r}\n", **parts})
        slow = Slow()
        with LocalHub(root, hook=slow) as hub:
            plain = {name: run(*case, hub, slow, 0.0) for name, case in cases.items()}
            runs: dict[str, list[Run]] = {name: [] for name in cases}
            for _ in range(arguments.runs):
                for name, case in cases.items():
                    runs[name].append(run(*case, hub, slow, arguments.delay / 1e3))
    print(f"a build of {arguments.files} files, {arguments.runs} runs each, medians")
    print(f"{'':<12}{'requests':>10}{'no delay, ms':>14}{f'{arguments.delay:g} ms each, ms':>18}")
    slowed = {name: statistics.median(one.seconds for one in runs[name]) for name in cases}
    for name in cases:
        counts = {len(one.requests) for one in (plain[name], *runs[name])}
        requests = "/".join(map(str, sorted(counts)))
        print(f"{name:<12}{requests:>10}{plain[name].seconds * 1e3:>14.1f}{slowed[name] * 1e3:>18.1f}")
    print(f"ratio of the times with the delay: {slowed['kernelhub'] / slowed['kernels']:.3f}")
    if arguments.list:
        for name in cases:
            print(f"\n{name}:", *plain[name].requests, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
