"""Signatures: may a kernel be called in every way in which the original is?

The rule, stricter than "same number and kinds", so that a misfit is refused when binding and not met at run time:

- Parameters are compared by position. Positional-only ones may have any name. A name that callers can use must be
  the same, except that of the first parameter of a layer (``hidden_states`` for ``x``: the input is passed by
  position), and those without a default in a function.
- A kernel with ``**kwargs`` takes the original's parameters with a default by name, in any order, listed or not.
- A parameter may be left out where the original has a default, so the kernel needs one there: the same value, or None.
- ``*args`` and ``**kwargs`` of the original must be in the kernel too.
- What the kernel has besides must have a default.
"""

from __future__ import annotations

import inspect
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_PLAIN = (bool, int, float, str)


def method_signature(method: Callable[..., Any]) -> Signature | None:
    """The signature of a method of a class, without ``self`` and without annotations; None if unreadable."""
    signature = function_signature(method)
    if signature is None:
        return None
    first, *rest = signature.parameters.values() or (None,)
    if first is not None and first.kind is Parameter.VAR_POSITIONAL:
        rest = [first, *rest]  # forward(*args): self is one of them
    return Signature(rest)


def function_signature(function: Callable[..., Any]) -> Signature | None:
    """The signature of a callable without annotations, seen through ``functools.wraps``; None if unreadable."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return Signature([parameter.replace(annotation=Parameter.empty) for parameter in parameters])


def difference(kernel: Signature, original: Signature, *, free_names: str = "first") -> str | None:
    """Why the kernel cannot be called as the original is, or None.

    ``free_names`` tells which names without a default may differ: that of the ``first`` parameter, or of ``all``.
    """
    problems = (
        _starred_problem(kernel, original),
        *(_positional_problem(kernel, original, index, free_names) for index in range(len(_positional(original)))),
        *(_keyword_problem(kernel, parameter) for parameter in _of_kind(original, Parameter.KEYWORD_ONLY)),
        _surplus_problem(kernel, original),
    )
    problem = next(filter(None, problems), None)
    return problem and f"{problem}; its signature is {kernel}, that of the original {original}"


def _starred_problem(kernel: Signature, original: Signature) -> str | None:
    for kind, stars in ((Parameter.VAR_POSITIONAL, "*"), (Parameter.VAR_KEYWORD, "**")):
        for parameter in _of_kind(original, kind):
            if not _of_kind(kernel, kind):
                return f"it does not take {stars}{parameter.name}"
    return None


def _positional_problem(kernel: Signature, original: Signature, index: int, free_names: str) -> str | None:
    wanted = _positional(original)[index]
    if wanted.default is not Parameter.empty and _of_kind(kernel, Parameter.VAR_KEYWORD):
        return _keyword_problem(kernel, wanted)
    given = _positional(kernel)[index : index + 1]
    if not given:
        return None if _of_kind(kernel, Parameter.VAR_POSITIONAL) else f"it does not take {wanted.name!r}"
    free = wanted.default is Parameter.empty and (free_names == "all" or index == 0)
    if not free and not _same_name(given[0], wanted):
        return f"its parameter {index + 1} is {given[0].name!r} instead of {wanted.name!r}"
    return _default_problem(given[0], wanted)


def _same_name(given: Parameter, wanted: Parameter) -> bool:
    if wanted.kind is Parameter.POSITIONAL_ONLY:
        return True
    return given.kind is Parameter.POSITIONAL_OR_KEYWORD and given.name == wanted.name


def _keyword_problem(kernel: Signature, wanted: Parameter) -> str | None:
    given = kernel.parameters.get(wanted.name)
    if given is not None and given.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
        return _default_problem(given, wanted)
    return None if _of_kind(kernel, Parameter.VAR_KEYWORD) else f"it does not take {wanted.name!r} by keyword"


def _default_problem(given: Parameter, wanted: Parameter) -> str | None:
    if wanted.default is Parameter.empty:
        return None
    if given.default is Parameter.empty:
        return f"its parameter {given.name!r} has no default"
    plain = isinstance(given.default, _PLAIN) and (wanted.default is None or isinstance(wanted.default, _PLAIN))
    if plain and given.default != wanted.default:
        return f"its parameter {given.name!r} defaults to {given.default!r} instead of {wanted.default!r}"
    return None


def _surplus_problem(kernel: Signature, original: Signature) -> str | None:
    required = [parameter for parameter in original.parameters.values() if parameter.default is Parameter.empty]
    by_position = len([parameter for parameter in required if parameter.kind in _POSITIONAL])
    by_name = [parameter.name for parameter in required]
    for parameter in (*_positional(kernel)[by_position:], *_of_kind(kernel, Parameter.KEYWORD_ONLY)):
        if parameter.default is Parameter.empty and parameter.name not in by_name:
            return f"it needs {parameter.name!r}, which callers of the original may not give"
    return None


def _positional(signature: Signature) -> Sequence[Parameter]:
    return [parameter for parameter in signature.parameters.values() if parameter.kind in _POSITIONAL]


def _of_kind(signature: Signature, kind: object) -> Sequence[Parameter]:
    return [parameter for parameter in signature.parameters.values() if parameter.kind is kind]
