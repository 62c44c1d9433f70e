"""Builds that other programs downloaded: a source of bytes that are checked like any download."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import Recorder
from kernel_repository import trust, write_build

from kernelhub import load_kernel
from kernelhub.errors import DigestMismatch, FetchError, KernelHubError, NotCached, UntrustedPublisher
from kernelhub.hfcache import CachedIndex
from kernelhub.request import KernelRequest
from kernelhub.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernelhub.serve import LocalHub

REPO = "acme/relu"
COMMIT = "c" * 40
FILES: dict[str, str | bytes] = {
    "__init__.py": "from .parts.table import TWO\nONE = 1\n",
    "parts/table.py": "TWO = 2\n",
}
# The interpreter of an environment with `kernels`; the cache is then filled by the peer itself.
PEER = Path(os.environ.get("PEER_PYTHON", "no-peer"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; the one that huggingface_hub would use."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    return folder


def fill(cache: Path, build: Path, *, repo_type: str = "kernel", commit: str = COMMIT, links: bool = True) -> Path:
    """Put a build into a cache as huggingface_hub does, and say that branch v1 is there; the folder of the build."""
    repository = cache / f"{repo_type}s--{REPO.replace('/', '--')}"
    folder = repository / "snapshots" / commit / "build" / build.name
    (repository / "blobs").mkdir(parents=True, exist_ok=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "v1").write_text(commit)
    for file in [path for path in build.rglob("*") if path.is_file()]:
        body, target = file.read_bytes(), folder / file.relative_to(build)
        target.parent.mkdir(parents=True, exist_ok=True)
        if links:
            blob = repository / "blobs" / hashlib.sha1(b"blob %d\0%s" % (len(body), body)).hexdigest()
            blob.write_bytes(body)
            target.symlink_to(os.path.relpath(blob, target.parent))
        else:
            target.write_bytes(body)
    return folder


@pytest.fixture
def build(tmp_path: Path) -> Path:
    return write_build(tmp_path / "published", REPO, "v1", "torch-cpu", FILES)


@pytest.fixture
def offline(tmp_path: Path, reporter: Recorder, forget_kernels: object) -> Session:
    return Session(cache_dir=tmp_path / "store", endpoint="http://127.0.0.1:9", offline=True, reporter=reporter)


@pytest.mark.parametrize("request_", [REPO, f"{REPO}@v1", f"{REPO}@{COMMIT}", f"{REPO}@>=1"])
@pytest.mark.parametrize("repo_type", ["kernel", "model"])
@pytest.mark.parametrize("links", [True, False])
def test_a_cache_serves_offline(
    cache: Path, build: Path, offline: Session, request_: str, repo_type: str, links: bool
) -> None:
    """REF huggingface/kernels#553, PrimeIntellect-ai/prime-rl#2276: everything on disk, and yet no load."""
    fill(cache, build, repo_type=repo_type, links=links)
    kernel = load_kernel(request_, session=offline, trust_remote_code=[REPO])
    assert (kernel.ONE, kernel.TWO) == (1, 2)
    assert str(offline.store.root) in kernel.__file__
    shutil.rmtree(cache)
    assert offline.obtain(offline.resolve(KernelRequest.parse(f"{REPO}@{COMMIT}"), trust=True)).name == "relu"


def test_a_cache_trusts_nobody(cache: Path, build: Path, offline: Session) -> None:
    fill(cache, build)
    with pytest.raises(UntrustedPublisher, match="whose trust was never asked online"):
        load_kernel(REPO, session=offline)


def test_a_recorded_trust_decision_holds_for_a_cached_kernel(cache: Path, build: Path, offline: Session) -> None:
    fill(cache, build)
    offline.store.record("publishers", "acme", {"trusted": True})
    assert load_kernel(REPO, session=offline).ONE == 1


