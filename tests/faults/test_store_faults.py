"""A sample of the store's faults with a fixed seed; the scripts beside this file run them at full size."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import bitflips
import kill
import processes
import syscalls
from kernel_repository import write_build
from scene import REPO, Nursery, problems, scene

WRITES = "mkdir,mkdirat,rename,renameat,renameat2,unlink,unlinkat,rmdir,chmod,fchmod,ftruncate,utimensat,link,symlink"


def can_trace() -> bool:
    """Is there a strace that may attach to processes here?"""
    if shutil.which("strace") is None:
        return False
    return subprocess.run(["strace", "-f", "-o", os.devnull, "true"], capture_output=True).returncode == 0


traced = pytest.mark.skipif(not can_trace(), reason="needs strace, and the right to trace")


def test_r_1_killed_processes_leave_nothing_torn_lost_or_behind() -> None:
    assert kill.run(trials=6, seed=2).failures == []


@traced
def test_r_2_r_6_failing_system_calls_are_typed_errors_and_leave_nothing_torn_lost_or_behind() -> None:
    figures = syscalls.run(sample=24, seed=3)
    assert figures.failures == []
    assert figures.calls > 100


def test_r_24_processes_that_start_at_once_download_each_file_once() -> None:
    figures = processes.run(12, 1, locks=True)
    assert figures.failures == []
    assert figures.most_requests <= 3 + 4 + 12


def test_r_25_kernels_that_share_dependencies_come_once_each_without_a_deadlock() -> None:
    """Eight kernels that need the same two, half of them in the other order, in two processes each."""
    with scene() as (folder, hub), Nursery() as nursery:
        shared = ["acme/shared-a", "acme/shared-b"]
        kernels = [f"acme/kernel-{number}" for number in range(8)]
        for number, name in enumerate((*shared, *kernels)):
            needs = [] if name in shared else shared[:: 1 if number % 2 else -1]
            depends = {"kernel-depends": [{"repo-id": need, "version": 1} for need in needs]}
            files = {"__init__.py": "from .table import ONE, TWO\n", "table.py": f"ONE, TWO = 1, 2  # {name}\n"}
            write_build(folder / "repositories", name, "v1", "torch-cpu", files, metadata_overrides=depends)
        assert nursery.run(folder / "warm-up", hub.url).status == 0
        hub.clear()
        nursery.start(folder / "store", hub.url, "load", *kernels, count=16)
        assert [outcome for outcome in nursery.outcomes() if outcome.status] == []
        bodies = Counter(request.path for request in hub.requests if "/resolve/" in request.path)
        assert len(bodies) == 10 * 3
        assert set(bodies.values()) == {1}


@traced
@pytest.mark.parametrize(
    ("calls", "works"),
    [("symlink,symlinkat,link,linkat", True), ("rename,renameat,renameat2", False)],
    ids=["no links", "no renaming"],
)
def test_r_32_what_a_file_system_cannot_do_is_done_without_or_told(calls: str, works: bool) -> None:
    """REF huggingface/huggingface_hub#1133, #3063: moves and links that a file system does not have."""
    with scene() as (folder, hub), Nursery() as nursery:
        store = folder / "store"
        options = ["-e", f"trace={calls}", "-e", f"inject={calls}:error=EPERM", "-o", os.devnull]
        outcome = syscalls.trace(nursery, store, hub.url, options, "load")
        assert outcome.status == (0 if works else 3), outcome
        if not works:
            assert re.match(rf"CacheError: kernel store {store}: .*Operation not permitted", outcome.said)
            assert problems(store, hub.url, after_recovery=False) == []
            assert nursery.run(store, hub.url, "load").status == 0
        assert problems(store, hub.url, after_recovery=True) == []


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_r_30_without_locks_nothing_is_corrupt() -> None:
    """REF huggingface/huggingface_hub#4306: locks that succeed for everybody, and two writers in one partial file."""
    assert processes.run(8, 1, locks=False).failures == []


def test_r_34_r_35_every_flipped_bit_is_found() -> None:
    figures = bitflips.run(flips=60, seed=4)
    assert figures.failures == []
    assert figures.found == 60


@traced
def test_r_7_a_warm_load_from_a_read_only_mount_writes_nothing() -> None:
    """REF huggingface/huggingface_hub#2797, #4829.

    REF huggingface/huggingface_hub#4829; vllm-project/llm-compressor#2984: a file rewritten at each load was read while
    empty.
    """
    with scene() as (folder, hub), Nursery() as nursery:
        store = folder / "store"
        assert nursery.run(store, hub.url).status == 0
        log = folder / "log"
        options = ["-o", str(log), "-e", f"trace=openat,{WRITES}"]
        outcome = syscalls.trace(nursery, store, hub.url, options, "load", "offline")
        assert outcome.status == 0, outcome
        lines = [line for line in log.read_text().splitlines() if str(store) in line]
        opened = [line for line in lines if "openat(" in line]
        assert opened
        assert [line for line in opened if "O_RDONLY" not in line] == []
        assert [line for line in lines if line not in opened] == []


def test_r_8_a_store_that_cannot_be_written_is_told_before_a_download() -> None:
    with scene() as (folder, hub), Nursery() as nursery:
        view, store = folder / "view", folder / "store"
        assert nursery.run(folder / "warm", hub.url).status == 0
        for path in (view, store):
            path.mkdir(mode=0o700)
        bind = subprocess.run(["mount", "--bind", store, view], capture_output=True)
        if bind.returncode or subprocess.run(["mount", "-o", "remount,ro,bind", view], capture_output=True).returncode:
            pytest.skip("needs the right to mount a folder read-only")  # root's, in most containers too
        try:
            hub.clear()
            outcome = nursery.run(view, hub.url)
            assert outcome.status == 3
            assert outcome.said.startswith(f"CacheError: kernel store {view}: cannot be used (Read-only file system)")
            bodies = [request.path for request in hub.requests if "/resolve/" in request.path]
            assert [path for path in bodies if not path.endswith("metadata.json")] == []
        finally:
            subprocess.run(["umount", view], check=True)


def test_a_store_works_at_another_path_and_without_any_network() -> None:
    with scene() as (folder, hub), Nursery() as nursery:
        store = folder / "store"
        assert nursery.run(store, hub.url).status == 0
        hub.clear()
        moved = Path(shutil.copytree(store, folder / "moved to" / "another place"))
        shutil.rmtree(store)
        for words in (("load", "offline"), ("load",)):
            outcome = nursery.run(moved, hub.url, *words)
            assert outcome.status == 0, outcome
        assert hub.requests == []
        assert problems(moved, hub.url, after_recovery=True) == []
        assert REPO.replace("/", "--") in {path.name for path in moved.glob("hubs/*/builds/*")}


def test_r_5_a_full_disk_is_told_and_what_is_stored_still_loads() -> None:
    with scene() as (folder, hub), Nursery() as nursery:
        assert nursery.run(folder / "warm", hub.url).status == 0
        disk = folder / "disk"
        disk.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk], capture_output=True).returncode:
            pytest.skip("needs the right to mount a file system")  # root's, in most containers too
        try:
            assert nursery.run(disk / "store", hub.url).status == 0
            (disk / "filling").write_bytes(bytes(shutil.disk_usage(disk).free))
            assert nursery.run(disk / "store", hub.url, "load").status == 0
            shutil.rmtree(disk / "store" / "hubs")
            outcome = nursery.run(disk / "store", hub.url)
            assert "CacheFullError" in outcome.said, outcome
        finally:
            subprocess.run(["umount", disk], check=True)
