"""Kernels that were written for the package `kernels` load here, and nobody else sees anything of it."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from kernel_repository import trust, write_build

import kernelhub.integrations.kernels as api
from kernelhub import load_kernel
from kernelhub.errors import ImportFailed, KernelDependencyError, MissingDependency
from kernelhub.integrations.kernels.companion import companion

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kernelhub.session import Session


@pytest.fixture
def load(hub_root: Path, session: Session) -> Callable[..., Any]:
    """Publish kernels, given as the source of each and what it depends on, and load the first of them."""
    trust(hub_root, "acme")

    def publish_and_load(**kernels: tuple[str, list[str]]) -> Any:
        for name, (source, needs) in kernels.items():
            wanted = [{"repo-id": f"acme/{need}", "version": 1} for need in needs]
            facts = {"kernel-depends": wanted}
            write_build(hub_root, f"acme/{name}", "v1", "torch-cpu", {"__init__.py": source}, metadata_overrides=facts)
        return load_kernel(f"acme/{next(iter(kernels))}", session=session)

    return publish_and_load


def test_a_kernel_with_dependencies_loads_without_the_package(load: Callable[..., Any]) -> None:
    assert "kernels" not in sys.modules
    module = load(
        attention=(
            "import torch\n"
            "from kernels import get_kernel_dep\n"
            "rotary = get_kernel_dep('acme/rotary')\n"
            "def f(x):\n    return rotary.turn(x) + 1\n",
            ["rotary"],
        ),
        rotary=(
            "from kernels import get_kernel_dep\nbase = get_kernel_dep('acme/base')\nturn = base.double\n",
            ["base"],
        ),
        base=("def double(x):\n    return 2 * x\n", []),
    )
    assert module.f(3) == 7
    assert module.rotary.base.__name__.endswith(".base")
    assert "kernels" not in sys.modules


def test_a_dependency_is_loaded_before_the_kernel_runs(load: Callable[..., Any]) -> None:
    """Its operators may be called without asking for its module."""
    source = "import sys\nNAMES = [name for name in sys.modules if name.endswith('.base')]\n"
    assert load(user=(source, ["base"]), base=("", [])).NAMES


def test_every_public_name_can_be_imported(load: Callable[..., Any]) -> None:
    lines = [f"from kernels import {', '.join(api.__all__)}", "import kernels", "import kernels.layer as layer"]
    lines += ["from kernels.deps import get_kernel_dep as again", "from kernels import layer as other"]
    module = load(user=("\n".join([*lines, ""]), []))
    assert sorted(set(api.__all__) - set(module.kernels.__all__)) == []
    assert module.again is module.get_kernel_dep
    assert module.layer is module.other is module.kernels


def test_a_part_of_the_kernel_that_is_called_kernels_is_its_own(hub_root: Path, session: Session) -> None:
    trust(hub_root, "acme")
    files: dict[str, str | bytes] = {
        "__init__.py": "from .kernels import ONE\nfrom . import kernels\nfrom .deep import TWO\n",
        "kernels.py": "ONE = 1\n",
        "deep/__init__.py": "from ..kernels import ONE\nTWO = 2 * ONE\n",
    }
    write_build(hub_root, "acme/own", "v1", "torch-cpu", files)
    module = load_kernel("acme/own", session=session)
    assert (module.ONE, module.kernels.ONE, module.TWO) == (1, 1, 2)


def test_marks_record_and_functions_stay(load: Callable[..., Any]) -> None:
    module = load(
        user=(
            "from torch import nn\n"
            "from kernels import Mode, use_kernel_forward_from_hub, use_kernel_func_from_hub, has_kernel\n"
            "@use_kernel_forward_from_hub('SiluAndMul')\nclass Layer(nn.Module):\n    pass\n"
            "@use_kernel_func_from_hub('rope')\ndef f():\n    return 1\n"
            "KNOWN = has_kernel('acme/base'), has_kernel('acme/other', revision='main')\n",
            ["base"],
        ),
        base=("", []),
    )
    assert module.Layer.kernel_layer_name == "SiluAndMul"
    assert module.f() == 1
    assert module.KNOWN == (True, False)


def test_values_are_those_that_everybody_gets(load: Callable[..., Any]) -> None:
    source = "from kernels import Device, KernelizeFallback, Mode\nDEVICE, MODE = Device('cuda'), Mode.TRAINING\n"
    module = load(user=(source, []))
    assert (module.DEVICE.type, module.MODE) == ("cuda", api.Mode.TRAINING)
    assert module.KernelizeFallback is api.KernelizeFallback


@pytest.mark.parametrize("use", ["kernelize(None)", "LayerRepository('a/b', layer_name='C')", "use_kernel_mapping({})"])
def test_what_is_not_offered_says_so_when_it_is_used(load: Callable[..., Any], use: str) -> None:
    name = use.partition("(")[0]
    with pytest.raises(ImportFailed, match=rf"kernel acme/user@.* uses kernels\.{name}, which a kernel that is being"):
        load(user=(f"from kernels import {name}\n{use}\n", []))


@pytest.mark.parametrize("source", ["from kernels import nothing\n", "import kernels\nkernels.nothing\n"])
def test_a_name_that_the_package_does_not_have_is_missing(load: Callable[..., Any], source: str) -> None:
    with pytest.raises(ImportFailed, match="nothing"):
        load(user=(source, []))


def test_a_submodule_that_is_not_there_is_missing(load: Callable[..., Any]) -> None:
    with pytest.raises(MissingDependency, match="kernels"):
        load(user=("import kernels.nowhere\n", []))


# S-32: nothing undeclared


@pytest.mark.parametrize(
    "call",
    [
        "from kernels import get_kernel_dep; get_kernel_dep('acme/other')",
        "from kernels import get_kernel; get_kernel('acme/other', version=1)",
        "from kernels import load_kernel; load_kernel('acme/other')",
        "from kernelhub import load_kernel; load_kernel('acme/other', session=SESSION)",
        "from kernelhub import load_kernel; load_kernel('builtin:RMSNorm')",
    ],
)
def test_s_32_an_undeclared_kernel_is_refused_with_both_names(
    call: str, load: Callable[..., Any], hub_root: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.SESSION", session, raising=False)
    load(other=("", []))
    with pytest.raises(KernelDependencyError, match=r"not declared .*: acme/user@[0-9a-f]{12} torch-cpu -> ") as caught:
        load(user=(f"{call}\n", []))
    assert ("-> acme/other" if "other" in call else "-> builtin") in str(caught.value)
    assert not [name for name in sys.modules if name.startswith("kernelhub_k_") and name.endswith(".user")]


def test_s_32_a_declared_kernel_may_be_loaded_through_the_public_function(
    load: Callable[..., Any], session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.SESSION", session, raising=False)
    source = "from kernelhub import load_kernel\nbase = load_kernel('acme/base', session=SESSION)\n"
    assert load(user=(source, ["base"]), base=("ONE = 1\n", [])).base.ONE == 1


def test_after_the_import_a_kernel_may_ask_for_what_it_declares(load: Callable[..., Any]) -> None:
    source = "def late():\n    from kernels import get_kernel_dep\n    return get_kernel_dep('acme/base')\n"
    module = load(user=(source, ["base"]), base=("ONE = 1\n", []))
    assert module.late().ONE == 1
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(module.late().ONE))
    thread.start()
    thread.join()
    assert found == [1]


def test_two_kernels_get_each_its_own_dependency(load: Callable[..., Any], hub_root: Path, session: Session) -> None:
    load(base=("WHO = 1\n", []))
    write_build(hub_root, "acme/base", "v2", "torch-cpu", {"__init__.py": "WHO = 2\n"}, version=2)
    source = "from kernels import get_kernel_dep\nWHO = get_kernel_dep('acme/base').WHO\n"
    for version in (1, 2):
        facts = {"kernel-depends": [{"repo-id": "acme/base", "version": version}]}
        name = f"acme/user{version}"
        write_build(hub_root, name, "v1", "torch-cpu", {"__init__.py": source}, metadata_overrides=facts)
        assert version == load_kernel(name, session=session).WHO


# An installed package of that name


def test_an_installed_package_is_left_alone(
    load: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels.py").write_text("REAL = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = load(user=("import kernels\nfrom kernels import get_kernel_dep\n", []))
    assert not hasattr(module.kernels, "REAL")
    assert "kernels" not in sys.modules
    real = __import__("kernels")
    try:
        assert real.REAL
        second = load(second=("import kernels\n", []))
        assert not hasattr(second.kernels, "REAL")
        assert sys.modules["kernels"] is real
    finally:
        del sys.modules["kernels"]


def test_other_threads_see_the_installed_package_while_a_kernel_is_imported(
    load: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels.py").write_text("REAL = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    source = (
        "import kernels, threading\nseen = []\n"
        "def look():\n    seen.append(BUILTIN_IMPORT('kernels').REAL)\n"
        "thread = threading.Thread(target=look)\nthread.start()\nthread.join()\n"
    )
    monkeypatch.setattr("builtins.BUILTIN_IMPORT", __import__, raising=False)
    try:
        module = load(user=(source, []))
        assert module.seen == [True]
        assert not hasattr(module.kernels, "REAL")
    finally:
        sys.modules.pop("kernels", None)


def test_the_companion_is_a_module_of_its_own() -> None:
    one, two = (companion("k", lambda name: sys, lambda name: False) for _ in range(2))
    assert one is not two
    assert one.get_kernel_dep("a/b") is sys
    assert one.__version__