@pytest.mark.parametrize("missing", ["parts/table.py", "metadata.json", "__init__.py"])
def test_a_partial_snapshot_is_no_build(cache: Path, build: Path, offline: Session, missing: str) -> None:
    """REF huggingface/huggingface_hub#4624: partial snapshots."""
    folder = fill(cache, build)
    (folder / missing).resolve().unlink()  # a link that leads nowhere
    with pytest.raises(NotCached, match="is not in"):
        load_kernel(REPO, session=offline, trust_remote_code=True)


@pytest.mark.parametrize("links", [True, False])
def test_a_cached_file_that_was_changed_is_not_imported(
    cache: Path, build: Path, offline: Session, links: bool
) -> None:
    folder = fill(cache, build, links=links)
    (folder / "parts/table.py").resolve().write_text("TWO = 3\n")
    with pytest.raises((DigestMismatch, FetchError)):
        load_kernel(REPO, session=offline, trust_remote_code=True)
    assert list(offline.store.builds()) == []


@pytest.mark.parametrize("place", ["__init__.py", "parts/table.py", "parts"])
def test_s_13_a_link_out_of_the_cache_is_not_followed(
    cache: Path, build: Path, offline: Session, tmp_path: Path, place: str
) -> None:
    folder = fill(cache, build)
    outside = tmp_path / "outside"
    target = folder / place
    if target.is_dir():
        shutil.move(target, outside)
    else:
        outside.write_bytes(target.read_bytes())
        target.unlink()
    target.symlink_to(outside)
    with pytest.raises(KernelHubError):
        load_kernel(REPO, session=offline, trust_remote_code=True)


def test_bytecode_that_importing_in_place_left_is_not_taken(cache: Path, build: Path, offline: Session) -> None:
    folder = fill(cache, build)
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__/__init__.cpython-311.pyc").write_bytes(b"")
    assert load_kernel(REPO, session=offline, trust_remote_code=True).ONE == 1
    [stored] = offline.store.builds()
    assert sorted(file.path for file in stored.manifest.files) == ["__init__.py", "metadata.json", "parts/table.py"]


def test_a_cached_build_without_digest_is_taken_as_unverified(
    cache: Path, tmp_path: Path, offline: Session, reporter: Recorder
) -> None:
    fill(cache, write_build(tmp_path / "published", REPO, "v1", "torch-cpu", FILES, digest=False))
    assert load_kernel(REPO, session=offline, trust_remote_code=True).ONE == 1
    assert any("lists no digests: its files are loaded unverified" in text for text in reporter.warnings)


def test_s_19_a_cache_that_strangers_can_write_is_left_alone(
    cache: Path, build: Path, offline: Session, reporter: Recorder
) -> None:
    fill(cache, build)
    cache.chmod(0o777)
    with pytest.raises(NotCached):
        load_kernel(REPO, session=offline, trust_remote_code=True)
    assert [text.partition("is left alone: others can write into")[1] != "" for text in reporter.warnings] == [True]


@pytest.mark.parametrize("text", ["", "v2", "c" * 39, "C" * 40, f"{COMMIT}/..", "\xff"])
def test_a_branch_file_that_names_no_commit_is_no_branch(cache: Path, build: Path, text: str) -> None:
    repository = fill(cache, build).parents[3]
    (repository / "refs/v1").write_bytes(text.encode("latin-1"))
    (repository / "snapshots").rename(repository / "none")
    with pytest.raises(NotCached):
        CachedIndex(Recorder()).refs(REPO)


def test_without_branch_files_a_build_says_which_version_it_is(cache: Path, build: Path, tmp_path: Path) -> None:
    """The peer loads by version and leaves no branch file behind."""
    other = write_build(tmp_path / "published", REPO, "v3", "torch-cpu", FILES, version=3)
    for age, (source, commit) in enumerate([(build, "e" * 40), (build, COMMIT), (other, "d" * 40)]):
        folder = fill(cache, source, commit=commit)
        os.utime(folder.parents[1], (age, age))
    shutil.rmtree(folder.parents[3] / "refs")
    assert CachedIndex(Recorder()).refs(REPO).versions == {1: COMMIT, 3: "d" * 40}


