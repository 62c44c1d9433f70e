"""Downloads: whole and right, or not there at all."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from kernel_repository import trust, write_build
from starlette.responses import Response, StreamingResponse

from kernelhub import lease, load_kernel
from kernelhub.errors import (
    CacheFullError,
    DigestMismatch,
    IncompleteDownload,
    InvalidMetadata,
    UntrustedPublisher,
)
from kernelhub.fetch import MAX_BUILD_BYTES
from kernelhub.request import KernelRequest
from kernelhub.session import Session

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from starlette.requests import Request

    from kernelhub.serve import LocalHub

REPO = "acme/relu"
BODY = os.urandom(3_000_000)
ETAG = f'"{hashlib.sha256(BODY).hexdigest()}"'
FILES: dict[str, str | bytes] = {"__init__.py": "ONE = 1\n", "part.bin": BODY}
BIG = "/torch-cpu/part.bin"


@pytest.fixture
def root(hub_root: Path) -> Path:
    trust(hub_root, "acme")
    write_build(hub_root, REPO, "v1", "torch-cpu", FILES)
    return hub_root


def nothing_left(session: Session) -> bool:
    return not list(session.store.builds()) and not list((session.store.root / "tmp").iterdir())


def cut(hub: LocalHub, count: int, *, times: int, size: int = len(BODY), reset: bool = False) -> list[str | None]:
    """Break off the big body after ``count`` bytes, the first ``times`` times; returns the ranges asked for."""
    ranges: list[str | None] = []

    def hook(request: Request) -> Response | None:
        if not request.url.path.endswith(BIG):
            return None
        ranges.append(request.headers.get("range"))
        if len(ranges) > times:
            return None

        async def chunks() -> AsyncIterator[bytes]:
            yield BODY[:count]
            await asyncio.sleep(0.05)
            if reset:
                hub.reset(request)
            raise ConnectionResetError

        return StreamingResponse(chunks(), headers={"ETag": ETAG, "Content-Length": str(size)})

    hub.hook = hook
    return ranges


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("reset", [False, True])
def test_r_10_r_11_an_interrupted_body_goes_on_where_it_stopped(
    reset: bool, root: Path, hub: LocalHub, session: Session
) -> None:
    ranges = cut(hub, 1_200_000, times=1, reset=reset)
    assert load_kernel(REPO, session=session).ONE == 1
    assert ranges[0] is None
    assert len(ranges) == 2
    if not reset:  # what a reset connection had delivered is up to the system
        assert ranges[1] == "bytes=1200000-"
    assert next(session.store.builds()).files_folder.joinpath("part.bin").read_bytes() == BODY


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("reset", [False, True])
def test_r_11_r_10_a_body_that_never_completes_is_not_kept_and_the_next_run_succeeds(
    reset: bool, root: Path, hub: LocalHub, session: Session
) -> None:
    """REF huggingface/huggingface_hub#1498, #1396, #1403: a truncated file stayed in the cache until it was deleted."""
    cut(hub, 1_200_000, times=9, reset=reset)
    with pytest.raises(IncompleteDownload, match=r"part\.bin'.*bytes, 3000000 were announced.*Nothing was kept"):
        load_kernel(REPO, session=session)
    assert nothing_left(session)
    hub.hook = None
    assert load_kernel(REPO, session=session).ONE == 1


def test_r_15_a_server_that_ignores_ranges_is_served_too(root: Path, hub: LocalHub, session: Session) -> None:
    asked = cut(hub, 1_200_000, times=1)
    first = hub.hook

    def hook(request: Request) -> Response | None:
        answer = first(request) if first else None
        if len(asked) == 2 and request.url.path.endswith(BIG):
            return Response(BODY, headers={"ETag": ETAG})
        return answer  # type: ignore[return-value]

    hub.hook = hook
    assert load_kernel(REPO, session=session).ONE == 1
    assert next(session.store.builds()).files_folder.joinpath("part.bin").read_bytes() == BODY


@pytest.mark.parametrize("times", [1, 9])
def test_r_13_wrong_bytes_of_the_right_length_are_fetched_again_then_refused(
    times: int, root: Path, hub: LocalHub, session: Session
) -> None:
    served: list[str] = []

    def hook(request: Request) -> Response | None:
        if not request.url.path.endswith(BIG) or len(served) >= times:
            return None
        served.append(request.headers.get("range", ""))
        return Response(bytes(len(BODY)), headers={"ETag": ETAG})

    hub.hook = hook
    if times == 1:
        assert load_kernel(REPO, session=session).ONE == 1
        return
    with pytest.raises(IncompleteDownload, match=r"content hash [0-9a-f]{64}, [0-9a-f]{64} was announced"):
        load_kernel(REPO, session=session)
    assert served == ["", ""]
    assert nothing_left(session)


