"""kernelize and its inverse: bind the kernels of a config to the layers of a live model, all or nothing."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch import nn

from kernelhub.errors import UnknownLayer, VerificationError, did_you_mean
from kernelhub.layers import binding
from kernelhub.layers.decision import LEFT_ALONE, Decider, Decision, settle
from kernelhub.layers.discovery import ROOT, discover, function_modules
from kernelhub.layers.report import Report, Row
from kernelhub.mode import Mode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import FunctionType

    import torch

    from kernelhub.config import KernelChoice, KernelConfig
    from kernelhub.layers.discovery import Discovery
    from kernelhub.layers.symbol import LoadedSymbol, PlannedSymbol

    Load = Callable[[KernelChoice, str], LoadedSymbol]
    Resolve = Callable[[KernelChoice, str], PlannedSymbol]
    BackendOf = Callable[[torch.device], str]

Model = TypeVar("Model", bound=nn.Module)

_logger = logging.getLogger("kernelhub")


def kernelize(
    model: nn.Module,
    config: KernelConfig,
    *,
    mode: Mode | None = None,
    load: Load,
    backend_of: BackendOf,
    strict: bool = True,
) -> Report:
    """Bind the kernels of ``config`` to the layers of ``model``, in place; what was bound before is replaced.

    Everything is decided first and bound last: an error leaves the model as it was, with its earlier kernels.

    Args:
        mode: what the kernels are for; taken from the model's ``training`` flags when None.
        load: brings the symbol for a choice and a backend name; called once for each pair.
        backend_of: names the backend of a device (``cuda`` may mean ROCm).
        strict: raise when an entry means no layer, or fits none of those that it means; else skip with the reason.

    Raises:
        UnknownLayer: (strict) an entry means no layer of this model.
        ContractMismatch: (strict) the kernel of an entry fits none of its layers.
        VerificationError: a kernel is not what it should be; also when not strict.
        KernelHubError: (strict) the error of ``load`` for an entry that binds nothing.
    """
    earlier = [(module, binding.suspend(module)) for module in _recorded(model)]
    try:
        mode = mode_of(model) if mode is None else mode
        decider = Decider(model, mode, backend_of, load, lambda error: not isinstance(error, VerificationError))
        rows, decisions = _decide(config, discover(model, config.entries), decider, mode, strict)
        _bind_all(decisions)
        result = Report((*rows, *(decision.row for decision in decisions)))
        binding.keep_report(model, result)
    except BaseException:
        unkernelize(model)
        for module, state in earlier:
            vars(module).update(state)
        raise
    _log(model, result)
    return result


def plan(
    model: nn.Module,
    config: KernelConfig,
    *,
    mode: Mode | None = None,
    resolve: Resolve,
    backend_of: BackendOf,
) -> Report:
    """What ``kernelize`` would do as far as can be told without loading a kernel; errors become reasons."""
    mode = mode_of(model) if mode is None else mode
    decider = Decider(model, mode, backend_of, resolve, lambda error: True)
    rows, decisions = _decide(config, discover(model, config.entries), decider, mode, strict=False)
    return Report((*rows, *(decision.row for decision in decisions)))


def unkernelize(model: Model) -> Model:
    """Give every layer its own forward back and remove all traces; returns the model."""
    for module in _recorded(model):
        binding.unbind(module)
    return model


def report(model: nn.Module) -> Report:
    """What is bound in ``model`` now, and what its last ``kernelize`` skipped and why."""
    live = dict.fromkeys(row for path, module in _walk(model) for row in _live_rows(path, module))
    stored = [row for path, module in model.named_modules() for row in _stored_rows(path, module)]
    kept = [row for row in stored if row.state == "skipped" or row in live]
    return Report(tuple(dict.fromkeys([*kept, *live])))


def mode_of(model: nn.Module) -> Mode:
    """Training as soon as one module trains: gradients also flow through modules that are in evaluation mode."""
    return Mode.of(training=any(module.training for module in model.modules()))


def _decide(
    config: KernelConfig, discovery: Discovery, decider: Decider, mode: Mode, strict: bool
) -> tuple[list[Row], list[Decision]]:
    unknown = [entry.layer for entry in config.entries if not discovery.targets[entry.layer]]
    if unknown and strict:
        raise UnknownLayer(unknown[0], discovery.names)
    paths = {entry.layer for entry in config.entries if entry.is_path}
    pairs = [
        (entry, target)
        for entry in config.entries
        for target in discovery.targets[entry.layer]
        if target.owner not in paths  # a module that a path entry names has its row there
    ]
    decisions = decider.decide(pairs)
    if strict:
        for entry in config.entries:
            _refuse_idle([decision for decision in decisions if decision.row.layer == entry.layer])
    return [_unknown_row(layer, discovery.names, mode) for layer in unknown], settle(decisions)


def _refuse_idle(decisions: Sequence[Decision]) -> None:
    """Raise the first error of an entry that binds nothing; being left alone or unfit for the mode is no error."""
    errors = [decision.error for decision in decisions if decision.error is not None]
    if errors and not any(decision.accepted for decision in decisions):
        raise errors[0]


def _unknown_row(layer: str, names: Sequence[str], mode: Mode) -> Row:
    reason = f"no layer of this model answers to {layer!r}{did_you_mean(layer, names)}"
    return Row("", layer, reason=reason, mode=mode.value)


def _bind_all(decisions: Iterable[Decision]) -> None:
    accepted: dict[int, list[Decision]] = {}
    for decision in decisions:
        if decision.accepted:
            accepted.setdefault(id(decision.target.module), []).append(decision)
    forwards: dict[tuple[Any, ...], FunctionType] = {}
    for group in accepted.values():
        rows = tuple(decision.row for decision in group)
        binding.bind(group[0].target.module, _shared_forward(group, forwards), rows)


def _shared_forward(group: Sequence[Decision], forwards: dict[tuple[Any, ...], FunctionType]) -> FunctionType:
    """One function for all modules with the same kernels, so that torch.compile compiles it once."""
    original = type(group[0].target.module).forward
    key = (original, *((decision.target.function, id(decision.value)) for decision in group))
    if key not in forwards:
        forwards[key] = _forward_for(group, original)
    return forwards[key]


def _forward_for(group: Sequence[Decision], original: Callable[..., Any]) -> FunctionType:
    value = group[0].value
    if group[0].target.function:
        replaced: Mapping[str, Callable[..., Any]] = {each.target.function: each.value for each in group}
        forward = binding.forward_calling(cast("FunctionType", original), replaced)
    elif isinstance(value, type):
        forward = binding.named_forward(cast("FunctionType", value.forward))  # type: ignore[attr-defined]
    else:
        forward = binding.forward_from(value)
    trains = all(getattr(decision.value, "has_backward", True) for decision in group)
    return forward if trains else binding.without_training(forward)


def _walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module that can be bound, with its path; a function that layers share comes once for each of them."""
    for path, module in model.named_modules():
        yield path, module
        for name, function in function_modules(module):
            yield f"{path}.{name}".lstrip("."), function


def _recorded(model: nn.Module) -> list[nn.Module]:
    found = {id(module): module for _, module in _walk(model) if binding.RECORD in vars(module)}
    return list(found.values())


def _live_rows(path: str, module: nn.Module) -> Iterator[Row]:
    record = binding.record_of(module)
    if record is not None and binding.is_bound(module):
        yield from (replace(row, module=path or ROOT) for row in record.rows)


def _stored_rows(path: str, module: nn.Module) -> Iterator[Row]:
    record = binding.record_of(module)
    for row in record.report or () if record is not None else ():
        inside = "" if row.module == ROOT else row.module
        known = ".".join(filter(None, (path, inside))) or ROOT
        yield replace(row, module=known if row.module else "")


def _log(model: nn.Module, result: Report) -> None:
    """One line a model; a warning when kernels were asked for and not one is bound."""
    idle = not result.bound and any(row.reason != LEFT_ALONE for row in result.skipped)
    _logger.log(logging.WARNING if idle else logging.INFO, "%s: %s", type(model).__name__, result.summary)
