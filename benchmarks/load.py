#!/usr/bin/env python3
"""What verification, preflight and the strict mode add to the time of importing a kernel.

- small: a pure-Python kernel from a warm store, against `import` of the same files (medians).
- strict: the same, and a build with 200 MB of native libraries, in the strict mode.
- preflight: a native library of 50 MB, most of it device code as in builds for CUDA, with 300 symbols of torch, that
  registers operators under its id, in new processes that have torch already: read in place, and in a store, where the
  second process finds the verdict of the first.

Needs g++ for the library. Numbers are milliseconds.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

import torch

from kernelhub import Session
from kernelhub.elf import defined_symbols
from kernelhub.loader import load
from kernelhub.package import PREFIX
from kernelhub.request import KernelRequest
from kernelhub.serve import LocalHub

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernelhub.verify import VerifiedBuild

SMALL = {"__init__.py": b"from . import layers\n", "layers.py": b"class Layer:\n    pass\n"}
ID = "_native_cpu_0a1b2c3"  # as builders make it: name, backend and a hash
BULK = r"""asm(".section .nv_fatbin,\"a\"\n.incbin \"$path\"\n.text");"""
# The collection of garbage that importing torch leaves due is not what is measured.
PREFLIGHT = """
import gc, sys, time
import torch
gc.collect()
start = time.perf_counter()
from pathlib import Path
from kernelhub.host import this_host
from kernelhub.preflight import preflight_folder
imported = time.perf_counter()
this_host()
asked = time.perf_counter()
report = preflight_folder("bench", "torch-cpu", Path(sys.argv[1]), names=sys.argv[2:])
first = time.perf_counter()
assert report.refused is None and report.libraries[0].namespaces, report
preflight_folder("bench", "torch-cpu", Path(sys.argv[1]), names=sys.argv[2:])
print(imported - start, asked - imported, first - asked, time.perf_counter() - first)
"""
STORED = """
import gc, sys, time
import torch
from pathlib import Path
from kernelhub import Session
from kernelhub.request import KernelRequest
session = Session(cache_dir=Path(sys.argv[1]), endpoint=sys.argv[2], token=False, lockfile=False)
build = session.obtain(session.resolve(KernelRequest.parse("bench/native"), backend="cpu"))
gc.collect()
start = time.perf_counter()
from kernelhub.preflightrecord import judge
from kernelhub.source import FolderSource
report = judge(build, FolderSource(build.folder))
judged = time.perf_counter()
again = judge(build, FolderSource(build.folder))
print(judged - start, time.perf_counter() - judged)
assert report.refused is None and report.libraries[0].namespaces, report
"""


def publish(root: Path, name: str, files: dict[str, bytes], id: str = "") -> None:
    build = root / "bench" / name / "v1" / "build" / "torch-cpu"
    hashes = {path: base64.b64encode(hashlib.sha256(body).digest()).decode() for path, body in files.items()}
    metadata = {
        "name": name,
        "id": id or f"_{name}",
        "version": 1,
        "license": "Apache-2.0",
        "backend": {"type": "cpu"},
        "digest": {"algorithm": "sha256", "files": hashes},
    }
    build.mkdir(parents=True)
    for path, body in {"metadata.json": json.dumps(metadata).encode(), **files}.items():
        (build / path).write_bytes(body)
    (root / "bench" / "organization.json").write_text('{"trustedKernelPublisher": true}')


def forget() -> None:
    for name in [name for name in sys.modules if name.startswith((PREFIX, "bare_kernel"))]:
        del sys.modules[name]


def median(action: Callable[[], object], runs: int) -> float:
    times = []
    for _ in range(runs):
        forget()
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def obtain(session: Session, name: str) -> VerifiedBuild:
    return session.obtain(session.resolve(KernelRequest.parse(f"bench/{name}")))


def show(what: str, value: float) -> None:
    print(f"{what:<72}{value:9.2f} ms")


def bench_loads(folder: Path, runs: int, megabytes: int) -> None:
    root = folder / "hub"
    publish(root, "small", SMALL)
    publish(root, "large", {"__init__.py": b"", "_large.abi3.so": os.urandom(1 << 20) * megabytes})
    bare = folder / "bare" / "bare_kernel"
    bare.mkdir(parents=True)
    for path, body in SMALL.items():
        (bare / path).write_bytes(body)
    sys.path.insert(0, str(bare.parent))
    sys.dont_write_bytecode = True
    with LocalHub(root) as hub:
        options = {"cache_dir": folder / "store", "endpoint": hub.url, "token": False}
        plain, strict = Session(**options), Session(**options, strict=True)
        large = obtain(strict, "large")
        load(obtain(plain, "small"))
        base = median(lambda: importlib.import_module("bare_kernel"), runs)
        loaded = median(lambda: load(obtain(plain, "small")), runs)
        sealed = median(lambda: load(obtain(strict, "small")), runs)
    show("import of two files, without bytecode", base)
    show("the same: resolved, verified, loaded from a warm store; overhead", loaded - base)
    show("the same in the strict mode; overhead", sealed - base)
    from kernelhub.source import SealedSource  # noqa: PLC0415  # what is measured next

    times = []
    for _ in range(5):
        start = time.perf_counter()
        source = SealedSource(large)
        times.append(time.perf_counter() - start)
        os.close(int(Path(source.library(large.folder / "_large.abi3.so")).name))
    show(f"strict mode: {megabytes} MB copied, hashed and sealed (median of 5)", statistics.median(times) * 1e3)
    show(f"strict mode: {megabytes} MB copied, hashed and sealed (best of 5)", min(times) * 1e3)


def bench_preflight(folder: Path, runs: int) -> None:
    with (Path(torch.__file__).parent / "lib" / "libtorch_cpu.so").open("rb") as file:
        names = sorted(name for name in defined_symbols(file) if name.startswith(("_ZN2at", "_ZN3c10")))
    step = max(1, len(names) // 300)
    used = ["aoti_torch_library_init_def", *names[::step][:300]]
    calls = [f'extern "C" void f{at}() asm("{name}");' for at, name in enumerate(used)]
    uses = "".join(f"f{at}();" for at in range(len(calls)))
    (folder / "data").write_bytes(os.urandom(50 << 20))
    source = folder / "large.cpp"
    bulk = Template(BULK).substitute(path=folder / "data")
    name = f'extern "C" const char *name() {{ return "{ID}"; }}'
    source.write_text("\n".join([*calls, bulk, name, f'extern "C" void PyInit__large() {{ {uses} }}']))
    target = folder / "build" / "_large.abi3.so"
    target.parent.mkdir()
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(target), str(source), "-lstdc++"], check=True)
    rows = []
    for _ in range(runs):
        command = [sys.executable, "-c", PREFLIGHT, str(target.parent), ID]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows.append([float(part) * 1e3 for part in told.split()])
    labels = [
        "preflight: importing kernelhub's part, once a process",
        "preflight: asking this process (and importing pyelftools), once a process",
        f"preflight: a library of {target.stat().st_size >> 20} MB with {len(calls)} symbols of torch, first sight",
        "preflight: the same library again",
    ]
    for label, column in zip(labels, zip(*rows, strict=True), strict=True):
        show(label, statistics.median(column))
    bench_stored(folder, target, runs)


def bench_stored(folder: Path, library: Path, runs: int) -> None:
    root = folder / "native"
    publish(root, "native", {"__init__.py": b"", library.name: library.read_bytes()}, id=ID)
    rows = []
    with LocalHub(root) as hub:
        for run in range(runs):
            command = [sys.executable, "-c", STORED, str(folder / f"store-{run}"), hub.url]
            told = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(2)]
            rows.append([float(part) * 1e3 for line in told for part in line.split()])
    labels = ("first process", "again in it", "any later process", "again in that")
    for label, column in zip(labels, zip(*rows, strict=True), strict=True):
        show(f"preflight: the same library in a store, {label}", statistics.median(column))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=30, help="loads of the small kernel")
    parser.add_argument("--processes", type=int, default=3, help="new processes for the preflight")
    parser.add_argument("--megabytes", type=int, default=200, help="size of the large build")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kernelhub-bench-") as folder:
        bench_loads(Path(folder), arguments.runs, arguments.megabytes)
        bench_preflight(Path(folder), arguments.processes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
