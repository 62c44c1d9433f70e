"""Loader: import a verified build under a private name, once per process.

The package is ``kernelhub_k_<digest>.<name>``: the name depends on the content only, never on what the metadata
claims, so it cannot shadow or be shadowed by an installed module (S-25). Sources are compiled from the files in the
build; bytecode is neither read nor written (S-16). Native libraries are judged before any of them is opened (S-28).
When an import fails, ``sys.modules``, ``sys.path`` and what was registered with torch are as they were (S-27).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import threading
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from kernelhub import operators
from kernelhub.errors import (
    ImportFailed,
    IncompatibleLibrary,
    KernelDependencyError,
    KernelHubError,
    MissingDependency,
    SymbolNotFound,
)
from kernelhub.package import PREFIX, Kernel, KernelFinder
from kernelhub.preflightrecord import judge
from kernelhub.pythondepend import check_python_depends, package_of
from kernelhub.reporter import Reporter
from kernelhub.source import FolderSource, SealedSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kernelhub.metadata import Metadata
    from kernelhub.source import Source
    from kernelhub.verify import VerifiedBuild

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


@dataclass(frozen=True)
class LoadedKernel:
    """One kernel of this process: where it came from, how far it was proven, and its module.

    ``commit`` is empty for builds read in place; ``notes`` tell what its import did to other modules.
    """

    origin: str
    commit: str
    variant: str
    state: str
    module: ModuleType
    notes: tuple[str, ...] = ()
    metadata: Metadata | None = None

    def __str__(self) -> str:
        commit = f"@{self.commit}" if self.commit else ""
        return f"{self.origin}{commit} {self.variant} ({self.state}) as {self.module.__name__}"


def loaded_kernels() -> list[LoadedKernel]:
    """The kernels that this process has imported, in the order in which that was done."""
    return [kernel for name, kernel in list(_LOADED.items()) if sys.modules.get(name) is kernel.module]


def load(build: VerifiedBuild) -> ModuleType:
    """The kernel's module; the same object for the same content, however often and from how many threads.

    Raises:
        MissingDependency: a Python package that the kernel needs is not installed; told before anything is imported.
        IncompatibleLibrary: a native library cannot be loaded; told before it is opened where its bytes tell.
        KernelDependencyError: another kernel that is being imported asks for it without declaring it.
        ImportFailed: the kernel's own code raised.
    """
    with _LOCK:
        _check_declared(build)
        return _load(build)


def _load(build: VerifiedBuild) -> ModuleType:
    """The module, with the modules of all that it depends on: those first, as a kernel may call their operators."""
    name = module_name(build)
    with _LOCK:
        if name in sys.modules:
            return sys.modules[name]
        sealed = module_name(_sealed(build))  # promises more than is asked for
        if sealed in sys.modules:
            return sys.modules[sealed]
        for dependency in build.dependencies:
            _load(dependency)
        check_python_depends(build.build, build.metadata)
        source = _SEALED.get(name) or (SealedSource(build) if build.strict else FolderSource(build.folder))
        report = judge(build, source)
        report.check(_hint(build))
        if isinstance(source, SealedSource) and any(library.registers for library in report.libraries):
            _SEALED[name] = source
        _FINDER.add(name, build, source)
        with operators.claimed(build, report.libraries, source):
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
    """The private name under which this content, with the dependencies it was resolved with, is imported."""
    return f"{PREFIX}{_identity(build)[:_DIGEST_DIGITS]}.{build.name}"


def _identity(build: VerifiedBuild) -> str:
    """What makes two builds the same module: their bytes, their dependencies, and whether those bytes are sealed."""
    parts = [build.digest, *map(_identity, build.dependencies), *(["strict"] if build.strict else [])]
    return build.digest if len(parts) == 1 else hashlib.sha256(" ".join(parts).encode()).hexdigest()


def _sealed(build: VerifiedBuild) -> VerifiedBuild:
    """The same build as the strict mode loads it."""
    return replace(build, strict=True, dependencies=tuple(map(_sealed, build.dependencies)))


class _Trail(threading.local):
    """What this thread is importing: the builds, outermost first, and the modules that have begun to run."""

    def __init__(self) -> None:
        self.builds: list[VerifiedBuild] = []
        self.modules: list[ModuleType] = []

    def begin(self, module: ModuleType) -> None:
        self.modules.append(module)


def _depend(kernel: Kernel, repo_id: str) -> ModuleType:
    """The module of a kernel that another one asks for."""
    declared = kernel.declared()
    if repo_id not in declared:
        raise _undeclared(kernel.build, str(repo_id))
    return _load(declared[repo_id])


_TRAIL = _Trail()
_FINDER = KernelFinder(_depend, _TRAIL.begin)
_LOCK = threading.RLock()
_LOADED: dict[str, LoadedKernel] = {}
# What registers operators is opened once a process: when its import failed, the next attempt meets the same library.
_SEALED: dict[str, Source] = {}
if hasattr(os, "register_at_fork"):  # the thread that held the lock does not live on in the child
    os.register_at_fork(after_in_child=lambda: globals().update(_LOCK=threading.RLock()))


def _import(build: VerifiedBuild, name: str) -> ModuleType:
    """Import one module of a build; on any failure everything is as it was."""
    with _LOCK:
        if name in sys.modules:
            return sys.modules[name]
        before = _Before()
        _TRAIL.builds.append(build)
        try:
            module = importlib.import_module(name)
            notes = before.settle(build)
        except KernelHubError:
            before.restore()
            raise
        except Exception as error:
            before.restore()
            raise _load_error(build, error) from error
        except BaseException:
            before.restore()
            raise
        finally:
            _TRAIL.builds.pop()
            del _TRAIL.modules[before.begun :]
        if name == module_name(build):
            _LOADED[name] = _describe(build, module, notes)
        return module


def _describe(build: VerifiedBuild, module: ModuleType, notes: tuple[str, ...]) -> LoadedKernel:
    is_folder = Path(build.kernel).is_absolute()
    origin, _, commit = (build.kernel, "", "") if is_folder else build.kernel.partition("@")
    state = f"{build.state.value}, strict" if build.strict else build.state.value
    return LoadedKernel(origin, commit, build.variant, state, module, notes, build.metadata)


def _check_declared(build: VerifiedBuild) -> None:
    """S-32: while a kernel is imported it may load what it declares, and nothing else."""
    if not _TRAIL.builds:
        return
    parent = _TRAIL.builds[-1]
    if build.digest not in {allowed.digest for allowed in (parent, *parent.dependencies)}:
        raise _undeclared(parent, build.build)


def _undeclared(parent: VerifiedBuild, wanted: str) -> KernelDependencyError:
    return KernelDependencyError("not declared in the metadata of the kernel that asks for it", (parent.build, wanted))


class _Before:
    """The state of the process before an import, to which a failure returns."""

    def __init__(self) -> None:
        self.begun = len(_TRAIL.modules)
        self._modules = dict(sys.modules)
        self._path = list(sys.path)
        self._kept = len(operators.kept_libraries())

    def restore(self) -> None:
        """Forget the modules of our own prefix that a failed import added, and undo what it replaced."""
        for module in _TRAIL.modules[self.begun :]:
            operators.forget(list(vars(module).values()))
        operators.forget(operators.kept_libraries()[self._kept :])
        del operators.kept_libraries()[self._kept :]
        for name in [name for name in sys.modules if name.startswith(PREFIX) and name not in self._modules]:
            del sys.modules[name]
        self._replaced()
        self._planted()
        if sys.path != self._path:
            sys.path[:] = self._path

    def settle(self, build: VerifiedBuild) -> tuple[str, ...]:
        """After a success: undo what the kernel did to modules that are not its own, and tell it (S-25)."""
        problems = [f"replaced the module {name} in sys.modules" for name in self._replaced()]
        problems += [f"put a module of its own into sys.modules as {name}" for name in self._planted()]
        for problem in problems:
            if build.strict:
                raise ImportFailed(build.build, f"it {problem}", "The strict mode does not allow that.")
            Reporter().warn(f"kernel {build.build} {problem}; that was undone")
        return tuple(problems)

    def _replaced(self) -> list[str]:
        """Put back the entries of sys.modules that are gone or are another object now; their names."""
        changed = [name for name, module in self._modules.items() if sys.modules.get(name) is not module]
        for name in changed:
            sys.modules[name] = self._modules[name]
        return changed

    def _planted(self) -> list[str]:
        """Take out new entries of sys.modules that are modules of a kernel under other names; these names."""
        planted = [
            name
            for name, module in list(sys.modules.items())
            if name not in self._modules
            and not name.startswith(PREFIX)
            and str(getattr(module, "__name__", "")).startswith(PREFIX)
        ]
        for name in planted:
            del sys.modules[name]
        return planted


def _hint(build: VerifiedBuild) -> str:
    """What to do when a library does not fit."""
    if build.alternatives:
        return f"Other builds of this version that may do: {', '.join(build.alternatives)}."
    return "See `kernelhub explain` for builds and versions that fit."


def _load_error(build: VerifiedBuild, error: Exception) -> KernelHubError:
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith(PREFIX):
        top = error.name.partition(".")[0]
        if top not in sys.modules and importlib.util.find_spec(top) is None:
            return MissingDependency(build.build, top, top, package_of(top))
    refusal = next((link for link in _chain(error) if _is_of_library(link)), None)
    if refusal is not None:
        library = str(getattr(refusal, "path", None) or "native library")
        return IncompatibleLibrary(build.build, library, _first_line(refusal), _hint(build))
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
