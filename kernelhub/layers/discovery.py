"""Discovery: which modules of a model each entry of a config means.

The key of an entry is, in this order of precedence for one module:

1. a module path or path pattern: it has a ``.`` or ``*``, or means nothing as a name but equals a path (``norm``);
   or a fusion, which claims all of its layers or none;
2. a layer name that modules are marked with (``marker.mark_of``), or functions attached in ``_kernel_funcs``;
3. without such marks in this model, a structure (``structure.STRUCTURES``) or a function that a forward calls;
4. without those, a class name or the end of one (``names.names_class``).

So an exact path wins over a pattern, a pattern over a name, and among equals the entry that comes first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from kernelhub.layers.marker import MARK, mark_of
from kernelhub.layers.names import matches_path, names_class, short_names
from kernelhub.layers.structure import FUNCTIONS, STRUCTURES, calls_function, global_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from kernelhub.config import LayerEntry
    from kernelhub.fusion import Fusion, Member

ROOT = "(model)"
_new = tuple.__new__  # a Target from its fields in order, in half of the time: there may be thousands


class Siblings(NamedTuple):
    """The layers of a fusion in one parent, in the order of the fusion, with their names there."""

    parent: nn.Module
    path: str
    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]

    @property
    def title(self) -> str:
        """The path of the first layer and the names of the others."""
        first, *others = self.names
        return " + ".join([f"{self.path}.{first}".lstrip("."), *others])


class Target(NamedTuple):
    """One module that an entry means, or the first of the ``siblings`` that a fusion means.

    ``function`` names the global function to replace inside the module's forward; empty: replace its whole forward.
    ``misfit`` says why the module is only nearly what the entry means; ``owner`` is the entry that serves it instead.
    """

    path: str
    module: nn.Module
    layer: str
    function: str = ""
    misfit: str = ""
    owner: str = ""
    siblings: Siblings | None = None

    @property
    def kind(self) -> str:
        return "function" if self.function else "module"

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The module, and those that a fusion replaces with it."""
        return (self.module,) if self.siblings is None else self.siblings.modules

    @property
    def title(self) -> str:
        """The path for people: the model itself has the empty path."""
        return (self.path or ROOT) if self.siblings is None else self.siblings.title


class Discovery(NamedTuple):
    """The targets of each entry, by its key, and the model that they are in."""

    targets: Mapping[str, Sequence[Target]]
    model: nn.Module

    @property
    def names(self) -> Sequence[str]:
        """All layer names that the model answers to; found only when asked for."""
        return layer_names(self.model)


class _Places(NamedTuple):
    """The modules of a model with their paths: under ``every`` path, and each once, under its first."""

    every: Sequence[tuple[str, nn.Module]]
    first: Sequence[tuple[str, nn.Module]]


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
    places = _places(walk(model))
    marks = [name for _, module in places.first for name in _marks(module)]
    structures = [key for key in (*STRUCTURES, *FUNCTIONS) if not all(t.misfit for t in _by_structure(key, places))]
    # A class that leaves forward to nn.Module (ModuleList) is a container, not a layer.
    classes = [type(module) for _, module in places.first if type(module).forward is not nn.Module.forward]
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


def _places(walked: Iterable[tuple[str, nn.Module]]) -> _Places:
    every = walked if isinstance(walked, list) else list(walked)
    if len({id(module) for _, module in every}) == len(every):
        return _Places(every, every)
    first: dict[int, tuple[str, nn.Module]] = {}
    for place in every:
        first.setdefault(id(place[1]), place)
    return _Places(every, list(first.values()))


def _targets(entry: LayerEntry, places: _Places) -> Iterable[Target]:
    if entry.fusion is not None:
        return _by_fusion(entry.layer, entry.fusion, places)
    if entry.is_path:
        return _by_path(entry.layer, places)
    found = []
    for rule in (_by_mark, _by_structure, _by_class_name, _by_path):
        targets = tuple(rule(entry.layer, places))
        if not all(target.misfit for target in targets):
            return targets
        found.append(targets)
    return next(filter(None, found), ())