def test_r_12_s_35_a_body_longer_than_announced_is_stopped(root: Path, hub: LocalHub, session: Session) -> None:
    """Without a length, and for ever; the disk never holds more than was announced."""
    written = [0]

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield bytes(1 << 20)
            written.append(sum(path.stat().st_size for path in session.store.root.glob("tmp/*/files/part.bin")))
            await asyncio.sleep(0)

    def hook(request: Request) -> Response | None:
        headers = {"ETag": ETAG}
        return StreamingResponse(endless(), headers=headers) if request.url.path.endswith(BIG) else None

    hub.hook = hook
    with pytest.raises(IncompleteDownload, match="longer than the announced 3000000 bytes"):
        load_kernel(REPO, session=session)
    assert 0 < max(written) <= len(BODY)
    assert nothing_left(session)


@pytest.mark.parametrize("lie", [-1, 1])
@pytest.mark.parametrize("name", ["metadata.json", "__init__.py", "part.bin"])
def test_r_23_a_listing_that_lies_about_a_size_is_found_out(
    lie: int, name: str, root: Path, session: Session, change_tree: Any
) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        row = next(row for row in rows if row["path"].endswith(name))
        row["size"] += lie
        if "lfs" in row:
            row["lfs"]["size"] += lie

    change_tree(REPO, change)
    with pytest.raises((IncompleteDownload, DigestMismatch), match=re.escape(name)):
        load_kernel(REPO, session=session)
    assert not list(session.store.builds())


@pytest.mark.parametrize("size", [MAX_BUILD_BYTES + 1, 1 << 62])
def test_s_35_an_absurd_size_is_refused_before_any_body(
    size: int, root: Path, hub: LocalHub, session: Session, change_tree: Any
) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        next(row for row in rows if row["path"].endswith("part.bin"))["lfs"]["size"] = size

    change_tree(REPO, change)
    with pytest.raises(IncompleteDownload, match=f"bytes, more than {MAX_BUILD_BYTES}"):
        load_kernel(REPO, session=session)
    assert not [record for record in hub.requests if "/resolve/" in record.path and "metadata.json" not in record.path]


