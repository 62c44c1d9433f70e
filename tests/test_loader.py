"""Importing a verified build: under its own name, once, and without a trace when it fails."""

from __future__ import annotations

import builtins
import dataclasses
import importlib
import importlib.resources
import inspect
import json
import os
import pickle
import py_compile
import re
import subprocess
import sys
import textwrap
import threading
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kernel_repository import trust, write_build

from kernelhub import load_kernel, loaded_kernels
from kernelhub.errors import (
    DigestMismatch,
    ImportFailed,
    IncompatibleLibrary,
    InvalidMetadata,
    MissingDependency,
    SymbolNotFound,
)
from kernelhub.loader import load as load_build
from kernelhub.metadata import Metadata
from kernelhub.package import PREFIX, SourceLoader
from kernelhub.pythondepend import DEPENDENCIES, check_python_depends
from kernelhub.request import KernelRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from compiled_kernel import CompiledKernel

    from kernelhub.api import Session


@pytest.fixture
def load(tmp_path: Path, hubless: Session) -> Callable[..., Any]:
    """Write a build and load it: ``load({"__init__.py": ...}, symbol, name="relu")``."""

    def write_and_load(files: dict[str, Any], symbol: str = "", name: str = "relu", **facts: Any) -> Any:
        texts = {path: textwrap.dedent(body) if isinstance(body, str) else body for path, body in files.items()}
        build = write_build(tmp_path / "local", f"acme/{name}", "v1", "torch-cpu", texts, **facts)
        return load_kernel(f"{build}:{symbol}" if symbol else str(build), session=hubless)

    return write_and_load


READABLE = {"__init__.py": "from . import layers\n", "layers.py": "def f():\n    return 1\n", "data/a.txt": "text"}


def kernel_modules() -> set[str]:
    return {name for name in sys.modules if name.startswith(PREFIX)}


def test_modules_know_where_they_are(load: Callable[..., Any], tmp_path: Path) -> None:
    module = load(READABLE)
    folder = tmp_path / "local/acme/relu/v1/build/torch-cpu"
    assert module.__file__ == str(folder / "__init__.py")
    assert module.__path__ == [str(folder)]
    assert module.layers.__file__ == str(folder / "layers.py")
    assert module.__name__ == module.__spec__.name == module.__package__
    assert importlib.import_module(module.__name__) is module


def test_sources_and_resources_can_be_read(load: Callable[..., Any]) -> None:
    module = load(READABLE)
    assert inspect.getsource(module.layers.f) == "def f():\n    return 1\n"
    assert inspect.getsource(module) == "from . import layers\n"
    assert importlib.resources.files(module).joinpath("data/a.txt").read_text() == "text"
    assert importlib.resources.files(module.__name__).joinpath("data", "a.txt").read_text() == "text"


def test_packages_inside_import_each_other(load: Callable[..., Any]) -> None:
    module = load(
        {
            "__init__.py": "from .deep.down import value\n",
            "deep/__init__.py": "from .. import base\n",
            "deep/down.py": "from ..base import ONE\nfrom ..plain import two\nvalue = ONE + two.TWO\n",
            "base.py": "ONE = 1\n",
            "plain/two.py": "TWO = 2\n",
        }
    )
    assert module.value == 3


def test_objects_of_a_kernel_can_be_pickled_in_its_process(load: Callable[..., Any]) -> None:
    layer = load({"__init__.py": "class Layer:\n    pass\n"}, "Layer")
    assert type(pickle.loads(pickle.dumps(layer()))) is layer


def test_a_nested_package_of_an_older_build_loads(load: Callable[..., Any]) -> None:
    module = load({"relu/__init__.py": "from . import layers\n", "relu/layers.py": "class L:\n    pass\n"})
    assert module.layers.L.__module__ == f"{module.__name__}.layers"


