"""Loader: import a verified build under a private name, once per process.

The package is ``kernelhub_k_<digest>.<name>``: the name depends on the content only, never on what the metadata
claims, so it cannot shadow or be shadowed by an installed module (S-25). Sources are compiled from the files in the
build; bytecode is neither read nor written (S-16). When an import fails, ``sys.modules`` is as it was (S-27).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import threading
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from itertools import accumulate
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from kernelhub.errors import ImportFailed, IncompatibleLibrary, KernelHubError, MissingDependency, SymbolNotFound
from kernelhub.pythondepend import check_python_depends, package_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kernelhub.verify import VerifiedBuild

PREFIX = "kernelhub_k_"
LAYERS = "layers"

_DIGEST_DIGITS = 12
# What the dynamic loaders of Linux, macOS and Windows say when a library does not fit this machine.
_LIBRARY_WORDS = (
    "undefined symbol",
    "GLIBC",
    "CXXABI",
    "cannot open shared object",
    "ELF header",
    "ELF class",
    "ELF file",
    "file too short",
    "Symbol not found",
    "Library not loaded",
    "DLL load failed",
)


def load(build: VerifiedBuild) -> ModuleType:
    """The kernel's module; the same object for the same content, however often and from how many threads.

    Raises:
        MissingDependency: a Python package that the kernel needs is not installed; told before anything is imported.
        IncompatibleLibrary: a native library cannot be loaded.
        ImportFailed: the kernel's own code raised.
    """
    name = module_name(build)
    with _LOCK:
        if name in sys.modules:
            return sys.modules[name]
        check_python_depends(build.build, build.metadata)
        _FINDER.add(name, build)
        with _claimed_operators(build):
            return _import(build, name)


def symbol(build: VerifiedBuild, name: str) -> Any:
    """The object that a kernel defines under a (dotted) name: in its top module, or in its ``layers`` module.

    Raises:
        SymbolNotFound: not defined there, or it belongs to another package; the message lists what is exported.
    """
    module = load(build)
    places = [module, *_layers_module(build)]
    found = next((steps for place in places if (steps := _walk(place, name))[-1] is not None), None)
    if found is None:
        raise SymbolNotFound(build.kernel, name, exported(places))
    if not all(_is_own(step, module) for step in found):
        raise SymbolNotFound(build.kernel, name, exported(places), "is not one that is defined by")
    return found[-1]


def exported(places: Sequence[ModuleType]) -> list[str]:
    """The public names of a kernel: classes, functions and submodules of its layers module and its top module."""
    names: set[str] = set()
    for place in places:
        candidates = getattr(place, "__all__", None) or [name for name in vars(place) if not name.startswith("_")]
        values = {name: getattr(place, name, None) for name in candidates}
        names |= {name for name, value in values.items() if _is_named(value) and _is_own(value, places[0])}
    return sorted(names)


def _is_named(value: object) -> bool:
    return callable(value) or isinstance(value, ModuleType)


def module_name(build: VerifiedBuild) -> str:
    """The private name under which this content is imported."""
    return f"{PREFIX}{build.digest[:_DIGEST_DIGITS]}.{build.name}"


class SourceLoader(SourceFileLoader):
    """Compiles a build's source on every import; never touches ``__pycache__``."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


class KernelFinder(MetaPathFinder):
    """Finds the modules of loaded builds, and nothing else; sits on ``sys.meta_path`` while builds are loaded."""

    def __init__(self) -> None:
        self._folders: dict[str, Path] = {}

    def add(self, name: str, build: VerifiedBuild) -> None:
        """Make a build importable under ``name``."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        self._folders[name] = _package_folder(build)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not fullname.startswith(PREFIX):
            return None
        parts = fullname.split(".")
        if len(parts) == 1:
            return _namespace_spec(fullname, [])
        folder = self._folders.get(".".join(parts[:2]))
        return None if folder is None else _spec(fullname, folder.joinpath(*parts[2:]), is_root=len(parts) == 2)


_FINDER = KernelFinder()
_LOCK = threading.RLock()
_OPERATORS: dict[str, tuple[str, frozenset[tuple[int, int]]]] = {}  # namespace -> build, device and inode of libraries


def _spec(fullname: str, base: Path, *, is_root: bool) -> ModuleSpec | None:
    """The spec of a package folder, a source file or an extension module, in Python's own order."""
    package = base / "__init__.py"
    if package.is_file():
        return spec_from_file_location(
            fullname, package, loader=SourceLoader(fullname, str(package)), submodule_search_locations=[str(base)]
        )
    if is_root:
        return None
    for suffix in EXTENSION_SUFFIXES:
        library = base.with_name(base.name + suffix)
        if library.is_file():
            return spec_from_file_location(fullname, library, loader=ExtensionFileLoader(fullname, str(library)))
    source = base.with_name(f"{base.name}.py")
    if source.is_file():
        return spec_from_file_location(fullname, source, loader=SourceLoader(fullname, str(source)))
    return _namespace_spec(fullname, [str(base)]) if base.is_dir() else None


