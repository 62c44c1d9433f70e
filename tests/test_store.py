"""The store: complete builds only, whatever happened to its files before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from kernelhub.errors import CacheError, CacheFullError, LockTimeout
from kernelhub.store import FILES, MANIFEST, FileStat, Manifest, Store, StoredBuild, StoredFile, open_regular

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMIT = "c" * 40
KEY = ("acme/relu", COMMIT, "torch-cpu")
DAMAGE = ["", "{", "[]", "null", '{"name": 1}', "\xff", '{"schema": 1, "files": [1]}', '{"files": {"path": 1}}']


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", "https://hub.example")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.fixture
def read_only(tmp_path: Path, store: Store) -> Iterator[Store]:
    """A store with one build, seen through a read-only mount: file modes would not stop root."""
    put(store)
    view = tmp_path / "view"
    view.mkdir()
    bind = subprocess.run(["mount", "--bind", store.root, view], capture_output=True)
    if bind.returncode or subprocess.run(["mount", "-o", "remount,ro,bind", view], capture_output=True).returncode:
        pytest.skip("needs the right to mount a folder read-only")
    yield Store(view, store.endpoint)
    subprocess.run(["umount", view], check=True)


def put(store: Store, text: str = "") -> StoredBuild:
    with store.staging() as staged:
        (staged / FILES).mkdir()
        (staged / FILES / "__init__.py").write_text(text)
        return store.publish(staged, Manifest(*KEY, store.endpoint, (StoredFile("__init__.py", len(text), "0" * 64),)))


def test_a_build_is_there_once_it_is_published(store: Store) -> None:
    assert store.find(*KEY) is None
    with store.staging() as staged:
        (staged / FILES).mkdir()
        assert store.find(*KEY) is None
    put(store)
    found = store.find(*KEY)
    assert found is not None
    assert found.manifest.size == 0
    assert [build.folder for build in store.builds()] == [found.folder]
    assert list((store.root / "tmp").iterdir()) == []


def test_what_was_not_published_is_gone(store: Store) -> None:
    with store.staging() as staged:
        (staged / "folder").mkdir()
        (staged / "folder" / "file").write_text("")
        (staged / "folder" / "file").chmod(0o444)
        (staged / "folder").chmod(0o500)
    assert not staged.exists()


def test_the_first_of_two_publishers_wins(store: Store) -> None:
    first = put(store, "first")
    second = put(store, "second")
    assert second.folder == first.folder
    assert (first.files_folder / "__init__.py").read_text() == "first"


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_manifest_counts_as_no_build_and_is_replaced(store: Store, damage: str) -> None:
    manifest = put(store, "old").folder / MANIFEST
    manifest.write_bytes(damage.encode("latin-1"))
    assert store.find(*KEY) is None
    assert list(store.builds()) == []
    assert (put(store, "new").files_folder / "__init__.py").read_text() == "new"
    assert store.find(*KEY) is not None
    assert list((store.root / "tmp").iterdir()) == []


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_receipt_means_hash_again(store: Store, damage: str) -> None:
    build = put(store)
    build.write_receipt({"__init__.py": FileStat(0, 1, 2, 3)})
    assert build.receipt() == {"__init__.py": FileStat(0, 1, 2, 3)}
    (build.folder / "receipt.json").write_bytes(damage.encode("latin-1"))
    assert build.receipt() == {}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_counts_as_absent(store: Store, damage: str) -> None:
    store.record("publishers", "acme", {"trusted": True})
    assert (store.recorded("publishers", "acme") or {})["trusted"] is True
    [path] = store.root.glob("hubs/*/records/publishers/*.json")
    path.write_bytes(damage.encode("latin-1"))
    assert store.recorded("publishers", "acme") is None


def test_a_record_of_another_name_does_not_answer(store: Store) -> None:
    store.record("revisions", "a/b@refs/pr/1", {"commit": COMMIT})
    assert store.recorded("revisions", "a/b@refs--pr/1") is None


def test_each_hub_has_its_own_builds_and_answers(store: Store, tmp_path: Path) -> None:
    put(store)
    store.record("publishers", "acme", {"trusted": True})
    other = Store(tmp_path / "store", "https://mirror.example")
    assert other.find(*KEY) is None
    assert other.recorded("publishers", "acme") is None
    assert Store(tmp_path / "store", "https://hub.example/").find(*KEY) is not None


def test_a_discarded_build_is_gone(store: Store) -> None:
    build = put(store)
    (build.files_folder / "__init__.py").chmod(0o444)
    store.discard(build)
    store.discard(build)
    assert store.find(*KEY) is None
    assert not build.folder.exists()
    assert list((store.root / "tmp").iterdir()) == []


def test_folders_are_private(store: Store) -> None:
    build = put(store)
    inside = [folder for folder in build.folder.parents if folder.is_relative_to(store.root)]
    assert {folder.stat().st_mode & 0o777 for folder in [build.folder, *inside]} == {0o700}


@pytest.mark.parametrize("kind", ["file", "dangling link", "under a file"])
def test_a_path_that_cannot_be_a_folder_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "store"
    if kind == "file":
        path.write_text("")
    elif kind == "dangling link":
        path.symlink_to(tmp_path / "nowhere")
    else:
        (tmp_path / "file").write_text("")
        path = tmp_path / "file" / "store"
    with pytest.raises(CacheError, match=f"kernel store {path}: cannot be used .*KERNELHUB_CACHE"):
        Store(path, "https://hub.example").check_space(0)


def test_a_newer_layout_is_read_and_not_written(store: Store) -> None:
    put(store)
    (store.root / "store.json").write_text(json.dumps({"schema": 2}))
    assert store.find(*KEY) is not None
    before = sorted(store.root.rglob("*"))
    store.record("publishers", "acme", {"trusted": True})
    with pytest.raises(CacheError, match=r"another layout \(schema 2\)"):
        put(store)
    with pytest.raises(CacheError, match="another layout"), store.lock(*KEY):
        pass
    assert sorted(store.root.rglob("*")) == before


def test_a_build_that_does_not_fit_is_refused_with_the_numbers(small_disk: Path) -> None:
    store = Store(small_disk / "store", "https://hub.example")
    store.check_space(1 << 20)
    with pytest.raises(CacheFullError, match=r"disk full, 5242880 bytes needed, [0-9]+ bytes free") as caught:
        store.check_space(4 << 20)
    assert caught.value.free < 4 << 20


def test_a_read_only_store_answers_and_takes_no_writes(read_only: Store) -> None:
    build = read_only.find(*KEY)
    assert build is not None
    build.write_receipt({})
    read_only.record("publishers", "acme", {"trusted": True})
    assert read_only.recorded("publishers", "acme") is None
    for write in (lambda: read_only.discard(build), lambda: put(read_only), lambda: read_only.lock(*KEY).__enter__()):
        with pytest.raises(CacheError, match=f"kernel store {read_only.root}: .*Read-only file system"):
            write()


def test_a_lock_is_held_by_one_at_a_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELHUB_LOCK_TIMEOUT", "0.1")
    with store.lock(*KEY):
        with pytest.raises(LockTimeout, match=r"waited 0 s for the lock .*acme--relu--cccccccccccc--torch-cpu\.lock"):
            store.lock(*KEY).__enter__()
        with store.lock("acme/gelu", COMMIT, "torch-cpu"):
            pass
    with store.lock(*KEY):
        pass


def test_a_lock_is_free_when_its_holder_is_killed(store: Store) -> None:
    code = "import sys, time; from pathlib import Path; from kernelhub.store import Store\n"
    code += (
        f"with Store(Path({str(store.root)!r}), 'https://hub.example').lock{KEY!r}:\n print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        threading.Timer(0.2, holder.kill).start()
        started = time.monotonic()
        with store.lock(*KEY):
            assert 0.1 < time.monotonic() - started < 2


def test_leftovers_of_dead_processes_are_swept_and_others_stay(store: Store) -> None:
    put(store)
    with store.staging() as mine:
        host, pid, _ = mine.name.split("--")
        with subprocess.Popen([sys.executable, "-c", ""]) as dead:
            pass
        names = {
            f"{host}--{dead.pid}--x": False,
            f"{host}--{'9' * 30}--x": True,
            f"elsewhere--{dead.pid}--x": True,
            f"elsewhere--{dead.pid}--old": False,
            f"{host}--{pid}--other": True,
        }
        for name in names:
            (store.root / "tmp" / name / "files").mkdir(parents=True)
            (store.root / "tmp" / name / "files" / "x").write_text("")
        day = time.time() - 25 * 3600
        os.utime(store.root / "tmp" / f"elsewhere--{dead.pid}--old", (day, day))
        with store.lock(*KEY):
            left = {path.name for path in (store.root / "tmp").iterdir()}
        assert left == {name for name, stays in names.items() if stays} | {mine.name}


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "fifo")
    with open_regular(tmp_path / "file") as file:
        assert file.read() == b"x"
    for name in ("link", "fifo", ".", "gone"):
        with pytest.raises(OSError, match=r"regular|symbolic|No such"):
            open_regular(tmp_path / name)
