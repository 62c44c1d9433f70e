"""The store: complete builds only, whatever happened to its files before, and whoever else is on the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import Recorder, let_others_in

from kernelhub import lease
from kernelhub.errors import CacheError, CacheFullError, InvalidConfig, LockTimeout
from kernelhub.store import FILES, MANIFEST, FileStat, Manifest, Store, StoredBuild, StoredFile, open_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
def test_r_36_a_damaged_manifest_counts_as_no_build_and_is_replaced(store: Store, damage: str) -> None:
    manifest = put(store, "old").folder / MANIFEST
    manifest.write_bytes(damage.encode("latin-1"))
    assert store.find(*KEY) is None
    assert list(store.builds()) == []
    assert (put(store, "new").files_folder / "__init__.py").read_text() == "new"
    assert store.find(*KEY) is not None
    assert list((store.root / "tmp").iterdir()) == []


@pytest.mark.parametrize("damage", DAMAGE)
def test_r_36_a_damaged_receipt_means_hash_again(store: Store, damage: str) -> None:
    build = put(store)
    build.write_receipt({"__init__.py": FileStat(0, 1, 2, 3)})
    assert build.receipt() == {"__init__.py": FileStat(0, 1, 2, 3)}
    (build.folder / "receipt.json").write_bytes(damage.encode("latin-1"))
    assert build.receipt() == {}


@pytest.mark.parametrize("damage", DAMAGE)
def test_r_36_a_damaged_record_counts_as_absent(store: Store, damage: str) -> None:
    store.record("publishers", "acme", {"trusted": True})
    assert (store.recorded("publishers", "acme") or {})["trusted"] is True
    [path] = store.root.glob("hubs/*/records/publishers/*.json")
    path.write_bytes(damage.encode("latin-1"))
    reporter = Recorder()
    again = Store(store.root, store.endpoint, reporter=reporter)
    for _ in range(2):
        assert again.recorded("publishers", "acme") is None
        assert again.recorded("publishers", "nobody") is None
    assert len(reporter.warnings) == (0 if '"name"' in damage else 1)


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
    """REF triton-lang/triton#518: a folder in /tmp belonged to the first user, and the second one could not write."""
    build = put(store)
    inside = [folder for folder in build.folder.parents if folder.is_relative_to(store.root)]
    assert {folder.stat().st_mode & 0o777 for folder in [build.folder, *inside]} == {0o700}


def test_r_9_a_folder_that_is_missing_is_made_with_its_parents(tmp_path: Path) -> None:
    store = Store(tmp_path / "not" / "yet" / "there", "https://hub.example")
    assert store.find(*KEY) is None
    put(store)
    assert store.find(*KEY) is not None


@pytest.mark.parametrize("kind", ["file", "dangling link", "under a file"])
def test_r_9_a_path_that_cannot_be_a_folder_is_named(tmp_path: Path, kind: str) -> None:
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


def test_r_37_a_newer_layout_is_read_and_not_written(store: Store) -> None:
    put(store)
    (store.root / "store.json").write_text(json.dumps({"schema": 2, "written_by": "kernelhub 9.0"}))
    assert store.find(*KEY) is not None
    before = sorted(store.root.rglob("*"))
    store.record("publishers", "acme", {"trusted": True})
    with pytest.raises(CacheError, match=r"another layout \(schema 2, by kernelhub 9\.0\)"):
        put(store)
    with pytest.raises(CacheError, match="another layout"), store.lock(*KEY):
        pass
    assert sorted(store.root.rglob("*")) == before


def test_r_5_a_build_that_does_not_fit_is_refused_with_the_numbers(small_disk: Path) -> None:
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


