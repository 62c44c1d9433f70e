"""Discovery: which modules of a model each entry of a config means.

The key of an entry is, in this order of precedence for one module:

1. a module path or path pattern: it has a ``.`` or ``*``, or means nothing as a name but equals a path (``norm``);
2. a layer name that modules are marked with (``marker.mark_of``), or functions attached in ``_kernel_funcs``;
3. without such marks in this model, a structure (``structure.STRUCTURES``) or a function that a forward calls;
4. without those, a class name or the end of one (``names.names_class``).

So an exact path wins over a pattern, a pattern over a name, and among equals the entry that comes first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from kernelhub.layers.marker import MARK, mark_of
from kernelhub.layers.names import matches_path, names_class, short_names
from kernelhub.layers.structure import FUNCTIONS, STRUCTURES, calls_function, global_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from kernelhub.config import LayerEntry

ROOT = "(model)"


@dataclass(eq=False, slots=True)  # not frozen: there may be thousands, and freezing triples what one costs
class Target:
    """One module that an entry means.

    ``function`` names the global function to replace inside the module's forward; empty: replace its whole forward.
    ``misfit`` says why the module is only nearly what the entry means; ``owner`` is the entry that serves it instead.
    """

    path: str
    module: nn.Module
    layer: str
    function: str = ""
    misfit: str = ""
    owner: str = ""

    @property
    def kind(self) -> str:
        return "function" if self.function else "module"

    @property
    def title(self) -> str:
        """The path for people: the model itself has the empty path."""
        return self.path or ROOT


class Discovery(NamedTuple):
    """The targets of each entry, by its key, and the model that they are in."""

    targets: Mapping[str, Sequence[Target]]
    model: nn.Module

    @property
    def names(self) -> Sequence[str]:
        """All layer names that the model answers to; found only when asked for."""
        return layer_names(self.model)


class _Place(NamedTuple):
    path: str
    module: nn.Module
    again: bool  # the same module was met under another path before


def discover(
    model: nn.Module, entries: Iterable[LayerEntry], walked: Iterable[tuple[str, nn.Module]] | None = None
) -> Discovery:
    """Find the targets of each entry, in the order of ``model.named_modules()``; changes nothing.

    ``walked`` is what ``walk(model)`` gave, where that is at hand.
    """
    places = _places(walk(model) if walked is None else walked)
    entries = tuple(entries)
    found = {entry.layer: tuple(_targets(entry, places)) for entry in entries}
    if len(entries) == 1:
        return Discovery(found, model)  # nothing to share out
    ranks = {entry.layer: _rank(entry, found[entry.layer]) for entry in entries}
    return Discovery(_owned(found, ranks), model)


def layer_names(model: nn.Module) -> tuple[str, ...]:
    """The layer names that an entry for this model may use: marks, structures, and short class names."""
    places = [place for place in _places(walk(model)) if not place.again]
    marks = [name for place in places for name in _marks(place.module)]
    structures = [key for key in (*STRUCTURES, *FUNCTIONS) if not all(t.misfit for t in _by_structure(key, places))]
    # A class that leaves forward to nn.Module (ModuleList) is a container, not a layer.
    classes = [type(place.module) for place in places if type(place.module).forward is not nn.Module.forward]
    return tuple(dict.fromkeys([*marks, *structures, *short_names(classes)]))


def function_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The functions that transformers turned into modules and attached to this one, by layer name."""
    attached = vars(module).get("_kernel_funcs")
    if isinstance(attached, dict):
        yield from ((key, value) for key, value in attached.items() if isinstance(value, nn.Module))


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``model.named_modules(remove_duplicate=False)``, in its order, without a generator for each module."""
    stack = [("", model)]
    while stack:
        path, module = stack.pop()
        yield path, module
        if module._modules:
            start = f"{path}." if path else ""
            stack += [(start + name, child) for name, child in reversed(module._modules.items()) if child is not None]


def _places(walked: Iterable[tuple[str, nn.Module]]) -> list[_Place]:
    seen: set[int] = set()
    places = []
    for path, module in walked:
        places.append(_Place._make((path, module, id(module) in seen)))
        seen.add(id(module))
    return places


def _targets(entry: LayerEntry, places: Sequence[_Place]) -> Iterable[Target]:
    if entry.is_path:
        return _by_path(entry.layer, places)
    found = []
    for rule in (_by_mark, _by_structure, _by_class_name, _by_path):
        targets = tuple(rule(entry.layer, places))
        if not all(target.misfit for target in targets):
            return targets
        found.append(targets)
    return next(filter(None, found), ())


def _by_path(key: str, places: Sequence[_Place]) -> Iterator[Target]:
    named: dict[int, Target] = {}
    for place in places:
        if matches_path(key, place.path):
            named.setdefault(id(place.module), Target(place.path, place.module, key))
    yield from named.values()


def _by_mark(key: str, places: Sequence[_Place]) -> Iterator[Target]:
    marked: dict[type, bool] = {}
    for place in places:
        if place.again:
            continue
        kind, state = type(place.module), place.module.__dict__
        if kind not in marked or MARK in state:
            marked[kind] = mark_of(place.module) == key
        if marked[kind]:
            yield Target(place.path, place.module, key)
        if "_kernel_funcs" in state:
            for name, function in function_modules(place.module):
                if key in (name, mark_of(function)):
                    yield _function_target(place, key, function)


def _function_target(place: _Place, key: str, function: nn.Module) -> Target:
    """Replace the function inside this one module where its forward loads it, else in the wrapper itself.

    The wrapper is shared by all models of the process: the last ``kernelize`` decides what it runs.
    """
    name = global_name(place.module, function)
    if name is None:
        return Target(f"{place.path}.{key}".lstrip("."), function, key)
    return Target(place.path, place.module, key, name)


def _by_structure(key: str, places: Sequence[_Place]) -> Iterator[Target]:
    recognise = _recogniser(key)
    for place in places:
        answer = False if place.again else recognise(place.module)
        if answer:
            misfit = answer if isinstance(answer, str) else ""
            yield Target(place.path, place.module, key, FUNCTIONS.get(key, ""), misfit)


def _recogniser(key: str) -> Callable[[nn.Module], bool | str]:
    if key in FUNCTIONS:
        return lambda module: calls_function(module, FUNCTIONS[key])
    return STRUCTURES.get(key, lambda module: False)


def _by_class_name(key: str, places: Sequence[_Place]) -> Iterator[Target]:
    for place in places:
        if not place.again and names_class(key, type(place.module).__name__):
            yield Target(place.path, place.module, key)


def _marks(module: nn.Module) -> list[str]:
    functions = [mark_of(function) or key for key, function in function_modules(module)]
    mark = mark_of(module)
    return [mark, *functions] if mark else functions


def _rank(entry: LayerEntry, targets: Sequence[Target]) -> int:
    if "*" in entry.layer:
        return 1
    return 0 if any(target.path == entry.layer for target in targets) else 2


def _owned(found: Mapping[str, Sequence[Target]], ranks: Mapping[str, int]) -> dict[str, tuple[Target, ...]]:
    owners: dict[tuple[int, str], str] = {}
    for key in sorted(found, key=ranks.__getitem__):
        for target in found[key]:
            if not target.misfit:
                owners.setdefault((id(target.module), target.function), key)
    return {key: tuple(_with_owner(targets, key, owners)) for key, targets in found.items()}


def _with_owner(targets: Sequence[Target], key: str, owners: Mapping[tuple[int, str], str]) -> Iterator[Target]:
    fits_some = any(not target.misfit for target in targets)
    for target in targets:
        owner = owners.get((id(target.module), target.function), key)
        if target.misfit and fits_some and owner != key:
            continue  # a SiLU MLP is no news to the GELU entry while another entry serves it
        yield target if owner == key else replace(target, owner="" if target.misfit else owner)