def test_a_build_without_a_package_is_told(load: Callable[..., Any]) -> None:
    with pytest.raises(ImportFailed, match=r"it has no __init__\.py"):
        load({"layers.py": ""})
    with pytest.raises(ImportFailed, match=r"it has no __init__\.py"):
        load({"a/__init__.py": "", "b/__init__.py": ""}, name="two")


# Symbols

SYMBOLS = """
    from __future__ import annotations
    import functools, os
    import torch
    from torch import nn
    from torch.nn.functional import silu

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

    @torch.library.custom_op("kernelhub_test::triple", mutates_args=())
    def triple(x: torch.Tensor) -> torch.Tensor:
        return 3 * x

    def scale(x, by):
        return by * x

    double = Double.apply
    quadruple = functools.partial(scale, by=4)
    aten = torch.ops.aten
    LIMIT = 5
    """


@pytest.mark.parametrize("name", ["double", "triple", "quadruple", "scale", "Double.apply", "aten.relu"])
def test_whatever_a_kernel_makes_can_be_asked_for(load: Callable[..., Any], name: str) -> None:
    assert callable(load({"__init__.py": SYMBOLS}, name))


@pytest.mark.parametrize("name", ["os", "os.system", "os.environ", "nn.Module", "silu", "torch.float32", "functools"])
def test_what_a_kernel_imports_cannot_be_asked_for(load: Callable[..., Any], name: str) -> None:
    with pytest.raises(SymbolNotFound, match="is not one that is defined by"):
        load({"__init__.py": SYMBOLS}, name)


def test_a_missing_symbol_lists_what_there_is(load: Callable[..., Any]) -> None:
    """REF huggingface/diffusers#14012, #14016; bghira/SimpleTuner#2782: an AttributeError at the first use."""
    files = {"__init__.py": SYMBOLS, "layers.py": "from torch import nn\nclass ReLU(nn.Module):\n    pass\n"}
    with pytest.raises(SymbolNotFound, match="did you mean 'ReLU'") as caught:
        load(files, "ReLu")
    assert caught.value.exported == ["Double", "ReLU", "aten", "double", "layers", "quadruple", "scale", "triple"]
    with pytest.raises(SymbolNotFound):
        load(files, "layers.ReLU.missing.too")


def test_a_kernel_that_says_what_it_exports_is_believed(load: Callable[..., Any]) -> None:
    with pytest.raises(SymbolNotFound) as caught:
        load({"__init__.py": '__all__ = ["f"]\ndef f(): pass\ndef g(): pass\n'}, "missing")
    assert caught.value.exported == ["f"]


# Failures


def test_s_27_an_import_that_fails_leaves_nothing_and_can_be_retried(
    load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "__init__.py": "from . import layers\nimport os\nif 'FAIL' in os.environ: raise ValueError('one\\ntwo')\n",
        "layers.py": "import sys\nsys.modules.pop('colorsys', None)\n",
    }
    colorsys = importlib.import_module("colorsys")
    before = dict(sys.modules)
    monkeypatch.setenv("FAIL", "1")
    with pytest.raises(ImportFailed, match=r"torch-cpu failed: ValueError: one\.") as caught:
        load(files)
    assert isinstance(caught.value.__cause__, ValueError)
    assert dict(sys.modules) == before
    assert sys.modules["colorsys"] is colorsys
    monkeypatch.delenv("FAIL")
    assert load(files).layers


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_r_4_s_27_an_interrupted_import_leaves_nothing(
    load: Callable[..., Any], error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "__init__.py": f"from . import layers\nimport os\nif 'FAIL' in os.environ: raise {error.__name__}\n",
        "layers.py": "",
    }
    before = dict(sys.modules)
    monkeypatch.setenv("FAIL", "1")
    with pytest.raises(error):
        load(files)
    assert dict(sys.modules) == before
    monkeypatch.delenv("FAIL")
    assert load(files).layers


