"""Conversion: how the parameters of a layout are made of those of the layers it stands for.

A layout class declares rules in ``conversion_mapping``, as transformers' checkpoint loading reads them: objects with
``source_patterns`` and ``target_patterns`` (regular expressions of parameter paths) and, unless the rule only renames,
``operations`` whose ``convert`` takes tensors to tensors. The objects are used as they are: this module imports nothing
of transformers, and a kernel may bring its own.

The rules are written for tensors that are read once from a file. Here the layers keep their parameters, and the
layout's have to follow them through training, so a rule has to be something with a gradient. It is tried on
consecutive integers and has to be the same as one of the recipes below: anything else is refused with the reason.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kernelhub.layers import joint
from kernelhub.layers.report import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MOST_INT32 = 2**31 - 1
_PREFIXES = ("", "model.")  # rules name paths from a whole language model on; its base model lacks the first step

Shape = tuple[int, ...]


class NotConvertible(Exception):
    """Why a layout cannot have its parameters; the text becomes the reason in a report."""


class Recipe(NamedTuple):
    """One parameter of a layout: ``same`` as a source, a ``join`` or ``stack`` of several, a ``part`` or ``swap``.

    ``sources`` are positions in a list of tensors; ``dims`` are the dimension of a join, stack or part, with the start
    and length of the latter, or the two dimensions that are swapped.
    """

    kind: str
    sources: tuple[int, ...]
    dims: tuple[int, ...] = ()

    def make(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The parameter, made of the sources so that gradients reach them."""
        used = [tensors[index] for index in self.sources]
        if self.kind == "same":
            return used[0]
        if self.kind == "join":
            return joint.joined(used, self.dims[0])
        if self.kind == "stack":
            return torch.stack(used, self.dims[0])
        return used[0].narrow(*self.dims) if self.kind == "part" else used[0].transpose(*self.dims)

    @property
    def can_be_joint(self) -> bool:
        """Can the sources lie in one piece of memory that already is the result?"""
        return self.kind == "join" and self.dims == (0,)


@dataclass(frozen=True)
class Rule:
    """One rule of a ``conversion_mapping``."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    operations: tuple[Any, ...]

    @classmethod
    def read(cls, value: Any) -> Rule:
        """The rule that an object of the kernel means.

        Raises:
            NotConvertible: it has no patterns.
        """
        try:
            rule = cls(
                _texts(value.source_patterns),
                _texts(value.target_patterns),
                tuple(getattr(value, "operations", None) or ()),
            )
        except (AttributeError, TypeError) as error:
            raise NotConvertible(f"{type(value).__name__} in its conversion_mapping is no rule ({error})") from error
        if not rule.sources or not rule.targets:
            raise NotConvertible("a rule in its conversion_mapping has no patterns")
        return rule

    def renamed(self, key: str) -> tuple[str, str] | None:
        """The path that a path becomes, and the pattern that it matches; None if it matches none.

        The first target stands for all: an operation tells them apart. ``\\1`` in it is a group of the pattern.
        """
        for pattern in sorted(self.sources, key=len, reverse=True):
            match = re.search(_expression(pattern), key)
            if match is not None:
                target = re.sub(r"\\(\d)", lambda group, match=match: match[int(group[1])] or "", self.targets[0])  # type: ignore[misc]  # the lambda is used at once
                return key[: match.start()] + target + key[match.end() :], pattern
        return None


class Conversion:
    """The rules of one layout class; what they do to tensors of given shapes is tried once."""

    def __init__(self, rules: Sequence[Any], config: Any = None) -> None:
        read = [Rule.read(rule) for rule in rules]
        self._renamings = [rule for rule in read if not rule.operations]
        self._converters = [rule for rule in read if rule.operations]
        self._config = config
        self._tried: dict[object, dict[str, Recipe]] = {}

    def recipes(self, sources: Mapping[str, Shape], targets: Mapping[str, Shape]) -> dict[str, Recipe]:
        """How each target is made of the sources; both are paths from the model on, with shapes.

        Raises:
            NotConvertible: a target that nothing becomes, a source that becomes no target, or an operation that
                cannot be followed.
        """
        prefix = next((each for each in _PREFIXES if self._applies(each, sources)), "")
        found: dict[str, Recipe] = {}
        for (name, rule), group in self._groups(prefix, sources).items():
            made = self._made(
                rule, prefix + name, group, sources, {prefix + key: size for key, size in targets.items()}
            )
            found.update({key.removeprefix(prefix): recipe for key, recipe in made.items()})
        _check(found, list(sources), targets)
        return found

    def _applies(self, prefix: str, sources: Mapping[str, Shape]) -> bool:
        rules = (*self._renamings, *self._converters)
        return any(rule.renamed(prefix + key) is not None for rule in rules for key in sources)

    def _groups(
        self, prefix: str, sources: Mapping[str, Shape]
    ) -> dict[tuple[str, Rule | None], list[tuple[str, int]]]:
        """The sources that become one name by one rule, each with the pattern that it matches."""
        groups: dict[tuple[str, Rule | None], list[tuple[str, int]]] = {}
        for index, key in enumerate(sources):
            name, rule, pattern = self._renamed(prefix + key)
            groups.setdefault((name.removeprefix(prefix), rule), []).append((pattern, index))
        return groups

    def _renamed(self, key: str) -> tuple[str, Rule | None, str]:
        for rule in self._renamings:
            key = (rule.renamed(key) or (key, ""))[0]
        for rule in self._converters:
            renamed = rule.renamed(key)
            if renamed is not None:
                return renamed[0], rule, renamed[1]
        return key, None, ""

    def _made(
        self,
        rule: Rule | None,
        name: str,
        group: list[tuple[str, int]],
        sources: Mapping[str, Shape],
        targets: Mapping[str, Shape],
    ) -> dict[str, Recipe]:
        if rule is None:
            if len(group) > 1:
                raise NotConvertible(f"{len(group)} parameters would become {name}")
            return {name: Recipe("same", (group[0][1],))}
        shapes = list(sources.values())
        group = sorted(group, key=lambda each: rule.sources.index(each[0]))
        key = (id(rule), tuple((pattern, shapes[index]) for pattern, index in group))
        if key not in self._tried:
            self._tried[key] = self._try(rule, name, [(pattern, shapes[index]) for pattern, index in group], targets)
        tried = self._tried[key]
        indices = [index for _, index in group]
        return {
            _expanded(name, target, tried): recipe._replace(sources=tuple(indices[each] for each in recipe.sources))
            for target, recipe in tried.items()
        }

    def _try(
        self, rule: Rule, name: str, group: Sequence[tuple[str, Shape]], targets: Mapping[str, Shape]
    ) -> dict[str, Recipe]:
        tensors = _consecutive([shape for _, shape in group])
        given: dict[str, Any] = {}
        for (pattern, _), tensor in zip(group, tensors, strict=True):
            given.setdefault(pattern, []).append(tensor)
        made = self._operated(rule, name, given, _Shapes(targets))
        found = {target: _recipe(value, tensors) for target, value in made.items()}
        for target, recipe in found.items():
            if recipe is None:
                does = ", ".join(type(operation).__name__ for operation in rule.operations)
                raise NotConvertible(f"what {does} makes of {target} cannot follow the layers' parameters")
        return {target: recipe for target, recipe in found.items() if recipe is not None}

    def _operated(self, rule: Rule, name: str, given: dict[str, Any], model: _Shapes) -> dict[str, torch.Tensor]:
        try:
            for operation in rule.operations:
                given = operation.convert(
                    given,
                    source_patterns=list(rule.sources),
                    target_patterns=list(rule.targets),
                    full_layer_name=name,
                    model=model,
                    config=self._config,
                    missing_keys=None,
                )
            return {key: value[0] if isinstance(value, list) else value for key, value in given.items()}
        except Exception as error:  # code of the kernel, or of transformers, on shapes that it does not like
            raise NotConvertible(one_line(f"its conversion raised {type(error).__name__}: {error}")) from error


class _Shapes:
    """The part of a model that an operation may ask: the shapes of its parameters."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self._shapes = shapes

    def get_parameter(self, name: str) -> torch.Tensor:
        return torch.empty(self._shapes[name], device="meta")


