"""Two kernels with one operator namespace: torch would end the process, so the second is refused before that."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from compiled_kernel import marking_library
from kernel_repository import write_build

from kernelhub.elf import held_names

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux is looked at")

# Registers through torch's C interface when it is opened, and ends the process as TORCH_LIBRARY would.
REGISTER = """
extern "C" int aoti_torch_library_init_def(const char*, const char*, unsigned, void**);
extern "C" int aoti_torch_library_init_fragment(const char*, const char*, unsigned, void**);
extern "C" int aoti_torch_library_def(void*, const char*);
__attribute__((constructor)) static void register_operators() {{
  void* library;
  if (aoti_torch_library_init_{kind}("{namespace}", "probe.cpp", 1, &library)) std::abort();
  if (aoti_torch_library_def(library, "{operator}(Tensor x) -> Tensor")) std::abort();
}}
"""
TORCH = f"-L{Path(torch.__file__).parent / 'lib'}"

LOAD = """
import sys, torch
from kernelhub import Session, load_kernel
from kernelhub.errors import IncompatibleLibrary
session = Session(lockfile=False, strict={strict})
for path in {paths!r}:
    try:
        load_kernel(path, session=session, backend="cpu")
        print("loaded")
    except IncompatibleLibrary as error:
        print("refused:", error)
with open("/proc/self/maps") as file:
    print(len({{line.split()[4] for line in file if "_probe.abi3.so" in line}}), "opened")
print([hasattr(getattr(torch.ops, name), "f") for name in {namespaces!r}])
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., bytes]:
    """Compiles a stripped library, once each: ``library(namespace, kind, operator, extra)``; it holds ``extra`` too."""
    folder = tmp_path_factory.mktemp("libraries")

    @cache
    def compile_one(namespace: str, kind: str = "def", operator: str = "f", extra: str = "") -> bytes:
        declare = REGISTER.format(namespace=namespace, kind=kind, operator=operator)
        declare += f'__attribute__((used, visibility("default"))) const char* extra() {{ return "{extra}"; }}\n'
        return marking_library(
            folder, "_probe", "-s", "-Wl,--no-as-needed", TORCH, "-ltorch_cpu", "-lc10", declare=declare
        )

    return compile_one


def publish(root: Path, name: str, body: bytes, **facts: Any) -> Path:
    files: dict[str, str | bytes] = {"__init__.py": "from . import _probe\n", "_probe.abi3.so": body}
    return write_build(root, f"acme/{name}", "v1", "torch-cpu", files, **facts)


def run(builds: Sequence[Path], namespaces: Sequence[str], strict: bool = False) -> list[str]:
    """What a process of its own prints that loads these builds one after the other."""
    code = LOAD.format(paths=[str(build) for build in builds], namespaces=list(namespaces), strict=strict)
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


WITH_ID: dict[str, Any] = {"metadata_overrides": {"id": "shared_ops"}}
WITHOUT_ID: dict[str, Any] = {"digest": False, "metadata_overrides": {"id": None}}


@pytest.mark.parametrize(
    ("facts", "strict"),
    [(WITH_ID, False), (WITHOUT_ID, False), (WITH_ID, True)],
    ids=["with the same id", "without an id", "sealed"],
)
def test_s_26_a_namespace_is_defined_once(
    facts: dict[str, Any], strict: bool, library: Callable[..., bytes], tmp_path: Path
) -> None:
    one = publish(tmp_path, "one", library("shared_ops"), **facts)
    two = publish(tmp_path, "two", library("shared_ops", operator="g"), **facts)
    lines = run([one, two, one], ["shared_ops"], strict)
    assert [line.partition(":")[0] for line in lines[:3]] == ["loaded", "refused", "loaded"]
    assert f"torch.ops.shared_ops are already registered by {one} torch-cpu" in lines[1]
    assert lines[1].startswith(f"refused: kernel {two} torch-cpu: native library ")
    assert lines[1].endswith("load one of them in another process.")
    assert lines[3:] == ["1 opened", "[True]"]


def test_a_build_that_says_what_it_registers_may_hold_any_other_string(
    library: Callable[..., bytes], tmp_path: Path
) -> None:
    one = publish(tmp_path, "one", library("first_ops"), **WITHOUT_ID)
    facts: dict[str, Any] = {"metadata_overrides": {"id": "second_ops"}}
    two = publish(tmp_path, "two", library("second_ops", extra="first_ops"), **facts)
    three = publish(tmp_path, "three", library("third_ops"), **WITHOUT_ID)
    lines = run([one, two, three], ["first_ops", "second_ops", "third_ops"])
    assert lines == ["loaded", "loaded", "loaded", "3 opened", "[True, True, True]"]


def test_a_kernel_that_adds_to_the_operators_of_one_it_depends_on_is_loaded(
    library: Callable[..., bytes], tmp_path: Path
) -> None:
    one = publish(tmp_path, "one", library("shared_ops"), **WITHOUT_ID)
    two = publish(tmp_path, "two", library("shared_ops", kind="fragment", operator="g"), **WITHOUT_ID)
    code = f"""
        import dataclasses, torch
        from kernelhub import KernelRequest, Session
        from kernelhub.loader import load
        session = Session(lockfile=False)
        one, two = (
            session.obtain(session.resolve(KernelRequest.parse(path), backend="cpu"))
            for path in ({str(one)!r}, {str(two)!r})
        )
        load(dataclasses.replace(two, dependencies=(one,)))
        print(torch.ops.shared_ops.f, torch.ops.shared_ops.g)
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "shared_ops.f shared_ops.g\n"


def test_a_build_that_failed_before_it_registered_anything_owns_nothing(
    library: Callable[..., bytes], tmp_path: Path
) -> None:
    files: dict[str, str | bytes] = {
        "__init__.py": "import nowhere\nfrom . import _probe\n",
        "_probe.abi3.so": library("shared_ops"),
    }
    one = write_build(tmp_path, "acme/one", "v1", "torch-cpu", files, **WITH_ID)
    two = publish(tmp_path, "two", library("shared_ops", operator="g"), **WITH_ID)
    code = f"""
        from kernelhub import Session, load_kernel
        from kernelhub.errors import MissingDependency
        session = Session(lockfile=False)
        try:
            load_kernel({str(one)!r}, session=session, backend="cpu")
        except MissingDependency as error:
            print(error.module)
        print(load_kernel({str(two)!r}, session=session, backend="cpu")._probe.__name__.rpartition(".")[2])
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "nowhere\n_probe\n"


@pytest.mark.parametrize("start", [0, 100, (4 << 20) - 3, (4 << 20) - 1, (4 << 20) + 2046])
def test_a_name_is_found_wherever_it_stands(start: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * start + b"\0name\0" + b"unnamed\0named\0" + b"y" * 100)
    with path.open("rb") as file:
        assert held_names(file, ["name", "named", "unname", "nam", "absent"]) == ("name", "named")
