"""kernelize and its inverse: bind the kernels of a config to the layers of a live model, all or nothing."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from kernelhub.errors import KernelHubError, UnknownLayer, VerificationError, did_you_mean
from kernelhub.layers import binding, joint
from kernelhub.layers.binder import Binder
from kernelhub.layers.decider import Decider
from kernelhub.layers.decision import Decision, settle
from kernelhub.layers.discovery import ROOT, discover, function_modules, walk
from kernelhub.layers.outcome import LEFT_ALONE, NO_ERRORS
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
    # Given the decisions for each candidate of the config: those to bind.
    Judge = Callable[[nn.Module, Sequence[Sequence[Decision]]], Sequence[Decision]]
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
    judge: Judge | None = None,
) -> Report:
    """Bind the kernels of ``config`` to the layers of ``model``, in place; what was bound before is replaced.

    Everything is decided first and bound last: an error leaves the model as it was, with its earlier kernels.

    Args:
        mode: pins the kernels of one mode; when None every call of a layer takes those for the ``training`` flag that
            the layer has then, and for torch.compile where that traces it.
        load: brings the symbol for a choice and a backend name; called once for each pair.
        backend_of: names the backend of a device (``cuda`` may mean ROCm).
        strict: raise when an entry means no layer, or fits none of those that it means; else skip with the reason.
        judge: has the last word, before anything is bound: it sees what was decided for the first candidate of every
            entry, for the second, and so on. When None the first candidates are bound.

    Raises:
        UnknownLayer: (strict) an entry means no layer of this model.
        ContractMismatch: (strict) the kernel of an entry fits none of its layers.
        VerificationError: a kernel is not what it should be; also when not strict.
        KernelHubError: (strict) the error of ``load`` for an entry that binds nothing.
    """
    walked = list(walk(model))
    earlier = _suspended(walked)
    try:
        rows, decisions = _decided(model, config, walked, mode, load, backend_of, strict, judge)
        Binder().bind_all(model, decisions)
        result = Report(_rows_later(rows, decisions))
        binding.keep_report(model, result)
    except BaseException:
        _resume(model, earlier)
        raise
    _log(model, result, decisions)
    return result


def rehearse(
    model: nn.Module,
    config: KernelConfig,
    *,
    mode: Mode | None = None,
    load: Load,
    backend_of: BackendOf,
    strict: bool = True,
    judge: Judge,
) -> None:
    """Let ``judge`` see what ``kernelize`` would decide, with nothing bound meanwhile; the model is left as it was."""
    walked = list(walk(model))
    earlier = _suspended(walked)
    try:
        _decided(model, config, walked, mode, load, backend_of, strict, judge)
    finally:
        _resume(model, earlier)


def _decided(
    model: nn.Module,
    config: KernelConfig,
    walked: Sequence[tuple[str, nn.Module]],
    mode: Mode | None,
    load: Load,
    backend_of: BackendOf,
    strict: bool,
    judge: Judge | None,
) -> tuple[list[Row], list[Decision]]:
    current = _mode_of(walked)
    discovery = discover(model, config.entries, walked)

    def decide(part: KernelConfig, *, strict: bool) -> tuple[list[Row], list[Decision]]:
        decider = Decider(model, mode, backend_of, load, _forgiven, current=current)
        return _decide(part, discovery, decider, mode or current, strict)

    if strict:
        _refuse_unknown(config, discovery)
    if judge is None:
        return decide(config, strict=strict)
    return _judged(judge, model, config, decide, strict=strict)


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


@contextmanager
def reverting(model: nn.Module) -> Iterator[None]:
    """When the ``with`` block ends in an exception the model gets the kernels back that it had before."""
    earlier = _suspended(walk(model))
    _resume(model, earlier)
    try:
        yield
    except BaseException:
        _resume(model, earlier)
        raise


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
    return Report(_rows_later(rows, decisions))


def forward_of(decision: Decision) -> FunctionType:
    """What the layer of a decision would run if it were bound now."""
    return Binder().forward(decision)


def unkernelize(model: Model) -> Model:
    """Give every layer its own forward back and remove all traces; returns the model."""
    for module in _recorded(walk(model)):
        binding.unbind(module)
    return model


def report(model: nn.Module) -> Report:
    """What is bound in ``model`` now, and what its last ``kernelize`` skipped and why.

    A kernel whose place somebody else took since then is skipped too.
    """
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


def _refuse_unknown(config: KernelConfig, discovery: Discovery) -> None:
    for entry in config.entries:
        if not discovery.targets[entry.layer] and not entry.is_optional:
            raise UnknownLayer(entry.layer, discovery.names)


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


def _judged(
    judge: Judge,
    model: nn.Module,
    config: KernelConfig,
    decide: Callable[..., tuple[list[Row], list[Decision]]],
    *,
    strict: bool,
) -> tuple[list[Row], list[Decision]]:
    """What a judge makes of the decisions for the candidates; it is no error that one of several does not fit."""
    candidates = config.candidates()
    alone = len(candidates) == 1
    rounds = [decide(each, strict=strict and alone) for each in candidates]
    if strict and not alone:
        _refuse_idle(config, [decision for _, decisions in rounds for decision in decisions])
    return rounds[0][0], list(judge(model, [decisions for _, decisions in rounds]))


def _forgiven(error: KernelHubError) -> bool:
    return not isinstance(error, VerificationError)


def _unknown_row(layer: str, names: Sequence[str], mode: Mode) -> Row:
    reason = f"no layer of this model answers to {layer!r}{did_you_mean(layer, names)}"
    return Row("", layer, reason=reason, mode=mode.value)


def _suspended(walked: Iterable[tuple[str, nn.Module]]) -> list[tuple[nn.Module, dict[str, Any]]]:
    return [(module, binding.suspend(module)) for module in _recorded(walked)]


def _resume(model: nn.Module, earlier: Iterable[tuple[nn.Module, Mapping[str, Any]]]) -> None:
    unkernelize(model)
    for module, state in earlier:
        vars(module).update(state)
    fusions = [fused for module, _ in earlier if (fused := binding.fused_of(module)) is not None]
    if fusions:
        elsewhere = joint.addresses_in_use(list(model.parameters()))
        for fused in dict.fromkeys(fusions):
            fused.join(elsewhere)


def _rows_later(rows: Sequence[Row], decisions: Sequence[Decision]) -> Callable[[], tuple[Row, ...]]:
    """The rows of a report, without a reference to the model: few calls read them all."""
    targets = [decision.target for decision in decisions]
    titles = [target.path if target.siblings is None else target.title for target in targets]
    facts = [decision.facts for decision in decisions]

    def made() -> tuple[Row, ...]:
        told = (fact._replace(module=title or ROOT) for title, each in zip(titles, facts, strict=True) for fact in each)
        return (*rows, *told)

    return made


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
    if record is None or record.forward is None:
        return
    title = (path if record.fused is None else record.fused.titled(path)) or ROOT
    reason = binding.displaced(module)
    changes: dict[str, Any] = {} if reason is None else {"state": "skipped", "reason": reason}
    yield from (row._replace(module=title, **changes) for row in record.rows)


def _stored_rows(path: str, module: nn.Module) -> Iterator[Row]:
    record = binding.record_of(module)
    for row in record.report or () if record is not None else ():
        inside = "" if row.module == ROOT else row.module
        known = ".".join(filter(None, (path, inside))) or ROOT
        yield row._replace(module=known if row.module else "")


def _log(model: nn.Module, result: Report, decisions: Sequence[Decision]) -> None:
    """One line a model; a warning when kernels were asked for and not one is bound."""
    idle = not any(decision.accepted for decision in decisions) and any(
        row.reason != LEFT_ALONE for row in result.skipped
    )
    level = logging.WARNING if idle else logging.INFO
    if _logger.isEnabledFor(level):
        _logger.log(level, "%s: %s", type(model).__name__, result.summary)
