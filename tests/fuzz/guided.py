#!/usr/bin/env python3
"""The same targets driven by atheris, which keeps inputs that reach new code; needs `pip install atheris`.

    python tests/fuzz/guided.py metadata -runs=1000000 -seed=1

Further options are libFuzzer's. A failure, a minute for one input (machines pause) or 512 MiB in all end the run; the
input is then written to the current folder, and the figures at the end tell the slowest one.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

_LIMITS = ("-timeout=60", "-rss_limit_mb=512", "-print_final_stats=1")


def main() -> int:
    atheris = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["kernelhub", "elftools", "tomllib", "json"]):
        targets = importlib.import_module("target").TARGETS
    name, *options = sys.argv[1:]
    target = targets[name]
    with tempfile.TemporaryDirectory(prefix="kernelhub-fuzz-") as corpus:
        for number, body in enumerate(target.mutator.corpus):
            Path(corpus, str(number)).write_bytes(body)
        child = os.fork()  # libFuzzer ends its process
        if not child:
            atheris.Setup([sys.argv[0], *_LIMITS, *options, corpus], target.read)
            atheris.Fuzz()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    sys.exit(main())
