"""Companion: the layout class that a kernel brings, and the layout that it makes for some layers.

Beside ``Kernel`` a kernel with parameters of its own defines ``KernelLayout`` in the same module, as transformers asks
for: a torch module whose ``__init__`` makes the parameters that the kernel wants, from the layers of a fusion, in the
order of its key, or, for a plain layer name, from the arguments that the layer itself was made with. The rules in its
``conversion_mapping`` say which parameters of the layers become which of its own (``conversion``).

It is called while the layers' parameters are on the meta device, so it costs no memory and no random numbers.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from kernelhub.layers.conversion import Conversion, NotConvertible, Recipe
from kernelhub.layers.layout import Layout, Link, Slot, Source
from kernelhub.layers.report import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

SUFFIX = "Layout"


def companion(kernel: Any) -> type[nn.Module] | None:
    """The layout class that a kernel layer comes with, or None."""
    if not isinstance(kernel, type):
        return None
    found = getattr(sys.modules.get(kernel.__module__), f"{kernel.__name__}{SUFFIX}", None)
    return found if isinstance(found, type) and issubclass(found, nn.Module) else None


def lay_out(layout: type[nn.Module], layers: Mapping[str, nn.Module], conversion: Conversion, *, fused: bool) -> Layout:
    """The layout of some layers, given by their paths in the model, the first one first.

    Args:
        fused: the layout class takes the layers; else the arguments that the one layer was made with.

    Raises:
        NotConvertible: the layout cannot be made, or not every parameter has a place in it.
    """
    members = list(layers.values())
    inside = [module for layer in members for module in layer.modules()]
    with _without_weights(inside) as known:
        arguments = members if fused else _constructor_arguments(layout, members[0])
        module = _made(layout, arguments)
    own = _own_modules(module, members, inside)
    _check_buffers(module, own, members)
    drafts = _drafts(module, own, next(iter(layers)))
    sources = _sources(layers, module, own)
    slots = _slots(drafts, sources, known, conversion)
    return Layout(module, own, slots, tuple(sources.values()), _holding(_links(members, module)))


class _Draft(NamedTuple):
    """A parameter that a layout class made, by where it is."""

    owner: nn.Module
    name: str
    parameter: nn.Parameter


def _constructor_arguments(layout: type[nn.Module], layer: nn.Module) -> list[Any]:
    names = list(inspect.signature(layout).parameters)
    lost = [name for name in names if not hasattr(layer, name)]
    if lost:
        kind = type(layer).__name__
        raise NotConvertible(
            f"{layout.__name__} needs {', '.join(lost)}, which a {kind} was made with but does not keep"
        )
    return [getattr(layer, name) for name in names]


def _made(layout: type[nn.Module], arguments: Sequence[Any]) -> nn.Module:
    try:
        with torch.random.fork_rng(devices=()), torch.device("meta"):
            return layout(*arguments)
    except Exception as error:  # code of the kernel, on layers that it does not like
        raise NotConvertible(one_line(f"{layout.__name__} raised {type(error).__name__}: {error}")) from error


@contextmanager
def _without_weights(modules: Sequence[nn.Module]) -> Iterator[dict[int, Source]]:
    """Let modules have their parameters on the meta device; gives where each of those stands, by its identity."""
    known: dict[int, Source] = {}
    stand_ins: dict[int, nn.Parameter] = {}
    originals = []
    for module in dict.fromkeys(modules):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                originals.append((module, name, parameter))
    try:
        for module, name, parameter in originals:
            stand_in = stand_ins.setdefault(id(parameter), _on_meta(parameter))
            known.setdefault(id(stand_in), Source(module, name))
            module._parameters[name] = stand_in
        yield known
    finally:
        for module, name, parameter in originals:
            module._parameters[name] = parameter


def _on_meta(parameter: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad)


def _own_modules(module: nn.Module, members: Sequence[nn.Module], inside: Sequence[nn.Module]) -> list[nn.Module]:
    theirs = set(map(id, inside))
    found = list(module.modules())
    if any(each is member for each in found for member in members):
        raise NotConvertible(f"{type(module).__name__} holds the layer that it stands for")
    return [each for each in found if id(each) not in theirs]


def _check_buffers(module: nn.Module, own: Sequence[nn.Module], members: Sequence[nn.Module]) -> None:
    """A buffer is state too: it stays where it is, and the kernel has to take it from there."""
    theirs = {id(buffer) for member in members for buffer in member.buffers()}
    made = [
        name
        for each in own
        for name, buffer in each._buffers.items()
        if buffer is not None and id(buffer) not in theirs
    ]
    if made:
        raise NotConvertible(f"{type(module).__name__} has buffers of its own ({', '.join(made)})")
    kept = set(map(id, module.buffers()))
    saved = {
        name: each._buffers[name]
        for member in members
        for each in member.modules()
        for name in each._buffers.keys() - each._non_persistent_buffers_set
    }
    lost = [name for name, buffer in saved.items() if buffer is not None and id(buffer) not in kept]
    if lost:
        raise NotConvertible(f"its layout has no place for the buffers {', '.join(lost)}")


def _drafts(module: nn.Module, own: Sequence[nn.Module], path: str) -> dict[str, _Draft]:
    """The parameters of a layout's own modules, by the path that they had if it stood in the model."""
    mine = set(map(id, own))
    return {
        ".".join(filter(None, (path, inner, name))): _Draft(owner, name, parameter)
        for inner, owner in module.named_modules()
        if id(owner) in mine
        for name, parameter in owner._parameters.items()
        if parameter is not None
    }