def _texts(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _expression(pattern: str) -> str:
    """A pattern ends where a name ends: ``weight`` does not match ``weight_scale``."""
    expression = pattern.replace("*.", r".*\.")
    return rf"{expression}(?!\w)" if expression[-1:].isalnum() else expression


def _expanded(name: str, target: str, made: Mapping[str, Recipe]) -> str:
    """The full path of one of the targets of an operation; ``name`` has the first of them."""
    if len(made) == 1:
        return name
    standing = next((each for each in made if each in name), None)
    if standing is None:
        raise NotConvertible(f"{target} and others of its rule cannot be told apart in {name}")
    return name.replace(standing, target, 1)


def _check(found: Mapping[str, Recipe], sources: Sequence[str], targets: Mapping[str, Shape]) -> None:
    for target in targets:
        if target not in found:
            raise NotConvertible(f"no rule of its conversion_mapping makes {target}")
    kept = {index for name, recipe in found.items() if name in targets for index in recipe.sources}
    lost = [key for index, key in enumerate(sources) if index not in kept]
    if lost:
        raise NotConvertible(f"its layout has no place for {', '.join(lost)}")


def _consecutive(shapes: Sequence[Shape]) -> list[torch.Tensor]:
    """Tensors of these shapes whose elements all differ."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    dtype = torch.int32 if sum(sizes) <= _MOST_INT32 else torch.int64
    whole = torch.arange(sum(sizes), dtype=dtype, device="cpu")
    return [part.view(shape) for part, shape in zip(torch.split(whole, sizes), shapes, strict=True)]


def _recipe(made: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Recipe | None:
    """The recipe that makes the same of these tensors, or None."""
    everything = tuple(range(len(tensors)))
    return next((each for each in _candidates(made, tensors, everything) if _is(each, made, tensors)), None)


def _candidates(made: torch.Tensor, tensors: Sequence[torch.Tensor], sources: tuple[int, ...]) -> list[Recipe]:
    dims = range(made.dim())
    if len(sources) > 1:
        joins = [Recipe("join", sources, (dim,)) for dim in dims]
        return joins + [Recipe("stack", sources, (dim,)) for dim in dims]
    swaps = [Recipe("swap", sources, pair) for pair in combinations(dims, 2)]
    return [Recipe("same", sources), *_parts(made, tensors[0]), *swaps]


def _parts(made: torch.Tensor, source: torch.Tensor) -> list[Recipe]:
    if made.dim() != source.dim() or not made.numel():
        return []
    where = (source == made.flatten()[0]).nonzero()
    starts = where[0].tolist() if len(where) else []
    return [Recipe("part", (0,), (dim, start, made.shape[dim])) for dim, start in enumerate(starts)]


def _is(recipe: Recipe, made: torch.Tensor, tensors: Sequence[torch.Tensor]) -> bool:
    try:
        return torch.equal(recipe.make(tensors), made)
    except (RuntimeError, IndexError):  # shapes that do not fit
        return False
