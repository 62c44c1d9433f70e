"""A verdict on libraries is kept for processes like this one, and believed only where nobody else can write."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from compiled_kernel import marking_library
from kernel_repository import trust, write_build

from kernelhub import Session, load_kernel
from kernelhub.errors import IncompatibleLibrary
from kernelhub.host import fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kernelhub.serve import LocalHub

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux is looked at")

NAME = "_probe.abi3.so"
SOURCE = "from . import _probe\n"
REFUSED = {"path": NAME, "reasons": ["planted"], "notes": [], "registers": False, "namespaces": [], "unread": False}

# A process in which no library can be read: pyelftools is not there.
BLIND = """
import sys
from pathlib import Path
sys.modules["elftools"] = None
from kernelhub import Session, load_kernel
from kernelhub.errors import IncompatibleLibrary
session = Session(cache_dir=Path(sys.argv[1]), endpoint=sys.argv[2], offline=True, lockfile=False)
try:
    print("loaded", load_kernel("acme/probe", session=session, backend="cpu").__name__)
except IncompatibleLibrary as error:
    print("refused", error.cause)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return marking_library(tmp_path_factory.mktemp("marking"), "_probe")


@pytest.fixture
def publish(hub_root: Path) -> Callable[[bytes], None]:
    def write(body: bytes) -> None:
        trust(hub_root, "acme")
        write_build(hub_root, "acme/probe", "v1", "torch-cpu", {"__init__.py": SOURCE, NAME: body})

    return write


def record_of(session: Session) -> Path:
    [build] = session.store.builds()
    return build.folder / "preflight.json"


def blind(session: Session) -> str:
    command = [sys.executable, "-c", BLIND, str(session.store.root), session.store.endpoint]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_another_process_need_not_look_at_the_library(
    library: bytes, publish: Callable[[bytes], None], session: Session
) -> None:
    publish(library)
    load_kernel("acme/probe", session=session)
    assert blind(session).startswith("loaded kernelhub_k_")
    record_of(session).unlink()
    assert blind(session).startswith("refused a damaged ELF file")


def test_a_refusal_is_kept_too(publish: Callable[[bytes], None], session: Session) -> None:
    publish(b"text")
    with pytest.raises(IncompatibleLibrary):
        load_kernel("acme/probe", session=session)
    assert json.loads(record_of(session).read_text())["libraries"][0]["reasons"]
    assert blind(session) == "refused not an ELF file (it starts with b'text')\n"


def damaged(facts: dict[str, Any]) -> list[bytes]:
    """The same record with one thing wrong in each, every one of which would refuse the library if it were believed."""
    bad = {**facts, "libraries": [REFUSED]}
    changes: list[dict[str, Any]] = [
        {"depends_on": "0" * 64},
        {"depends_on": None},
        {"libraries": []},
        {"libraries": None},
        {"libraries": "ab"},
        {"libraries": [REFUSED, REFUSED]},
        {"libraries": [[]]},
        {"libraries": [{**REFUSED, "path": "other.so"}]},
        {"libraries": [{**REFUSED, "path": 5}]},
        {"libraries": [{**REFUSED, "reasons": "planted"}]},
        {"libraries": [{**REFUSED, "reasons": [5]}]},
        {"libraries": [{**REFUSED, "registers": "yes"}]},
        {"libraries": [{key: REFUSED[key] for key in ("path", "reasons")}]},
        {"notes": None},
    ]
    texts = [json.dumps({**bad, **change}) for change in changes]
    return [b"", b"null", b"[]", b"{", json.dumps(bad).encode()[:-9], b"\xff\xfe", *(text.encode() for text in texts)]


def test_r_36_a_damaged_or_foreign_record_counts_as_none(
    library: bytes, publish: Callable[[bytes], None], session: Session, forget_kernels: Callable[[], None]
) -> None:
    publish(library)
    load_kernel("acme/probe", session=session)
    path = record_of(session)
    good = path.read_bytes()
    for body in damaged(json.loads(good)):
        path.write_bytes(body)
        forget_kernels()
        assert load_kernel("acme/probe", session=session)._probe
        assert path.read_bytes() == good
    believed = {**json.loads(good), "libraries": [REFUSED]}
    path.write_text(json.dumps(believed))
    forget_kernels()
    with pytest.raises(IncompatibleLibrary, match="planted"):
        load_kernel("acme/probe", session=session)


def test_a_record_is_for_one_build_only(
    library: bytes, hub_root: Path, session: Session, forget_kernels: Callable[[], None]
) -> None:
    trust(hub_root, "acme")
    for version, body in ((1, b"text"), (2, library)):
        files: dict[str, str | bytes] = {"__init__.py": SOURCE, NAME: body}
        write_build(hub_root, "acme/probe", f"v{version}", "torch-cpu", files, version=version)
    with pytest.raises(IncompatibleLibrary):
        load_kernel("acme/probe@v1", session=session)
    refused = record_of(session).read_bytes()
    load_kernel("acme/probe@v2", session=session)
    for build in session.store.builds():
        (build.folder / "preflight.json").write_bytes(refused)
    forget_kernels()
    assert load_kernel("acme/probe@v2", session=session)._probe


def test_where_others_can_write_none_is_kept_or_believed(
    library: bytes,
    publish: Callable[[bytes], None],
    hub: LocalHub,
    tmp_path: Path,
    forget_kernels: Callable[[], None],
) -> None:
    publish(library)
    shared = Session(cache_dir=tmp_path / "shared", endpoint=hub.url, token=False, shared_cache=True)
    load_kernel("acme/probe", session=shared)
    assert not record_of(shared).exists()
    private = Session(cache_dir=tmp_path / "shared", endpoint=hub.url, token=False, shared_cache=False)
    (tmp_path / "shared").chmod(0o700)
    [build] = private.store.builds()
    forget_kernels()
    build.keep("preflight", {"libraries": [REFUSED], "notes": []}, fingerprint())
    assert record_of(shared).exists()
    assert load_kernel("acme/probe", session=shared)._probe


def test_a_store_that_cannot_be_written_is_judged_each_time(
    library: bytes, publish: Callable[[bytes], None], session: Session, forget_kernels: Callable[[], None]
) -> None:
    publish(library)
    load_kernel("acme/probe", session=session)
    path = record_of(session)
    path.unlink()
    path.mkdir()  # nothing can take its place
    forget_kernels()
    assert load_kernel("acme/probe", session=session)._probe
