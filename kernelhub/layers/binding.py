"""Binding: give one module another forward, and take it away again without a trace.

Only the module's own ``__dict__`` is written: a bound method as its ``forward``, and a record under one private name.
Parameters, hooks, buffers and the class stay as they are, and ``nn.Module.__call__`` runs hooks as before.

- ``copy.deepcopy`` copies the record, so the copy can be unbound on its own.
- Pickle writes the record as a plain string (no import of kernelhub when loading) and a bound method as "the forward
  of that module": an unpickled module runs the forward of its class, and ``unbind`` removes the leftovers.
- A loss function of transformers goes where its models keep one that their user sets (``_loss_function``).
- ``accelerate`` keeps the forward that its hook wraps in ``_old_forward``: there the kernel goes below the hook.
"""

from __future__ import annotations

import copy
import inspect
import logging
from dataclasses import dataclass, replace
from types import CellType, CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, cast

from torch.compiler import is_compiling

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from kernelhub.layers.fusing import Fused
    from kernelhub.layers.report import Report, Row

RECORD = "_kernelhub"
FORWARD = "forward"
LOSS = "_loss_function"
_HOOKED_FORWARD = "_old_forward"
HOOK = "_hf_hook"

_logger = logging.getLogger("kernelhub")


@dataclass(eq=False, slots=True)  # not frozen: there may be thousands, and freezing triples what one costs
class BoundLayer:
    """What kernelhub left in one module; layers that are bound alike share one, so it is never changed.

    ``slot`` is the key of ``__dict__`` that holds the bound ``forward`` (empty: none was bound here), ``before`` what
    it held earlier (None: nothing), ``rows`` the facts for the report without the module's name, ``report`` that of the
    model rooted here, ``fused`` what it shares with the other layers that the same kernel replaces.
    """

    slot: str = ""
    forward: FunctionType | BoundLoss | None = None
    before: Any = None
    rows: tuple[Row, ...] = ()
    report: Report | None = None
    fused: Fused | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundLayer:
        return replace(self, before=copy.deepcopy(self.before, memo), fused=copy.deepcopy(self.fused, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the slot to empty when cleaning up; a slot that was in use keeps its unpickled forward."""
        return str, (self.slot if self.before is None else "",)


def record_of(module: nn.Module) -> BoundLayer | None:
    """The record of a module; None where kernelhub left nothing, or only the leftovers of a pickle."""
    record = vars(module).get(RECORD)
    return record if isinstance(record, BoundLayer) else None


def fused_of(module: nn.Module) -> Fused | None:
    """What a module shares with the other layers that one kernel replaces, if it is one of them."""
    record = record_of(module)
    return None if record is None else record.fused


def is_bound(module: nn.Module) -> bool:
    """Does this module run a kernel now, be it below a wrapper that others put around it (mixed precision)?"""
    record = record_of(module)
    if record is None or record.forward is None:
        return False
    slots = (LOSS,) if record.slot == LOSS else (FORWARD, _HOOKED_FORWARD)
    return any(_leads_to(vars(module).get(slot), record.forward) for slot in slots)


def occupied(module: nn.Module) -> str | None:
    """Why a module cannot be bound although a kernel may fit, or None: something else replaced its forward."""
    state = module.__dict__
    if FORWARD not in state and HOOK not in state:
        return None
    record = record_of(module)
    forward = state.get(_slot(module))
    ours = record is not None and _slot_in_use(module, record) is not None
    if forward is None or ours or getattr(forward, "__func__", None) is type(module).forward:
        return None
    return f"its forward was already replaced on the instance (by {_name_of(forward)}), undo that first"


def displaced(module: nn.Module) -> str | None:
    """Why the kernel that was bound here does not run any more, or None: something else replaced its forward since."""
    record = record_of(module)
    if record is None or record.forward is None or is_bound(module):
        return None
    forward = vars(module).get(LOSS if record.slot == LOSS else _slot(module))
    if forward is None:
        return "its bound forward was removed from the instance"
    return f"its forward was replaced after the kernel was bound (by {_name_of(forward)})"


def _name_of(forward: Any) -> str:
    """Where a forward was really written: ``functools.wraps`` gives it the name of another one."""
    function = getattr(forward, "__func__", forward)
    code = getattr(function, "__code__", None)
    if code is None:
        return type(forward).__qualname__
    return f"{function.__globals__.get('__name__', function.__module__)}.{code.co_name}"


def bind(module: nn.Module, forward: FunctionType, rows: tuple[Row, ...] = (), fused: Fused | None = None) -> None:
    """Let ``module`` run ``forward(module, ...)`` until ``unbind``. The module must not be bound yet."""
    bind_as(module, BoundLayer(FORWARD, forward, None, rows, None, fused))


def bind_as(module: nn.Module, record: BoundLayer) -> None:
    """``bind`` as a record says, which may be that of other modules too."""
    state = module.__dict__
    if HOOK in state or FORWARD in state:
        slot = _slot(module)
        record = replace(record, slot=slot, before=state.get(slot))
    state[record.slot] = MethodType(record.forward, module)  # type: ignore[arg-type]  # a function, for a forward
    state[RECORD] = record


def bind_loss(model: nn.Module, loss: BoundLoss, rows: tuple[Row, ...] = ()) -> None:
    """Let a transformers model compute its loss by ``loss`` until ``unbind``. The model must not be bound yet."""
    state = vars(model)
    state[RECORD] = BoundLayer(LOSS, loss, state.get(LOSS), rows)
    state[LOSS] = loss


class BoundLoss:
    """A kernel as the loss function of a model; pickled as the function that it stands for."""

    def __init__(self, kernel: Callable[..., Any], original: Callable[..., Any], *, compiles: bool) -> None:
        self._kernel = kernel
        self.original = original
        self._compiles = compiles
        self.__name__ = original.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() and not self._compiles:
            return self.original(*args, **kwargs)
        return self._kernel(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundLoss:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, (self.original,)  # copying a function gives the function


def exchange(module: nn.Module, forward: FunctionType | BoundLoss) -> None:
    """Let a bound module run another forward from now on; ``unbind`` stays the inverse of ``bind``.

    Does nothing where the bound forward is not in its place any more.
    """
    record = record_of(module)
    slot = None if record is None else _slot_in_use(module, record)
    if record is not None and slot is not None:
        vars(module)[slot] = forward if isinstance(forward, BoundLoss) else MethodType(forward, module)
        vars(module)[RECORD] = replace(record, forward=forward)


def keep_report(model: nn.Module, report: Report) -> None:
    """Store the report of a whole model in its root module, where ``unbind`` removes it."""
    state = vars(model)
    state[RECORD] = replace(state.get(RECORD, BoundLayer()), report=report)


def unbind(module: nn.Module) -> None:
    """Exact inverse of ``bind`` and ``keep_report``; does nothing to a module that has neither.

    What others put in place of the bound forward, or around it, is never thrown away: the log says so.
    """
    state = vars(module)
    bound = is_bound(module)
    record = state.pop(RECORD, None)
    if isinstance(record, BoundLayer) and record.fused is not None:
        record.fused.part()
    if isinstance(record, str):
        state.pop(record, None)
    elif record is not None and record.forward is not None and not _restore(module, record):
        name = type(module).__name__
        if bound:
            state[RECORD] = record
            _logger.warning("a %s still runs its kernel, inside a wrapper around its forward: undo that first", name)
        else:
            _logger.warning("the forward of a bound %s was replaced later and is kept", name)


def suspend(module: nn.Module) -> dict[str, Any]:
    """Unbind, and return what ``vars(module).update`` needs to bind again exactly as it was."""
    state = vars(module)
    kept = {key: state[key] for key in (FORWARD, _HOOKED_FORWARD, LOSS, RECORD) if key in state}
    unbind(module)
    return kept


def _restore(module: nn.Module, record: BoundLayer) -> bool:
    """Put back what was there before; False if the bound forward is not where it was put."""
    state = vars(module)
    slot = _slot_in_use(module, record)
    if slot is None:
        return False
    if record.before is not None:
        state[slot] = record.before
    elif slot in (FORWARD, LOSS):
        del state[slot]
    else:
        # A hook was added while the kernel was bound, and holds it as the forward to call.
        state[slot] = MethodType(type(module).forward, module)
    return True


def _slot(module: nn.Module) -> str:
    hooked = HOOK in vars(module) and _HOOKED_FORWARD in vars(module)
    return _HOOKED_FORWARD if hooked else FORWARD


def _slot_in_use(module: nn.Module, record: BoundLayer) -> str | None:
    state = vars(module)
    if record.forward is None:
        return None
    if record.slot == LOSS:
        return LOSS if state.get(LOSS) is record.forward else None
    slots = (record.slot, FORWARD, _HOOKED_FORWARD)
    return next((slot for slot in slots if getattr(state.get(slot), "__func__", None) is record.forward), None)


def _leads_to(forward: Any, kernel: object) -> bool:
    while forward is not None and getattr(forward, "__func__", forward) is not kernel:
        forward = getattr(forward, "__wrapped__", None)
    return forward is not None


def forward_calling(forward: FunctionType, replaced: Mapping[str, Callable[..., Any]]) -> FunctionType:
    """A copy of ``forward`` that finds other objects under some global names; the original is not touched.

    The copy sees the other globals as they are now. It has no global ``__name__``: with one, torch.compile would look
    the names up, or guard them, in the module of that name, where the original function still stands. Decorators
    around ``forward`` (see ``structure.rewrappable``) are rebuilt around the copy.
    """
    if hasattr(forward, "__wrapped__"):
        inner = forward_calling(forward.__wrapped__, replaced)
        return _twin(forward, forward.__globals__, {id(forward.__wrapped__): inner})
    scope = {**forward.__globals__, **replaced}
    scope.pop("__name__", None)
    return _twin(forward, scope)


def forward_from(function: Callable[..., Any]) -> FunctionType:
    """A forward that passes its arguments to a plain function, for modules without state."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return cast("FunctionType", forward)


def named_forward(function: FunctionType) -> FunctionType:
    """The function, named ``forward``: pickle writes a bound method by the name of its function."""
    return function if function.__name__ == FORWARD else _twin(function, function.__globals__)


def spelling(function: FunctionType, names: Mapping[str, str]) -> FunctionType:
    """A copy of a forward that reads attributes under other names (``contract`` has checked that it can be made).

    The names are changed in the code itself: nothing is added to the module, and a call costs what it did.
    """
    twin = _twin(function, function.__globals__)
    twin.__code__ = _respelled(function.__code__, names)
    return twin


def _respelled(code: CodeType, names: Mapping[str, str]) -> CodeType:
    constants = tuple(_respelled(each, names) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(co_names=tuple(names.get(name, name) for name in code.co_names), co_consts=constants)


def answering_as(function: FunctionType, original: Callable[..., Any]) -> FunctionType:
    """The function, showing the signature of ``original`` if its own is ``*args``: callers look for names there."""
    parameters = inspect.signature(function).parameters.values()
    if all(each.kind is not inspect.Parameter.VAR_POSITIONAL for each in parameters):
        return function
    twin = _twin(function, function.__globals__)
    twin.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]  # read by inspect.signature
    return twin


def _twin(
    function: FunctionType, scope: dict[str, Any], held: Mapping[int, FunctionType] | None = None
) -> FunctionType:
    """A copy of ``function`` with other globals; ``held`` replaces what its closure holds, by identity."""
    closure = function.__closure__
    if closure is not None and held:
        closure = tuple(CellType(held.get(id(cell.cell_contents), cell.cell_contents)) for cell in closure)
    twin = FunctionType(function.__code__, scope, FORWARD, function.__defaults__, closure)
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__annotations__ = function.__annotations__
    twin.__module__, twin.__qualname__, twin.__doc__ = function.__module__, function.__qualname__, function.__doc__
    vars(twin).update(vars(function))
    if held:
        twin.__wrapped__ = held[id(function.__wrapped__)]  # type: ignore[attr-defined]  # set by functools.wraps
    return twin
