"""Attributes: what a kernel layer takes from the module that it is bound to.

They are the names annotated in its class (``weight: torch.Tensor``) and those that its forward reads as
``self.<name>``. What the kernel looks for itself is optional: names given to ``hasattr`` or ``getattr``, whatever is
read under a condition that uses them, and reads in a ``try``. Without source code the annotations alone count.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_origin
from weakref import WeakKeyDictionary

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_FLAGS = ("can_torch_compile", "has_backward")
_LOOKING = ("hasattr", "getattr")
_NOTHING = object()
_USED: WeakKeyDictionary[type[nn.Module], dict[str, bool]] = WeakKeyDictionary()


def missing_attribute(
    kernel: type[nn.Module], module: nn.Module, spelled: Mapping[str, str] = MappingProxyType({})
) -> str | None:
    """Why the module lacks something that the kernel layer uses, or None.

    ``spelled`` gives the module's own name of an attribute that the kernel calls otherwise.
    """
    return lacking(kernel, spelled)(module)


def lacking(
    kernel: type[nn.Module], spelled: Mapping[str, str] = MappingProxyType({})
) -> Callable[[nn.Module], str | None]:
    """``missing_attribute`` for many modules: the kernel is read once."""
    used = [(name, spelled.get(name, name), is_tensor) for name, is_tensor in _used(kernel).items()]

    def check(module: nn.Module) -> str | None:
        state, parameters = module.__dict__, module._parameters
        for name, own, is_tensor in used:
            if (own in state and not is_tensor) or parameters.get(own) is not None:
                continue
            value = getattr(module, own, _NOTHING)
            if value is _NOTHING:
                return f"it uses self.{name}, which {type(module).__name__} does not have{_as_spelled(name, own)}"
            if is_tensor and not isinstance(value, torch.Tensor):
                kind = type(value).__name__
                return f"it uses self.{name} as a tensor, but there it is {kind}{_as_spelled(name, own)}"
        return None

    return check


def _as_spelled(name: str, own: str) -> str:
    return "" if name == own else f" (as {own!r})"


def _used(kernel: type[nn.Module]) -> Mapping[str, bool]:
    """The names a kernel layer uses, and whether it declares them as tensors; read once per class."""
    if kernel not in _USED:
        annotated = annotations_of(kernel)
        names = [*annotated, *read_attributes(kernel.forward)]
        _USED[kernel] = {name: name in annotated and _is_tensor(annotated[name]) for name in names}
    return _USED[kernel]


def annotations_of(kernel: type[nn.Module]) -> dict[str, Any]:
    """The attributes that a kernel layer's class declares by annotation, class variables left out."""
    found: dict[str, Any] = {}
    for cls in reversed(kernel.__mro__[: kernel.__mro__.index(nn.Module)]):
        found.update(_own_annotations(cls))
    return {name: value for name, value in found.items() if name not in _FLAGS and not _is_class_variable(value)}


def _own_annotations(cls: type) -> dict[str, Any]:
    try:
        return inspect.get_annotations(cls)
    except NameError:  # Python 3.14 evaluates them only now; an import for type checkers is not there
        return {}


def read_attributes(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names that a forward reads from ``self`` on every path, in order; empty without source code."""
    function = _parse(forward)
    if function is None or not function.args.args:
        return ()
    me = function.args.args[0].arg
    optional = {_name_asked(node) for node in ast.walk(function) if _asks(node, me)}
    reads = (name for statement in function.body for name in _reads(statement, me))
    return tuple(dict.fromkeys(name for name in reads if name not in optional))


def unrenamable(forward: Callable[..., Any], name: str) -> str | None:
    """Why ``self.<name>`` cannot be given another name inside a forward, or None.

    The name has to stand for the attribute of ``self`` wherever it occurs.
    """
    function = _parse(forward)
    if function is None or not function.args.args:
        return f"the source of the kernel, which uses {name!r}, cannot be read"
    me = function.args.args[0].arg
    uses = [node for node in ast.walk(function) if isinstance(node, ast.Attribute) and node.attr == name]
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name]
    if names or any(not (isinstance(node.value, ast.Name) and node.value.id == me) for node in uses):
        return f"the kernel uses the name {name!r} for something else too"
    return None if uses else f"the kernel's forward does not use self.{name}"


def _parse(forward: Callable[..., Any]) -> ast.FunctionDef | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return None
    first = tree.body[0] if tree.body else None
    return first if isinstance(first, ast.FunctionDef) else None


def _reads(node: ast.AST, me: str) -> Iterator[str]:
    if isinstance(node, ast.Try) or _is_looking(node, me):
        return
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == me:
        if isinstance(node.ctx, ast.Load):
            yield node.attr
        return
    for child in ast.iter_child_nodes(node):
        yield from _reads(child, me)


def _is_looking(node: ast.AST, me: str) -> bool:
    """Is this an ``if`` or a condition that asks which attributes ``self`` has?"""
    if isinstance(node, (ast.If, ast.IfExp)):
        return any(_asks(part, me) for part in ast.walk(node.test))
    return isinstance(node, ast.BoolOp) and any(_asks(part, me) for part in ast.walk(node))


def _asks(node: ast.AST, me: str) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _LOOKING and node.args):
        return False
    return isinstance(node.args[0], ast.Name) and node.args[0].id == me


def _name_asked(node: ast.AST) -> str | None:
    name = node.args[1] if isinstance(node, ast.Call) and len(node.args) > 1 else None
    return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else None


def _is_tensor(annotation: Any) -> bool:
    if isinstance(annotation, type):
        return issubclass(annotation, torch.Tensor)
    # A text (from __future__ import annotations) counts when it is a tensor type alone, not "Tensor | None".
    return isinstance(annotation, str) and annotation.rpartition(".")[2] in ("Tensor", "Parameter")


def _is_class_variable(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return annotation.rpartition("typing.")[2].startswith("ClassVar")
    return "ClassVar" in str(get_origin(annotation) or annotation)
