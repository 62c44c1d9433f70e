"""Packages of ours under the name of others: importlib finds them, and nothing stays behind."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import pickle
import sys
from typing import TYPE_CHECKING, Any

import pytest

from kernelhub.integrations.finder import Finder, StandIn, installed
from kernelhub.integrations.transformers.release import KERNELS_API, kernels_version

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BORROWED = StandIn("borrowed", "json", "Borrowed.Name", lambda: "4.5.6")


@pytest.fixture
def finder() -> Iterator[Finder]:
    finder = Finder([BORROWED])
    sys.meta_path.insert(0, finder)
    yield finder
    sys.meta_path.remove(finder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "borrowed"]:
        del sys.modules[name]


def test_a_package_and_its_modules_are_found_with_the_same_objects(finder: Finder) -> None:
    borrowed: Any = importlib.import_module("borrowed")
    decoder: Any = importlib.import_module("borrowed.decoder")
    assert (borrowed.__name__, borrowed.__version__, borrowed.dumps) == ("borrowed", "4.5.6", json.dumps)
    assert decoder.JSONDecoder is json.JSONDecoder
    assert borrowed.decoder is decoder is not json.decoder
    assert json.__name__ == "json"
    assert json.__spec__.name == "json"
    assert pickle.loads(pickle.dumps(borrowed.JSONDecoder)) is json.JSONDecoder


def test_what_the_package_does_not_have_is_not_found(finder: Finder) -> None:
    assert importlib.util.find_spec("borrowed.nothing") is None
    with pytest.raises(ModuleNotFoundError, match=r"borrowed\.nothing"):
        importlib.import_module("borrowed.nothing")
    assert finder.find_spec("borrowedx") is None


@pytest.mark.parametrize("name", ["Borrowed.Name", "borrowed-name", "borrowed_name"])
def test_its_distribution_tells_the_version_under_every_spelling(finder: Finder, name: str) -> None:
    assert importlib.metadata.version(name) == "4.5.6"
    assert importlib.metadata.distribution(name).metadata["Name"] == "Borrowed.Name"


def test_its_distribution_is_listed_with_its_package(finder: Finder) -> None:
    assert importlib.metadata.packages_distributions()["borrowed"] == ["Borrowed.Name"]
    assert not list(importlib.metadata.distributions(name="borrowed-name", path=["/"]))
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("borrowed-else")
    with pytest.raises(FileNotFoundError, match="has no files"):
        importlib.metadata.distribution("borrowed-name").locate_file("x.py")


def test_a_hook_runs_after_the_import_and_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hooked_here.py").write_text("ONE = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[Any] = []
    finder = Finder([], {"hooked_here": lambda module: seen.append(module.ONE)})
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    module = importlib.import_module("hooked_here")
    monkeypatch.delitem(sys.modules, "hooked_here")
    assert seen == [1]
    plain = importlib.util.find_spec("hooked_here")
    assert plain is not None
    assert module.__spec__ is not None
    assert type(module.__loader__) is type(module.__spec__.loader) is importlib.machinery.SourceFileLoader


def test_a_hook_for_a_module_that_is_not_there_finds_nothing() -> None:
    assert Finder([], {"no_such_module": print}).find_spec("no_such_module") is None


def test_a_bare_folder_is_no_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder `kernels` beside the script hides nothing: projects call their own sources so."""
    (tmp_path / "only_a_folder").mkdir()
    (tmp_path / "a_module.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed("only_a_folder") is None
    assert installed("no_such_package") is None
    assert installed("a_module") == str(tmp_path / "a_module.py")
    monkeypatch.setitem(sys.modules, "made_by_hand", type(sys)("made_by_hand"))
    assert installed("made_by_hand") == "sys.modules"


# Which version transformers accepts


@pytest.mark.parametrize(
    ("requirement", "version"),
    [
        ("kernels<0.18,>=0.17.2", KERNELS_API),
        ("kernels", KERNELS_API),
        ("kernels>=0.16.0,<0.17", "0.16.0"),
        ("kernels<0.19,>=0.18.2", "0.18.2"),
        ("kernels==0.19.*", "0.19"),
        ("kernels~=0.20.1", "0.20.1"),
        ("kernelsx==3", KERNELS_API),
    ],
)
def test_the_version_told_is_one_that_transformers_asks_for(
    requirement: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "transformers-5.99.dist-info"
    folder.mkdir()
    lines = [
        "Metadata-Version: 2.1",
        "Name: transformers",
        "Version: 5.99",
        f'Requires-Dist: {requirement}; extra == "k"',
    ]
    (folder / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert kernels_version() == version


def test_without_transformers_the_version_is_that_of_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    assert kernels_version() == KERNELS_API
