"""Only what was stored, or what its own metadata lists, is handed to the loader."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from kernel_repository import trust, write_build

from kernelhub.errors import DigestMismatch, InvalidMetadata
from kernelhub.request import KernelRequest
from kernelhub.store import FileStat
from kernelhub.verify import VerificationState, VerifiedBuild, hash_file, rehash, verify_stored

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kernelhub.api import Session
    from kernelhub.resolution import Resolution
    from kernelhub.store import StoredBuild

REPO = "acme/relu"
FILES: dict[str, str | bytes] = {"__init__.py": "ONE = 1\n", "parts/table.py": "TWO = 2\n"}


@pytest.fixture
def resolution(hub_root: Path, session: Session) -> Resolution:
    trust(hub_root, "acme")
    write_build(hub_root, REPO, "v1", "torch-cpu", FILES)
    return session.resolve(KernelRequest.parse(REPO))


@pytest.fixture
def stored(resolution: Resolution, session: Session) -> StoredBuild:
    session.obtain(resolution)
    [build] = session.store.builds()
    return build


def local(folder: Path, session: Session) -> VerifiedBuild:
    return session.obtain(session.resolve(KernelRequest.parse(str(folder))))


def test_a_stored_build_is_self_attested(stored: StoredBuild, resolution: Resolution) -> None:
    verified = verify_stored(stored, resolution)
    assert verified.state is VerificationState.SELF_ATTESTED
    assert verified.digest == stored.manifest.digest
    assert verified.name == "relu"


def test_files_are_hashed_again_only_after_their_stat_changed(
    stored: StoredBuild, resolution: Resolution, monkeypatch: pytest.MonkeyPatch
) -> None:
    """REF huggingface/kernels#745: every load hashed every file, and then none did."""
    hashed: list[str] = []
    monkeypatch.setattr("kernelhub.verify.hash_file", lambda path, *_: hashed.append(path.name) or hash_file(path))
    verify_stored(stored, resolution)
    assert hashed == []
    os.utime(stored.files_folder / "parts/table.py", (1, 1))
    verify_stored(stored, resolution)
    assert hashed == ["table.py"]
    verify_stored(stored, resolution)
    assert hashed == ["table.py"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda path: path.unlink(), "'parts/table.py' is missing"),
        (lambda path: path.with_name("more.py").write_text(""), "'parts/more.py' is not listed"),
        (lambda path: path.write_text("TWO = 3\n"), "'parts/table.py' has changed since it was stored"),
        (lambda path: path.rename(path.with_name("Table.py")), "'parts/table.py' is missing"),
        (lambda path: path.with_name("TABLE.py").write_text(""), "but for letter case"),
        (lambda path: path.with_name("a\\b.py").write_text(""), "backslash"),
    ],
)
def test_a_stored_build_that_changed_names_the_file(
    stored: StoredBuild, resolution: Resolution, change: Callable[[Path], object], problem: str
) -> None:
    (stored.files_folder / "parts/table.py").chmod(0o644)
    change(stored.files_folder / "parts/table.py")
    with pytest.raises(DigestMismatch, match=re.escape(problem)) as caught:
        verify_stored(stored, resolution)
    assert str(caught.value).startswith(f"kernel build acme/relu@{resolution.commit[:12]} torch-cpu: ")


