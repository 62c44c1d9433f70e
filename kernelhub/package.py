"""Package: how the modules of a verified build are found and run, under its private name.

``KernelFinder`` sits on ``sys.meta_path`` and knows nothing but the builds that were added to it. Sources are compiled
from the bytes that the build's source hands out; bytecode is neither read nor written (S-16). The modules of a kernel
import through a function of ours, which answers ``import kernels`` for that one kernel: nothing is put into
``sys.modules`` under that name, so other code, and an installed ``kernels``, see nothing of it.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kernelhub.errors import ImportFailed
from kernelhub.source import SealedSource

if TYPE_CHECKING:
    from pathlib import Path
    from types import CodeType

    from kernelhub.source import Source
    from kernelhub.verify import VerifiedBuild

PREFIX = "kernelhub_k_"

# Packages that kernels import and that are answered here, with the module that makes the answer. By name, and looked
# up when a kernel asks: what answers needs more of kernelhub than the loader may.
_COMPANIONS = {"kernels": "kernelhub.integrations.kernels.companion"}

Depend = Callable[["Kernel", str], ModuleType]
"""Gives a kernel the module of another one that it asks for."""

Begin = Callable[[ModuleType], object]
"""Is told each module whose code is about to run."""


class SourceLoader(SourceFileLoader):
    """Compiles a build's source on every import; never touches ``__pycache__``."""

    def __init__(self, fullname: str, path: str, kernel: Kernel | None = None) -> None:
        super().__init__(fullname, path)
        self._kernel = kernel

    def get_data(self, path: str) -> bytes:
        return super().get_data(path) if self._kernel is None else self._kernel.source.read(path)

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code

    def exec_module(self, module: ModuleType) -> None:
        if self._kernel is not None:
            self._kernel.prepare(module, self.path)
        super().exec_module(module)


class LibraryLoader(ExtensionFileLoader):
    """Opens a native module at the place that the source of the build names; the module still knows its own file."""

    def __init__(self, fullname: str, path: Path, source: Source) -> None:
        super().__init__(fullname, source.library(path))
        self._file = str(path)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        module.__file__ = self._file


class Kernel:
    """A build that is importable: its folder, its source, and the builtins that its modules see."""

    def __init__(self, build: VerifiedBuild, source: Source, depend: Depend, begin: Begin) -> None:
        self.build = build
        self.source = source
        self._depend = depend
        self._begin = begin
        self.folder = _package_folder(build, source)
        self._companions: dict[str, ModuleType] = {}
        self._builtins = {**vars(builtins), "__import__": self._import}

    def prepare(self, module: ModuleType, path: str) -> None:
        """What a module gets before its code runs."""
        vars(module)["__builtins__"] = self._builtins
        self._begin(module)
        if isinstance(self.source, SealedSource):
            self.source.remember_lines(path)

    def _import(self, name: str, *arguments: Any, **keywords: Any) -> ModuleType:
        """``__import__`` for the modules of this kernel; takes the same arguments."""
        top = name.partition(".")[0]
        if top not in _COMPANIONS:
            return builtins.__import__(name, *arguments, **keywords)
        level = keywords.get("level", arguments[3] if len(arguments) > 3 else 0)
        if level:
            return builtins.__import__(name, *arguments, **keywords)
        companion = self._companion(top)
        for part in name.split(".")[1:]:
            if not hasattr(companion, part):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return companion

    def _companion(self, name: str) -> ModuleType:
        if name not in self._companions:
            make = importlib.import_module(_COMPANIONS[name]).companion
            self._companions[name] = make(
                self.build.build, lambda repo_id: self._depend(self, repo_id), self.declared().__contains__
            )
        return self._companions[name]

    def declared(self) -> dict[str, VerifiedBuild]:
        """The dependencies by the names that the kernel's own metadata gives them."""
        wanted = self.build.metadata.kernel_depends if self.build.metadata else ()
        return {need.repo_id: build for need, build in zip(wanted, self.build.dependencies, strict=True)}


class KernelFinder(MetaPathFinder):
    """Finds the modules of loaded builds, and nothing else; sits on ``sys.meta_path`` while builds are loaded."""

    def __init__(self, depend: Depend, begin: Begin) -> None:
        self._kernels: dict[str, Kernel] = {}
        self._depend = depend
        self._begin = begin

    def add(self, name: str, build: VerifiedBuild, source: Source) -> None:
        """Make a build importable under ``name``."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        self._kernels[name] = Kernel(build, source, self._depend, self._begin)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not fullname.startswith(PREFIX):
            return None
        parts = fullname.split(".")
        if len(parts) == 1:
            return _namespace_spec(fullname, [])
        kernel = self._kernels.get(".".join(parts[:2]))
        return None if kernel is None else _spec(fullname, kernel, kernel.folder.joinpath(*parts[2:]), len(parts) == 2)


def _spec(fullname: str, kernel: Kernel, base: Path, is_root: bool) -> ModuleSpec | None:
    """The spec of a package folder, a source file or an extension module, in Python's own order."""
    source = kernel.source
    package = base / "__init__.py"
    if source.has_file(package):
        loader = SourceLoader(fullname, str(package), kernel)
        return spec_from_file_location(fullname, package, loader=loader, submodule_search_locations=[str(base)])
    if is_root:
        return None
    for suffix in EXTENSION_SUFFIXES:
        library = base.with_name(base.name + suffix)
        if source.has_file(library):
            opener = LibraryLoader(fullname, library, source)
            return spec_from_file_location(fullname, opener.path, loader=opener)
    module = base.with_name(f"{base.name}.py")
    if source.has_file(module):
        return spec_from_file_location(fullname, module, loader=SourceLoader(fullname, str(module), kernel))
    return _namespace_spec(fullname, [str(base)]) if source.has_folder(base) else None


def _namespace_spec(fullname: str, locations: list[str]) -> ModuleSpec:
    """A package without code: the ``kernelhub_k_<digest>`` that holds one kernel, or a folder without __init__.py."""
    spec = ModuleSpec(fullname, None, is_package=True)
    spec.submodule_search_locations = locations
    return spec


def _package_folder(build: VerifiedBuild, source: Source) -> Path:
    """Where ``__init__.py`` is: at the top, or, in older builds, in a folder named after the kernel."""
    packages = [path.removesuffix("__init__.py") for path in source.paths() if path.endswith("__init__.py")]
    if "" in packages:
        return build.folder
    nested = [path for path in packages if path.count("/") == 1]
    if len(nested) != 1:
        raise ImportFailed(build.build, "it has no __init__.py")
    return build.folder / nested[0].rstrip("/")
