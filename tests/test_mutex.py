"""Locks: one process at a time where that is to be had, never for ever, and always with a name."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest
from conftest import Recorder

from kernelhub import mutex
from kernelhub.durable import host
from kernelhub.errors import LockTimeout
from kernelhub.mutex import Holder, break_locks, held

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOLD = """
import sys, time
from pathlib import Path
from kernelhub.mutex import held
from kernelhub.reporter import Reporter
with held(Path(sys.argv[1]), 5.0, Reporter()):
    print(flush=True)
    time.sleep(60)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "build.lock"


@pytest.fixture(params=[errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def no_flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A file system without locks (R31)."""

    def refuse(*_: object) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)
    yield
    mutex._without_locks.clear()


def holder(path: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"
    return process


def test_r_28_who_waits_too_long_is_told_who_holds_it(path: Path) -> None:
    with holder(path) as process:
        with pytest.raises(LockTimeout) as caught, held(path, 0.1, Recorder()):
            pass
        process.kill()
    assert f"held by process {process.pid} on {host()} since {time.strftime('%Y-')}" in str(caught.value)
    assert 0.1 <= caught.value.waited < 10


def test_r_28_who_waits_is_told_every_ten_seconds(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mutex.TELL_SECONDS == 10
    monkeypatch.setattr(mutex, "TELL_SECONDS", 0.2)
    reporter = Recorder()
    with holder(path) as process:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(LockTimeout), held(path, 2.0, reporter):
            pass
        process.kill()
    assert 2 <= len(reporter.warnings) <= 9
    assert all(f"waiting for the lock {path}, held by process {process.pid} on" in text for text in reporter.warnings)


def test_r_27_the_lock_of_a_killed_process_is_free_at_once(path: Path) -> None:
    with holder(path) as process:
        started = time.monotonic()
        threading.Timer(0.2, process.kill).start()
        with held(path, 30.0, Recorder()):
            assert 0.1 < time.monotonic() - started < 10


def test_the_lock_file_says_nothing_once_it_is_free(path: Path) -> None:
    with held(path, 1.0, Recorder()):
        assert Holder.read(path) is not None
    assert path.read_bytes() == b""


def test_r_39_a_forked_child_does_not_release_the_lock(path: Path) -> None:
    read, write = os.pipe()
    with held(path, 1.0, Recorder()):
        child = os.fork()
        if child == 0:
            os.write(write, b"x")
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(read, 1) == b"x"
        code = HOLD.replace("5.0", "0.1").replace("time.sleep(60)", "")
        done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
        assert f"held by process {os.getpid()} on" in done.stderr
    for handle in (read, write):
        os.close(handle)


def test_r_39_leaving_the_block_in_a_child_leaves_the_lock_to_the_parent(path: Path) -> None:
    child = 0
    with held(path, 1.0, Recorder()):
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            assert Holder.read(path) is not None
            handle = os.open(path, os.O_RDWR)
            with pytest.raises(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(handle)
    if not child:
        os._exit(0)


def test_threads_take_turns(path: Path) -> None:
    inside, most = [], []

    def work() -> None:
        with held(path, 10.0, Recorder()):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.002)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 8


def test_r_31_without_file_locks_a_file_takes_their_place_and_that_is_told_once(no_flock: None, path: Path) -> None:
    reporter = Recorder()
    for _ in range(2):
        with held(path, 1.0, reporter), held(path.with_name("other.lock"), 1.0, reporter):
            with pytest.raises(LockTimeout, match=r"build\.lock\.held.* --break-lock"), held(path, 0.05, reporter):
                pass
            assert path.with_name("build.lock.held").exists()
    assert len(reporter.warnings) == 1
    assert "has no file locks" in reporter.warnings[0]
    assert not list(path.parent.glob("*.held"))


@pytest.fixture
def left_behind(no_flock: None, path: Path) -> Path:
    mutex._without_locks.add(path.parent)
    return path.with_name("build.lock.held")


def test_r_29_a_dead_process_of_this_host_holds_nothing(left_behind: Path, path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        pass
    for since in (0, time.time() + 1e9):  # whatever the clock said
        left_behind.write_text(json.dumps(Holder(dead.pid, host(), since)))
        started = time.monotonic()
        with held(path, 30.0, Recorder()):
            assert time.monotonic() - started < 10
    assert not list(path.parent.iterdir())


@pytest.mark.parametrize(
    "content", [["1", "elsewhere", 0], [os.getpid(), host(), 0], [-1, host(), 0], [1e99, "x", 1e99]]
)
def test_r_29_who_may_be_alive_is_waited_for_and_named(left_behind: Path, path: Path, content: list[object]) -> None:
    """REF huggingface/huggingface_hub#2543, #3944: everybody waited for ever for a lock of nobody knew whom."""
    left_behind.write_text(json.dumps(content))
    with pytest.raises(LockTimeout, match=r"held by .*build\.lock\.held.* --break-lock"), held(path, 0.1, Recorder()):
        pass
    assert left_behind.exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "[1]", "\x1b[2J", '["a", "b", "c"]', "[NaN, 1, 1]"])
def test_a_lock_file_that_says_nothing_has_an_unknown_holder(left_behind: Path, path: Path, content: str) -> None:
    left_behind.write_text(content)
    with pytest.raises(LockTimeout, match="held by an unknown process"), held(path, 0.05, Recorder()):
        pass


def test_r_29_locks_of_other_machines_are_broken_when_somebody_says_so(left_behind: Path, path: Path) -> None:
    mine = path.with_name("mine.lock.held")
    mine.write_text(json.dumps(Holder.this()))
    silent = path.with_name("silent.lock.held")
    silent.touch()
    left_behind.write_text(json.dumps(Holder(1, "elsewhere", 0)))
    assert break_locks(path.parent, dry_run=True) == break_locks(path.parent, dry_run=True)
    found = break_locks(path.parent)
    assert {(lock.path, lock.abandoned) for lock in found} == {(left_behind, True), (silent, True), (mine, False)}
    assert list(path.parent.iterdir()) == [mine]
    with held(path, 0.1, Recorder()):
        pass


def test_of_many_who_break_a_dead_lock_one_holds_it(left_behind: Path, path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        pass
    left_behind.write_text(json.dumps(Holder(dead.pid, host(), 0)))
    test_threads_take_turns(path)


def test_s_13_a_link_in_the_place_of_a_lock_is_not_followed(path: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    path.symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic"), held(path, 1.0, Recorder()):
        pass
    assert (tmp_path / "precious").read_text() == "x"
