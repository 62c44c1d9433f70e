"""kernelize and its inverse: bind the kernels of a config to the layers of a live model, all or nothing."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from torch import nn

from kernelhub.errors import UnknownLayer, VerificationError, did_you_mean
from kernelhub.layers import binding, choosing
from kernelhub.layers.decision import LEFT_ALONE, NO_ERRORS, NO_KERNELS, Decider, Decision, Kernel, settle
from kernelhub.layers.discovery import ROOT, discover, function_modules, walk
from kernelhub.layers.report import Report, Row
from kernelhub.mode import SERVED, Mode

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
        mode: pins the kernels of one mode; when None every call of a layer takes those for the ``training`` flag that
            the layer has then, and for torch.compile where that traces it.
        load: brings the symbol for a choice and a backend name; called once for each pair.
        backend_of: names the backend of a device (``cuda`` may mean ROCm).
        strict: raise when an entry means no layer, or fits none of those that it means; else skip with the reason.

    Raises:
        UnknownLayer: (strict) an entry means no layer of this model.
        ContractMismatch: (strict) the kernel of an entry fits none of its layers.
        VerificationError: a kernel is not what it should be; also when not strict.
        KernelHubError: (strict) the error of ``load`` for an entry that binds nothing.
    """
    walked = list(walk(model))
    earlier = _suspended(walked)
    try:
        current = _mode_of(walked)
        decider = Decider(
            model,
            mode,
            backend_of,
            load,
            lambda error: not isinstance(error, VerificationError),
            current=current,
        )
        rows, decisions = _decide(config, discover(model, config.entries, walked), decider, mode or current, strict)
        _Binder().bind_all(decisions)
        result = Report((*rows, *(row for decision in decisions for row in decision.rows)))
        binding.keep_report(model, result)
    except BaseException:
        _resume(model, earlier)
        raise
    _log(model, result)
    return result


@contextmanager
def kernelized(model: Model, bind: Callable[[Model], object]) -> Iterator[Model]:
    """``bind`` the model for the time of a ``with`` block; afterwards it has the kernels that it had before, if any."""
    earlier = _suspended(walk(model))
    _resume(model, earlier)
    bind(model)
    try:
        yield model
    finally:
        _resume(model, earlier)


def plan(
    model: nn.Module,
    config: KernelConfig,
    *,
    mode: Mode | None = None,
    resolve: Resolve,
    backend_of: BackendOf,
) -> Report:
    """What ``kernelize`` would do as far as can be told without loading a kernel; errors become reasons."""
    current = mode_of(model)
    decider = Decider(model, mode, backend_of, resolve, lambda error: True, current=current)
    rows, decisions = _decide(config, discover(model, config.entries), decider, mode or current, strict=False)
    return Report((*rows, *(row for decision in decisions for row in decision.rows)))


def unkernelize(model: Model) -> Model:
    """Give every layer its own forward back and remove all traces; returns the model."""
    for module in _recorded(walk(model)):
        binding.unbind(module)
    return model


def report(model: nn.Module) -> Report:
    """What is bound in ``model`` now, and what its last ``kernelize`` skipped and why."""
    live = dict.fromkeys(row for path, module in _walk(model) for row in _live_rows(path, module))
    stored = [row for path, module in model.named_modules() for row in _stored_rows(path, module)]
    kept = [row for row in stored if row.state in ("skipped", "postponed") or row in live]
    return Report(tuple(dict.fromkeys([*kept, *live])))


def mode_of(model: nn.Module) -> Mode:
    """Training as soon as one module trains: gradients also flow through modules that are in evaluation mode."""
    return _mode_of(walk(model))


def _mode_of(walked: Iterable[tuple[str, nn.Module]]) -> Mode:
    return Mode.of(training=any(module.training for _, module in walked))


