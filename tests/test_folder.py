"""Builds read in place: a user's own folder, and the shipped collection."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from kernel_repository import write_build

from kernelhub import load_kernel
from kernelhub.errors import DigestMismatch, InvalidMetadata, NoCompatibleVariant, RepositoryNotFound, RevisionNotFound
from kernelhub.folder import LocalFolder, open_builtin
from kernelhub.revision import Revision

if TYPE_CHECKING:
    from pathlib import Path

    from kernelhub.api import Session

SOURCE = "class Layer:\n    pass\n"


@pytest.fixture
def build(tmp_path: Path) -> Path:
    return write_build(tmp_path, "acme/relu", "v1", "torch-cpu", {"__init__.py": SOURCE})


def test_builds_are_found_from_the_repository_the_build_folder_and_the_build_itself(build: Path) -> None:
    for folder in (build.parents[1], build.parent, build):
        assert LocalFolder.open(folder).builds == {"torch-cpu": build}


def test_a_build_folder_of_any_name_is_taken_as_it_is(build: Path) -> None:
    moved = build.rename(build.parents[2] / "my kernel")
    assert LocalFolder.open(moved).unnamed == moved


def test_an_older_build_with_a_nested_package_can_be_named_itself(build: Path, hubless: Session) -> None:
    (build / "relu").mkdir()
    (build / "__init__.py").rename(build / "relu" / "__init__.py")
    (build / "metadata.json").unlink()
    assert load_kernel(f"{build}:Layer", session=hubless).__name__ == "Layer"


def test_a_folder_without_a_build_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(RepositoryNotFound, match="no such folder"):
        LocalFolder.open(tmp_path / "gone")
    with pytest.raises(RepositoryNotFound, match=r"no __init__\.py and no build/<variant> folder"):
        LocalFolder.open(tmp_path)


def test_a_local_build_is_loaded_in_place_and_writes_nothing(build: Path, hubless: Session) -> None:
    """REF huggingface/kernels#102, #123, #211, #271: a build on this machine could not be loaded."""
    before = sorted(build.rglob("*"))
    assert load_kernel(f"{build.parents[1]}:Layer", session=hubless).__name__ == "Layer"
    assert sorted(build.rglob("*")) == before
    assert not hubless.store.root.exists()


def test_a_changed_local_build_is_a_digest_mismatch(build: Path, hubless: Session) -> None:
    (build / "__init__.py").write_text(SOURCE + "# changed\n")
    with pytest.raises(DigestMismatch, match="does not match the sha256"):
        load_kernel(str(build), session=hubless)


def test_a_local_build_for_another_machine_says_why(tmp_path: Path, hubless: Session) -> None:
    build = write_build(tmp_path, "acme/relu", "v1", "torch-cuda", {"__init__.py": ""})
    with pytest.raises(NoCompatibleVariant, match="built for cuda"):
        load_kernel(str(build), session=hubless, backend="cpu")


@pytest.mark.parametrize("kind", ["folder", "fifo", "link"])
def test_s_37_metadata_that_is_no_regular_file_is_refused_without_waiting(
    kind: str, build: Path, hubless: Session
) -> None:
    metadata = build / "metadata.json"
    moved = metadata.rename(build.parent / "metadata.json")
    if kind == "folder":
        metadata.mkdir()
    elif kind == "fifo":
        os.mkfifo(metadata)
    else:
        metadata.symlink_to(moved)
    with pytest.raises(InvalidMetadata, match="cannot be read"):
        load_kernel(str(build), session=hubless)


def test_s_14_metadata_beyond_its_limit_is_not_read_to_its_end(build: Path, hubless: Session) -> None:
    with (build / "metadata.json").open("r+b") as file:
        file.truncate(1 << 40)  # sparse: reading all of it would take longer than any test
    with pytest.raises(InvalidMetadata, match="more than 1048576"):
        load_kernel(str(build), session=hubless)


def test_the_shipped_collection_is_versioned() -> None:
    assert open_builtin(None).label == open_builtin(Revision.parse("latest")).label
    assert open_builtin(Revision.parse("v1")).label == "builtin@v1"
    with pytest.raises(RevisionNotFound, match="versions are v1"):
        open_builtin(Revision.parse("v999"))
