"""kernelhub.lock: what is read, what is refused, and that writing is canonical and whole."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelhub.errors import InvalidLockfile
from kernelhub.index import ContentHash, ListedFile
from kernelhub.lockfile import MAX_BYTES, Lock, LockedKernel
from kernelhub.request import KernelRequest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
DATA = Path(__file__).parent / "data"

names = st.from_regex(r"[a-z][a-z0-9_]{0,8}\.(?:py|so)", fullmatch=True)
hex40 = st.text("0123456789abcdef", min_size=40, max_size=40)
hex64 = st.text("0123456789abcdef", min_size=64, max_size=64)
hashes = st.one_of(hex40.map(lambda h: ContentHash("git", h)), hex64.map(lambda h: ContentHash("sha256", h)))
files = st.dictionaries(names, st.tuples(st.integers(0, 10**15), hashes), max_size=4).map(
    lambda found: tuple(ListedFile(path, *found[path]) for path in sorted(found))
)
variants = st.dictionaries(st.sampled_from(["torch-cpu", "torch-cuda", "torch213-cxx11-cu130-x86_64-linux"]), files)
requests = st.builds(
    lambda repo, version: KernelRequest.parse(f"org/{repo}@v{version}"),
    st.from_regex(r"[a-z][a-z0-9]{0,6}", fullmatch=True),
    st.integers(0, 99),
)
kernels = st.builds(LockedKernel, requests, hex40, st.just(()), st.booleans(), variants)
locks = st.lists(kernels, max_size=4, unique_by=lambda kernel: kernel.request.repo_id).map(
    lambda found: Lock(tuple(sorted(found, key=lambda kernel: kernel.name)))
)


def entry(**changes: object) -> str:
    fields = {"request": "org/repo@v1", "commit": COMMIT} | changes
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in fields.items() if value is not None)
    return f"schema = 1\n[[kernel]]\n{lines}\n"


@given(locks)
def test_what_is_written_reads_back_as_the_same_lock(lock: Lock) -> None:
    assert Lock.parse(lock.dump()) == lock


@given(locks)
def test_s_30_the_same_lock_gives_the_same_bytes_in_any_order(lock: Lock) -> None:
    assert Lock(lock.kernels[::-1]).dump() == lock.dump()


@given(st.binary(max_size=200))
def test_any_bytes_are_a_lock_or_a_named_error(data: bytes) -> None:
    with contextlib.suppress(InvalidLockfile):
        Lock.parse(data)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "empty file"),
        ("{}", "not a list"),
        (entry(commit="main"), "field 'commit'"),
        (entry(commit=COMMIT[:39]), "field 'commit'"),
        (entry(commit=COMMIT + "0"), "field 'commit'"),
        (entry(commit="a" * 64), "64 hex digits"),
        (entry(commit=None), "field 'commit'"),
        (entry(colour="blue"), "unknown field 'colour'"),
        ("schema = 2\n", "unknown schema version"),
        ("kernel = []\n", "unknown schema version"),
        ("schema = 1\nother = 1\n", "unknown field 'other'"),
        (entry(request="../../etc@v1"), "'..'"),
        (entry(request="/etc/passwd"), "field 'request'"),
        (entry(request="ab"), "no organization"),
        (entry(request="http://evil/a"), "not the page of a kernel repository"),
        (entry(request=""), "empty"),
        (entry(request="org/repo"), "field 'request'"),
        (entry(request="org/repo@v1:Symbol"), "field 'request'"),
        (entry(dependency="yes"), "field 'dependency'"),
        (entry(dependencies="org/x@v1"), "field 'dependencies'"),
        (entry() + entry().partition("\n")[2], "locked twice"),
        (entry() + entry(request="org/repo@v2").partition("\n")[2], "ambiguous"),
        (entry() + "[kernel.variants.torch-cpu]\n'../a.py' = 'git:" + COMMIT + " 1'\n", "'..'"),
        (entry() + "[kernel.variants.torch-cpu]\n'a.py' = 'md5:0 1'\n", "file 'a.py'"),
        (entry() + "[kernel.variants.nonsense]\n", "unknown framework"),
        ("<<<<<<< HEAD\nschema = 1\n", "unresolved merge conflict, line 1"),
        ("schema = 1\n=======\n", "unresolved merge conflict, line 2"),
        ('[{"repo_id": "a/b"}]', "unknown fields"),
        ('[{"dependency": {"repo-id": "a/b"}, "lock": {"commit": "x"}}]', "field 'dependency'"),
        ('[{"dependency": {"repo-id": "a/b", "version": 1}, "lock": {}}]', "field 'lock'"),
        ("[" * 100_000, "JSON"),
    ],
)
def test_s_30_a_lock_that_cannot_be_trusted_is_refused_with_the_reason(text: str, problem: str) -> None:
    with pytest.raises(InvalidLockfile) as caught:
        Lock.parse(text.encode())
    assert problem in str(caught.value)
    assert "kernelhub.lock" in str(caught.value)


def test_a_byte_order_mark_is_refused_and_windows_line_ends_are_not() -> None:
    with pytest.raises(InvalidLockfile, match="BOM at byte 0"):
        Lock.parse(b"\xef\xbb\xbf" + entry().encode())
    assert Lock.parse(entry().replace("\n", "\r\n").encode()).kernels[0].commit == COMMIT


def test_an_upper_case_commit_is_read_as_lower_case() -> None:
    assert Lock.parse(entry(commit=COMMIT.upper()).encode()).kernels[0].commit == COMMIT


def test_s_30_a_huge_lock_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "kernelhub.lock"
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(InvalidLockfile, match="more than"):
        Lock.read(path)


def test_a_lock_path_that_is_no_file_is_named_with_the_reason(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.lock"):
        with pytest.raises(InvalidLockfile, match="cannot be read") as caught:
            Lock.read(path)
        assert str(path) in str(caught.value)


def test_an_empty_list_locks_nothing() -> None:
    assert Lock.parse(b"[]").kernels == ()
    assert Lock.parse(b"schema = 1\n").kernels == ()


def test_the_peers_current_format_pins_commits() -> None:
    document = [
        {"dependency": {"repo-id": "org/a", "version": 2}, "lock": {"commit": COMMIT}},
        {"dependency": {"repo-id": "org/b", "revision": "main"}, "lock": {"commit": COMMIT}},
    ]
    lock = Lock.parse(json.dumps(document).encode())
    assert [(kernel.name, kernel.commit) for kernel in lock.kernels] == [("org/a@v2", COMMIT), ("org/b@main", COMMIT)]


def test_the_peers_older_format_pins_commits() -> None:
    lock = Lock.read(DATA / "kernels-legacy.lock")
    assert lock.kernels[0].request.repo_id == "kernels-community/relu"
    assert lock.kernels[0].commit == "d649efb56fb249ac8f7a57fa1866728ad0c60e52"


WRITE = """
import sys
from pathlib import Path
from kernelhub.lockfile import Lock
path = Path(sys.argv[1])
Lock.parse(path.with_name("new").read_bytes()).write(path)
"""
WRITING = "write,fsync,fchmod,chmod,rename,renameat,renameat2,unlink,unlinkat"


def test_r_53_a_process_killed_at_any_system_call_leaves_the_old_lock_or_the_new_one(tmp_path: Path) -> None:
    strace = ["strace", "-f", "-o", str(tmp_path / "log"), "-e", f"trace={WRITING}"]
    if shutil.which("strace") is None or subprocess.run([*strace, "true"], capture_output=True).returncode:
        pytest.skip("needs strace, and the right to trace")
    old, new = (Lock.parse(entry(commit=letter * 40).encode()).dump() for letter in "ab")
    path = tmp_path / "project" / "kernelhub.lock"
    path.parent.mkdir()
    path.with_name("new").write_bytes(new)
    command = [sys.executable, "-B", "-c", WRITE, str(path)]

    def write(*options: str) -> int:
        path.write_bytes(old)
        return subprocess.run([*strace, *options, *command], capture_output=True, check=False).returncode

    assert write() == 0
    calls = Counter(re.findall(r"^\d+ +([a-z0-9]+)\(", (tmp_path / "log").read_text(), re.MULTILINE))
    assert {"write", "fsync", "rename"} <= set(calls)
    seen = set()
    for call, number in [(call, number) for call, most in calls.items() for number in range(1, most + 1)]:
        assert write("-e", f"inject={call}:signal=KILL:when={number}") != 0
        seen.add(path.read_bytes())
        Lock.read(path)
    assert seen == {old, new}
    assert write() == 0
    assert path.read_bytes() == new
    assert sorted(other.name for other in path.parent.iterdir()) == ["kernelhub.lock", "new"]


def test_a_lock_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "kernelhub.lock"
    path.write_text("old")
    Lock.parse(entry().encode()).write(path)
    assert Lock.read(path) == Lock.parse(entry().encode())
    assert [other.name for other in tmp_path.iterdir()] == ["kernelhub.lock"]


def test_a_lock_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "taken"
    target.mkdir()
    (target / "inside").touch()
    with pytest.raises(OSError, match="taken"):
        Lock.parse(entry().encode()).write(target)
    assert [other.name for other in tmp_path.iterdir()] == ["taken"]
