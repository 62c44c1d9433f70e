"""Loads go on while other processes prune, replace and damage what is loaded (R26, R39, R51)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from scene import Nursery, problems, scene

from kernelhub import lease
from kernelhub.errors import CacheError
from kernelhub.inventory import stored_kernels
from kernelhub.store import Store


def test_r_26_r_51_loads_succeed_while_everything_free_is_pruned() -> None:
    with scene() as (folder, hub), Nursery() as nursery:
        root = folder / "store"
        assert nursery.run(root, hub.url).status == 0
        store = Store(root, hub.url)
        removed = 0
        for _ in range(6):
            nursery.start(root, hub.url, "load", count=4)
            for _ in range(60):
                removed += sum(store.remove(kernel.build) for kernel in stored_kernels(store))
            outcomes = nursery.outcomes()
            assert [outcome for outcome in outcomes if outcome.status] == []
        assert removed > 1
        assert nursery.run(root, hub.url, "load").status == 0
        assert problems(root, hub.url, after_recovery=True) == []


def test_r_34_of_many_who_find_the_same_damage_each_loads_the_mended_build() -> None:
    """The slower ones must not remove what the fastest has fetched again."""
    with scene() as (folder, hub), Nursery() as nursery:
        root = folder / "store"
        for round_ in range(4):
            assert nursery.run(root, hub.url).status == 0
            [build] = Store(root, hub.url).builds()
            path = build.files_folder / "parts/table.py"
            path.chmod(0o644)
            path.write_text("TWO = 3\n")
            nursery.start(root, hub.url, count=5)
            assert [outcome for outcome in nursery.outcomes() if outcome.status] == [], round_
            assert problems(root, hub.url, after_recovery=True) == []


def test_r_39_a_fork_after_a_load_uses_the_kernel_and_keeps_it_from_being_pruned() -> None:
    with scene() as (folder, hub), Nursery() as nursery:
        root = folder / "store"
        assert nursery.run(root, hub.url).status == 0
        store = Store(root, hub.url)
        [build] = store.builds()
        assert store.lease(build)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.read(read, 1)
            os._exit(0 if (build.files_folder / "__init__.py").read_text().startswith("from") else 1)
        lease.drop_all()
        assert not store.remove(build)
        os.write(write, b"x")
        assert os.waitpid(child, 0)[1] == 0
        assert store.remove(build)
        for handle in (read, write):
            os.close(handle)


def test_a_store_that_becomes_unreadable_is_a_typed_error() -> None:
    with scene() as (folder, hub), Nursery() as nursery:
        root = folder / "store"
        assert nursery.run(root, hub.url).status == 0
        root.chmod(0o777)
        outcome = nursery.run(root, hub.url)
        assert outcome.said.startswith(f"{CacheError.__name__}: kernel store {root}: {root} is writable for others")