def test_r_27_a_lock_is_free_when_its_holder_is_killed(store: Store) -> None:
    code = "import sys, time; from pathlib import Path; from kernelhub.store import Store\n"
    code += (
        f"with Store(Path({str(store.root)!r}), 'https://hub.example').lock{KEY!r}:\n print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        started = time.monotonic()
        threading.Timer(0.2, holder.kill).start()
        with store.lock(*KEY):
            assert 0.1 < time.monotonic() - started < 10


def test_r_33_leftovers_of_dead_processes_are_swept_and_others_stay(store: Store) -> None:
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


# Who else may write (S-18), and who may read


@pytest.mark.parametrize("place", ["", "hubs", "hubs/{hub}/builds/acme--relu", "hubs/{hub}/builds/acme--relu/{commit}"])
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_s_18_a_folder_that_others_can_write_is_refused_with_the_command_that_mends_it(
    store: Store, place: str, mode: int
) -> None:
    build = put(store)
    hub = next((store.root / "hubs").iterdir()).name
    folder = store.root / place.format(hub=hub, commit=COMMIT)
    folder.chmod(mode)
    again = Store(store.root, store.endpoint)
    with pytest.raises(CacheError, match=rf"writable for others\. Run `chmod -R go-w '{folder}'`.*SHARED_CACHE=1"):
        again.lease(again.find(*KEY) or build)
    subprocess.run(f"chmod -R go-w '{folder}'", shell=True, check=True)
    assert again.lease(build)
    lease.drop_all()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give folders away")
def test_r_9_s_18_a_store_of_somebody_else_is_refused_with_the_command_that_mends_it(store: Store) -> None:
    put(store)
    store.record("publishers", "acme", {"trusted": True})
    os.chown(store.root, 1234, 1234)
    other = Store(store.root, store.endpoint)
    for use in (lambda: other.find(*KEY), lambda: other.recorded("publishers", "acme"), lambda: list(other.builds())):
        with pytest.raises(CacheError, match=rf"belongs to user 1234\. Run `chown -R 0 '{store.root}'`, or set"):
            use()
    assert Store(store.root, store.endpoint, shared=True).find(*KEY) is not None


def test_a_shared_store_is_writable_as_the_umask_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """REF huggingface/huggingface_hub#2580, #3714: lock files and folders of the first user shut the others out."""
    monkeypatch.setenv("KERNELHUB_SHARED_CACHE", "1")
    shared = Store(tmp_path / "shared", "https://hub.example")
    before = os.umask(0o002)
    try:
        put(shared)
        shared.record("publishers", "acme", {"trusted": True})
        with shared.lock(*KEY):
            pass
    finally:
        os.umask(before)
    paths = [shared.root, *shared.root.rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_dir()} == {0o775}
    files = [path for path in paths if path.is_file() and FILES not in path.parts]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o664}


def as_user(user: int, group: int, work: Callable[[], object]) -> int:
    """The exit status of ``work`` in a fork of this process that has become somebody else."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        os.umask(0o002)
        os.setgroups([group])
        os.setgid(group)
        os.setuid(user)
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


@pytest.fixture
def reachable(tmp_path: Path) -> Path:
    """A folder that other users can get to."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    let_others_in(tmp_path)
    return tmp_path


def test_two_users_fill_and_prune_a_shared_store(reachable: Path) -> None:
    root = reachable / "shared"
    root.mkdir()
    os.chown(root, -1, 5000)
    root.chmod(0o2775)

    def replace() -> None:
        store = Store(root, "https://hub.example", shared=True)
        store.record("publishers", "acme", {"trusted": True})
        with store.lock(*KEY):
            build = store.find(*KEY)
            assert build is None or store.remove(build)
            assert store.find(*KEY) is None
            put(store)

    for user in (1001, 1002, 1001):
        assert as_user(user, 5000, replace) == 0
    assert list((root / "tmp").iterdir()) == []


def test_somebody_else_reads_a_shared_store_without_writing(reachable: Path) -> None:
    store = Store(reachable / "store", "https://hub.example", shared=True)
    put(store)
    before = sorted((path, path.stat().st_mtime_ns) for path in store.root.rglob("*"))

    def use() -> None:
        other = Store(store.root, store.endpoint, shared=True)
        build = other.find(*KEY)
        assert build is not None
        assert build.always_hash
        assert other.lease(build)
        with pytest.raises(CacheError, match="Permission denied"), other.lock(*KEY):
            pass

    assert as_user(1001, 1001, use) == 0
    assert sorted((path, path.stat().st_mtime_ns) for path in store.root.rglob("*")) == before


