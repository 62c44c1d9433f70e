#!/usr/bin/env python3
"""The long form of two tests: a writer that swaps files during strict loads, and damaged libraries for the ELF reader.

scripts/stress_loading.py swap --count 10000
scripts/stress_loading.py elf --count 1000000 --seed 1 LIBRARY...
"""

from __future__ import annotations

import argparse
import base64
import builtins
import hashlib
import io
import json
import random
import resource
import sys
import tempfile
import threading
import time
from pathlib import Path

from kernelhub import Session
from kernelhub.elf import NotALibrary, read_library
from kernelhub.errors import DigestMismatch
from kernelhub.loader import PREFIX, load
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


def damaged(library: bytes, chance: random.Random) -> bytes:
    data = bytearray(library)
    for _ in range(chance.choice((1, 2, 8, 64))):
        at = chance.randrange(chance.choice((64, 1024, len(data))))
        data[at] = chance.choice((0, 1, 0x7F, 0xFF, chance.randrange(256)))
    if chance.random() < 0.1:
        del data[chance.randrange(len(data)) :]
    return bytes(data)


def stress_elf(libraries: list[Path], count: int, seed: int) -> bool:
    chance, bodies = random.Random(seed), [path.read_bytes() for path in libraries]
    refused, slowest = 0, 0.0
    for _ in range(count):
        data = damaged(chance.choice(bodies), chance)
        start = time.process_time()
        try:
            read_library(io.BytesIO(data))
        except NotALibrary:
            refused += 1
        slowest = max(slowest, time.process_time() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{count} damaged libraries: {refused} refused, slowest {slowest * 1e3:.0f} ms, peak memory {peak} MiB")
    return slowest < 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["swap", "elf"])
    parser.add_argument("libraries", nargs="*", type=Path, help="elf: intact libraries to start from")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_intermixed_args()
    if arguments.what == "swap":
        return 0 if stress_swap(arguments.count) else 1
    return (
        0 if stress_elf(arguments.libraries or [Path(sys.executable).resolve()], arguments.count, arguments.seed) else 1
    )


if __name__ == "__main__":
    sys.exit(main())