def test_a_change_that_hides_behind_its_time_stamp_is_found(stored: StoredBuild, resolution: Resolution) -> None:
    path = stored.files_folder / "parts/table.py"
    before = path.stat()
    path.chmod(0o644)
    path.write_text("TWO = 4\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DigestMismatch, match="has changed"):
        verify_stored(stored, resolution)


@pytest.mark.parametrize("place", ["__init__.py", "parts/table.py", "parts", "more"])
def test_s_13_a_link_in_a_stored_build_is_refused(stored: StoredBuild, resolution: Resolution, place: str) -> None:
    path, outside = stored.files_folder / place, stored.folder / "outside"
    if path.exists():
        path.rename(outside)  # the same bytes, elsewhere
    path.symlink_to(outside)
    with pytest.raises(DigestMismatch, match=rf"'{place}' is neither a file nor a folder"):
        verify_stored(stored, resolution)


@pytest.mark.parametrize("place", ["__init__.py", "parts/table.py", "more"])
def test_s_37_a_fifo_in_a_stored_build_is_refused_without_waiting(
    stored: StoredBuild, resolution: Resolution, place: str
) -> None:
    (stored.files_folder / place).unlink(missing_ok=True)
    os.mkfifo(stored.files_folder / place)
    with pytest.raises(DigestMismatch, match=rf"'{place}' is neither a file nor a folder"):
        verify_stored(stored, resolution)


def test_s_40_a_write_through_a_hard_link_is_found(stored: StoredBuild, resolution: Resolution, tmp_path: Path) -> None:
    path = stored.files_folder / "__init__.py"
    assert {file.stat().st_mode & 0o777 for file in (path, stored.files_folder / "parts/table.py")} == {0o444}
    (tmp_path / "twin").hardlink_to(path)
    verify_stored(stored, resolution)
    (tmp_path / "twin").chmod(0o644)
    (tmp_path / "twin").write_text("ONE = 0\n")
    with pytest.raises(DigestMismatch, match="has changed"):
        verify_stored(stored, resolution)


def hashes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that are hashed from now on."""
    hashed: list[str] = []
    monkeypatch.setattr("kernelhub.verify.hash_file", lambda path, *_: hashed.append(path.name) or hash_file(path))
    return hashed


def test_s_40_a_file_with_a_second_name_is_hashed_at_each_load(
    stored: StoredBuild, resolution: Resolution, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "twin").hardlink_to(stored.files_folder / "__init__.py")
    verify_stored(stored, resolution)
    hashed = hashes(monkeypatch)
    verify_stored(stored, resolution)
    assert hashed == ["__init__.py"]
    (tmp_path / "twin").unlink()
    for _ in range(2):
        verify_stored(stored, resolution)
    assert hashed == ["__init__.py"] * 2


def test_s_18_in_a_shared_store_each_load_hashes_every_file_and_writes_nothing(
    stored: StoredBuild, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERNELHUB_SHARED_CACHE", "1")
    shared = dataclasses.replace(session)
    before = sorted((path, path.stat().st_mtime_ns) for path in session.store.root.rglob("*"))
    resolution = shared.resolve(KernelRequest.parse(REPO))
    hashed = hashes(monkeypatch)
    for _ in range(2):
        assert shared.obtain(resolution).digest == stored.manifest.digest
    assert sorted(hashed) == sorted(2 * ["__init__.py", "metadata.json", "table.py"])
    assert sorted((path, path.stat().st_mtime_ns) for path in session.store.root.rglob("*")) == before


def test_s_18_damage_that_no_stat_shows_is_found_in_a_shared_store(stored: StoredBuild, resolution: Resolution) -> None:
    path = stored.files_folder / "parts/table.py"
    path.chmod(0o644)
    path.write_text("TWO = 4\n")
    stored.write_receipt(
        {file.path: FileStat.of((stored.files_folder / file.path).stat()) for file in stored.manifest.files}
    )
    verify_stored(stored, resolution)  # a private store believes its receipt
    with pytest.raises(DigestMismatch, match=r"'parts/table\.py' has changed"):
        verify_stored(dataclasses.replace(stored, always_hash=True), resolution)
    with pytest.raises(DigestMismatch, match=r"'parts/table\.py' has changed"):
        rehash(stored)


def test_r_54_stored_files_cannot_be_written_by_accident(stored: StoredBuild) -> None:
    for file in stored.manifest.files:
        assert (stored.files_folder / file.path).stat().st_mode & 0o222 == 0


@pytest.mark.parametrize("planted", ["__pycache__/__init__.cpython-311.pyc", "planted.pyc", "parts/x.pyo", "x.pth"])
def test_s_16_planted_bytecode_is_refused(stored: StoredBuild, resolution: Resolution, planted: str) -> None:
    path = stored.files_folder / planted
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"")
    with pytest.raises(DigestMismatch, match="is refused: Python bytecode"):
        verify_stored(stored, resolution)


def test_a_stored_file_that_cannot_be_read_is_a_mismatch(stored: StoredBuild, resolution: Resolution) -> None:
    missing = dataclasses.replace(stored, folder=stored.folder / "gone")
    with pytest.raises(DigestMismatch, match=r"'\.' cannot be read \(No such file or directory\)"):
        verify_stored(missing, resolution)


# S-15: what the metadata's digest has to be


def encoded(text: str, algorithm: str = "sha256") -> str:
    return base64.b64encode(hashlib.new(algorithm, text.encode()).digest()).decode()


GOOD = {path: encoded(str(text)) for path, text in FILES.items()}


@pytest.mark.parametrize(
    ("digest", "error", "problem"),
    [
        ({"algorithm": "sha256", "files": {}}, DigestMismatch, "'__init__.py' is not listed"),
        ({"algorithm": "sha256", "files": {"__init__.py": GOOD["__init__.py"]}}, DigestMismatch, "is not listed"),
        ({"algorithm": "sha256", "files": GOOD | {"gone.py": encoded("")}}, DigestMismatch, "'gone.py' is missing"),
        ({"algorithm": "sha256", "files": GOOD | {"__init__.py": encoded("")}}, DigestMismatch, "does not match"),
        ({"algorithm": "md5", "files": GOOD}, InvalidMetadata, "digest.algorithm"),
        ({"files": GOOD}, InvalidMetadata, "digest.algorithm"),
        ({"algorithm": "sha512", "files": GOOD}, InvalidMetadata, "canonical base64 of 64 bytes"),
        ({"algorithm": "sha256", "files": GOOD | {"__init__.py": "00" * 32}}, InvalidMetadata, "canonical base64"),
        ({"algorithm": "sha256", "files": list(GOOD)}, InvalidMetadata, "digest.files"),
        ({"algorithm": "sha256", "files": GOOD | {"metadata.json": encoded("")}}, InvalidMetadata, "metadata itself"),
        ({"algorithm": "sha256", "files": GOOD | {"../x.py": encoded("")}}, InvalidMetadata, "segment '..'"),
        ({"algorithm": "sha256", "files": GOOD | {"x.pyc": encoded("")}}, InvalidMetadata, "bytecode"),
    ],
)
def test_s_15_a_digest_lists_exactly_the_files(
    digest: dict[str, Any], error: type[Exception], problem: str, tmp_path: Path, hubless: Session
) -> None:
    build = write_build(tmp_path, REPO, "v1", "torch-cpu", FILES, metadata_overrides={"digest": digest})
    with pytest.raises(error, match=re.escape(problem)):
        local(build, hubless)


def test_s_15_sha512_is_a_digest_too(tmp_path: Path, hubless: Session) -> None:
    files = {path: encoded(str(text), "sha512") for path, text in FILES.items()}
    digest = {"digest": {"algorithm": "sha512", "files": files}}
    build = write_build(tmp_path, REPO, "v1", "torch-cpu", FILES, metadata_overrides=digest)
    assert local(build, hubless).state is VerificationState.SELF_ATTESTED
    (build / "parts/table.py").write_text("TWO = 3\n")
    with pytest.raises(DigestMismatch, match="does not match the sha512"):
        local(build, hubless)


def test_s_15_a_missing_digest_is_unverified(tmp_path: Path, hubless: Session) -> None:
    build = write_build(tmp_path, REPO, "v1", "torch-cpu", FILES, digest=False)
    assert local(build, hubless).state is VerificationState.UNVERIFIED


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "empty"),
        (b"null", "not a filled JSON object"),
        (b"[" * 200_000, "nested deeper than 32 levels"),
        (b'{"name": "ab", "name": "cd"}', "duplicate key 'name'"),
        (b'{"digest": {"algorithm": "sha256", "files": {"a": "", "a": ""}}}', "duplicate key 'a'"),
        (b'{"version": NaN}', "NaN is not JSON"),
        (b'{"version": 1' + b"0" * 5000 + b"}", "key 'version'"),
        (b'{"name": "\xff"}', "not UTF-8"),
        (b'{"name": "' + b"x" * (1 << 20) + b'"}', "more than 1048576"),
        (b'{"id": "' + b"x" * 129 + b'"}', "at most 128"),
    ],
)
def test_s_14_metadata_within_bounds_only(body: bytes, problem: str, tmp_path: Path, hubless: Session) -> None:
    build = write_build(tmp_path, REPO, "v1", "torch-cpu", FILES)
    (build / "metadata.json").write_bytes(body)
    with pytest.raises(InvalidMetadata, match=re.escape(problem)):
        local(build, hubless)


MEASURE = """
import resource, sys
from kernelhub import Environment, KernelRequest, Session
session = Session(environment=Environment.parse("torch=2.13"), lockfile=False)
peaks = []
for folder in sys.argv[1:]:
    session.obtain(session.resolve(KernelRequest.parse(folder)))
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(peaks[1] - peaks[0])
"""


def test_s_36_verifying_a_large_build_needs_little_memory(tmp_path: Path) -> None:
    """In a process of its own, whose peak nothing else has raised."""
    pytest.importorskip("resource")
    builds = [
        write_build(tmp_path, f"acme/{name}", "v1", "torch-cpu", FILES, digest=False) for name in ("small", "large")
    ]
    with (builds[1] / "big.bin").open("wb") as file:
        file.truncate(256 << 20)
    command = [sys.executable, "-c", MEASURE, *map(str, builds)]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert grown * (1 if sys.platform == "darwin" else 1024) < 64 << 20


@pytest.mark.parametrize(("repo_id", "name"), [("acme/re-lu.v2", "re_lu_v2"), ("acme/2fast", "kernel_2fast")])
def test_a_build_without_metadata_is_named_after_its_repository(
    repo_id: str, name: str, hub_root: Path, session: Session
) -> None:
    trust(hub_root, "acme")
    build = write_build(hub_root, repo_id, "v1", "torch-cpu", FILES)
    (build / "metadata.json").unlink()
    assert session.obtain(session.resolve(KernelRequest.parse(repo_id))).name == name


def test_s_15_an_empty_digest_beside_files_is_an_error_that_counts_them(tmp_path: Path, hubless: Session) -> None:
    files: dict[str, str | bytes] = {"__init__.py": "raise SystemExit\n", **{f"part{n}.py": "" for n in range(6)}}
    digest = {"algorithm": "sha256", "files": {}}
    folder = write_build(tmp_path, "acme/relu", "v1", "torch-cpu", files, metadata_overrides={"digest": digest})
    with pytest.raises(
        DigestMismatch, match=r"'__init__\.py' is not listed, nor are 6 others \('part0.py', .*, \.\.\.\)"
    ):
        local(folder, hubless)
