#!/usr/bin/env python3
"""How long a full check of a stored build takes, and how much memory: every file hashed again.

    python benchmarks/verify.py                   200 MB, as one library and three small files
    python benchmarks/verify.py --megabytes 4096  the memory stays the same

The speed of hashing the same bytes in memory is shown beside it: more than that is reading and bookkeeping.
"""

from __future__ import annotations

import argparse
import hashlib
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

from kernelhub.store import FILES, Manifest, Store, StoredFile
from kernelhub.verify import hash_file, rehash

_BLOCK = bytes(range(256)) * 4096  # 1 MiB


def _fill(store: Store, megabytes: int) -> None:
    with store.staging() as staged:
        folder = staged / FILES
        folder.mkdir()
        with (folder / "_kernel.abi3.so").open("wb") as file:
            for _ in range(megabytes):
                file.write(_BLOCK)
        for name in ("__init__.py", "layers.py", "metadata.json"):
            (folder / name).write_text("# small\n" * 100)
        paths = sorted(folder.iterdir())
        files = tuple(StoredFile(path.name, path.stat().st_size, hash_file(path)) for path in paths)
        store.publish(staged, Manifest("acme/large", "c" * 40, "torch-cpu", store.endpoint, files))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to put the store; default: the temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kernelhub-verify-", dir=arguments.folder) as folder:
        store = Store(Path(folder) / "store", "https://hub.example")
        _fill(store, arguments.megabytes)
        [build] = store.builds()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        times, bare = [], []
        for _ in range(arguments.runs):
            begun = time.perf_counter()
            rehash(build)
            times.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            hasher = hashlib.sha256()
            for _ in range(arguments.megabytes):
                hasher.update(_BLOCK)
            bare.append(time.perf_counter() - begun)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    seconds, hashing = statistics.median(times), statistics.median(bare)
    print(f"verify {arguments.megabytes} MiB: {seconds * 1e3:.0f} ms; hashing alone {hashing * 1e3:.0f} ms", end="")
    print(f" (ratio {seconds / hashing:.2f}); {grown / 1024:.1f} MiB more memory")
    return 0


if __name__ == "__main__":
    sys.exit(main())
