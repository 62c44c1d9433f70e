#!/usr/bin/env python3
"""What loading a stored kernel again costs, beside `kernels` (the peer) and beside importing the bare files.

Over a local Hub: requests of a load by commit and by version when everything is stored, and the time of a load in a new
process over the time of importing the same files as a plain package. Only the load is timed, not the start of Python;
processes take turns, medians of all runs. The peer may live in another environment: --peer-python.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from kernelhub.serve import LocalHub

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from kernel_repository import trust, write_build

REPO = "acme/relu"
FILES: dict[str, str | bytes] = {
    "__init__.py": "from .layers import relu\n",
    "layers.py": "def relu(x):\n    return x.clamp(min=0)\n",
}
# Torch is imported before the clock starts, as in every program that uses kernels.
OURS = """
import sys, time, torch, kernelhub
from kernelhub import Session, load_kernel
session = Session(token=False)
begun = time.perf_counter()
load_kernel({request!r}, session=session)
print(time.perf_counter() - begun)
"""
PEER = """
import time, torch, kernels
begun = time.perf_counter()
kernels.get_kernel({repo!r}, {argument})
print(time.perf_counter() - begun)
"""
BARE = """
import sys, time, torch, importlib
sys.path.insert(0, {folder!r}); sys.dont_write_bytecode = True
begun = time.perf_counter()
importlib.import_module({package!r})
print(time.perf_counter() - begun)
"""


class Bench:
    """A Hub, an environment for the processes, and what they measured."""

    def __init__(self, folder: Path, hub: LocalHub, peer: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "KERNEL"))}
        self.environment = {**kept, "HF_HOME": str(folder / "home"), "HF_ENDPOINT": hub.url}
        self.hub = hub
        self.peer = peer

    def seconds(self, code: str, *, peer: bool = False) -> float:
        command = [self.peer if peer else sys.executable, "-c", code]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True)
        return float(done.stdout.split()[-1])

    def requests(self, code: str, *, peer: bool = False) -> int:
        """Requests of one more load, without those that huggingface_hub makes on its own account once a day."""
        self.seconds(code, peer=peer)
        self.hub.clear()
        self.seconds(code, peer=peer)
        return len([request for request in self.hub.requests if "agent-harnesses" not in request.path])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has the package `kernels`")
    parser.add_argument("--runs", type=int, default=9, help="processes of each kind")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="kernelhub-warm-") as name:
        folder = Path(name)
        trust(folder / "hub", "acme")
        build = write_build(folder / "hub", REPO, "v1", "torch-cpu", FILES)
        with LocalHub(folder / "hub") as hub:
            bench = Bench(folder, hub, arguments.peer_python)
            figures = _measure(bench, build, folder, arguments.runs)
    if arguments.json:
        print(json.dumps(figures, indent=2))
        return 0
    print("requests of a warm load   by commit   by version")
    for who in ("kernelhub", "kernels"):
        print(f"  {who:<24}{figures[f'{who} requests by commit']:>9}{figures[f'{who} requests by version']:>13}")
    for who in ("bare import", "kernelhub", "kernelhub, by commit", "kernels"):
        print(f"{who:<22}{figures[f'{who} ms']:8.2f} ms")
    ours, peer = (figures[f"{who} ms"] - figures["bare import ms"] for who in ("kernelhub", "kernels"))
    print(f"over the bare import: kernelhub {ours:.2f} ms, kernels {peer:.2f} ms, ratio {ours / peer:.3f}")
    return 0


def _measure(bench: Bench, build: Path, folder: Path, runs: int) -> dict[str, float]:
    by_version = OURS.format(request=f"{REPO}@v1")
    bench.seconds(by_version)
    commit = next(path.name for path in (folder / "home/kernelhub").glob("hubs/*/builds/*/*") if path.is_dir())
    by_commit = OURS.format(request=f"{REPO}@{commit}")
    peer_version = PEER.format(repo=REPO, argument="version=1")
    peer_commit = PEER.format(repo=REPO, argument=f"revision={commit!r}")
    package = folder / "bare" / "plain_package"
    package.parent.mkdir()
    package.symlink_to(build)
    bare = BARE.format(folder=str(package.parent), package=package.name)
    figures: dict[str, float] = {
        "kernelhub requests by commit": bench.requests(by_commit),
        "kernelhub requests by version": bench.requests(by_version),
        "kernels requests by commit": bench.requests(peer_commit, peer=True),
        "kernels requests by version": bench.requests(peer_version, peer=True),
    }
    cases = {
        "bare import": (bare, False),
        "kernelhub": (by_version, False),
        "kernelhub, by commit": (by_commit, False),
        "kernels": (peer_version, True),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(runs):
        for name, (code, peer) in cases.items():
            times[name].append(bench.seconds(code, peer=peer))
    return figures | {f"{name} ms": statistics.median(values) * 1e3 for name, values in times.items()}


if __name__ == "__main__":
    sys.exit(main())
