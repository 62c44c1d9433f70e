"""Loader: import a verified build under a private name, once per process.

The package is ``kernelhub_k_<digest>.<name>``: the name depends on the content only, never on what the metadata
claims, so it cannot shadow or be shadowed by an installed module (S-25). Sources are compiled from the files in the
build; bytecode is neither read nor written (S-16). When an import fails, ``sys.modules`` is as it was (S-27).
"""

from __future__ import annotations

import importlib
import sys
import threading
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from kernelhub.errors import ImportFailed, IncompatibleLibrary, KernelHubError, MissingDependency, SymbolNotFound

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kernelhub.verify import VerifiedBuild

PREFIX = "kernelhub_k_"
LAYERS = "layers"

_DIGEST_DIGITS = 12
_LIBRARY_WORDS = ("undefined symbol", "GLIBC", "CXXABI", "cannot open shared object", "ELF", "DLL load failed")


def load(build: VerifiedBuild) -> ModuleType:
    """The kernel's module; the same object for the same content, however often and from how many threads.

    Raises:
        MissingDependency: a Python package that the kernel imports is not installed.
        IncompatibleLibrary: a native library cannot be loaded.
        ImportFailed: the kernel's own code raised.
    """
    _FINDER.add(module_name(build), build)
    return _import(build, module_name(build))


def symbol(build: VerifiedBuild, name: str) -> Any:
    """The object that a kernel defines under a (dotted) name: in its top module, or in its ``layers`` module.

    Raises:
        SymbolNotFound: not defined there, or it belongs to another package; the message lists what is exported.
    """
    module = load(build)
    places = [module, *_layers_module(build)]
    found = next((value for place in places if (value := _walk(place, name)) is not None), None)
    if found is None:
        raise SymbolNotFound(build.kernel, name, exported(places))
    if not _is_own(found, module):
        raise SymbolNotFound(build.kernel, name, exported(places), "is not one that is defined by")
    return found


def exported(places: Sequence[ModuleType]) -> list[str]:
    """The public names of a kernel: those of its layers module and its top module."""
    names: dict[str, None] = {}
    for place in reversed(places):
        listed = getattr(place, "__all__", None)
        candidates = listed if listed is not None else [name for name in vars(place) if not name.startswith("_")]
        names.update(dict.fromkeys(name for name in candidates if _is_own(getattr(place, name, None), place)))
    return sorted(names)


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
        self._folders.setdefault(name, _package_folder(build))

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
    text = str(error).strip().splitlines()
    cause = f"{type(error).__name__}: {text[0] if text else ''}"
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith(PREFIX):
        top = error.name.partition(".")[0]
        return MissingDependency(build.build, top, top, top)
    if isinstance(error, (ImportError, OSError)) and any(word in str(error) for word in _LIBRARY_WORDS):
        library = getattr(error, "path", None) or "native library"
        return IncompatibleLibrary(build.build, str(library), cause, "See `kernelhub explain` for builds that fit.")
    return ImportFailed(build.build, cause)


def _layers_module(build: VerifiedBuild) -> list[ModuleType]:
    """The submodule ``layers`` if the kernel has one."""
    name = f"{module_name(build)}.{LAYERS}"
    return [_import(build, name)] if _FINDER.find_spec(name) is not None else []


def _walk(place: object, name: str) -> Any:
    for part in name.split("."):
        place = getattr(place, part, None)
    return place


def _is_own(value: object, module: ModuleType) -> bool:
    """Does ``value`` belong to the kernel, rather than to a package that the kernel imports?"""
    if isinstance(value, ModuleType):
        return value.__name__.startswith(module.__name__)
    origin = getattr(value, "__module__", None)
    # Objects without a home (compiled ops, constants) are what the kernel says they are.
    return origin is None or not isinstance(origin, str) or origin.startswith((PREFIX, "torch._ops"))