def _decide(
    config: KernelConfig, discovery: Discovery, decider: Decider, mode: Mode, strict: bool
) -> tuple[list[Row], list[Decision]]:
    unknown = [entry for entry in config.entries if not discovery.targets[entry.layer]]
    missed = [entry.layer for entry in unknown if not entry.is_optional]
    if missed and strict:
        raise UnknownLayer(missed[0], discovery.names)
    paths = {entry.layer for entry in config.entries if entry.is_path}
    pairs = [
        (entry, target)
        for entry in config.entries
        for target in discovery.targets[entry.layer]
        if target.owner not in paths  # a module that a path entry names has its row there
    ]
    decisions = decider.decide(pairs)
    if strict:
        _refuse_idle(config, decisions)
    return [_unknown_row(entry.layer, discovery.names, mode) for entry in unknown], settle(decisions)


def _refuse_idle(config: KernelConfig, decisions: Sequence[Decision]) -> None:
    """Raise the first error of an entry that binds nothing, or fails for all its layers in one of the modes.

    Being left alone, served by another entry or unfit for a mode is no error.
    """
    if all(decision.errors is NO_ERRORS for decision in decisions):
        return
    groups: dict[str, list[Decision]] = {entry.layer: [] for entry in config.entries if not entry.is_optional}
    for decision in decisions:
        if decision.target.layer in groups and not decision.target.owner:
            groups[decision.target.layer].append(decision)
    for group in groups.values():
        idle = not any(decision.accepted for decision in group)
        for errors in zip(*(decision.errors for decision in group), strict=True):
            found = [error for error in errors if error is not None]
            if found and (idle or len(found) == len(group)):
                raise found[0]


def _unknown_row(layer: str, names: Sequence[str], mode: Mode) -> Row:
    reason = f"no layer of this model answers to {layer!r}{did_you_mean(layer, names)}"
    return Row("", layer, reason=reason, mode=mode.value)


def _suspended(walked: Iterable[tuple[str, nn.Module]]) -> list[tuple[nn.Module, dict[str, Any]]]:
    return [(module, binding.suspend(module)) for module in _recorded(walked)]


def _resume(model: nn.Module, earlier: Iterable[tuple[nn.Module, Mapping[str, Any]]]) -> None:
    unkernelize(model)
    for module, state in earlier:
        vars(module).update(state)


class _Guards(NamedTuple):
    """What is put around a kernel, and the forward that it makes way for."""

    original: Any
    sharded: bool
    on_device: bool


class _Binder:
    """Binds what was decided. Modules with the same kernels share one function, which torch.compile compiles once."""

    def __init__(self) -> None:
        self._forwards: dict[tuple[object, ...], FunctionType] = {}
        self._among_processes = choosing.among_processes()
        self._several_devices = choosing.several_cuda_devices()

    def bind_all(self, decisions: Iterable[Decision]) -> None:
        accepted: dict[int, list[Decision]] = {}
        for decision in decisions:
            if decision.kernels is not NO_KERNELS:
                accepted.setdefault(id(decision.target.module), []).append(decision)
        for group in accepted.values():
            first = group[0]
            module = first.target.module
            if first.is_loss:
                binding.bind_loss(module, _loss(first, module), first.rows)
            elif len(group) == 1:
                forward = self._forward(module, group, (id(first.kernels), first.target.function))
                binding.bind(module, forward, first.rows)
            else:
                key = tuple([(id(decision.kernels), decision.target.function) for decision in group])
                rows = tuple([row for decision in group for row in decision.rows])
                binding.bind(module, self._forward(module, group, key), rows)

    def _forward(self, module: nn.Module, group: Sequence[Decision], kernels: tuple[object, ...]) -> FunctionType:
        """The function for these kernels: decisions about layers of one class share the tuple ``kernels`` names."""
        sharded = self._among_processes or choosing.has_split_weight(module)
        on_device = self._several_devices and _on_cuda(module)
        key = (type(module), sharded, on_device, kernels)
        forward = self._forwards.get(key)
        if forward is None:
            guards = _Guards(type(module).forward, sharded, on_device)
            forward = self._forwards[key] = self._same(guards, group)
        return forward

    def _same(self, guards: _Guards, group: Sequence[Decision]) -> FunctionType:
        """The function for these kernels, which two classes with one forward share too."""
        functions = tuple(decision.target.function for decision in group)
        key = (guards, functions, *(decision.kernels for decision in group))
        if key not in self._forwards:
            self._forwards[key] = _switching(guards, group)
        return self._forwards[key]