def test_a_short_commit_is_found_when_it_is_the_only_one(cache: Path, build: Path) -> None:
    fill(cache, build)
    index = CachedIndex(Recorder())
    assert index.commit(REPO, "cccccc") == COMMIT
    fill(cache, build, commit="c" * 39 + "d")
    with pytest.raises(NotCached):
        index.commit(REPO, "cccccc")


def test_the_peers_own_variable_is_looked_at_first(
    tmp_path: Path, cache: Path, build: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """REF PrimeIntellect-ai/prime-rl#2276: a workaround looked at one of the variables only."""
    fill(cache, build)
    peers = tmp_path / "peers"
    fill(peers, build, commit="d" * 40)
    monkeypatch.setenv("KERNELS_CACHE", str(peers))
    assert CachedIndex(Recorder()).refs(REPO).versions == {1: "d" * 40}
    monkeypatch.delenv("KERNELS_CACHE")
    assert CachedIndex(Recorder()).refs(REPO).versions == {1: COMMIT}
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert CachedIndex(Recorder()).refs(REPO).versions == {1: COMMIT}


@pytest.fixture
def published(hub_root: Path) -> Path:
    trust(hub_root, "acme")
    return write_build(hub_root, REPO, "v1", "torch-cpu", FILES)


def commit_of(session: Session) -> str:
    return session.resolve(KernelRequest.parse(REPO)).commit


def test_online_no_file_that_the_cache_has_is_downloaded_again(
    cache: Path, published: Path, session: Session, asked: Callable[[], list[str]]
) -> None:
    fill(cache, published, commit=commit_of(session))
    assert load_kernel(
        REPO, session=Session(cache_dir=session.cache_dir.with_name("two"), endpoint=session.endpoint)
    ).ONE
    asked()
    third = Session(cache_dir=session.cache_dir.with_name("three"), endpoint=session.endpoint)
    assert load_kernel(REPO, session=third).ONE == 1
    assert not [request for request in asked() if "/resolve/" in request]


@pytest.mark.parametrize("body", [b"TWO = 3\n", b"TWO", b"TWO = 2\n\n"])
def test_online_a_cached_file_that_differs_is_downloaded(
    cache: Path, published: Path, session: Session, asked: Callable[[], list[str]], body: bytes
) -> None:
    folder = fill(cache, published, commit=commit_of(session))
    (folder / "parts/table.py").resolve().write_bytes(body)
    (folder / "metadata.json").resolve().write_bytes(b"{}" + b" " * ((published / "metadata.json").stat().st_size - 2))
    asked()
    second = Session(cache_dir=session.cache_dir.with_name("two"), endpoint=session.endpoint)
    assert load_kernel(REPO, session=second).TWO == 2
    bodies = sorted(request.rpartition("/")[2] for request in asked() if "/resolve/" in request)
    assert bodies == ["metadata.json", "table.py"]


@pytest.mark.parametrize("asked", ["version=1", "revision='v1'"])
@pytest.mark.skipif(not PEER.exists(), reason="needs an environment with kernels 0.17.2")
def test_a_cache_that_the_peer_filled_serves_offline(
    asked: str, tmp_path: Path, published: Path, hub: LocalHub, offline: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    code = f"import kernels; print(kernels.get_kernel({REPO!r}, {asked}).TWO)"
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG")}
    environment = {**kept, "HF_HOME": str(home), "HF_ENDPOINT": hub.url}
    done = subprocess.run([PEER, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "2\n", done.stderr
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    kernel = load_kernel(f"{REPO}@v1", session=offline, trust_remote_code=[REPO])
    assert kernel.TWO == 2
    commit = next(offline.store.builds()).manifest.commit
    fresh = Session(cache_dir=tmp_path / "other", endpoint=offline.endpoint, offline=True)
    assert load_kernel(f"{REPO}@{commit}", session=fresh, trust_remote_code=[REPO]).TWO == 2
