"""Loads that follow a lock, over HTTP."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from kernel_repository import trust, write_build

import kernelhub
from kernelhub.errors import IncompleteDownload, NotLocked, UntrustedPublisher
from kernelhub.lockfile import Lock
from kernelhub.request import KernelRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kernelhub.serve import LocalHub
    from kernelhub.session import Session


@pytest.fixture
def repository(hub_root: Path) -> Path:
    trust(hub_root, "org")
    write_build(hub_root, "org/kernel", "v1", "torch-cpu", {"__init__.py": "answer = 1\n"})
    write_build(hub_root, "org/kernel", "v1", "torch-cuda", {"__init__.py": "answer = 'cuda'\n"})
    return hub_root


def without_lock(session: Session, tmp_path: Path) -> Session:
    """A session that follows no lock and remembers nothing."""
    return replace(session, cache_dir=tmp_path / "other-store", lockfile=False)


def lock(session: Session, path: Path, *requests: str) -> Session:
    """Write a lock for the requests, and return the session that follows it."""
    session.make_lock([KernelRequest.parse(request) for request in requests]).write(path)
    return replace(session, lockfile=path)


def move_branch(root: Path) -> None:
    write_build(root, "org/kernel", "v1", "torch-cpu", {"__init__.py": "answer = 2\n"})


def test_the_locked_commit_is_loaded_although_the_branch_moved(
    repository: Path, session: Session, tmp_path: Path
) -> None:
    """REF huggingface/kernels#33, #42, #10, #114, #209: what was loaded was not always what was locked."""
    locked = lock(session, tmp_path / "kernelhub.lock", "org/kernel@v1")
    move_branch(repository)
    assert kernelhub.load_kernel("org/kernel@v1", session=locked).answer == 1
    assert kernelhub.load_kernel("org/kernel", session=locked).answer == 1
    commit = Lock.read(tmp_path / "kernelhub.lock").kernels[0].commit
    assert kernelhub.load_kernel(f"org/kernel@{commit}", session=locked).answer == 1


def test_a_locked_load_asks_for_bodies_only(
    repository: Path, session: Session, tmp_path: Path, asked: Callable[[], list[str]]
) -> None:
    locked = lock(session, tmp_path / "kernelhub.lock", "org/kernel@v1")
    asked()
    kernelhub.load_kernel("org/kernel@v1", session=locked)
    paths = [request for request in asked() if "/resolve/" not in request]
    # The repository's type is part of every address, and a session that did not make the lock has to ask for it.
    assert paths in ([], ["GET /api/kernels/org/kernel/refs"])
    kernelhub.load_kernel("org/kernel@v1", session=locked)
    assert asked() == []


def test_every_variant_is_locked_not_only_the_one_of_this_machine(
    repository: Path, session: Session, tmp_path: Path
) -> None:
    lock(session, tmp_path / "kernelhub.lock", "org/kernel@v1")
    assert set(Lock.read(tmp_path / "kernelhub.lock").kernels[0].variants) == {"torch-cpu", "torch-cuda"}


def test_a_kernel_that_is_not_in_the_lock_is_refused_with_the_next_command(
    repository: Path, session: Session, tmp_path: Path
) -> None:
    """REF huggingface/kernels#33, #42: a lock without an entry was found out late, or not at all."""
    write_build(repository, "org/other", "v1", "torch-cpu", {"__init__.py": ""})
    write_build(repository, "org/kernel", "v2", "torch-cpu", {"__init__.py": ""})
    locked = lock(session, tmp_path / "kernelhub.lock", "org/kernel@v1")
    for request in ("org/other@v1", "org/kernel@v2", "org/kernel@main", f"org/kernel@{'0' * 40}"):
        with pytest.raises(NotLocked, match="kernelhub lock"):
            kernelhub.load_kernel(request, session=locked)


def test_a_lock_covers_the_kernels_that_a_kernel_depends_on(repository: Path, session: Session, tmp_path: Path) -> None:
    write_build(
        repository,
        "org/parent",
        "v1",
        "torch-cpu",
        {"__init__.py": ""},
        metadata_overrides={"kernel-depends": [{"repo-id": "org/kernel", "version": 1}]},
    )
    locked = lock(session, tmp_path / "kernelhub.lock", "org/parent@v1")
    kernels = {kernel.name: kernel for kernel in Lock.read(tmp_path / "kernelhub.lock").kernels}
    assert kernels["org/parent@v1"].dependencies == ("org/kernel@v1",)
    assert kernels["org/kernel@v1"].dependency
    move_branch(repository)
    resolution = locked.resolve(KernelRequest.parse("org/parent@v1"))
    assert resolution.dependencies[0].commit == kernels["org/kernel@v1"].commit


def test_s_08_an_unlocked_dependency_in_a_locked_tree_is_an_error(
    repository: Path, session: Session, tmp_path: Path
) -> None:
    write_build(
        repository,
        "org/parent",
        "v1",
        "torch-cpu",
        {"__init__.py": ""},
        metadata_overrides={"kernel-depends": [{"repo-id": "org/kernel", "version": 1}]},
    )
    path = tmp_path / "kernelhub.lock"
    lock(session, path, "org/parent@v1")
    whole = Lock.read(path)
    Lock(tuple(kernel for kernel in whole.kernels if not kernel.dependency)).write(path)
    with pytest.raises(NotLocked, match="org/kernel"):
        kernelhub.load_kernel("org/parent@v1", session=replace(session, lockfile=path))


def test_s_30_a_lock_never_grants_trust(hub_root: Path, session: Session, tmp_path: Path) -> None:
    write_build(hub_root, "stranger/kernel", "v1", "torch-cpu", {"__init__.py": ""})
    path = tmp_path / "kernelhub.lock"
    with pytest.raises(UntrustedPublisher):
        session.make_lock([KernelRequest.parse("stranger/kernel@v1")])
    session.make_lock([KernelRequest.parse("stranger/kernel@v1")], trust=["stranger/kernel"]).write(path)
    with pytest.raises(UntrustedPublisher):
        kernelhub.load_kernel("stranger/kernel@v1", session=replace(session, lockfile=path))


def test_a_file_that_differs_from_the_lock_is_not_loaded(repository: Path, session: Session, tmp_path: Path) -> None:
    path = tmp_path / "kernelhub.lock"
    lock(session, path, "org/kernel@v1")
    text = path.read_text()
    whole = Lock.read(path)
    listed = next(file for file in whole.kernels[0].variants["torch-cpu"] if file.path == "__init__.py")
    path.write_text(text.replace(listed.hash.hex, "0" * 40))
    with pytest.raises(IncompleteDownload, match="content hash"):
        kernelhub.load_kernel("org/kernel@v1", session=replace(session, lockfile=path))


def test_a_lock_in_the_current_folder_is_followed(
    repository: Path, hub: LocalHub, session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    lock(session, project / "kernelhub.lock", "org/kernel@v1")
    move_branch(repository)
    monkeypatch.chdir(project)
    assert kernelhub.load_kernel("org/kernel@v1", session=replace(session)).answer == 1
    assert kernelhub.load_kernel("org/kernel@v1", session=without_lock(session, tmp_path)).answer == 2


def test_the_variable_names_the_lock_to_follow(
    repository: Path, session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "elsewhere.lock"
    lock(session, path, "org/kernel@v1")
    move_branch(repository)
    monkeypatch.setenv("KERNELHUB_LOCK", str(path))
    assert kernelhub.load_kernel("org/kernel@v1", session=replace(session)).answer == 1
