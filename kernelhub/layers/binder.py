"""Binder: gives layers the forwards that were decided on. Layers with the same kernels share one function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kernelhub.layers import binding, choosing, fusing, joint
from kernelhub.layers.binding import BoundLayer
from kernelhub.layers.fitting import replacement
from kernelhub.layers.outcome import NO_KERNELS
from kernelhub.mode import SERVED, Mode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import FunctionType

    from torch import nn

    from kernelhub.layers.decision import Decision
    from kernelhub.layers.outcome import Kernel

    Forward = Callable[..., Any]


class _Guards(NamedTuple):
    """What is put around a kernel, and the forward that it makes way for."""

    original: Any
    sharded: bool
    on_device: bool


class Binder:
    """Binds what was decided. The functions are shared, so that torch.compile compiles each once."""

    def __init__(self) -> None:
        self._forwards: dict[tuple[object, ...], FunctionType] = {}
        self._records: dict[tuple[object, ...], BoundLayer] = {}
        self._before: tuple[object, object, BoundLayer | None] = None, None, None
        self._passing: dict[Any, FunctionType] = {}
        self._among_processes = choosing.among_processes()
        self._several_devices = choosing.several_cuda_devices()

    def bind_all(self, model: nn.Module, decisions: Iterable[Decision]) -> None:
        groups: dict[int, list[Decision]] = {}
        fusions: list[fusing.Fused] = []
        for decision in decisions:
            if decision.kernels is NO_KERNELS or self._bound_as_before(decision):
                continue
            target = decision.target
            if decision.layouts:
                fusions.append(self._fuse(decision))
            elif target.function:
                groups.setdefault(id(target.module), []).append(decision)
            elif decision.is_loss:
                binding.bind_loss(target.module, _loss(decision, target.module), decision.facts)
            elif binding.RECORD not in target.module.__dict__:  # a function that layers share comes once for each
                binding.bind_as(target.module, self._record(decision))
        for group in groups.values():
            rows = tuple([fact for decision in group for fact in decision.facts])
            binding.bind(group[0].target.module, self._forward(group), rows)
        if fusions:
            elsewhere = joint.addresses_in_use(list(model.parameters()))
            for fused in fusions:
                fused.join(elsewhere)

    def forward(self, decision: Decision) -> FunctionType:
        """The function for one decision about a layer."""
        return self._forward([decision])

    def _bound_as_before(self, decision: Decision) -> bool:
        """Bind a layer as the one before, where that was decided alike; most layers are."""
        facts, kernels, record = self._before
        if record is None or decision.facts is not facts or decision.kernels is not kernels:
            return False
        module = decision.target.module
        if binding.RECORD in module.__dict__ or choosing.has_split_weight(module):
            return False
        binding.bind_as(module, record)
        return True

    def _record(self, decision: Decision) -> BoundLayer:
        """What is left in a layer whose whole forward is replaced; layers that are bound alike share it."""
        sharded, on_device = self._surroundings(decision.target.module)
        key = (id(decision.facts), id(decision.kernels), sharded, on_device)
        record = self._records.get(key)
        if record is None:
            record = BoundLayer(binding.FORWARD, self._forward([decision]), rows=decision.facts)
            self._records[key] = record
        if not (sharded or self._several_devices):
            self._before = decision.facts, decision.kernels, record
        return record

    def _fuse(self, decision: Decision) -> fusing.Fused:
        target, layouts = decision.target, [layout for _, layout in decision.layouts]
        if target.siblings is None:
            fused = fusing.Fused(None, (), (target.module,), layouts)
        else:
            fused = fusing.Fused(target.siblings.parent, target.siblings.names, target.siblings.modules, layouts)
        binding.bind(target.module, self._forward([decision]), decision.facts, fused)
        for layer in target.modules[1:]:
            own: Any = type(layer).forward
            if own not in self._passing:
                self._passing[own] = binding.named_forward(cast("FunctionType", fusing.passing(own)))
            binding.bind(layer, self._passing[own], (), fused)
        return fused

    def _surroundings(self, module: nn.Module) -> tuple[bool, bool]:
        """May a weight be sharded, and has the device of the tensors to be entered?"""
        sharded = self._among_processes or choosing.has_split_weight(module)
        return sharded, self._several_devices and _on_cuda(module)

    def _forward(self, group: Sequence[Decision]) -> FunctionType:
        """The function for the kernels of decisions about one module."""
        module = group[0].target.module
        guards = _Guards(type(module).forward, *self._surroundings(module))
        parts = [(each.target.function, len(each.target.modules), bool(each.layouts), each.kernels) for each in group]
        key = (guards, *parts)
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
    if len(group[0].target.modules) > 1:
        guards = guards._replace(original=fusing.alone(guards.original))
    made: dict[tuple[Kernel | None, ...], Forward] = {}
    for kernels in zip(*(decision.kernels for decision in group), strict=True):
        if kernels not in made:
            made[kernels] = _guarded(guards, _plain(guards, group, kernels))
    forwards = (made[kernels] for kernels in zip(*(decision.kernels for decision in group), strict=True))
    return binding.named_forward(cast("FunctionType", choosing.by_mode(*forwards)))


def _plain(guards: _Guards, group: Sequence[Decision], kernels: Sequence[Kernel | None]) -> Forward:
    """What a module runs in one mode: its own forward, one with other functions inside, or that of a kernel."""
    pairs = [(decision.target, kernel) for decision, kernel in zip(group, kernels, strict=True) if kernel is not None]
    original = cast("FunctionType", guards.original)
    if not pairs:
        return original
    if pairs[0][0].function:
        replaced = {target.function: replacement(target, kernel) for target, kernel in pairs}
        return binding.forward_calling(original, replaced)
    forward = _of_kernel(pairs[0][1], original)
    laid_out = [kernel for kernel, _ in group[0].layouts]
    return fusing.first(laid_out.index(pairs[0][1]), forward, original) if pairs[0][1] in laid_out else forward


def _of_kernel(kernel: Kernel, original: FunctionType) -> Forward:
    if not isinstance(kernel.value, type):
        return binding.forward_from(kernel.value)
    forward = cast("FunctionType", kernel.value.forward)  # type: ignore[attr-defined]
    if kernel.spelled:
        forward = binding.spelling(forward, dict(kernel.spelled))
    return binding.answering_as(binding.named_forward(forward), original)


def _guarded(guards: _Guards, forward: Forward) -> Forward:
    original: Forward = guards.original
    if forward is original:
        return original
    if guards.on_device:
        forward = choosing.on_device_of_tensors(forward)
    return choosing.when_whole(forward, original) if guards.sharded else forward


def _on_cuda(module: nn.Module) -> bool:
    first = next(module.parameters(), None)
    return first is None or first.is_cuda
