"""The same calls, side by side: what the package `kernels` answers was recorded, and may be asked again."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from peer.scene import RECORDED, make_calls, scene_facts, write_scene

from kernelhub.serve import LocalHub

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PEER = Path(os.environ.get("PEER_PYTHON", "no-peer"))
OUTCOMES: dict[str, Any] = json.loads((RECORDED / "calls.json").read_text(encoding="utf-8"))

VALUE_ERROR = {"raises": ["ValueError"]}
IMPORT_ERROR = {"raises": ["ImportError"]}


class Other(NamedTuple):
    """What kernelhub answers instead, and why; docs/differences.md says more."""

    outcome: Any
    reason: str


DIFFERENT = {
    "layer_calls.a kernel that does not fit, all cases": Other(0.0, "with ALL a misfit leaves the layer alone"),
    "layer_calls.a kernel that needs an attribute": Other({"raises": ["TypeError"]}, "told before it runs"),
    "layer_calls.a kernel with another name": Other({"raises": ["TypeError"]}, "callers may name their arguments"),
    "layer_calls.an inherited mark": Other(-1.0, "a class with its own forward is another layer"),
    "layer_calls.bound for a device that is not there": Other(VALUE_ERROR, "its builds cannot run here"),
    "layer_calls.no backward, in inference, while it trains": Other(0.0, "a kernel without backward does not train"),
    "loading_calls.get a negative version": Other(VALUE_ERROR, "a version that is none is a ValueError"),
    "loading_calls.get a version as text": Other(VALUE_ERROR, "a version that is none is a ValueError"),
    "loading_calls.get of type model": Other("model", "repositories of type model are found too"),
    "loading_calls.get what is misspelt": Other(IMPORT_ERROR, "what an import raises is the cause of an ImportError"),
    "loading_calls.get what needs something untrusted with trust": Other(VALUE_ERROR, "trust is not passed on"),
    "loading_calls.get what raises": Other(IMPORT_ERROR, "what an import raises is the cause of an ImportError"),
    "loading_calls.get what needs newer kernels": Other(1, "kernelhub is another package than the one that is meant"),
    "loading_calls.get what was changed": Other({"raises": []}, "files that differ from their digests are refused"),
    "loading_calls.get without metadata": Other("bare", "builds without metadata load, with a warning"),
    "loading_calls.install": Other(["files", ["__init__.py", "layers.py", "metadata.json"]], "another store"),
    "loading_calls.install a nested package": Other(["files", ["metadata.json", "nested"]], "another store"),
    "loading_calls.install what is there": Other(["files", ["__init__.py", "layers.py", "metadata.json"]], "the same"),
    "loading_calls.local build for another backend": Other(
        {"raises": ["FileNotFoundError", "OSError", "LookupError"]}, "a local build has to fit this machine too"
    ),
    "loading_calls.locked in an old file": Other(1, "the first format of kernels.lock is read too"),
    "offline_calls.get something untrusted with trust": Other(1, "versions that were asked for are known offline"),
    "offline_calls.get what uses kernels": Other("base", "the same"),
    "offline_calls.install what is there": Other(["files", ["__init__.py", "layers.py", "metadata.json"]], "the same"),
    "offline_calls.load something untrusted": Other(VALUE_ERROR, "trust is asked for offline too"),
    "value_calls.a layer beside its module": Other("Relu", "layers may be in the top module"),
    "value_calls.a range in words": Other(VALUE_ERROR, "a capability is a whole number"),
}


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path | str, str], dict[str, Any]]]:
    """Make the calls with an interpreter and a package: ``ask(python, package)``."""
    folder = tmp_path_factory.mktemp("calls")
    root = folder / "repositories"
    root.mkdir()
    write_scene(root)
    with LocalHub(root) as hub:
        facts = scene_facts(root, folder, hub)

        def make(python: Path | str, package: str) -> dict[str, Any]:
            home = folder / package
            home.mkdir()
            return make_calls(python, package, facts, home, hub.url)

        yield make


@pytest.fixture(scope="module")
def ours(ask: Callable[[Path | str, str], dict[str, Any]]) -> dict[str, Any]:
    return ask(sys.executable, "kernelhub.integrations.kernels")


def alike(wanted: Any, found: Any) -> bool:
    """The same value; or an exception that the clauses for the wanted one catch."""
    if not isinstance(wanted, dict) or "raises" not in wanted:
        return bool(wanted == found)
    if not isinstance(found, dict) or "raises" not in found:
        return False
    return not wanted["raises"] or wanted["raises"][0] in found["raises"]


@pytest.mark.skipif(not PEER.exists(), reason="needs an environment with kernels 0.17.2")
def test_the_recorded_answers_are_those_of_the_package(ask: Callable[[Path | str, str], dict[str, Any]]) -> None:
    assert ask(PEER, "kernels") == OUTCOMES


@pytest.mark.parametrize("call", sorted(OUTCOMES))
def test_a_call_has_the_same_outcome(ours: dict[str, Any], call: str) -> None:
    if call in DIFFERENT:
        assert not alike(OUTCOMES[call], ours[call]), "no longer different"
        assert alike(DIFFERENT[call].outcome, ours[call]), ours[call]
    else:
        assert alike(OUTCOMES[call], ours[call]), (OUTCOMES[call], ours[call])


def test_no_call_is_left_out(ours: dict[str, Any]) -> None:
    assert ours.keys() == OUTCOMES.keys()
    assert len(OUTCOMES) > 200