def _by_path(key: str, places: _Places) -> Iterator[Target]:
    named: dict[int, Target] = {}
    for path, module in places.every:
        if matches_path(key, path):
            named.setdefault(id(module), Target(path, module, key))
    yield from named.values()


def _by_fusion(key: str, fusion: Fusion, places: _Places) -> Iterator[Target]:
    for path, parent in places.first:
        if not matches_path(fusion.parent, path):
            continue
        for names in _sibling_names(fusion, parent):
            children = [parent._modules.get(name) for name in names]
            found = tuple(child for child in children if child is not None)
            if found:
                siblings = Siblings(parent, path, names, found)
                misfit = next(filter(None, map(_not_named, fusion.members, children)), "")
                yield Target(f"{path}.{names[0]}".lstrip("."), found[0], key, misfit=misfit, siblings=siblings)


def _sibling_names(fusion: Fusion, parent: nn.Module) -> Iterator[tuple[str, ...]]:
    if len(fusion.members) > 1:
        yield tuple(member.child for member in fusion.members)
        return
    yield from ((name,) for name in parent._modules if matches_path(fusion.members[0].child, name))


def _not_named(member: Member, module: nn.Module | None) -> str:
    """Why a module is not what a fusion says, or nothing."""
    if module is None:
        return f"there is no {member.child!r} beside it"
    name = type(module).__name__
    if member.name == mark_of(module) or names_class(member.name, name):
        return ""
    answer = _recogniser(member.name)(module)
    told = f", {answer}" if isinstance(answer, str) else ""
    return "" if answer is True else f"{member.child} is a {name}, which {member.name!r} does not name{told}"


def _by_mark(key: str, places: _Places) -> Iterator[Target]:
    marked: dict[type, bool] = {}
    for path, module in places.first:
        kind, state = type(module), module.__dict__
        if kind not in marked or MARK in state:
            marked[kind] = mark_of(module) == key
        if marked[kind]:
            yield _new(Target, (path, module, key, "", "", "", None))
        if "_kernel_funcs" in state:
            for name, function in function_modules(module):
                if key in (name, mark_of(function)):
                    yield _function_target(path, module, key, function)


def _function_target(path: str, module: nn.Module, key: str, function: nn.Module) -> Target:
    """Replace the function inside this one module where its forward loads it, else in the wrapper itself.

    The wrapper is shared by all models of the process: the last ``kernelize`` decides what it runs.
    """
    name = global_name(module, function)
    if name is None:
        return Target(f"{path}.{key}".lstrip("."), function, key)
    return Target(path, module, key, name)


def _by_structure(key: str, places: _Places) -> Iterator[Target]:
    recognise = _recogniser(key)
    for path, module in places.first:
        answer = recognise(module)
        if answer:
            misfit = answer if isinstance(answer, str) else ""
            yield Target(path, module, key, FUNCTIONS.get(key, ""), misfit)


def _recogniser(key: str) -> Callable[[nn.Module], bool | str]:
    if key in FUNCTIONS:
        return lambda module: calls_function(module, FUNCTIONS[key])
    return STRUCTURES.get(key, lambda module: False)


def _by_class_name(key: str, places: _Places) -> Iterator[Target]:
    for path, module in places.first:
        if names_class(key, type(module).__name__):
            yield Target(path, module, key)


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
            claims = _claims(target)
            if not target.misfit and not any(claim in owners for claim in claims):
                owners.update(dict.fromkeys(claims, key))
    return {key: tuple(_with_owner(targets, key, owners)) for key, targets in found.items()}


def _claims(target: Target) -> list[tuple[int, str]]:
    return [(id(module), target.function) for module in target.modules]


def _with_owner(targets: Sequence[Target], key: str, owners: Mapping[tuple[int, str], str]) -> Iterator[Target]:
    fits_some = any(not target.misfit for target in targets)
    for target in targets:
        found = (owners.get(claim, key) for claim in _claims(target))
        owner = next((each for each in found if each != key), key)
        if target.misfit and fits_some and owner != key:
            continue  # a SiLU MLP is no news to the GELU entry while another entry serves it
        yield target if owner == key else target._replace(owner="" if target.misfit else owner)