def test_s_27_a_layers_module_that_fails_leaves_the_kernel_as_it_was(load: Callable[..., Any]) -> None:
    files = {"__init__.py": "", "layers.py": "raise RuntimeError('no')\n"}
    module = load(files)
    before = dict(sys.modules)
    for _ in range(2):
        with pytest.raises(ImportFailed, match="RuntimeError: no"):
            load(files, "Layer")
    assert dict(sys.modules) == before
    assert load(files) is module
    assert not hasattr(module, "layers")


@pytest.mark.parametrize(
    ("source", "error", "problem"),
    [
        ("import surely_not_there.part", MissingDependency, "(import surely_not_there), which is not installed"),
        ("import tvm_ffi", MissingDependency, "run `pip install apache-tvm-ffi`"),
        ("import json.surely_not_there", ImportFailed, "No module named 'json.surely_not_there'"),
        ("from . import gone", ImportFailed, "cannot import name 'gone'"),
        ("from .gone import x", ImportFailed, "No module named 'kernelhub_k_"),
        ("from json import MYSELF", ImportFailed, "cannot import name 'MYSELF'"),
        ("import torch\ntorch.ops.load_library('/gone.so')", IncompatibleLibrary, "cannot open shared object file"),
        ("def f(:", ImportFailed, "SyntaxError: "),
        ("raise OSError(28, 'No space left on device')", ImportFailed, "No space left on device"),
    ],
)
def test_r_41_a_failed_import_says_what_failed(
    load: Callable[..., Any], source: str, error: type[Exception], problem: str
) -> None:
    if "tvm_ffi" in source and importlib.util.find_spec("tvm_ffi"):
        pytest.skip("tvm_ffi is installed")
    with pytest.raises(error, match=re.escape(problem)) as caught:
        load({"__init__.py": source + "\n"})
    assert type(caught.value) is error
    assert "torch-cpu" in str(caught.value)


@pytest.mark.parametrize("body", [b"", b"\x7fELF", b"#!/bin/sh\n", b"\x7fELF\x01" + b"\0" * 100])
def test_a_file_that_is_no_library_is_an_incompatible_one(load: Callable[..., Any], body: bytes) -> None:
    with pytest.raises(IncompatibleLibrary, match=r"_x_cpu_0\.abi3\.so"):
        load({"__init__.py": "from . import _x_cpu_0\n", "_x_cpu_0.abi3.so": body})


# Names


