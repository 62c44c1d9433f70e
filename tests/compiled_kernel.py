"""Compiles one C++ operator against the installed torch, laid out as a kernel build is."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils.cpp_extension import include_paths, library_paths

from kernelhub.environment import Environment
from kernelhub.variant import TORCH, Variant

if TYPE_CHECKING:
    from pathlib import Path

# Loading the library is what registers the operator; the module itself is empty and of the stable Python ABI.
_MODULE = """
#define Py_LIMITED_API 0x030a0000
#include <Python.h>
static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "{module}", nullptr, -1, nullptr}};
extern "C" __attribute__((visibility("default"))) PyObject* PyInit_{module}() {{
  {before}
  return PyModule_Create(&module);
}}
"""
_OPERATOR = """
#include <ATen/ATen.h>
#include <torch/library.h>
static at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double epsilon) {{
  return x * at::rsqrt(x.pow(2).mean(-1, true) + epsilon) * weight;
}}
TORCH_LIBRARY({module}, m) {{ m.def("rms_norm(Tensor x, Tensor weight, float epsilon) -> Tensor"); }}
TORCH_LIBRARY_IMPL({module}, CompositeImplicitAutograd, m) {{ m.impl("rms_norm", rms_norm); }}
"""
_FILES = {
    "__init__.py": """
        from . import layers
        from ._ops import ops

        def rms_norm(x, weight, epsilon):
            return ops.rms_norm(x, weight, epsilon)
        """,
    "_ops.py": """
        import torch
        from . import {module}

        ops = torch.ops.{module}
        """,
    "layers.py": """
        from torch import nn
        from ._ops import ops

        class RMSNorm(nn.Module):
            def forward(self, hidden_states):
                return ops.rms_norm(hidden_states, self.weight, self.variance_epsilon)
        """,
}


@dataclass(frozen=True)
class CompiledKernel:
    """The variant for the machine that compiled it, the operators' namespace, and the files of the build."""

    variant: str
    id: str
    files: dict[str, str | bytes]


def compile_kernel(folder: Path, name: str = "rms_norm_probe") -> CompiledKernel:
    """A kernel with the operator ``rms_norm``, compiled in ``folder`` unless it is there already."""
    environment = Environment.detect().with_backend("cpu")
    abi = None if environment.cxx11_abi is None else "cxx11" if environment.cxx11_abi else "cxx98"
    variant = Variant(TORCH, environment.torch, abi, environment.backend, environment.cpu, environment.os)
    text = _OPERATOR + _MODULE
    module = f"_{name}_cpu_{hashlib.sha256(f'{text}{torch.__version__}'.encode()).hexdigest()[:7]}"
    library = folder / f"{module}.abi3.so"
    if not library.is_file():
        flags = ["-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={int(bool(environment.cxx11_abi))}"]
        flags += [f"-isystem{path}" for path in include_paths("cpu")]
        libraries = [f"-L{path}" for path in library_paths("cpu")] + ["-ltorch", "-ltorch_cpu", "-lc10"]
        compile_library(library, text.format(module=module, before=""), *flags, libraries=libraries)
    sources = {path: _dedented(text).replace("{module}", module) for path, text in _FILES.items()}
    return CompiledKernel(str(variant), module, {**sources, library.name: library.read_bytes()})


def broken_library(folder: Path, module: str) -> bytes:
    """An extension module that calls a function which no library has."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")  # kernelhub itself compiles nothing
    library = folder / f"{module}.abi3.so"
    text = 'extern "C" void gone_in_this_torch();' + _MODULE
    compile_library(library, text.format(module=module, before="gone_in_this_torch();"))
    return library.read_bytes()


_MARKING = """
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
__attribute__((constructor)) static void leave_a_mark() {
  if (const char* path = std::getenv("KERNELHUB_TEST_MARK")) {
    if (FILE* file = std::fopen(path, "w")) std::fclose(file);
    else throw std::runtime_error("no mark");
  }
}
"""


def marking_library(folder: Path, module: str = "_probe", *flags: str, declare: str = "", before: str = "") -> bytes:
    """An extension module that creates the file of ``KERNELHUB_TEST_MARK`` as soon as it is opened."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")  # kernelhub itself compiles nothing
    library = folder / f"{module}.abi3.so"
    compile_library(library, _MARKING + declare + _MODULE.format(module=module, before=before), *flags)
    return library.read_bytes()


def compile_library(target: Path, text: str, *flags: str, libraries: list[str] | None = None) -> None:
    """Compile ``text`` with g++; ``target`` appears when it is complete."""
    source = target.with_name(f"{target.name}.cpp")
    source.write_text(text)
    unfinished = target.with_name(f"{target.name}.unfinished")
    python = sysconfig.get_path("include")
    command = ["g++", "-shared", "-fPIC", "-O1", "-fvisibility=hidden", f"-I{python}", *flags]
    done = subprocess.run(
        [*command, str(source), "-o", str(unfinished), *(libraries or [])], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    unfinished.rename(target)


def _dedented(text: str) -> str:
    return "".join(f"{line[8:]}\n" for line in text.strip("\n").splitlines())