def _sources(layers: Mapping[str, nn.Module], module: nn.Module, own: Sequence[nn.Module]) -> dict[str, Source]:
    """The parameters of the layers by their paths, without those of modules that the kernel calls itself."""
    kept = set(map(id, module.modules())) - set(map(id, own))
    return {
        ".".join(filter(None, (path, inner, name))): Source(owner, name)
        for path, layer in layers.items()
        for inner, owner in layer.named_modules()
        if id(owner) not in kept
        for name, parameter in owner._parameters.items()
        if parameter is not None
    }


def _slots(
    drafts: Mapping[str, _Draft], sources: Mapping[str, Source], known: Mapping[int, Source], conversion: Conversion
) -> tuple[Slot, ...]:
    """How each parameter of a layout is made: one that its class took from a layer is that, others follow the rules."""
    positions = {(id(owner), name): index for index, (owner, name) in enumerate(sources.values())}
    taken = {path: known[id(draft.parameter)] for path, draft in drafts.items() if id(draft.parameter) in known}
    gone = {(id(owner), name) for owner, name in taken.values()}
    left = {path: source for path, source in sources.items() if (id(source.owner), source.name) not in gone}
    fresh = {path: draft for path, draft in drafts.items() if path not in taken}
    recipes = conversion.recipes(
        {path: tuple(source.owner.get_parameter(source.name).shape) for path, source in left.items()},
        {path: tuple(draft.parameter.shape) for path, draft in fresh.items()},
    )
    for path, draft in fresh.items():
        _check_shape(recipes[path], path, draft, list(left.values()))
    places = [positions[id(source.owner), source.name] for source in left.values()]
    converted = {
        path: recipes[path]._replace(sources=tuple(places[index] for index in recipes[path].sources)) for path in fresh
    }
    same = {path: Recipe("same", (positions[id(source.owner), source.name],)) for path, source in taken.items()}
    slots = {**converted, **same}
    return tuple(Slot(draft.owner, draft.name, slots[path]) for path, draft in drafts.items())


def _check_shape(recipe: Recipe, path: str, draft: _Draft, sources: Sequence[Source]) -> None:
    weights = [torch.empty(source.owner.get_parameter(source.name).shape, device="meta") for source in sources]
    made, wanted = tuple(recipe.make(weights).shape), tuple(draft.parameter.shape)
    if made != wanted:
        raise NotConvertible(f"its conversion_mapping makes {path} of shape {made}, and its layout wants {wanted}")


def _holding(links: tuple[Link, ...]) -> tuple[Link, ...]:
    loose = [link.name for link in links if not link.holds]
    if loose:
        raise NotConvertible(f"{', '.join(loose)} inside have hooks or another forward, which would not run")
    return links


def _links(members: Iterable[nn.Module], module: nn.Module) -> tuple[Link, ...]:
    """What has to stay in the layers: their modules, but for those inside one that the kernel calls itself."""
    kept = set(map(id, module.modules()))
    links: list[Link] = []
    stack = list(members)
    while stack:
        parent = stack.pop()
        for name, child in parent._modules.items():
            if child is not None:
                links.append(Link(parent, name, child, id(child) in kept))
                stack += [] if id(child) in kept else [child]
    return tuple(links)