@pytest.mark.parametrize("name", ["utils", "json", "torch", "os", "kernelhub"])
def test_s_25_a_kernel_shadows_no_module(
    load: Callable[..., Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """REF huggingface/kernels#20; pytorch/hub#243, #185: the order of imports decided whose ``utils`` it was."""
    (tmp_path / "utils.py").write_text("MINE = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    files = {"__init__.py": f"from .{name} import VALUE\nimport {name} as outside\n", f"{name}.py": "VALUE = 1\n"}
    before = {key: module for key, module in sys.modules.items() if not key.startswith(PREFIX)}
    module = load(files, name=name, metadata_overrides={"id": name})
    assert module.VALUE == 1
    assert module.__name__.endswith(f".{name}")
    assert {key: sys.modules.get(key) for key in before} == before
    outside = importlib.import_module(name)
    assert module.outside is outside
    assert not outside.__name__.startswith(PREFIX)
    assert getattr(outside, "MINE", True)
    sys.modules.pop("utils", None)


def test_s_26_two_versions_live_side_by_side(hub_root: Path, session: Session) -> None:
    """REF huggingface/kernel-builder#11: the second version of a kernel ended the process."""
    trust(hub_root, "acme")
    for version in (1, 2):
        files = {"__init__.py": f"from .part import f\nVERSION = {version}\n", "part.py": "def f(): pass\n"}
        write_build(hub_root, "acme/relu", f"v{version}", "torch-cpu", files, version=version)
    one, two = (load_kernel("acme/relu", version=version, session=session) for version in (1, 2))
    assert (one.VERSION, two.VERSION) == (1, 2)
    assert one.f is not two.f
    assert one.f.__module__ != two.f.__module__
    assert load_kernel("acme/relu", version=1, session=session) is one


def test_s_26_a_second_library_with_the_same_operators_is_refused_not_fatal(
    compiled: CompiledKernel, tmp_path: Path
) -> None:
    """In a process of its own: torch would end it if the second library were opened."""
    files = [{**compiled.files, "version.py": f"VERSION = {version}\n"} for version in (1, 2)]
    builds = [
        write_build(
            tmp_path, "acme/rms", f"v{n}", compiled.variant, body, version=n, metadata_overrides={"id": compiled.id}
        )
        for n, body in enumerate(files, 1)
    ]
    code = f"""
        import torch
        from kernelhub import load_kernel
        from kernelhub.errors import IncompatibleLibrary
        first, second = {[str(build) for build in builds]!r}
        module = load_kernel(first, backend="cpu")
        try:
            load_kernel(second, backend="cpu")
        except IncompatibleLibrary as error:
            print(error)
        print(module.rms_norm(torch.ones(2), torch.ones(2), 0.0).tolist(), load_kernel(first, backend="cpu") is module)
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"torch.ops.{compiled.id} are already registered by {builds[0]}" in done.stdout
    assert done.stdout.endswith("[1.0, 1.0] True\n")


# Bytecode


def test_s_16_importing_writes_no_bytecode(hub_root: Path, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    trust(hub_root, "acme")
    write_build(hub_root, "acme/relu", "v1", "torch-cpu", {"__init__.py": "from . import a\n", "a.py": "A = 1\n"})
    module = load_kernel("acme/relu", session=session)
    assert module.a.A == 1
    assert not [path for path in session.store.root.rglob("*") if path.suffix == ".pyc" or path.name == "__pycache__"]


def test_s_16_bytecode_beside_a_source_is_not_run(tmp_path: Path) -> None:
    """A cache file that looks fresh by its header holds other code than the source."""
    source, evil = tmp_path / "a.py", tmp_path / "evil.py"
    source.write_text("A = 'source'\n")
    evil.write_text("A = 'secret'\n")
    os.utime(evil, ns=(source.stat().st_atime_ns, source.stat().st_mtime_ns))
    cached = importlib.util.cache_from_source(str(source))
    Path(cached).parent.mkdir()
    py_compile.compile(str(evil), cached)
    code = SourceLoader("a", str(source)).get_code("a")
    assert "source" in code.co_consts


# Python dependencies


@pytest.mark.parametrize("row", DEPENDENCIES, ids=lambda row: row.name)
def test_s_38_a_dependency_that_is_not_installed_is_named_with_its_package(
    row: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", nothing)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    metadata = Metadata(python_depends=(row.name,), backend=row.backend or "cpu")
    if row.module is None:
        return check_python_depends("acme/relu@1 torch-xpu", metadata)
    with pytest.raises(MissingDependency) as caught:
        check_python_depends("acme/relu@1 torch-cpu", metadata)
    text = str(caught.value)
    assert text.startswith(f"kernel acme/relu@1 torch-cpu needs '{row.name}' (import {row.module}), which is not")
    assert text.endswith(f"run `pip install {row.package}`.")
    return None


@pytest.mark.parametrize(("there", "missing"), [("helion", "tvm-ffi"), ("tvm_ffi", "helion")])
def test_of_two_dependencies_the_missing_one_is_named(
    there: str, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """REF huggingface/transformers#42723; hiyouga/LlamaFactory#8995: one message for two needs did not say which.

    The one that is there has no record of its own, as from a vendor's package of another name.
    """
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"{there}.py").write_text("")
    with pytest.raises(MissingDependency) as caught:
        check_python_depends("k", Metadata(python_depends=("helion", "tvm-ffi")))
    assert caught.value.dependency == missing
    assert there.replace("_", "-") not in str(caught.value)


def test_a_dependency_of_another_backend_does_not_count() -> None:
    check_python_depends("k", Metadata(python_depends=("nki", "nvidia-cutlass-dsl", "onednn"), backend="cpu"))
    check_python_depends("k", None)


def test_a_dependency_that_is_installed_is_found_by_its_records_or_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is imported: the module would raise."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "apache_tvm_ffi-0.1.dist-info").mkdir()
    (tmp_path / "apache_tvm_ffi-0.1.dist-info" / "METADATA").write_text("Name: apache-tvm-ffi\nVersion: 0.1\n")
    (tmp_path / "helion.py").write_text("raise RuntimeError")
    check_python_depends("k", Metadata(python_depends=("tvm-ffi", "helion")))


def test_s_38_an_unknown_dependency_is_refused_before_anything_is_imported(hub_root: Path, session: Session) -> None:
    trust(hub_root, "acme")
    build = write_build(hub_root, "acme/relu", "v1", "torch-cpu", {"__init__.py": "raise RuntimeError\n"})
    metadata = json.loads((build / "metadata.json").read_text())
    (build / "metadata.json").write_text(json.dumps({**metadata, "python-depends": ["evil-pkg"]}))
    with pytest.raises(InvalidMetadata, match=r"'evil-pkg' .*acme/relu.*python-depends"):
        load_kernel("acme/relu", session=session)
    assert kernel_modules() == set()


# What is loaded, and what a kernel does to others


def test_loaded_kernels_are_listed_with_where_they_came_from(hub_root: Path, session: Session) -> None:
    """REF huggingface/kernels#109, #121, #428: users could not see which kernels were in use."""
    trust(hub_root, "acme")
    write_build(hub_root, "acme/relu", "v1", "torch-cpu", {"__init__.py": ""})
    module = load_kernel("acme/relu", session=session)
    commit = session.resolve(KernelRequest.parse("acme/relu")).commit
    [kernel] = [kernel for kernel in loaded_kernels() if kernel.module is module]
    assert (kernel.origin, kernel.variant, kernel.state) == ("acme/relu", "torch-cpu", "self-attested")
    assert commit.startswith(kernel.commit)
    assert str(kernel) == f"acme/relu@{kernel.commit} torch-cpu (self-attested) as {module.__name__}"


def test_a_kernel_that_failed_is_not_listed(load: Callable[..., Any]) -> None:
    before = loaded_kernels()
    with pytest.raises(ImportFailed):
        load({"__init__.py": "raise ValueError\n"})
    assert loaded_kernels() == before


def test_a_kernel_can_be_reloaded(load: Callable[..., Any]) -> None:
    module = load(
        {"__init__.py": "COUNT = globals().get('COUNT', 0) + 1\nfrom . import part\n", "part.py": "ONE = 1\n"}
    )
    assert importlib.reload(module) is module
    assert module.COUNT == 2
    assert importlib.reload(module.part).ONE == 1


def test_s_25_modules_that_a_kernel_replaced_are_put_back_and_told(
    load: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    colorsys = importlib.import_module("colorsys")
    source = """
        import sys
        from . import part
        sys.modules["colorsys"] = part
        sys.modules["kernelhub_test_planted"] = part
        sys.modules.pop("json", None)
        """
    module = load({"__init__.py": source, "part.py": ""})
    assert sys.modules["colorsys"] is colorsys
    assert sys.modules["json"] is json
    assert "kernelhub_test_planted" not in sys.modules
    [kernel] = [kernel for kernel in loaded_kernels() if kernel.module is module]
    assert len(kernel.notes) == 3
    assert "replaced the module colorsys in sys.modules; that was undone" in caplog.text
    assert "put a module of its own into sys.modules as kernelhub_test_planted; that was undone" in caplog.text


def test_s_27_a_failed_import_leaves_the_search_path_and_torchs_operators(
    load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
        import os, sys, torch
        sys.path.insert(0, "/nowhere")
        library = torch.library.Library("kernelhub_test_failed", "DEF")
        library.define("f(Tensor x) -> Tensor")
        library.impl("f", lambda x: x + 1, "CPU")
        torch.library.define("kernelhub_test_failed_too::g", "(Tensor x) -> Tensor")
        @torch.library.custom_op("kernelhub_test_failed_three::h", mutates_args=())
        def h(x: torch.Tensor) -> torch.Tensor:
            return x.clone()
        if "FAIL" in os.environ:
            raise ValueError
        """
    path = list(sys.path)
    monkeypatch.setenv("FAIL", "1")
    kept = []
    for _ in range(2):
        with pytest.raises(ImportFailed) as caught:
            load({"__init__.py": source})
        kept.append(caught.value)  # and with it the frames of the module that failed
    assert sys.path == path
    assert not hasattr(torch.ops.kernelhub_test_failed, "f")
    monkeypatch.delenv("FAIL")
    load({"__init__.py": source})
    assert torch.ops.kernelhub_test_failed.f(torch.ones(1)).item() == 2
    sys.path.remove("/nowhere")


def test_r_40_64_threads_load_50_times_and_import_once(
    load: Callable[..., Any], tmp_path: Path, hubless: Session
) -> None:
    monitor: list[int] = []
    vars(builtins)["KERNELHUB_TEST_IMPORTS"] = monitor
    try:
        files = {
            "__init__.py": "import time\nKERNELHUB_TEST_IMPORTS.append(1)\ntime.sleep(0.05)\nfrom . import layers\n"
        }
        folder = write_build(tmp_path, "acme/often", "v1", "torch-cpu", files | {"layers.py": "class Layer: pass\n"})
        build = hubless.obtain(hubless.resolve(KernelRequest.parse(str(folder))))
        barrier, found = threading.Barrier(64), list[Any]()

        def run() -> None:
            barrier.wait()
            found.extend(load_build(build) for _ in range(50))

        threads = [threading.Thread(target=run) for _ in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert monitor == [1]
        assert len(found) == 3200
        assert len(set(found)) == 1
    finally:
        del vars(builtins)["KERNELHUB_TEST_IMPORTS"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_r_39_a_child_process_can_load_though_a_thread_of_its_parent_was_loading(tmp_path: Path) -> None:
    """In a process of its own, as this one has threads that a fork would leave behind."""
    slow, quick = (
        write_build(tmp_path, f"acme/{name}", "v1", "torch-cpu", {"__init__.py": source})
        for name, source in (("slow", "import time\nSTARTED.set()\ntime.sleep(1)\n"), ("quick", "ONE = 1\n"))
    )
    code = f"""
        import builtins, os, threading, warnings
        from kernelhub import Environment, Session, load_kernel
        warnings.simplefilter("ignore")
        builtins.STARTED = threading.Event()
        session = Session(environment=Environment.parse("torch=2.13,cpu=x86_64,os=linux"), lockfile=False)
        thread = threading.Thread(target=load_kernel, args=({str(slow)!r},), kwargs={{"session": session}})
        thread.start()
        STARTED.wait()
        child = os.fork()
        if not child:
            os._exit(load_kernel({str(quick)!r}, session=session).ONE)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        thread.join()
        """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_kernel_is_compiled_by_torch_as_any_other_code(load: Callable[..., Any]) -> None:
    """The modules of a kernel have an import function of their own among their builtins."""
    source = "import torch\ndef f(x):\n    import math\n    return torch.relu(x) * math.pi + len(range(3))\n"
    function = load({"__init__.py": source}, "f")
    x = torch.randn(8)
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), function(x))


# Tampering: nothing of a build that is not what it should be runs


def _in_place(path: Path) -> None:
    path.chmod(0o644)
    path.write_text("raise SystemExit\n")


def _linked(path: Path) -> None:
    path.rename(path.parents[3] / "moved")
    path.symlink_to(path.parents[3] / "moved")


def _through_a_hard_link(path: Path) -> None:
    twin = path.parents[3] / "twin"
    twin.hardlink_to(path)
    _in_place(twin)


def _planted(name: str) -> Callable[[Path], object]:
    def plant(path: Path) -> None:
        target = path.parent / name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(b"")

    return plant


TAMPERING: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "changed": ("part.py", _in_place, "'part.py'"),
    "missing": ("part.py", Path.unlink, "'part.py' is missing"),
    "unlisted": ("part.py", _planted("more.py"), "'more.py' is not listed"),
    "bytecode beside": ("part.py", _planted("part.pyc"), "'part.pyc' is refused: Python bytecode"),
    "bytecode cached": ("part.py", _planted("__pycache__/part.cpython-311.pyc"), "is refused: Python bytecode"),
    "linked file": ("part.py", _linked, "'part.py' is neither a file nor a folder"),
    "linked folder": ("inner", _linked, "'inner' is neither a file nor a folder"),
    "backslash": ("part.py", _planted("a\\b.py"), "backslash"),
    "case twin": ("part.py", _planted("PART.py"), "but for letter case"),
    "FIFO": ("part.py", lambda path: os.mkfifo(path.parent / "pipe"), "'pipe' is neither a file nor a folder"),
    "nested metadata": ("part.py", _planted("inner/metadata.json"), "'inner/metadata.json' is not listed"),
    "hard link": ("part.py", _through_a_hard_link, "'part.py'"),
}


@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
@pytest.mark.parametrize("place", ["folder", "store"])
@pytest.mark.parametrize("kind", TAMPERING)
def test_twelve_kinds_of_tampering_stop_before_any_code_runs(
    kind: str, place: str, strict: bool, hub_root: Path, session: Session
) -> None:
    ran = []
    vars(builtins)["KERNELHUB_TEST_RAN"] = ran.append
    files = {"__init__.py": "KERNELHUB_TEST_RAN(1)\n", "part.py": "", "inner/x.py": ""}
    trust(hub_root, "acme")
    folder = write_build(hub_root, "acme/relu", "v1", "torch-cpu", files)
    session.strict = strict
    if place == "store":
        session.obtain(session.resolve(KernelRequest.parse("acme/relu")))
        folder = next(iter(session.store.builds())).files_folder
        session = dataclasses.replace(session, offline=True)
    path, tamper, problem = TAMPERING[kind]
    tamper(folder / path)
    try:
        with pytest.raises(DigestMismatch, match=re.escape(problem)):
            load_kernel("acme/relu" if place == "store" else str(folder), session=session)
    finally:
        del vars(builtins)["KERNELHUB_TEST_RAN"]
    assert ran == []
    assert kernel_modules() == set()


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("directory", "cannot be read"),
        ("FIFO", "cannot be read"),
        ("symlink", "cannot be read"),
        ("0 bytes", r"empty \(0 bytes\)"),
        ("unreadable", "cannot be read"),
    ],
)
def test_metadata_of_another_kind_is_refused_without_waiting(
    kind: str, problem: str, tmp_path: Path, hubless: Session
) -> None:
    folder = write_build(tmp_path, "acme/relu", "v1", "torch-cpu", {"__init__.py": "raise SystemExit\n"})
    path = folder / "metadata.json"
    path.rename(tmp_path / "moved")
    if kind == "directory":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "symlink":
        path.symlink_to(tmp_path / "moved")
    elif kind == "0 bytes":
        path.touch()
    else:
        path.touch(0o000)
        if os.access(path, os.R_OK):
            pytest.skip("this user may read everything")
    with pytest.raises(InvalidMetadata, match=problem):
        load_kernel(str(folder), session=hubless)