def _namespace_spec(fullname: str, locations: list[str]) -> ModuleSpec:
    """A package without code: the ``kernelhub_k_<digest>`` that holds one kernel, or a folder without __init__.py."""
    spec = ModuleSpec(fullname, None, is_package=True)
    spec.submodule_search_locations = locations
    return spec


def _import(build: VerifiedBuild, name: str) -> ModuleType:
    """Import one module of a build; on any failure ``sys.modules`` is as it was."""
    with _LOCK:
        if name in sys.modules:
            return sys.modules[name]
        before = dict(sys.modules)
        try:
            return importlib.import_module(name)
        except KernelHubError:
            _restore(before)
            raise
        except Exception as error:
            _restore(before)
            raise _load_error(build, error) from error
        except BaseException:
            _restore(before)
            raise


@contextlib.contextmanager
def _claimed_operators(build: VerifiedBuild) -> Iterator[None]:
    """Torch ends the process when two libraries define one operator namespace: refuse the second one before (S-26)."""
    found = [path.stat() for path in build.folder.rglob("*") if path.name.endswith(tuple(EXTENSION_SUFFIXES))]
    namespace = build.metadata.id if build.metadata else None
    if not found or namespace is None:
        yield
        return
    claim = (build.build, frozenset((status.st_dev, status.st_ino) for status in found))
    owner = _OPERATORS.setdefault(namespace, claim)
    if owner[1] != claim[1]:
        cause = f"its operators torch.ops.{namespace} are already registered by {owner[0]}"
        raise IncompatibleLibrary(build.build, namespace, cause, "Load one of them in another process.")
    try:
        yield
    except IncompatibleLibrary:  # it was not opened, so it registered nothing
        if owner is claim:
            del _OPERATORS[namespace]
        raise


def _package_folder(build: VerifiedBuild) -> Path:
    """Where ``__init__.py`` is: at the top, or, in older builds, in a folder named after the kernel."""
    if (build.folder / "__init__.py").is_file():
        return build.folder
    nested = [path.parent for path in sorted(build.folder.glob("*/__init__.py"))]
    if len(nested) != 1:
        raise ImportFailed(build.build, "it has no __init__.py")
    return nested[0]


def _restore(before: dict[str, ModuleType]) -> None:
    """Forget the modules of our own prefix that a failed import added, and undo what it replaced."""
    for name in [name for name in sys.modules if name.startswith(PREFIX) and name not in before]:
        del sys.modules[name]
    for name, module in before.items():
        if sys.modules.get(name) is not module:
            sys.modules[name] = module


def _load_error(build: VerifiedBuild, error: Exception) -> KernelHubError:
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith(PREFIX):
        top = error.name.partition(".")[0]
        if top not in sys.modules and importlib.util.find_spec(top) is None:
            return MissingDependency(build.build, top, top, package_of(top))
    refusal = next((link for link in _chain(error) if _is_of_library(link)), None)
    if refusal is not None:
        library = str(getattr(refusal, "path", None) or "native library")
        hint = "See `kernelhub explain` for builds that fit."
        return IncompatibleLibrary(build.build, library, _first_line(refusal), hint)
    return ImportFailed(build.build, _first_line(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it was raised from: torch wraps what the dynamic loader said."""
    while error is not None:
        yield error
        error = error.__cause__


def _is_of_library(error: BaseException) -> bool:
    return isinstance(error, (ImportError, OSError)) and any(word in str(error) for word in _LIBRARY_WORDS)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _layers_module(build: VerifiedBuild) -> list[ModuleType]:
    """The submodule ``layers`` if the kernel has one."""
    name = f"{module_name(build)}.{LAYERS}"
    return [_import(build, name)] if _FINDER.find_spec(name) is not None else []


def _walk(place: object, name: str) -> list[Any]:
    """The objects along a dotted name; None from where it leads nowhere."""
    return list(accumulate(name.split("."), lambda at, part: getattr(at, part, None), initial=place))[1:]


def _is_own(value: object, module: ModuleType) -> bool:
    """Does ``value`` belong to the kernel, rather than to a package that the kernel imports?"""
    if isinstance(value, ModuleType):
        return value.__name__.startswith((module.__name__, "torch.ops."))
    if isinstance(value, (MethodType, BuiltinFunctionType)) and not isinstance(value.__self__, ModuleType):
        return _is_own(value.__self__, module)  # e.g. the ``apply`` of the kernel's own autograd function
    if not isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        return True  # an object that the kernel made: a compiled op, a partial, a constant
    origin = getattr(value, "__module__", None)
    return origin is None or str(origin).startswith(PREFIX)