def test_r_5_a_full_disk_is_told_before_any_body(root: Path, hub: LocalHub, session: Session, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")  # root's, in most containers too
    try:
        small = Session(cache_dir=disk / "store", endpoint=hub.url, token=False)
        with pytest.raises(CacheFullError, match=rf"kernel store {disk}/store: disk full, \d+ bytes needed, \d+ bytes"):
            load_kernel(REPO, session=small)
        assert not [record for record in hub.requests if BIG in record.path]
        assert nothing_left(small)
    finally:
        subprocess.run(["umount", disk], check=True)


def test_r_5_a_disk_that_fills_up_during_a_download_is_told(
    root: Path, hub: LocalHub, session: Session, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")

    def hook(request: Request) -> None:
        if request.url.path.endswith(BIG):  # somebody else takes the space that was free when it was checked
            (disk / "other").write_bytes(bytes(5 << 20))

    try:
        small = Session(cache_dir=disk / "store", endpoint=hub.url, token=False)
        hub.hook = hook
        with pytest.raises(CacheFullError, match="disk full"):
            load_kernel(REPO, session=small)
        assert nothing_left(small)
        hub.hook = None
        (disk / "other").unlink()
        assert load_kernel(REPO, session=small).ONE == 1
    finally:
        lease.drop_all()
        subprocess.run(["umount", disk], check=True)


def test_files_resolved_earlier_cost_one_more_request(
    root: Path, hub: LocalHub, session: Session, asked: Callable[[], list[str]]
) -> None:
    """The type of the repository is part of every address; it is asked for once, not once a file."""
    resolution = session.resolve(KernelRequest.parse(REPO))
    asked()
    Session(cache_dir=session.cache_dir, endpoint=hub.url, token=False).obtain(resolution)
    assert sum("/refs" in request for request in asked()) == 1


SMALL: dict[str, str | bytes] = {"__init__.py": "ONE = 1\n", "table.safetensors": b"\0", "deep/part.py": "TWO = 2\n"}


@pytest.fixture
def small(root: Path) -> str:
    write_build(root, "acme/small", "v1", "torch-cpu", SMALL)
    return "acme/small"


def names(requests: list[str]) -> list[str]:
    return sorted(request.partition("?")[0].rpartition("/")[2] for request in requests)


def test_a_first_load_asks_three_questions_and_for_each_file_once(
    small: str, session: Session, asked: Callable[[], list[str]]
) -> None:
    assert load_kernel(small, session=session).ONE == 1
    files = ["__init__.py", "metadata.json", "part.py", "table.safetensors"]
    assert names(asked()) == sorted(["overview", "refs", "build", *files])


def test_resolving_asks_for_no_file_but_the_metadata(
    small: str, session: Session, asked: Callable[[], list[str]]
) -> None:
    session.resolve(KernelRequest.parse(small))
    assert names(asked()) == ["build", "metadata.json", "overview", "refs"]
    assert not list(session.store.builds())


def test_a_large_build_is_fetched_when_its_metadata_is_known(
    root: Path, session: Session, asked: Callable[[], list[str]]
) -> None:
    session.resolve(KernelRequest.parse(REPO), ahead=True)
    assert names(asked()) == ["build", "metadata.json", "overview", "refs"]


def test_s_07_no_file_of_an_untrusted_publisher_is_asked_for(
    small: str, root: Path, session: Session, asked: Callable[[], list[str]]
) -> None:
    trust(root, "acme", False)
    with pytest.raises(UntrustedPublisher):
        load_kernel(small, session=session)
    assert set(names(asked())) <= {"overview", "refs"}


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("times", [1, 9])
def test_r_13_wrong_metadata_is_asked_for_again_then_refused(
    times: int, ahead: bool, small: str, root: Path, hub: LocalHub, session: Session
) -> None:
    served: list[bytes] = []
    right = (root / small / "v1/build/torch-cpu/metadata.json").read_bytes()
    etag = hashlib.sha1(b"blob %d\0" % len(right) + right).hexdigest()

    def hook(request: Request) -> Response | None:
        if not request.url.path.endswith("metadata.json") or len(served) >= times:
            return None
        served.append(bytes(len(right)))
        return Response(served[-1], headers={"ETag": f'"{etag}"'})

    hub.hook = hook
    request = KernelRequest.parse(small)
    if times == 1:
        session.obtain(session.resolve(request, ahead=ahead))
        return
    with pytest.raises((IncompleteDownload, DigestMismatch), match=r"metadata\.json"):
        session.resolve(request, ahead=ahead)
    assert len(served) == 2
    assert not list(session.store.builds())


@pytest.mark.parametrize("ahead", [True, False])
def test_metadata_that_cannot_be_read_keeps_nothing(
    ahead: bool, root: Path, session: Session, asked: Callable[[], list[str]]
) -> None:
    write_build(root, "acme/odd", "v1", "torch-cpu", SMALL, metadata_overrides={"version": "one"})
    with pytest.raises(InvalidMetadata):
        session.resolve(KernelRequest.parse("acme/odd"), ahead=ahead)
    assert not list(session.store.builds())
    assert not list(session.store.root.glob("tmp/*"))


# Processes

LOAD = """
    import sys
    from pathlib import Path
    from kernelhub import Environment, Session, load_kernel
    described = Environment.parse("torch=2.13")  # detecting would import torch in every process
    session = Session(cache_dir=Path(sys.argv[1]), endpoint=sys.argv[2], token=False, environment=described)
    print(load_kernel("acme/relu", session=session).ONE)
    """


IN_THE_BACKGROUND = """
    import sys, threading
    from pathlib import Path
    from kernelhub import Environment, KernelRequest, Session
    from kernelhub.prefetch import prefetch
    described = Environment.parse("torch=2.13")
    session = Session(cache_dir=Path(sys.argv[1]), endpoint=sys.argv[2], token=False, environment=described)
    requests = [KernelRequest.parse("acme/relu")]
    threading.Thread(target=prefetch, args=(requests, session), daemon=True).start()
    sys.stdin.readline()
    """


def start(session: Session, hub: LocalHub, code: str = LOAD) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), str(session.store.root), hub.url]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def slowly(hub: LocalHub, seconds: float) -> threading.Event:
    """Send the big body in pieces over that time; the event is set when it begins."""
    begun = threading.Event()

    def hook(request: Request) -> Response | None:
        if not request.url.path.endswith(BIG):
            return None

        async def chunks() -> AsyncIterator[bytes]:
            for start in range(0, len(BODY), 30_000):
                yield BODY[start : start + 30_000]
                begun.set()
                await asyncio.sleep(seconds / 100)

        headers = {"ETag": ETAG, "Content-Length": str(len(BODY))}
        return StreamingResponse(chunks(), headers=headers)

    hub.hook = hook
    return begun


