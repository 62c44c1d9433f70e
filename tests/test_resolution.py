"""From a request to one build at one commit: pinned once, trusted one by one, nothing fetched before it is judged."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from kernel_repository import trust, write_build

from kernelhub import Environment, load_kernel
from kernelhub.api import Session
from kernelhub.errors import (
    InvalidMetadata,
    InvalidPath,
    InvalidRequest,
    KernelDependencyError,
    NoCompatibleVariant,
    RepositoryNotFound,
    RevisionNotFound,
    UntrustedPublisher,
)
from kernelhub.request import KernelRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Recorder

    from kernelhub.resolution import Resolution
    from kernelhub.serve import LocalHub

REPO = "acme/relu"
H100 = "torch=2.13,cuda=13.0,sm=90,cpu=x86_64,os=linux"


@pytest.fixture
def root(hub_root: Path) -> Path:
    trust(hub_root, "acme")
    write_build(hub_root, REPO, "v1", "torch-cpu", {"__init__.py": "ONE = 1\n"})
    return hub_root


def resolve(session: Session, request: str = REPO, **options: Any) -> Resolution:
    return session.resolve(KernelRequest.parse(request), **options)


def for_machine(session: Session, text: str) -> Session:
    return Session(
        cache_dir=session.cache_dir, endpoint=session.endpoint, token=False, environment=Environment.parse(text)
    )


def depend(root: Path, repo_id: str, *needs: str, files: dict[str, str | bytes] | None = None) -> None:
    """Version 1 of a repository that needs version 1 of others."""
    trust(root, repo_id.partition("/")[0], repo_id.startswith("acme/"))
    wanted = [{"repo-id": need, "version": 1} for need in needs]
    overrides = {"kernel-depends": wanted}
    write_build(root, repo_id, "v1", "torch-cpu", files or {"__init__.py": ""}, metadata_overrides=overrides)


def redirect(root: Path, old: str, new: str) -> None:
    (root / old).mkdir(parents=True, exist_ok=True)
    (root / old / "repository.json").write_text(json.dumps({"redirect": new}))


def test_a_resolution_is_a_value_that_says_what_and_why(root: Path, session: Session) -> None:
    resolution = resolve(session)
    assert re.fullmatch("[0-9a-f]{40}", resolution.commit)
    assert resolution.build == f"acme/relu@{resolution.commit[:12]} torch-cpu"
    assert resolution.size == sum(file.size for file in resolution.files)
    assert resolution.trust.startswith("publisher acme is trusted by ")
    assert resolution.metadata is not None
    assert pickle.loads(pickle.dumps(resolution)) == resolution


def test_nothing_but_metadata_is_fetched(root: Path, session: Session, asked: Callable[[], list[str]]) -> None:
    resolve(session)
    assert [request.rpartition("/")[2] for request in asked() if "/resolve/" in request] == ["metadata.json"]


@pytest.mark.parametrize("revision", ["v2", "latest", ">=1,<3", "2"])
def test_a_version_can_be_asked_for_in_many_ways(revision: str, root: Path, session: Session) -> None:
    write_build(root, REPO, "v2", "torch-cpu", {"__init__.py": "TWO = 2\n"}, version=2)
    write_build(root, REPO, "v0", "torch-cpu", {"__init__.py": "ZERO = 2\n"}, version=0)
    assert resolve(session, f"{REPO}@{revision}").commit == resolve(session, f"{REPO}@v2").commit


def test_an_unknown_revision_lists_what_there_is(root: Path, session: Session) -> None:
    for revision in ("v2", ">=2", "no-such-branch", "c" * 40):
        with pytest.raises(RevisionNotFound, match=re.escape(repr(revision))):
            resolve(session, f"{REPO}@{revision}")
    write_build(root, "acme/plain", "main", "torch-cpu", {"__init__.py": ""})
    with pytest.raises(RevisionNotFound, match=r"it has no versions .* branches are 'main'"):
        resolve(session, "acme/plain")


def test_a_branch_made_after_the_last_look_is_found(root: Path, session: Session) -> None:
    resolve(session)
    write_build(root, REPO, "v2", "torch-cpu", {"__init__.py": "TWO = 2\n"}, version=2)
    assert resolve(session, f"{REPO}@v2").variant == "torch-cpu"


def test_builds_whose_architectures_do_not_fit_are_passed_over_and_told(root: Path, session: Session) -> None:
    gpus = {"torch213-cxx11-cu130-x86_64-linux": ["8.0"], "torch213-cu130-x86_64-linux": ["10.0"]}
    for variant, archs in gpus.items():
        write_build(root, "acme/gpu", "v1", variant, {"__init__.py": f"# {variant}\n"}, archs=archs)
    machine = for_machine(session, H100)
    with pytest.raises(NoCompatibleVariant) as caught:
        resolve(machine, "acme/gpu")
    for variant, archs in gpus.items():
        assert re.search(f"no code for GPU 9.0.*, only for {archs[0]}: {variant}", str(caught.value))
    write_build(root, "acme/gpu", "v2", "torch213-cxx11-cu130-x86_64-linux", {"__init__.py": ""}, archs=["9.0"])
    write_build(root, "acme/gpu", "v2", "torch213-cu130-x86_64-linux", {"__init__.py": ""}, archs=["10.0"])
    assert resolve(machine, "acme/gpu@v2").variant == "torch213-cxx11-cu130-x86_64-linux"


def test_metadata_larger_than_its_limit_is_not_fetched(
    root: Path, session: Session, asked: Callable[[], list[str]]
) -> None:
    (root / REPO / "v1/build/torch-cpu/metadata.json").write_bytes(b"{" + b" " * (1 << 20) + b"}")
    with pytest.raises(InvalidMetadata, match=r"1048578 bytes.*at most 1048576"):
        resolve(session)
    assert not [request for request in asked() if "/resolve/" in request]


# S-02


def test_s_02_a_branch_that_moves_keeps_its_commit_until_asked_again_and_the_move_is_told(
    root: Path, session: Session, reporter: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = resolve(session)
    session.obtain(before)
    write_build(root, REPO, "v1", "torch-cpu", {"__init__.py": "ONE = 11\n"})
    assert resolve(session).commit == before.commit
    monkeypatch.setenv("KERNELHUB_FRESH_SECONDS", "0.000001")
    after = resolve(session)
    assert after.commit != before.commit
    moved = f"kernel acme/relu@v1 moved: commit {before.commit[:12]} at its first use here, {after.commit[:12]} now"
    assert reporter.warnings == [moved]


def test_s_02_what_was_resolved_is_what_is_loaded(root: Path, session: Session) -> None:
    resolution = resolve(session)
    write_build(root, REPO, "v1", "torch-cpu", {"__init__.py": "ONE = 11\n"})
    assert session.obtain(resolution).folder.joinpath("__init__.py").read_text() == "ONE = 1\n"
    assert load_kernel(f"{REPO}@{resolution.commit}", session=session).ONE == 1


def test_s_02_main_is_resolved_once(root: Path, session: Session, asked: Callable[[], list[str]]) -> None:
    assert load_kernel(REPO, revision="main", session=session).ONE == 1
    requests = asked()
    assert sum("/refs" in request for request in requests) == 1
    assert not [request for request in requests if "/main" in request]


# S-04


def test_s_04_the_new_name_of_a_repository_is_trusted_on_its_own(root: Path, session: Session) -> None:
    redirect(root, "acme/old", "evil/relu")
    write_build(root, "evil/relu", "v1", "torch-cpu", {"__init__.py": "ONE = 666\n"})
    for opt_in in (False, True, ["acme/old"]):
        with pytest.raises(UntrustedPublisher, match="kernel 'evil/relu' would run code of publisher 'evil'"):
            resolve(session, "acme/old", trust=opt_in)
    assert resolve(session, "acme/old", trust=["evil/relu"]).name == "evil/relu"


def test_s_04_a_move_inside_what_is_trusted_is_followed_and_noted(root: Path, session: Session) -> None:
    redirect(root, "acme/old", REPO)
    resolution = resolve(session, "acme/old")
    assert (resolution.name, resolution.commit) == (REPO, resolve(session).commit)
    assert resolution.notes == ("acme/old has moved to acme/relu",)
    assert load_kernel("acme/old", session=session).ONE == 1


def test_s_04_one_hop_and_no_more(root: Path, session: Session) -> None:
    redirect(root, "acme/older", "acme/old")
    redirect(root, "acme/old", REPO)
    with pytest.raises(RepositoryNotFound, match="it moved to acme/old, which moved again"):
        resolve(session, "acme/older")
    redirect(root, "acme/loop", "acme/loop")
    with pytest.raises(RepositoryNotFound, match="moved again"):
        resolve(session, "acme/loop")


# S-08, S-09


def test_s_08_each_kernel_needs_its_own_opt_in(root: Path, session: Session) -> None:
    depend(root, "someone/top", "someone/part", REPO)
    depend(root, "someone/part")
    for opt_in in (True, ["someone/top"]):
        with pytest.raises(UntrustedPublisher, match=r"trust_remote_code=\['someone/part'\]"):
            resolve(session, "someone/top", trust=opt_in)
    resolution = resolve(session, "someone/top", trust=["someone/top", "someone/part"])
    assert [part.name for part in resolution.dependencies] == ["someone/part", REPO]
    assert [part.trust for part in resolution.tree()][-1] == "opted in by the caller"


def test_s_08_dependencies_are_obtained_too(root: Path, session: Session) -> None:
    depend(root, "acme/top", REPO)
    built = session.obtain(resolve(session, "acme/top"))
    assert [part.kernel for part in built.dependencies] == [resolve(session).kernel]
    assert len(list(session.store.builds())) == 2


def test_s_09_each_kernel_of_a_diamond_is_resolved_once(
    root: Path, session: Session, asked: Callable[[], list[str]]
) -> None:
    depend(root, "acme/top", "acme/left", "acme/right")
    depend(root, "acme/left", REPO)
    depend(root, "acme/right", REPO)
    resolution = resolve(session, "acme/top")
    assert [part.name for part in resolution.tree()] == [REPO, "acme/left", "acme/right", "acme/top"]
    requests = asked()
    assert sum("/acme/relu/tree/" in request for request in requests) == 1
    assert sum("/overview" in request for request in requests) == 1


def test_s_09_a_cycle_is_refused_with_its_path(root: Path, session: Session) -> None:
    depend(root, "acme/top", "acme/one")
    depend(root, "acme/one", "acme/two")
    depend(root, "acme/two", "acme/one")
    with pytest.raises(KernelDependencyError, match=r"a cycle: .*acme/one@v1 -> acme/two@v1 -> acme/one@v1"):
        resolve(session, "acme/top")
    depend(root, "acme/self", "acme/self")
    with pytest.raises(KernelDependencyError, match="a cycle"):
        resolve(session, "acme/self@v1")


def test_s_09_a_chain_may_be_eight_deep(root: Path, session: Session) -> None:
    for number in range(9):
        depend(root, f"acme/k{number}", f"acme/k{number + 1}")
    depend(root, "acme/k9")
    assert len(list(resolve(session, "acme/k1").tree())) == 9
    with pytest.raises(KernelDependencyError, match="more than 8 levels deep: acme/k0"):
        resolve(session, "acme/k0")


def test_s_09_a_tree_may_have_sixty_four_kernels(root: Path, session: Session) -> None:
    names = [f"acme/n{number}" for number in range(64)]
    for name in names:
        depend(root, name)
    depend(root, "acme/wide", *names[:63])
    depend(root, "acme/wider", *names)
    assert len(list(resolve(session, "acme/wide").tree())) == 64
    with pytest.raises(KernelDependencyError, match="more than 64 kernels in one tree"):
        resolve(session, "acme/wider")


def test_s_08_a_dependency_on_no_valid_name_is_refused(root: Path, session: Session) -> None:
    depend(root, "acme/top", "../evil")
    with pytest.raises(InvalidMetadata, match=r"'\.\./evil' \(from acme/top@"):
        resolve(session, "acme/top")


# S-10, S-11, S-12, S-16, S-34: names in a listing

BAD_NAMES = {
    "S-10 parent": ("build/torch-cpu/../evil.py", "segment '..'"),
    "S-10 parents": ("build/torch-cpu/a/../../../evil.py", "segment '..'"),
    "S-10 empty": ("build/torch-cpu//evil.py", "segment ''"),
    "S-10 dot": ("build/torch-cpu/./evil.py", "segment '.'"),
    "S-10 drive": ("build/torch-cpu/C:/evil.py", "character that is not allowed"),
    "S-10 nul": ("build/torch-cpu/a\0.py", "character that is not allowed"),
    "S-10 newline": ("build/torch-cpu/a\n.py", "character that is not allowed"),
    "S-10 escape": ("build/torch-cpu/\x1b[2J.py", "character that is not allowed"),
    "S-10 hidden": ("build/torch-cpu/.evil.py", "character that is not allowed"),
    "S-10 long": ("build/torch-cpu/" + "x" * 300, "length 300 > 255"),
    "S-10 deep": ("build/torch-cpu/" + "x/" * 20 + "x", "21 levels deep"),
    "S-11 backslash": ("build/torch-cpu/a\\evil.py", "backslash"),
    "S-11 elsewhere": ("build/torch-cuda/..\\evil.py", "backslash"),
    "S-11 folder": ("build/torch-cuda\\x/evil.py", "backslash"),
    "S-12 case": ("build/torch-cpu/__INIT__.py", "but for letter case"),
    "S-12 unicode": ("build/torch-cpu/caf\u00e9.py", "character that is not allowed"),
    "S-12 dot at the end": ("build/torch-cpu/evil.py.", "character that is not allowed"),
    "S-12 space at the end": ("build/torch-cpu/evil.py ", "character that is not allowed"),
    "S-12 device": ("build/torch-cpu/con.py", "reserved device name"),
    "S-12 device folder": ("build/torch-cpu/aux/x.py", "reserved device name"),
    "S-16 path file": ("build/torch-cpu/evil.pth", "Python bytecode"),
    "file and folder": ("build/torch-cpu/__init__.py/x", "a file and a folder"),
}


@pytest.mark.parametrize("name", list(BAD_NAMES))
def test_s_10_s_11_s_12_a_name_that_breaks_the_rule_refuses_the_build(
    name: str, root: Path, hub: LocalHub, session: Session, change_tree: Any
) -> None:
    path, problem = BAD_NAMES[name]
    change_tree(REPO, lambda rows: rows.append({"type": "file", "oid": "a" * 40, "size": 1, "path": path}))
    with pytest.raises(InvalidPath) as caught:
        load_kernel(REPO, session=session)
    text = str(caught.value)
    assert problem in text
    assert "(from acme/relu@" in text
    assert text.isprintable()
    assert not [record for record in hub.requests if "/resolve/" in record.path]


@pytest.mark.parametrize("name", ["__pycache__/__init__.cpython-311.pyc", "x.pyc", "a/x.pyo"])
def test_s_16_bytecode_of_a_repository_is_not_downloaded(
    name: str, root: Path, hub: LocalHub, session: Session, change_tree: Any
) -> None:
    row = {"type": "file", "oid": "a" * 40, "size": 1, "path": f"build/torch-cpu/{name}"}
    change_tree(REPO, lambda rows: rows.append(row))
    assert load_kernel(REPO, session=session).ONE == 1
    assert not [record for record in hub.requests if name in record.path]


@pytest.mark.parametrize(
    "variant", ["torch-..", "torch99-cpu-..-..", "torch-cpu ", "torch-CPU", "torch-cpu\n", "..", "torch-cp\u00fc"]
)
def test_s_34_a_folder_that_is_no_variant_is_told_and_not_used(
    variant: str, root: Path, session: Session, change_tree: Any
) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["path"] = row["path"].replace("torch-cpu", variant)

    change_tree(REPO, change)
    with pytest.raises(NoCompatibleVariant, match="ignored, not a build variant: ") as caught:
        load_kernel(REPO, session=session)
    assert ascii(variant) in str(caught.value)


def test_a_request_for_a_folder_takes_no_revision(session: Session) -> None:
    with pytest.raises(InvalidRequest, match="a local folder has no revision"):
        load_kernel("/tmp", version=1, session=session)


# S-05: a file in a repository that says where its kernel is now


def write_status(hub_root: Path, text: str) -> None:
    """A repository old/kernel without builds, with that kernel-status.toml."""
    folder = hub_root / "old" / "kernel" / "v1"
    folder.mkdir(parents=True)
    (folder / "kernel-status.toml").write_text(text)
    trust(hub_root, "old")


STATUS = 'kind = "redirect"\ndestination = "new/kernel"\nrevision = "{}"\n'


def test_s_05_a_redirect_file_is_followed_to_a_version_that_is_trusted_on_its_own(
    session: Session, hub_root: Path, reporter: Recorder
) -> None:
    write_status(hub_root, STATUS.format("v2"))
    write_build(hub_root, "new/kernel", "v2", "torch-cpu", {"__init__.py": ""})
    with pytest.raises(UntrustedPublisher, match="'new/kernel'"):
        session.resolve(KernelRequest.parse("old/kernel"))
    with pytest.raises(UntrustedPublisher, match="'new/kernel'"):  # an opt-in is not carried over
        session.resolve(KernelRequest.parse("old/kernel"), trust=True)
    trust(hub_root, "new")
    fresh = replace(session, cache_dir=session.store.root.parent / "fresh")
    found = fresh.resolve(KernelRequest.parse("old/kernel:Symbol"))
    assert (found.name, found.request.symbol) == ("new/kernel", "Symbol")
    assert "kernel new/kernel" in reporter.warnings[-1]
    assert "old/kernel has moved to new/kernel@v2" in reporter.warnings[-1]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (STATUS.format("main"), "may move"),
        (STATUS.format(""), "empty revision"),
        ('kind = "redirect"\ndestination = "new"\nrevision = "v1"', "no organization"),
        ('kind = "redirect"\nrevision = "v1"', "not a string"),
        ("kind", "kernel-status.toml"),
        ("#" * 5000, "more than 4096 bytes"),
    ],
)
def test_s_05_a_redirect_that_may_lead_anywhere_is_refused(
    session: Session, hub_root: Path, text: str, problem: str
) -> None:
    write_status(hub_root, text)
    with pytest.raises(InvalidMetadata, match=problem):
        session.resolve(KernelRequest.parse("old/kernel"))


def test_s_05_redirects_form_no_chain(session: Session, hub_root: Path) -> None:
    write_status(hub_root, STATUS.format("v1"))
    trust(hub_root, "new")
    folder = hub_root / "new" / "kernel" / "v1"
    folder.mkdir(parents=True)
    (folder / "kernel-status.toml").write_text('kind = "redirect"\ndestination = "old/other"\nrevision = "v1"\n')
    write_build(hub_root, "old/other", "v1", "torch-cpu", {"__init__.py": ""})
    with pytest.raises(RepositoryNotFound, match="moved again"):
        session.resolve(KernelRequest.parse("old/kernel"))


def test_s_05_another_status_or_none_leaves_the_repository_without_builds(session: Session, hub_root: Path) -> None:
    write_status(hub_root, 'kind = "deprecated"\n')
    with pytest.raises(NoCompatibleVariant, match="has no builds"):
        session.resolve(KernelRequest.parse("old/kernel"))


def test_a_kernel_without_a_license_is_told(tmp_path: Path, hubless: Session, reporter: Recorder) -> None:
    for name, license_ in (("none", None), ("empty", ""), ("some", "MIT")):
        facts = {"license": license_}
        folder = write_build(tmp_path, f"acme/{name}", "v1", "torch-cpu", {"__init__.py": ""}, metadata_overrides=facts)
        hubless.resolve(KernelRequest.parse(str(folder)))
    assert [warning.rpartition(": ")[2] for warning in reporter.warnings] == ["the kernel states no license"] * 2