def _loss(decision: Decision, model: nn.Module) -> binding.BoundLoss:
    original: Any = model.loss_function
    eager, compiled = (decision.kernels[SERVED.index(mode)] for mode in (Mode.TRAINING, Mode.TRAINING_COMPILE))
    kernel = eager or compiled
    assert kernel is not None
    function = kernel.value() if isinstance(kernel.value, type) else kernel.value
    return binding.BoundLoss(function, original, compiles=compiled is not None)


def _switching(guards: _Guards, group: Sequence[Decision]) -> FunctionType:
    """The forward for a group of decisions about one module: one kernel's, or one that picks among them."""
    made: dict[tuple[Kernel | None, ...], Callable[..., Any]] = {}
    for kernels in zip(*(decision.kernels for decision in group), strict=True):
        if kernels not in made:
            made[kernels] = _guarded(guards, _plain(guards, group, kernels))
    forwards = (made[kernels] for kernels in zip(*(decision.kernels for decision in group), strict=True))
    return binding.named_forward(cast("FunctionType", choosing.by_mode(*forwards)))


def _plain(guards: _Guards, group: Sequence[Decision], kernels: Sequence[Kernel | None]) -> Callable[..., Any]:
    """What a module runs in one mode: its own forward, one with other functions inside, or that of a kernel."""
    pairs = [
        (decision.target.function, kernel)
        for decision, kernel in zip(group, kernels, strict=True)
        if kernel is not None
    ]
    original = cast("FunctionType", guards.original)
    if not pairs:
        return original
    if pairs[0][0]:
        replaced = {function: kernel.value for function, kernel in pairs}
        return binding.forward_calling(original, replaced)
    kernel = pairs[0][1]
    if not isinstance(kernel.value, type):
        return binding.forward_from(kernel.value)
    forward = cast("FunctionType", kernel.value.forward)  # type: ignore[attr-defined]
    if kernel.spelled:
        forward = binding.spelling(forward, dict(kernel.spelled))
    return binding.answering_as(binding.named_forward(forward), original)


def _guarded(guards: _Guards, forward: Callable[..., Any]) -> Callable[..., Any]:
    original: Callable[..., Any] = guards.original
    if forward is original:
        return original
    if guards.on_device:
        forward = choosing.on_device_of_tensors(forward)
    return choosing.when_whole(forward, original) if guards.sharded else forward


def _on_cuda(module: nn.Module) -> bool:
    first = next(module.parameters(), None)
    return first is None or first.is_cuda


def _walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module that can be bound, with its path; a function that layers share comes once for each of them."""
    seen: set[int] = set()
    for path, module in walk(model):
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        for name, function in function_modules(module) if "_kernel_funcs" in module.__dict__ else ():
            yield f"{path}.{name}".lstrip("."), function


def _recorded(walked: Iterable[tuple[str, nn.Module]]) -> list[nn.Module]:
    """The modules with a record, those of functions included."""
    found: dict[int, nn.Module] = {}
    for _, module in walked:
        state = module.__dict__
        if binding.RECORD in state:
            found[id(module)] = module
        if "_kernel_funcs" in state:
            found.update((id(each), each) for _, each in function_modules(module) if binding.RECORD in vars(each))
    return list(found.values())


def _live_rows(path: str, module: nn.Module) -> Iterator[Row]:
    record = binding.record_of(module)
    if record is not None and binding.is_bound(module):
        yield from (row._replace(module=path or ROOT) for row in record.rows)


def _stored_rows(path: str, module: nn.Module) -> Iterator[Row]:
    record = binding.record_of(module)
    for row in record.report or () if record is not None else ():
        inside = "" if row.module == ROOT else row.module
        known = ".".join(filter(None, (path, inside))) or ROOT
        yield row._replace(module=known if row.module else "")


def _log(model: nn.Module, result: Report) -> None:
    """One line a model; a warning when kernels were asked for and not one is bound."""
    idle = not result.bound and any(row.reason != LEFT_ALONE for row in result.skipped)
    _logger.log(logging.WARNING if idle else logging.INFO, "%s: %s", type(model).__name__, result.summary)
