"""Decision: what shall become of each layer, before anything is changed."""

from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from kernelhub.config import ANY_DEVICE
from kernelhub.errors import ContractMismatch, KernelHubError
from kernelhub.layers.binding import occupied
from kernelhub.layers.contract import function_mismatch, mismatch, mode_mismatch
from kernelhub.layers.report import Row
from kernelhub.layers.symbol import LoadedSymbol, PlannedSymbol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import nn

    from kernelhub.config import KernelChoice, LayerEntry
    from kernelhub.layers.discovery import Target
    from kernelhub.mode import Mode


_PARALLEL = 8
LEFT_ALONE = "left alone by the config"


@dataclass(frozen=True, eq=False)
class Decision:
    """One row of the report to be. ``error`` is what a strict call raises if its entry binds nothing at all."""

    target: Target
    row: Row
    value: Any = None
    error: KernelHubError | None = None

    @property
    def accepted(self) -> bool:
        return self.row.state != "skipped"

    def skip(self, reason: str) -> Decision:
        return replace(self, row=replace(self.row, state="skipped", reason=reason), value=None)


class Decider:
    """Decides for the layers of one model. ``obtain`` is asked once for each kernel and backend.

    ``forgiven`` is the class of errors that make a layer skipped; others leave ``decide`` as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        mode: Mode,
        backend_of: Callable[[torch.device], str],
        obtain: Callable[[KernelChoice, str], LoadedSymbol | PlannedSymbol],
        forgiven: Callable[[KernelHubError], bool],
    ) -> None:
        self._mode = mode
        self._backend_of = backend_of
        self._obtain = obtain
        self._forgiven = forgiven
        self._device = next(_devices(model), torch.device("cpu"))
        self._obtained: dict[tuple[KernelChoice, str], LoadedSymbol | PlannedSymbol | KernelHubError] = {}

    def decide(self, pairs: Sequence[tuple[LayerEntry, Target]]) -> list[Decision]:
        """What becomes of each layer, with the reason when it is skipped."""
        places = [self._place(entry, target) for entry, target in pairs]
        self._obtain_all(
            place
            for place, (_, target) in zip(places, pairs, strict=True)
            if not isinstance(place, str) and _obstacle(target) is None
        )
        return [self._decision(entry, target, place) for (entry, target), place in zip(pairs, places, strict=True)]

    def _obtain_all(self, wanted: Iterable[tuple[KernelChoice, str]]) -> None:
        """Obtain each kernel once, several at a time: each may cost requests."""
        distinct = list(dict.fromkeys(wanted))
        if distinct:
            with ThreadPoolExecutor(min(len(distinct), _PARALLEL), "kernelhub-obtain") as pool:
                self._obtained.update(zip(distinct, pool.map(self._attempt, distinct), strict=True))

    def _decision(self, entry: LayerEntry, target: Target, place: tuple[KernelChoice, str] | str) -> Decision:
        decision = Decision(target, Row(target.title, entry.layer, mode=self._mode.value))
        return decision.skip(place) if isinstance(place, str) else self._with_kernel(decision, *place)

    def _place(self, entry: LayerEntry, target: Target) -> tuple[KernelChoice, str] | str:
        """The kernel and the backend for a layer, or the reason why it gets none."""
        if target.owner:
            return f"served by the entry {target.owner!r}"
        device = _device_of(target.module, self._device)
        if isinstance(device, str):
            return device
        backend = self._backend_of(device)
        choice = entry.choose(backend, self._mode)
        return _unchosen(entry, backend, self._mode) if choice is None else (choice, backend)

    def _with_kernel(self, decision: Decision, choice: KernelChoice, backend: str) -> Decision:
        named = replace(decision, row=replace(decision.row, kernel=str(choice), symbol=choice.request.symbol or ""))
        if reason := _obstacle(decision.target):
            return _refused(named, reason)
        found = self._obtained[choice, backend]
        if isinstance(found, KernelHubError):
            return replace(named.skip(str(found)), error=found)
        return self._checked(named, found)

    def _attempt(self, pair: tuple[KernelChoice, str]) -> LoadedSymbol | PlannedSymbol | KernelHubError:
        try:
            return self._obtain(*pair)
        except KernelHubError as error:
            if not self._forgiven(error):
                raise
            return error

    def _checked(self, decision: Decision, found: LoadedSymbol | PlannedSymbol) -> Decision:
        row = replace(decision.row, kernel=found.kernel, variant=found.variant, symbol=found.symbol)
        if isinstance(found, PlannedSymbol):
            return replace(decision, row=replace(row, state="would bind"))
        decision = replace(decision, row=replace(row, state="bound"), value=found.value)
        if reason := _misfit(found.value, decision.target):
            return _refused(decision, reason)
        reason = mode_mismatch(found.value, self._mode)
        return decision.skip(reason) if reason else decision


def _obstacle(target: Target) -> str | None:
    """Why a layer cannot be bound whatever the kernel, or None."""
    return target.misfit or occupied(target.module)


def settle(decisions: Sequence[Decision]) -> list[Decision]:
    """Skip functions inside a forward that is replaced as a whole: only one of the two can take effect."""
    whole = {id(each.target.module): each.row.layer for each in decisions if each.accepted and not each.target.function}
    return [
        decision.skip(f"its whole forward is replaced by the entry {whole[id(decision.target.module)]!r}")
        if decision.accepted and decision.target.function and id(decision.target.module) in whole
        else decision
        for decision in decisions
    ]


def original_of(target: Target) -> Any:
    """The function that a function target replaces."""
    return inspect.unwrap(type(target.module).forward).__globals__[target.function]


def _misfit(kernel: Any, target: Target) -> str | None:
    return function_mismatch(kernel, original_of(target)) if target.function else mismatch(kernel, target.module)


def _refused(decision: Decision, reason: str) -> Decision:
    target, row = decision.target, decision.row
    layer = type(target.module).__name__
    kernel = f"{row.kernel}:{row.symbol}" if row.variant else row.kernel
    return replace(decision.skip(reason), error=ContractMismatch(target.title, layer, kernel, reason))


def _unchosen(entry: LayerEntry, backend: str, mode: Mode) -> str:
    table = dict(entry.choices)
    device = backend if backend in entry.devices else ANY_DEVICE
    if any((device, step) in table for step in mode.lookup):
        return LEFT_ALONE
    if device in entry.devices:
        return f"the config has no kernel for {backend} in {mode.value} mode"
    return f"the config has no kernel for {backend}"


def _device_of(module: nn.Module, fallback: torch.device) -> torch.device | str:
    """The device of a module, or the reason why it has none to choose a kernel for."""
    devices = {device.type: device for device in _devices(module)} or {fallback.type: fallback}
    if "meta" in devices:
        return "on the meta device: it has no weights yet"
    if len(devices) > 1:
        return f"its parameters are on several kinds of device ({', '.join(devices)})"
    return next(iter(devices.values()))


def _devices(module: nn.Module) -> Iterator[torch.device]:
    parameters = (parameter.device for parameter in module.parameters())
    first = next(parameters, None)
    if first is None:
        yield from (buffer.device for buffer in module.buffers())
    else:
        yield first
        yield from parameters