def test_a_store_of_roots_is_used_by_everybody_who_can_read_it(reachable: Path, store: Store) -> None:
    """An image is filled by root and run by somebody else; whoever is root can do anything anyway."""
    put(store)
    for path in [store.root, *store.root.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert as_user(1001, 1001, lambda: _assert_leased(store)) == 0


def _assert_leased(store: Store) -> None:
    build = Store(store.root, store.endpoint).find(*KEY)
    assert build is not None
    assert store.lease(build)


@pytest.mark.parametrize("mask", [0, 0o077])
def test_r_50_umask_does_not_open_a_private_store(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        store = Store(tmp_path / "store", "https://hub.example")
        put(store)
        store.record("publishers", "acme", {"trusted": True})
        with store.lock(*KEY):
            pass
    finally:
        os.umask(before)
    outside = [path for path in (store.root, *store.root.rglob("*")) if FILES not in path.relative_to(store.root).parts]
    assert {path.stat().st_mode & 0o077 for path in outside} == {0}


# Leases and removal


def test_r_51_a_leased_build_is_not_removed_and_a_free_one_is(store: Store) -> None:
    build = put(store)
    assert store.lease(build)
    assert store.is_leased(build)
    assert not store.remove(build)
    assert store.find(*KEY) is not None
    lease.drop_all()
    assert not store.is_leased(build)
    assert store.remove(build)
    assert store.find(*KEY) is None
    assert not store.lease(build)
    assert list((store.root / "tmp").iterdir()) == []


def test_the_last_use_is_noted_once_a_day(store: Store) -> None:
    build = put(store)
    manifest = build.folder / MANIFEST
    for age, noted in ((0, False), (23 * 3600, False), (25 * 3600, True), (-25 * 3600, True)):
        then = time.time() - age
        os.utime(manifest, (then, then))
        assert store.lease(build)
        assert (abs(manifest.stat().st_mtime - then) > 1) is noted
    lease.drop_all()


def test_a_replaced_build_is_not_discarded_for_the_faults_of_the_old_one(store: Store) -> None:
    """Two processes find the same damage; the slower one must not remove what the faster one has repaired."""
    old = put(store, "old")
    store.discard(old)
    put(store, "new")
    store.discard(old)
    assert store.find(*KEY) is not None


# Places


def test_names_longer_than_a_file_name_are_kept_apart(store: Store) -> None:
    for number in range(2):
        store.record("revisions", f"acme/relu@{'x' * 300}{number}", {"commit": str(number)})
    assert (store.recorded("revisions", f"acme/relu@{'x' * 300}1") or {})["commit"] == "1"
    with store.lock("a" * 96 + "/" + "b" * 96, COMMIT, "torch-" + "c" * 100):
        pass


@pytest.mark.parametrize("name", [b"caf\xe9", b"two words", b'it\'s "quoted"', b"line\nbreak", "Ünïcode".encode()])
def test_r_49_odd_folder_names_work(tmp_path: Path, name: bytes) -> None:
    store = Store(tmp_path / os.fsdecode(name), "https://hub.example")
    put(store)
    with store.lock(*KEY):
        assert store.find(*KEY) is not None
    str(store.unwritable(OSError(28, "x"))).encode("utf-8", "backslashreplace")


def test_r_49_a_deleted_current_folder_is_told_only_where_it_matters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    put(Store(tmp_path / "store", "https://hub.example"))
    with pytest.raises(InvalidConfig, match="the current folder was deleted; expected an absolute path"):
        Store(Path("store"), "https://hub.example")
    monkeypatch.setenv("KERNELHUB_CACHE", "store")
    with pytest.raises(InvalidConfig, match="variable KERNELHUB_CACHE"):
        Store()


@pytest.mark.parametrize("name", ["a" * 300, "a/" * 2100])
def test_r_49_a_path_that_is_too_long_is_a_typed_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(CacheError, match="name too long"):
        Store(tmp_path / name, "https://hub.example").check_space(0)


def test_a_home_that_nobody_knows_names_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """REF kserve/kserve#3576, OHF-Voice/wyoming-faster-whisper#27: a random user id without a home."""
    for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    with pytest.raises(InvalidConfig, match=r"KERNELHUB_CACHE, HF_HOME, HOME\): no home folder is known"):
        Store()


@pytest.mark.parametrize("limit", [32, 64])
def test_r_50_few_open_files_are_enough(store: Store, limit: int) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(
        int(path.name) for path in Path("/proc/self/fd").iterdir()
    )  # the limit is on the number, not on the count
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + limit, before[1]))
    try:
        for _ in range(2 * limit):
            with store.lock(*KEY):
                store.lease(store.find(*KEY) or put(store))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        lease.drop_all()