@pytest.fixture
def downloading(root: Path, hub: LocalHub, session: Session) -> Iterator[subprocess.Popen[str]]:
    """A process in the middle of a download that would take half a minute."""
    begun = slowly(hub, 30)
    with start(session, hub) as process:
        assert begun.wait(30)
        time.sleep(0.2)
        yield process
        process.kill()


def test_r_1_a_killed_download_is_not_visible_and_swept_by_the_next(
    downloading: subprocess.Popen[str], hub: LocalHub, session: Session
) -> None:
    downloading.kill()
    downloading.wait()
    assert not list(session.store.builds())
    assert len(list((session.store.root / "tmp").iterdir())) == 1
    hub.hook = None
    assert load_kernel(REPO, session=session).ONE == 1
    assert not list((session.store.root / "tmp").iterdir())


def test_who_asks_during_a_download_gets_the_whole_build(root: Path, hub: LocalHub, session: Session) -> None:
    """REF moojink/openvla-oft#155: files were imported while another rank was still copying them."""
    begun = slowly(hub, 2)
    with start(session, hub) as process:
        assert begun.wait(30)
        assert len(list((session.store.root / "tmp").iterdir())) == 1
        assert not list(session.store.builds())
        assert load_kernel(REPO, session=session).ONE == 1
        assert process.communicate() == ("1\n", "")
    assert next(session.store.builds()).files_folder.joinpath("part.bin").read_bytes() == BODY
    assert sum(BIG in record.path for record in hub.requests) == 1


def test_r_3_an_interrupted_download_ends_soon_and_leaves_nothing(
    downloading: subprocess.Popen[str], hub: LocalHub, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = time.monotonic()
    downloading.send_signal(signal.SIGINT)
    downloading.wait()
    assert time.monotonic() - started < 10
    assert nothing_left(session)
    hub.hook = None
    monkeypatch.setenv("KERNELHUB_LOCK_TIMEOUT", "0.1")  # its lock is free
    assert load_kernel(REPO, session=session).ONE == 1


def test_r_52_a_process_ends_while_it_prefetches_in_the_background(root: Path, hub: LocalHub, session: Session) -> None:
    begun = slowly(hub, 60)
    with start(session, hub, IN_THE_BACKGROUND) as process:
        assert begun.wait(30)
        assert process.communicate("\n", timeout=50) == ("", "")
    assert process.returncode == 0
    assert not list(session.store.builds())
    hub.hook = None
    assert load_kernel(REPO, session=session).ONE == 1
    assert not list((session.store.root / "tmp").iterdir())


@pytest.mark.parametrize(("name", "limit"), [("RLIMIT_AS", 1 << 30), ("RLIMIT_NOFILE", 64)])
def test_r_50_a_first_load_needs_little_memory_and_few_open_files(
    name: str, limit: int, root: Path, hub: LocalHub, session: Session
) -> None:
    limited = f"\n    import resource\n    resource.setrlimit(resource.{name}, ({limit}, {limit})){LOAD}"
    with start(session, hub, limited) as process:
        output, errors = process.communicate()
    assert (output, errors) == ("1\n", "")


def test_r_24_eight_ranks_fetch_each_file_once_and_ask_a_few_questions(
    root: Path, hub: LocalHub, session: Session
) -> None:
    """REF huggingface/kernels#640: each rank listed a large repository page by page, until the Hub refused."""
    for number in range(30):
        files = {"__init__.py": "", **{f"part{part}.py": "" for part in range(39)}}
        write_build(root, REPO, "v1", f"torch2{number}-cu126-x86_64-linux", files)
    processes = [start(session, hub) for _ in range(8)]
    results = [process.communicate() for process in processes]
    assert [output for output, _ in results] == ["1\n"] * 8, results
    bodies = [record.path for record in hub.requests if "/resolve/" in record.path]
    assert sorted(bodies.count(path) for path in set(bodies) if "metadata.json" not in path) == [1, 1]
    assert not list((session.store.root / "tmp").iterdir())
    questions = [record.path for record in hub.requests if "/api/" in record.path and "harness" not in record.path]
    assert len(questions) <= 10  # each is asked once; who asks one may have to ask for the type of the repository too
