#!/usr/bin/env python3
"""How long `import kernelhub` takes over an empty interpreter, as a ratio of `import kernels` (the peer).

Each import runs in new processes, taking turns, so that both meet the same machine; medians of all runs. The peer may
live in another environment: --peer-python names its interpreter (default: this one).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time


def seconds(python: str, statement: str) -> float:
    start = time.perf_counter()
    subprocess.run([python, "-c", statement], check=True)
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has the package `kernels`")
    parser.add_argument("--runs", type=int, default=15, help="processes per statement")
    arguments = parser.parse_args()

    cases = {
        "empty (ours)": (sys.executable, "pass"),
        "kernelhub": (sys.executable, "import kernelhub"),
        "empty (peer's)": (arguments.peer_python, "pass"),
        "kernels": (arguments.peer_python, "import kernels"),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for python, statement in cases.values():
        seconds(python, statement)  # fill the file cache
    for _ in range(arguments.runs):
        for name, (python, statement) in cases.items():
            times[name].append(seconds(python, statement))
    median = {name: statistics.median(values) for name, values in times.items()}
    ours = median["kernelhub"] - median["empty (ours)"]
    peer = median["kernels"] - median["empty (peer's)"]
    for name, value in median.items():
        print(f"{name:<16}{value * 1e3:8.1f} ms")
    print(f"import kernelhub {ours * 1e3:.1f} ms, import kernels {peer * 1e3:.1f} ms, ratio {ours / peer:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
