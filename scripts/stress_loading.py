#!/usr/bin/env python3
"""The long form of a test: a writer swaps the files of a build during strict loads, and never gets its code run.

scripts/stress_loading.py --count 10000
"""

from __future__ import annotations

import argparse
import base64
import builtins
import hashlib
import json
import sys
import tempfile
import threading
from pathlib import Path

from kernelhub import Session
from kernelhub.errors import DigestMismatch
from kernelhub.loader import load
from kernelhub.package import PREFIX
from kernelhub.request import KernelRequest

GOOD = {"__init__.py": "from .part import WHO\n", "part.py": "WHO = 'good'\n"}
EVIL = "import builtins\nbuiltins.kernelhub_stress_evil = True\nWHO = 'evil'\n"


def write_build(folder: Path) -> None:
    hashes = {path: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for path, text in GOOD.items()}
    facts = {"name": "stress", "id": "_stress", "version": 1, "license": "Apache-2.0", "backend": {"type": "cpu"}}
    folder.mkdir()
    for path, text in GOOD.items():
        (folder / path).write_text(text)
    digest = {"algorithm": "sha256", "files": hashes}
    (folder / "metadata.json").write_text(json.dumps({**facts, "digest": digest}))


def swap(folder: Path, stop: threading.Event) -> None:
    """Put other code in place of the files, in turns by rename and by writing into them, and take it back."""
    turn = 0
    while not stop.wait(0.0002):
        turn += 1
        for path, text in GOOD.items():
            if turn % 3 == 0:
                (folder / path).write_text(EVIL)
                (folder / path).write_text(text)
            else:
                (folder.parent / "swap").write_text(EVIL if turn % 3 == 1 else text)
                (folder.parent / "swap").rename(folder / path)


def stress_swap(count: int) -> bool:
    with tempfile.TemporaryDirectory(prefix="kernelhub-stress-") as root:
        folder = Path(root) / "torch-cpu"
        write_build(folder)
        session = Session(cache_dir=Path(root) / "store", strict=True, lockfile=False)
        build = session.obtain(session.resolve(KernelRequest.parse(str(folder))))
        stop = threading.Event()
        writer = threading.Thread(target=swap, args=(folder, stop))
        writer.start()
        loaded = refused = 0
        try:
            for _ in range(count):
                for name in [name for name in sys.modules if name.startswith(PREFIX)]:
                    del sys.modules[name]
                try:
                    loaded += load(build).WHO == "good"
                except DigestMismatch:
                    refused += 1
        finally:
            stop.set()
            writer.join()
    evil = hasattr(builtins, "kernelhub_stress_evil")
    print(f"{count} strict loads: {loaded} ran the verified code, {refused} were refused, other code ran: {evil}")
    return not evil and loaded + refused == count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    return 0 if stress_swap(parser.parse_args().count) else 1


if __name__ == "__main__":
    sys.exit(main())
