"""Where another package `kernels` is installed: it stays in use, or is hidden and comes back (``shadow=True``)."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hub_liger import REPOSITORY, publish_liger
from layers.tiny_model import tiny
from transformers.utils.import_utils import is_kernels_available

import kernelhub
from kernelhub.integrations.transformers import disable, enable

if TYPE_CHECKING:
    from collections.abc import Iterator

TREE = Path(kernelhub.__file__).parents[1]
PEER = Path(os.environ.get("PEER_PYTHON", "no-peer"))


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An installed distribution `kernels` with a module of its own, imported already."""
    site = tmp_path / "site"
    (site / "kernels").mkdir(parents=True)
    (site / "kernels" / "__init__.py").write_text("from kernels.part import WHO\n", encoding="utf-8")
    (site / "kernels" / "part.py").write_text("WHO = 'the other one'\n", encoding="utf-8")
    (site / "kernels-0.1.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: kernels\nVersion: 0.1.0\n"
    (site / "kernels-0.1.0.dist-info" / "METADATA").write_text(metadata, encoding="utf-8")
    monkeypatch.syspath_prepend(str(site))
    is_kernels_available.cache_clear()
    yield importlib.import_module("kernels")
    disable()
    for name in ("kernels", "kernels.part"):
        del sys.modules[name]
    is_kernels_available.cache_clear()


def test_an_installed_one_stays_in_use(other: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kernelhub")
    enable()
    assert importlib.import_module("kernels") is other
    assert importlib.metadata.version("kernels") == "0.1.0"
    assert not is_kernels_available()  # that version is too old for transformers, which only it may say
    assert f"{other.__file__} stays in use as kernels; enable(shadow=True) replaces it" in caplog.text
    model = tiny()
    model.set_use_kernels(True, kernelhub.KernelConfig({"RMSNorm": "builtin:RMSNorm"}))
    assert kernelhub.report(model).bound
    assert model.use_kernels
    model.train()
    model.use_kernels = False
    assert not kernelhub.report(model).bound
    with pytest.raises(ValueError, match="Kernels are not available"):
        model.use_kernels = True


def test_it_is_hidden_when_asked_and_comes_back_unchanged(other: Any) -> None:
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "kernels"}
    for _ in range(2):
        enable(shadow=True)
        ours: Any = importlib.import_module("kernels")
        assert ours is not other
        assert ours.LayerRepository is kernelhub.integrations.kernels.LayerRepository
        assert importlib.metadata.version("kernels") != "0.1.0"
        assert is_kernels_available()
        disable()
        assert {name: sys.modules[name] for name in modules} == modules
        assert not [name for name in sys.modules if name.startswith("kernels.") and name not in modules]
        assert importlib.metadata.version("kernels") == "0.1.0"
        assert not is_kernels_available()


def test_the_switch_changes_sides(other: Any) -> None:
    enable()
    enable(shadow=True)
    assert importlib.import_module("kernels") is not other
    enable()
    assert importlib.import_module("kernels") is other


WITH_THE_PEER = """
import importlib, importlib.metadata, sys
from pathlib import Path

import kernels
import transformers
import kernelhub
from kernelhub.integrations.transformers import disable, enable
from layers.tiny_model import tiny

BUILD = sys.argv[1]

def names(module): return {name: id(value) for name, value in vars(module).items()}

def by_the_peer():
    model = tiny()
    layer = kernels.LocalLayerRepository(Path(BUILD), layer_name="LigerRMSNorm")
    with kernels.use_kernel_mapping({"RMSNorm": {"cpu": layer}}):
        kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="cpu")
    assert type(model.model.norm.forward.__self__).__name__ == "Qwen3RMSNorm"
    assert "LigerRMSNorm" in model.model.norm.forward.__func__.__qualname__
    assert not kernelhub.report(model).bound

real, version = kernels, importlib.metadata.version("kernels")
tiny().set_use_kernels(True)  # transformers keeps its defaults then
hub = importlib.import_module("transformers.integrations.hub_kernels")
before, modules = names(hub), {name for name in sys.modules if name.startswith("kernels")}
by_the_peer()
for shadow in (False, True, False):
    enable(shadow=shadow)
    assert (importlib.import_module("kernels") is real) is not shadow
    model = tiny()
    model.set_use_kernels(True, kernelhub.KernelConfig({"RMSNorm": BUILD + ":LigerRMSNorm"}, use_local_kernel=True))
    assert len(kernelhub.report(model).bound) == 9, kernelhub.report(model)
    model.use_kernels = False
    theirs = transformers.KernelConfig({"RMSNorm": BUILD + ":LigerRMSNorm"}, use_local_kernel=True)
    model.set_use_kernels(True, theirs)
    assert model.use_kernels
    assert len(kernelhub.report(model).bound) == (9 if shadow else 0)
    assert "LigerRMSNorm" in model.model.norm.forward.__func__.__qualname__
    if not shadow:
        by_the_peer()
    disable()
    assert sys.modules["kernels"] is real
    assert importlib.metadata.version("kernels") == version
    assert names(hub) == before
    by_the_peer()
print("done")
"""


@pytest.mark.skipif(not PEER.exists(), reason="PEER_PYTHON names no environment with `kernels` and transformers")
def test_with_the_real_package_both_work_and_everything_is_restored(tmp_path: Path) -> None:
    publish_liger(tmp_path / "hub")
    borrowed = tmp_path / "borrowed"  # what kernelhub needs and that environment may not have
    borrowed.mkdir()
    for name in ("elftools", "tomli_w"):
        (borrowed / name).symlink_to(Path(str(importlib.import_module(name).__file__)).parent)
    build = tmp_path / "hub" / REPOSITORY / "v3" / "build" / "torch-cpu"
    variables = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PYTHONDONTWRITEBYTECODE": "1",  # the peer writes it beside the kernel, which nobody may
        "PYTHONPATH": os.pathsep.join(map(str, (TREE, TREE / "tests", borrowed))),
        "KERNELHUB_BACKEND": "cpu",
    }
    command = [str(PEER), "-c", WITH_THE_PEER, str(build)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=variables, cwd=tmp_path)
    assert done.stdout == "done\n", done.stderr
