from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from kernelhub.errors import InvalidConfig
from kernelhub.repository_folder import ContentStore, File, Folder, HubFolder, RepositoryFolder, lfs_pointer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

REPO = "acme/relu"
FILES = {
    "README.md": b"relu\n",
    "build/torch-cpu/__init__.py": b"from . import layers\n",
    "build/torch-cpu/layers/__init__.py": b"",
    # git sorts "torch-cpu-x" before the folder "torch-cpu/": "-" comes before "/"
    "build/torch-cpu-x": b"not a folder\n",
    "build/torch.txt": b"\x00\xff binary",
    "build/\u00e9t\u00e9.py": b"summer = 1\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def hub(tmp_path: Path, root: Path) -> HubFolder:
    write(root / REPO / "v1", FILES)
    store = tmp_path / "store"
    store.mkdir()
    return HubFolder(root, ContentStore(store, lfs_threshold=1000))


@pytest.fixture
def repository(hub: HubFolder) -> RepositoryFolder:
    found = hub.repository(REPO)
    assert found is not None
    return found


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    for path, body in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(body)


def settle(folder: Path) -> None:
    """Make every file look as old as one that was written long ago."""
    for path in folder.rglob("*"):
        os.utime(path, (1, 1))


def git(folder: Path, *arguments: str, text: str | None = None) -> str:
    identity = {
        f"GIT_{who}_{what}": value
        for who in ("AUTHOR", "COMMITTER")
        for what, value in (("NAME", "kernelhub"), ("EMAIL", "serve@kernelhub.invalid"), ("DATE", "@0 +0000"))
    }
    nowhere = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_DIR": str(folder / ".git")}
    environment = os.environ | identity | nowhere
    command = ["git", "-c", "core.autocrlf=false", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, input=text, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def head(repository: RepositoryFolder, revision: str = "v1") -> tuple[str, str]:
    commit = repository.commit(revision)
    assert commit is not None
    return commit.id, commit.tree


def test_the_ids_of_files_trees_and_commits_are_those_of_git(
    repository: RepositoryFolder, root: Path, tmp_path: Path
) -> None:
    clone = tmp_path / "clone"
    shutil.copytree(root / REPO / "v1", clone)
    git(clone, "init", "--quiet")
    git(clone, "add", "--all", ".")
    tree = git(clone, "write-tree")
    commit = repository.commit("v1")
    assert commit is not None
    assert commit.tree == tree
    assert commit.id == git(clone, "commit-tree", tree, text=f"{REPO}\n")
    listed = git(clone, "-c", "core.quotePath=false", "ls-tree", "-r", "-t", tree).splitlines()
    expected = {line.split("\t")[1]: line.split()[2] for line in listed}
    assert {path: entry.oid for path, entry in commit.entries.items()} == expected
    assert list(commit.entries) == list(expected)


def test_an_lfs_file_is_in_git_as_its_pointer(repository: RepositoryFolder, root: Path, tmp_path: Path) -> None:
    write(root / REPO / "v1", {"big.bin": b"x" * 1000, "_relu.abi3.so": b"\x7fELF"})
    commit = repository.commit("v1")
    assert commit is not None
    for path, size in (("big.bin", 1000), ("_relu.abi3.so", 4)):
        file = commit.entries[path]
        assert isinstance(file, File)
        pointer = lfs_pointer(file.sha256, size)
        (tmp_path / "pointer").write_bytes(pointer)
        assert (file.size, file.pointer_size, file.etag) == (size, len(pointer), file.sha256)
        assert file.oid == git(tmp_path, "hash-object", "--no-filters", "pointer")


def test_an_empty_branch_has_the_empty_tree(repository: RepositoryFolder, root: Path) -> None:
    (root / REPO / "empty" / "folder").mkdir(parents=True)
    assert head(repository, "empty")[1] == "4b825dc642cb6eb9a060e54bf8d69288fbee4904"


def test_listings_are_of_one_folder_or_of_everything_below(repository: RepositoryFolder) -> None:
    commit = repository.commit("v1")
    assert commit is not None
    top = commit.listing()
    assert top is not None
    assert [(path, type(entry)) for path, entry in top] == [("README.md", File), ("build", Folder)]
    below = commit.listing("build/torch-cpu", recursive=True)
    assert below is not None
    assert [path.removeprefix("build/torch-cpu/") for path, _ in below] == [
        "__init__.py",
        "layers",
        "layers/__init__.py",
    ]
    assert commit.listing("build/torch") is None
    assert commit.listing("README.md") is None


def test_a_revision_is_a_branch_a_tag_a_ref_or_a_commit(repository: RepositoryFolder, root: Path) -> None:
    write(root / REPO / "v2", {"README.md": b"two\n"})
    first, second = head(repository)[0], head(repository, "v2")[0]
    tags = {"stable": "v1", "pinned": second, "gone": "v9"}
    (root / REPO / "repository.json").write_text(json.dumps({"tags": tags}))
    assert head(repository, "stable")[0] == head(repository, "refs/tags/stable")[0] == first
    assert head(repository, "pinned")[0] == head(repository, second)[0] == second
    assert head(repository, "refs/heads/v1")[0] == first
    assert set(repository.tags()) == {"stable", "pinned"}
    for missing in ("v9", "gone", "0" * 40, first[:12], "../relu/v1", "", "."):
        assert repository.commit(missing) is None


def test_main_is_the_newest_version_unless_it_exists(repository: RepositoryFolder, root: Path) -> None:
    for branch in ("v9", "v10"):
        write(root / REPO / branch, {"README.md": branch.encode()})
    assert head(repository, "main") == head(repository, "v10")
    write(root / REPO / "main", {"README.md": b"main"})
    assert head(repository, "main") != head(repository, "v10")
    assert set(repository.branches()) == {"v1", "v9", "v10", "main"}


def test_a_commit_is_known_by_id_before_its_branch_was_asked_for(tmp_path: Path, hub: HubFolder, root: Path) -> None:
    first = hub.repository(REPO)
    other = HubFolder(root, ContentStore(tmp_path / "store", lfs_threshold=1000)).repository(REPO)
    assert first is not None
    assert other is not None
    assert other.commit(head(first)[0]) is not None


def test_an_old_commit_outlives_the_move_of_its_branch(repository: RepositoryFolder, root: Path) -> None:
    old = repository.commit("v1")
    (root / REPO / "v1" / "README.md").write_bytes(b"moved\n")
    (root / REPO / "v1" / "build" / "torch.txt").unlink()
    new = repository.commit("v1")
    assert old is not None
    assert new is not None
    assert new.id != old.id
    assert repository.commit(old.id) is old
    for path, body in FILES.items():
        file = old.entries[path]
        assert isinstance(file, File)
        assert file.body.read_bytes() == body
    assert "build/torch.txt" not in new.entries


def test_a_branch_that_moves_back_has_its_old_commit_again(repository: RepositoryFolder, root: Path) -> None:
    before = head(repository)
    (root / REPO / "v1" / "README.md").write_bytes(b"moved\n")
    assert head(repository) != before
    (root / REPO / "v1" / "README.md").write_bytes(FILES["README.md"])
    assert head(repository) == before


def test_a_change_of_equal_size_within_one_clock_tick_is_seen(repository: RepositoryFolder, root: Path) -> None:
    seen = set()
    for number in range(50):
        (root / REPO / "v1" / "README.md").write_bytes(b"%02d\n" % number)
        seen.add(head(repository)[0])
    assert len(seen) == 50


def test_a_warm_look_reads_no_file(repository: RepositoryFolder, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(root)
    monkeypatch.setattr("kernelhub.repository_folder._SETTLED_AFTER_NS", -(10**18))
    before = repository.commit("v1")
    monkeypatch.setattr(ContentStore, "add", lambda *_: pytest.fail("a file was read again"))
    assert repository.commit("v1") is before


def test_only_the_changed_file_is_read_again(
    repository: RepositoryFolder, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernelhub.repository_folder._SETTLED_AFTER_NS", -(10**18))
    repository.commit("v1")
    read: list[str] = []
    copy = ContentStore._copy

    def noted(self: ContentStore, path: Path) -> File:
        read.append(path.name)
        return copy(self, path)

    monkeypatch.setattr(ContentStore, "_copy", noted)
    (root / REPO / "v1" / "README.md").write_bytes(b"changed length\n")
    repository.commit("v1")
    assert read == ["README.md"]


def test_hidden_files_caches_and_pipes_are_not_part_of_a_commit(repository: RepositoryFolder, root: Path) -> None:
    before = head(repository)
    branch = root / REPO / "v1"
    write(branch, {".gitattributes": b"x", ".git/config": b"x", "build/__pycache__/a.pyc": b"x"})
    os.mkfifo(branch / "pipe")
    (root / REPO / ".v2").mkdir()
    assert head(repository) == before
    assert set(repository.branches()) == {"v1", "main"}


def test_links_are_followed_to_files_inside_the_root_only(
    repository: RepositoryFolder, root: Path, tmp_path: Path
) -> None:
    before = head(repository)
    (tmp_path / "secret").write_bytes(b"secret")
    branch = root / REPO / "v1"
    for name, target in {
        "out": tmp_path / "secret",
        "out-folder": tmp_path,
        "circle": branch / "circle",
        "loop": branch,
        "nothing": branch / "missing",
    }.items():
        (branch / name).symlink_to(target)
    (root / REPO / "v3").symlink_to(tmp_path)
    (root / REPO / "v4").symlink_to(root / REPO / "v4")
    assert head(repository) == before
    (branch / "in").symlink_to("README.md")
    (root / REPO / "v2").symlink_to("v1")
    commit = repository.commit("v2")
    assert commit is not None
    assert commit.entries["in"] == commit.entries["README.md"]
    assert set(repository.branches()) == {"v1", "v2", "main"}


def test_names_that_are_not_utf8_are_left_out(repository: RepositoryFolder, root: Path) -> None:
    before = head(repository)
    write(root / REPO / "v1", {os.fsdecode(b"\xff.py"): b"x"})
    assert head(repository) == before


def test_repositories_are_found_inside_the_root_only(hub: HubFolder, root: Path, tmp_path: Path) -> None:
    write(tmp_path / "outside" / "relu" / "v1", {"a.py": b""})
    (root / "linked").symlink_to(tmp_path / "outside")
    write(root / ".hidden" / "relu" / "v1", {"a.py": b""})
    for repo_id in (
        "acme/missing",
        "acme",
        "acme/relu/v1",
        "acme/..",
        "../outside/relu",
        "../outside",
        "linked/relu",
        ".hidden/relu",
        "acme/",
        "/relu",
        "acme/re\0lu",
    ):
        assert hub.repository(repo_id) is None
    assert hub.organization("missing") is None
    assert hub.organization("..") is None
    assert hub.organization("acme") == {}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "JSON"),
        ("[]", "not a JSON object"),
        ('{"typ": "kernel"}', "'typ'"),
        ('{"gated": "yes"}', "'gated'"),
        ('{"type": "dataset"}', "'dataset'"),
    ],
)
def test_settings_that_cannot_be_understood_are_refused(
    repository: RepositoryFolder, root: Path, text: str, named: str
) -> None:
    (root / REPO / "repository.json").write_text(text)
    with pytest.raises(InvalidConfig, match=named) as caught:
        _ = repository.settings
    assert "repository.json" in str(caught.value)


def test_a_file_that_goes_away_while_it_is_read_is_looked_at_again(
    repository: RepositoryFolder, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = root / REPO / "v1" / "README.md"
    add = ContentStore.add

    def add_but_lose(self: ContentStore, path: Path, stamp: object) -> File:
        gone.unlink(missing_ok=True)
        return add(self, path, stamp)  # type: ignore[arg-type]

    monkeypatch.setattr(ContentStore, "add", add_but_lose)
    commit = repository.commit("v1")
    assert commit is not None
    assert "README.md" not in commit.entries


def test_a_branch_that_keeps_losing_files_raises_instead_of_looping(
    repository: RepositoryFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> File:
        raise FileNotFoundError("gone")

    monkeypatch.setattr(ContentStore, "add", lost)
    with pytest.raises(FileNotFoundError):
        repository.commit("v1")
