"""What a name gave when it was first used here, and what happens when it gives something else."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from kernel_repository import trust, write_build

from kernelhub import load_kernel
from kernelhub.errors import ChangedKernel
from kernelhub.prefetch import prefetch
from kernelhub.request import KernelRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Recorder

    from kernelhub.session import Session

REPO = "acme/relu"


@pytest.fixture
def root(hub_root: Path) -> Path:
    trust(hub_root, "acme")
    publish(hub_root, 1)
    return hub_root


@pytest.fixture(autouse=True)
def asked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELHUB_FRESH_SECONDS", "0.000001")


def publish(root: Path, value: int, repo_id: str = REPO, branch: str = "v1", **facts: Any) -> None:
    """Whoever may push does so."""
    write_build(root, repo_id, branch, "torch-cpu", {"__init__.py": f"VALUE = {value}\n"}, **facts)


def load(session: Session, request: str = REPO, **changes: Any) -> Any:
    """In what could be another process."""
    return load_kernel(request, session=replace(session, **changes)).VALUE


def strict(session: Session, request: str = REPO) -> Any:
    return load(session, request, strict=True)


def test_s_01_a_version_that_moved_is_told_once_before_the_import(
    root: Path, session: Session, reporter: Recorder
) -> None:
    assert load(session) == load(session) == 1
    before = session.resolve(KernelRequest.parse(REPO)).commit
    publish(root, 2)
    after = replace(session).resolve(KernelRequest.parse(REPO)).commit
    assert reporter.warnings == [
        f"kernel {REPO}@v1 moved: commit {before[:12]} at its first use here, {after[:12]} now"
    ]
    assert load(session) == 2
    assert len(reporter.warnings) == 2
    assert load(session) == 2
    assert len(reporter.warnings) == 2


def test_s_01_in_the_strict_mode_it_is_refused_until_somebody_says_which_one(
    root: Path, session: Session, tmp_path: Path, forget_kernels: Callable[[], None]
) -> None:
    assert strict(session) == 1
    publish(root, 2)
    for _ in range(2):
        with pytest.raises(ChangedKernel, match=rf"{REPO}@v1 moved: .*If you want this one, lock it") as caught:
            strict(session)
    assert strict(session, f"{REPO}@{caught.value.first}") == 1
    assert strict(session, f"{REPO}@{caught.value.now}") == 2
    with pytest.raises(ChangedKernel):
        strict(session)
    lock = session.make_lock([KernelRequest.parse(f"{REPO}@v1")])
    assert load(session, strict=True, lockfile=lock) == 2
    policy = tmp_path / "kernelhub.toml"
    policy.write_text(f'[pins]\n"{REPO}" = "{caught.value.now}"\n')
    assert load(session, strict=True, policy_file=policy) == 2


@pytest.mark.parametrize("name", ["main", ">=1", "latest"])
def test_s_01_a_branch_and_a_range_may_move_too(name: str, root: Path, session: Session) -> None:
    assert strict(session, f"{REPO}@{name}") == 1
    publish(root, 2, branch="v2", version=2)
    with pytest.raises(ChangedKernel, match=f"{REPO}@{name} moved"):
        strict(session, f"{REPO}@{name}")
    assert strict(session, f"{REPO}@v2") == 2


def test_s_01_a_kernel_that_another_one_needs_may_move_too(root: Path, session: Session) -> None:
    needs = {"kernel-depends": [{"repo-id": REPO, "version": 1}]}
    publish(root, 3, "acme/parent", metadata_overrides=needs)
    assert strict(session, "acme/parent") == 3
    publish(root, 2)
    with pytest.raises(ChangedKernel, match=f"{REPO}@v1 moved"):
        strict(session, "acme/parent")


def test_s_01_other_files_at_the_same_commit_are_told(root: Path, session: Session, reporter: Recorder) -> None:
    """A mirror that swaps files under a commit: the store was emptied, what was used is remembered."""
    assert strict(session) == 1
    [record] = session.store.root.glob("hubs/*/records/first-uses/*.json")
    facts = json.loads(record.read_text())
    for folder in session.store.root.glob("hubs/*/builds"):
        shutil.rmtree(folder)
    record.write_text(json.dumps({**facts, "digests": {"torch-cpu": "0" * 64}}))
    with pytest.raises(ChangedKernel, match=f"{REPO}@v1 has other files at commit {facts['commit'][:12]}"):
        strict(session)
    assert load(session) == 1
    assert [text for text in reporter.warnings if "has other files at commit" in text]
    assert strict(session) == 1


def test_s_01_what_is_prefetched_counts_as_used(root: Path, session: Session) -> None:
    prefetch([KernelRequest.parse(REPO)], session)
    publish(root, 2)
    with pytest.raises(ChangedKernel):
        strict(session)


@pytest.mark.parametrize("damage", ["", "{", '{"name": NAME}', '{"name": NAME, "time": 1, "commit": 1, "digests": 1}'])
def test_r_36_a_damaged_memory_is_written_again(damage: str, root: Path, session: Session) -> None:
    assert strict(session) == 1
    [record] = session.store.root.glob("hubs/*/records/first-uses/*.json")
    name = json.loads(record.read_text())["name"]
    record.write_text(damage.replace("NAME", json.dumps(name)))
    assert strict(session) == 1
    publish(root, 2)
    with pytest.raises(ChangedKernel):
        strict(session)
