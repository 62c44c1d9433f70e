"""Finder: packages that importlib finds here while an integration is on, and code that runs after an import.

It speaks importlib's own protocol (``sys.meta_path``): ``find_spec`` answers for a package that stands in for another
one, ``find_distributions`` for the version of its distribution. Nothing is imported before somebody asks for it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import sys
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import ModuleType

    Hook = Callable[[ModuleType], None]

# What the import system writes into a module: a stand-in has its own.
_OF_IMPORT = frozenset(("__name__", "__spec__", "__loader__", "__package__", "__path__", "__builtins__", "__cached__"))


@dataclass(frozen=True)
class StandIn:
    """A package of ours that is imported under the name of another one.

    ``name`` is the name to import, ``source`` our package with the same submodules, ``distribution`` the name under
    which its version is asked for, ``version`` tells that version when somebody does.
    """

    name: str
    source: str
    distribution: str
    version: Callable[[], str]

    def source_of(self, fullname: str) -> str:
        """Our module for one of its modules."""
        return self.source + fullname.removeprefix(self.name)


@dataclass(eq=False)
class Finder(MetaPathFinder):
    """Finds the modules and distributions of ``stand_ins``; runs ``hooks[name]`` right after module ``name`` ran."""

    stand_ins: Sequence[StandIn]
    hooks: Mapping[str, Hook] = field(default_factory=dict)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See importlib.abc.MetaPathFinder; None for what is not ours."""
        for stand_in in self.stand_ins:
            if f"{fullname}.".startswith(f"{stand_in.name}."):
                return _stand_in_spec(stand_in, fullname)
        return self._hooked_spec(fullname, path, target) if fullname in self.hooks else None

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        """See importlib.metadata.DistributionFinder; a search in other folders than those of imports finds nothing."""
        if context is not None and context.path is not sys.path:
            return []
        wanted = None if context is None else context.name
        names = [_normalized(each.distribution) for each in self.stand_ins]
        pairs = zip(names, self.stand_ins, strict=True)
        return [_Distribution(each) for name, each in pairs if wanted is None or _normalized(wanted) == name]

    def _hooked_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        spec = next((found for found in self._others(fullname, path, target)), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Hooked(spec.loader, self.hooks[fullname])
        return spec

    def _others(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> Iterator[ModuleSpec]:
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    yield spec


def installed(name: str) -> str | None:
    """Where a regular package or module ``name`` would be imported from, or None; a bare folder does not count."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # in sys.modules without a spec: somebody made it by hand
        return "sys.modules"
    if spec is None or spec.origin is None:
        return None
    return spec.origin


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _stand_in_spec(stand_in: StandIn, fullname: str) -> ModuleSpec | None:
    source = importlib.util.find_spec(stand_in.source_of(fullname))
    if source is None:
        return None
    version = stand_in.version if fullname == stand_in.name else None
    spec = ModuleSpec(fullname, _StandInLoader(source.name, version), origin=source.origin)
    if source.submodule_search_locations is not None:
        spec.submodule_search_locations = []  # its submodules are found here, and nowhere else
    return spec


class _StandInLoader(Loader):
    """Fills a module with the names of ours. The objects are the same, so they fit together and can be pickled."""

    def __init__(self, source: str, version: Callable[[], str] | None) -> None:
        self._source = source
        self._version = version

    def exec_module(self, module: ModuleType) -> None:
        source = importlib.import_module(self._source)
        vars(module).update((name, value) for name, value in vars(source).items() if name not in _OF_IMPORT)
        if self._version is not None:
            vars(module)["__version__"] = self._version()


class _Hooked(Loader):
    """The loader of a module, and what to do once the module is there."""

    def __init__(self, loader: Any, hook: Hook) -> None:
        self._loader = loader
        self._hook = hook

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # From here on the module is loaded as it always is, and shows no trace of this.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._hook(module)


class _Distribution(importlib.metadata.Distribution):
    """The metadata of a distribution that exists only here."""

    def __init__(self, stand_in: StandIn) -> None:
        self._stand_in = stand_in

    def read_text(self, filename: str) -> str | None:
        name = self._stand_in.distribution
        if filename == "METADATA":
            summary = "provided by kernelhub"
            return f"Metadata-Version: 2.1\nName: {name}\nVersion: {self._stand_in.version()}\nSummary: {summary}\n"
        return f"{self._stand_in.name}\n" if filename == "top_level.txt" else None

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        raise FileNotFoundError(f"{path}: {self._stand_in.distribution} is provided by kernelhub, it has no files")
