"""LOCAL_KERNELS puts folders of the user in the place of repositories, and nobody else's (S-19)."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_repository import trust, write_build

from kernelhub import explain, load_kernel
from kernelhub.errors import InvalidConfig
from kernelhub.override import override_of, parse_overrides
from kernelhub.request import KernelRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Recorder

    from kernelhub.session import Session


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A build in a folder of the user, which the variable puts in the place of acme/relu."""
    folder = write_build(tmp_path / "mine", "acme/relu", "v1", "torch-cpu", {"__init__.py": "WHO = 'mine'\n"})
    monkeypatch.setenv("LOCAL_KERNELS", f"acme/relu={folder}")
    return folder


# What the variable may say


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}),
        ("a/b=/x", {"a/b": "/x"}),
        ("a/b=/x:c/d=/y z/w=1", {"a/b": "/x", "c/d": "/y z/w=1"}),
        ('{"a/b": "/x:y", "c/d": "/$HOME/~"}', {"a/b": "/x:y", "c/d": "/$HOME/~"}),
        ("{}", {}),
    ],
)
def test_entries_are_read(text: str, found: dict[str, str]) -> None:
    assert parse_overrides(text) == {name: Path(path) for name, path in found.items()}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a/b=", "entry 1: not absolute"),
        ("=/x", "entry 1: empty"),
        ("a/b", "entry 1: no '='"),
        ("a/b=/x:", "entry 2: no '='"),
        ("a/b=../x", "entry 1: not absolute"),
        ("a/b=~/x", "entry 1: not absolute"),
        ("a/b=$HOME", "entry 1: not absolute"),
        (" a/b=/x", "entry 1: "),
        ("a/b =/x", "entry 1: "),
        ("a/b= /x", "entry 1: not a path (spaces around it are not taken away)"),
        ("a/b=/x ", "entry 1: not a path (spaces around it are not taken away)"),
        ("a/b=/x:y", "entry 2: no '='; a path that holds ':' needs the JSON form"),
        ("a/b=/x:../c=/y", "entry 2: "),
        ("a/b=/x:a/b=/y", "entry 2: named twice"),
        ('{"a/b": "/x", "a/b": "/y"}', "entry 2: named twice"),
        ('{"a/b": "x"}', "entry 1: not absolute"),
        ('{"a/b": 5}', "entry 1: not a path"),
        ('{"a": "/x"}', "entry 1: "),
        ('{"a/b": "/x"', "not JSON"),
        pytest.param('{"a":' * 100_000, "not JSON", id="100000 braces"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_entry(text: str, problem: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        parse_overrides(text)
    assert problem in str(caught.value)
    assert "variable LOCAL_KERNELS" in str(caught.value)


@given(st.dictionaries(st.from_regex(r"[a-z]{1,5}/[a-z]{1,5}", fullmatch=True), st.text(min_size=1), max_size=3))
def test_the_json_form_takes_every_path(paths: dict[str, str]) -> None:
    folders = {name: f"/{path}x" for name, path in paths.items() if "\0" not in path}
    assert parse_overrides(json.dumps(folders)) == {name: Path(path) for name, path in folders.items()}


def test_a_folder_that_others_can_write_is_refused(local: Path) -> None:
    for mode in (0o777, 0o775, 0o757):
        local.chmod(mode)
        with pytest.raises(InvalidConfig, match=rf"others can write into it \(mode {mode:o}\).*chmod go-w"):
            override_of("acme/relu")
    local.chmod(0o755)
    assert override_of("acme/relu") == local
    assert override_of("acme/other") is None


def test_a_folder_of_somebody_else_is_refused(local: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(local, 12345, -1)
    with pytest.raises(InvalidConfig, match=r"it belongs to user 12345; expected a folder of your own \(user 0\)"):
        override_of("acme/relu")


def test_what_is_no_folder_is_refused(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, problem in ((local / "gone", "No such file"), (local / "__init__.py", "not a folder")):
        monkeypatch.setenv("LOCAL_KERNELS", f"acme/relu={path}")
        with pytest.raises(InvalidConfig, match=problem):
            override_of("acme/relu")


# What it does


def test_s_19_the_folder_is_loaded_and_told_once(local: Path, hubless: Session, reporter: Recorder) -> None:
    for request in ("acme/relu", "acme/relu@v7"):
        assert load_kernel(request, session=hubless).WHO == "mine"
    assert load_kernel("acme/relu:WHO", session=hubless) == "mine"
    assert reporter.warnings == [f"kernel acme/relu is taken from {local}, as the variable LOCAL_KERNELS says"]
    told = explain("acme/relu", session=hubless)
    assert (told.trust, told.trusted) == ("on this machine", True)
    assert told.verdict == "torch-cpu, the best of 1 that fit"


def test_a_path_with_a_colon_is_loaded_as_it_is(
    tmp_path: Path, hubless: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = write_build(tmp_path / "mine", "acme/relu", "v1", "torch-cpu", {"__init__.py": "WHO = 'mine'\n"})
    odd = build.rename(tmp_path / "odd:name")
    monkeypatch.setenv("LOCAL_KERNELS", json.dumps({"acme/relu": str(odd)}))
    assert load_kernel("acme/relu", session=hubless).WHO == "mine"
    assert explain("acme/relu", session=hubless).verdict == "odd:name, as the folder itself is a build"


def test_other_repositories_and_dependencies(
    local: Path, hub_root: Path, session: Session, asked: Callable[[], list[str]]
) -> None:
    trust(hub_root, "acme")
    source = "from kernels import get_kernel_dep\nWHO = get_kernel_dep('acme/relu').WHO\n"
    facts = {"kernel-depends": [{"repo-id": "acme/relu", "version": 1}]}
    write_build(hub_root, "acme/user", "v1", "torch-cpu", {"__init__.py": source}, metadata_overrides=facts)
    assert load_kernel("acme/user", session=session).WHO == "mine"
    assert not [line for line in asked() if "acme/relu" in line]


@pytest.mark.parametrize("kind", ["strict", "lock"])
def test_s_19_in_the_strict_mode_and_under_a_lock_it_is_an_error(
    kind: str, local: Path, hub_root: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust(hub_root, "acme")
    write_build(hub_root, "acme/relu", "v1", "torch-cpu", {"__init__.py": "WHO = 'theirs'\n"})
    lock = session.make_lock([KernelRequest.parse("acme/relu")])
    changes: dict[str, object] = {"strict": True} if kind == "strict" else {"lockfile": lock}
    careful = dataclasses.replace(session, **changes)  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match=r"would take the place of acme/relu (in the strict mode|under a lock)"):
        load_kernel("acme/relu", session=careful)
    monkeypatch.delenv("LOCAL_KERNELS")
    assert load_kernel("acme/relu", session=careful).WHO == "theirs"


def test_a_variable_that_cannot_be_read_matters_when_a_repository_is_asked_for(
    hubless: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    build = write_build(tmp_path, "acme/relu", "v1", "torch-cpu", {"__init__.py": "WHO = 'path'\n"})
    monkeypatch.setenv("LOCAL_KERNELS", "nonsense")
    assert load_kernel(str(build), session=hubless).WHO == "path"
    with pytest.raises(InvalidConfig, match="entry 1: no '='"):
        load_kernel("acme/relu", session=hubless)
