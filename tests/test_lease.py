"""Leases: what is in use is known to be, for as long as the process lives, and without a write."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kernelhub import lease

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def dropped() -> Iterator[None]:
    yield
    lease.drop_all()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "manifest.json").write_text("{}")
    return tmp_path / "manifest.json"


def is_free(path: Path) -> bool:
    with lease.unleased(path) as free:
        return free


def test_what_is_leased_is_not_free_until_the_lease_is_dropped(path: Path) -> None:
    assert is_free(path)
    assert lease.take(path)
    assert lease.take(path)
    assert not is_free(path)
    lease.drop_all()
    assert is_free(path)
    assert is_free(path.with_name("gone"))


def open_files(path: Path) -> list[Path]:
    """The descriptors of this process that are open on a file. Other files of the process come and go meanwhile."""
    return [handle for handle in Path("/proc/self/fd").iterdir() if os.path.realpath(handle) == str(path)]


def test_many_leases_of_one_file_take_one_open_file(path: Path) -> None:
    threads = [threading.Thread(target=lease.take, args=(path,)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(open_files(path)) == 1


def test_what_is_being_removed_cannot_be_leased(path: Path) -> None:
    with lease.unleased(path) as free:
        assert free
        assert not lease.take(path)
    assert lease.take(path)


def test_what_was_replaced_is_another_thing(path: Path) -> None:
    lease.take(path)
    path.rename(path.with_name("old"))
    path.write_text("{}")
    assert is_free(path)
    assert lease.take(path)
    assert not is_free(path)


def test_r_39_a_fork_keeps_the_lease(path: Path) -> None:
    read, write = os.pipe()
    lease.take(path)
    child = os.fork()
    if child == 0:
        os.read(read, 1)
        os._exit(0)
    lease.drop_all()
    assert not is_free(path)
    os.write(write, b"x")
    os.waitpid(child, 0)
    assert is_free(path)
    for handle in (read, write):
        os.close(handle)


def test_where_nothing_can_be_locked_everything_counts_as_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert not is_free(path)
    with pytest.raises(OSError, match="not implemented"):
        lease.take(path)
