"""The names of the package `kernels`: all there, of the same kind, with the same arguments."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from peer.scene import RECORDED, SCRIPTS

import kernelhub.integrations.kernels as api

PEER = Path(os.environ.get("PEER_PYTHON", "no-peer"))
NAMES: dict[str, dict[str, Any]] = json.loads((RECORDED / "names.json").read_text(encoding="utf-8"))
TOP = ""
# A class that is written in Rust tells no signature; ours is made by its two functions only, as there.
WITHOUT_SIGNATURE = ("Metadata",)


def listed(python: Path | str, package: str) -> dict[str, dict[str, Any]]:
    command = [str(python), str(SCRIPTS / "names.py"), package]
    found: dict[str, dict[str, Any]] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return found


@pytest.fixture(scope="module")
def ours() -> dict[str, dict[str, Any]]:
    return listed(sys.executable, api.__name__)


@pytest.mark.skipif(not PEER.exists(), reason="needs an environment with kernels 0.17.2")
def test_the_recorded_names_are_those_of_the_package() -> None:
    assert listed(PEER, "kernels") == NAMES


@pytest.mark.parametrize("module", NAMES)
def test_every_name_can_be_imported_from_the_same_module(module: str) -> None:
    found = importlib.import_module(f"{api.__name__}.{module}".rstrip("."))
    assert [name for name in NAMES[module] if not hasattr(found, name)] == []


@pytest.mark.parametrize("module", NAMES)
def test_every_name_takes_the_same_arguments(ours: dict[str, dict[str, Any]], module: str) -> None:
    for name, wanted in NAMES[module].items():
        found = ours[module][name]
        assert found["kind"] == wanted["kind"], name
        assert found.get("values") == wanted.get("values"), name
        if name not in WITHOUT_SIGNATURE:
            assert found.get("signature") == wanted.get("signature"), name


@pytest.mark.parametrize("module", NAMES)
def test_every_class_has_the_same_members(ours: dict[str, dict[str, Any]], module: str) -> None:
    for name, wanted in NAMES[module].items():
        assert sorted(set(wanted.get("members", ())) - set(ours[module][name].get("members", ()))) == [], name


def test_the_public_names_are_sorted_and_the_same() -> None:
    assert api.__all__ == sorted(api.__all__)
    assert sorted(api.__all__) == sorted([*NAMES[TOP], "__version__"])
    assert api.__version__ == "0.17.2"


def test_importing_the_names_loads_neither_torch_nor_the_hubs_client() -> None:
    code = f"import sys, {api.__name__}; print([name for name in ('torch', 'huggingface_hub') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
