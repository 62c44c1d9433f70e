"""Every build of a kernel: dependencies, renamed repositories, and trees that never end."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from kernel_repository import trust, write_build

from kernelhub.errors import (
    InvalidMetadata,
    KernelDependencyError,
    PinMismatch,
    RepositoryNotFound,
    RevisionNotFound,
    UntrustedPublisher,
)
from kernelhub.request import KernelRequest

if TYPE_CHECKING:
    from pathlib import Path

    from kernelhub.assortment import Assortment
    from kernelhub.session import Session


def build(root: Path, repo_id: str, *needs: str, variant: str = "torch-cpu", **options: Any) -> None:
    depends = {"kernel-depends": [{"repo-id": name, "version": 1} for name in needs]} if needs else {}
    write_build(root, repo_id, "v1", variant, {"__init__.py": ""}, metadata_overrides=depends, **options)


def names(found: Assortment) -> list[str]:
    return [f"{each.name} {each.variant}" for each in found.builds]


@pytest.fixture
def root(hub_root: Path) -> Path:
    trust(hub_root, "org")
    return hub_root


def resolve_all(session: Session, text: str, **options: Any) -> Assortment:
    return session.resolve_all(KernelRequest.parse(text), **options)


def test_kernels_come_after_those_they_depend_on_each_once(root: Path, session: Session) -> None:
    build(root, "org/top", "org/left", "org/right")
    build(root, "org/left", "org/base")
    build(root, "org/right", "org/base")
    build(root, "org/base")
    build(root, "org/base", variant="torch-cuda")
    found = resolve_all(session, "org/top")
    assert names(found) == [
        "org/base torch-cpu",
        "org/base torch-cuda",
        "org/left torch-cpu",
        "org/right torch-cpu",
        "org/top torch-cpu",
    ]
    assert all(each.metadata_bytes and len(each.commit) == 40 for each in found.builds)


def test_what_only_one_build_needs_comes_too(root: Path, session: Session) -> None:
    build(root, "org/top", variant="torch-cpu")
    build(root, "org/top", "org/base", variant="torch-cuda")
    build(root, "org/base")
    assert "org/base torch-cpu" in names(resolve_all(session, "org/top"))


def test_an_opt_in_is_not_passed_on_to_dependencies(root: Path, session: Session) -> None:
    build(root, "stranger/top", "other/base")
    build(root, "other/base")
    with pytest.raises(UntrustedPublisher, match="'other/base'"):
        resolve_all(session, "stranger/top", trust=True)
    both = resolve_all(session, "stranger/top", trust=["stranger/top", "other/base"])
    assert len(both.builds) == 2


def test_a_pull_request_may_hold_anybodys_code(root: Path, session: Session) -> None:
    build(root, "org/top")
    with pytest.raises(UntrustedPublisher, match="pull request"):
        resolve_all(session, "org/top@refs/pr/1")


def test_a_pin_of_the_policy_holds(root: Path, session: Session, tmp_path: Path) -> None:
    build(root, "org/top")
    session.policy_file = tmp_path / "policy.toml"
    session.policy_file.write_text(f'[pins]\n"org/top" = "{"d" * 40}"\n')
    with pytest.raises(PinMismatch):
        resolve_all(session, "org/top")


def test_a_renamed_repository_is_followed_once_and_trusted_on_its_own(root: Path, session: Session) -> None:
    def move(source: str, destination: str) -> None:
        (root / source).mkdir(parents=True, exist_ok=True)
        (root / source / "repository.json").write_text(json.dumps({"redirect": destination}))

    build(root, "org/new")
    move("org/old", "org/new")
    assert names(resolve_all(session, "org/old")) == ["org/new torch-cpu"]
    move("org/older", "org/old")
    with pytest.raises(RepositoryNotFound, match="moved again"):
        resolve_all(session, "org/older")
    build(root, "stranger/new")
    move("org/sold", "stranger/new")
    with pytest.raises(UntrustedPublisher, match="'stranger/new'"):
        resolve_all(session, "org/sold", trust=["org/sold"])


def test_a_circle_ends(root: Path, session: Session) -> None:
    build(root, "org/one", "org/two")
    build(root, "org/two", "org/one")
    with pytest.raises(KernelDependencyError, match="a cycle"):
        resolve_all(session, "org/one")


def test_a_build_with_broken_metadata_is_a_failure_of_its_own(root: Path, session: Session) -> None:
    build(root, "org/top")
    write_build(root, "org/top", "v1", "torch-cuda", {"__init__.py": "", "metadata.json": "{"})
    found = resolve_all(session, "org/top")
    assert names(found) == ["org/top torch-cpu"]
    [(name, error)] = found.failures
    assert name.endswith(" torch-cuda")
    assert isinstance(error, InvalidMetadata)


def test_a_repository_without_builds_or_version_is_told(root: Path, session: Session) -> None:
    build(root, "org/top", variant="not a variant")
    with pytest.raises(RepositoryNotFound, match="has no builds"):
        resolve_all(session, "org/top")
    with pytest.raises(RevisionNotFound):
        resolve_all(session, "org/top@v9")
