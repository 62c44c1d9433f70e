"""Python packages that kernels may need: is each there, before anything is imported? Nothing is ever installed.

The table is the Hub's closed list of ``python-depends`` (hub format, metadata): what a build may name, what pip calls
it, what is imported, and the backend that it is for. A name outside the table is an error, not a guess (S-38).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import TYPE_CHECKING, NamedTuple

from kernelhub.errors import InvalidMetadata, MissingDependency

if TYPE_CHECKING:
    from kernelhub.metadata import Metadata


class PythonDependency(NamedTuple):
    """One row: the name in metadata, pip's name, the module (None: nothing to import), the backend (None: any)."""

    name: str
    package: str
    module: str | None
    backend: str | None = None


DEPENDENCIES: tuple[PythonDependency, ...] = (
    PythonDependency("einops", "einops", "einops"),
    PythonDependency("helion", "helion", "helion"),
    PythonDependency("nki", "nki", "nki", "neuron"),
    PythonDependency("nvidia-cutlass-dsl", "nvidia-cutlass-dsl", "cutlass", "cuda"),
    PythonDependency("onednn", "onednn", None, "xpu"),
    PythonDependency("tvm-ffi", "apache-tvm-ffi", "tvm_ffi"),
)
_BY_NAME = {dependency.name: dependency for dependency in DEPENDENCIES}
_PACKAGE_OF_MODULE = {dependency.module: dependency.package for dependency in DEPENDENCIES if dependency.module}


def check_python_depends(build: str, metadata: Metadata | None) -> None:
    """Refuse a build whose Python dependencies are not installed; those of another backend do not count.

    Raises:
        InvalidMetadata: it names a dependency that kernels cannot have; the message lists those they can.
        MissingDependency: not installed; the message has the kernel, the import name and pip's name.
    """
    for name in metadata.python_depends if metadata else ():
        dependency = _BY_NAME.get(name)
        if dependency is None:
            raise InvalidMetadata(name, "unknown entry of 'python-depends'", f"one of {', '.join(_BY_NAME)}", build)
        backend = metadata.backend if metadata else None
        needed = dependency.backend is None or backend in (None, dependency.backend)
        if needed and dependency.module is not None and not _is_installed(dependency.package, dependency.module):
            raise MissingDependency(build, name, dependency.module, dependency.package)


def package_of(module: str) -> str:
    """What pip calls the package with that top module, as far as the table knows."""
    return _PACKAGE_OF_MODULE.get(module, module)


def _is_installed(package: str, module: str) -> bool:
    """By the installer's records, else by what could be found; nothing is imported."""
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return importlib.util.find_spec(module) is not None
    return True
