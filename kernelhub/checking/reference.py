"""Reference: the plain layer in a wider dtype, and how far its result moves when its inputs are rounded once more.

Layers cast inside (``hidden_states.to(torch.float32)``), so widening weights and inputs alone would change little:
while the reference runs, every cast to a narrower floating dtype goes to the wide one instead.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from kernelhub.checking.call import is_mask
from kernelhub.checking.evaluation import evaluate
from kernelhub.layers.kernelize import unkernelize

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernelhub.checking.call import Call
    from kernelhub.checking.subject import Subject

_HALVES = (torch.float16, torch.bfloat16)
_MOST_BYTES = 4 << 30  # of outputs and weights in float64; above, half precision is judged against float32
_DRAWS = 2


@dataclass(frozen=True)
class Reference:
    """The numbers of the plain layer in a wide dtype; ``moved`` holds them again for inputs rounded once more."""

    exact: Mapping[str, torch.Tensor]
    moved: tuple[Mapping[str, torch.Tensor], ...]


def wide_dtype(dtype: torch.dtype, numbers: int) -> torch.dtype:
    """The dtype to judge ``dtype`` by: float64, but float32 for half precision where that would take too much memory.

    ``numbers`` is how many numbers go in and come out.
    """
    return torch.float32 if dtype in _HALVES and 8 * numbers > _MOST_BYTES else torch.float64


class Referee:
    """Evaluates the plain layer of a subject in ``wide``; ``unit`` is the rounding unit of the dtype that is judged.

    The wide copies of the layer are made once.
    """

    def __init__(self, subject: Subject, wide: torch.dtype, unit: float) -> None:
        self.wide = wide
        self._roundings = [None, *(_Rounding(draw + 1, unit) for draw in range(_DRAWS))]
        self._twins = [subject.with_module(_widened(subject.module, wide, each)) for each in self._roundings]

    def reference(self, call: Call, options: Mapping[str, Any]) -> Reference:
        """The numbers for one call; ``options`` are those of ``evaluate``."""
        numbers = [
            self._numbers(twin, call.map(partial(_wide_tensor, self.wide, rounding)), options)
            for twin, rounding in zip(self._twins, self._roundings, strict=True)
        ]
        return Reference(numbers[0], tuple(numbers[1:]))

    def _numbers(self, twin: Subject, call: Call, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        device_type = "cpu" if call.first is None else call.first.device.type
        with torch.autocast(device_type, enabled=False), _NoNarrowing(self.wide):
            return evaluate(twin.run_plain, call, twin.module, **options).numbers


class _Rounding:
    """Moves numbers by up to one rounding unit of their size, as if they were rounded once more."""

    def __init__(self, seed: int, unit: float) -> None:
        self._seed = seed
        self._unit = unit
        self._generators: dict[torch.device, torch.Generator] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        device = tensor.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        drawn = torch.rand(tensor.shape, generator=self._generators[device], device=device, dtype=tensor.dtype)
        return tensor * (1 + self._unit * (2 * drawn - 1))


def _wide_tensor(wide: torch.dtype, rounding: _Rounding | None, _: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor.detach().clone()
    widened = tensor.detach().to(wide, copy=True)
    return widened if rounding is None or is_mask(tensor) else rounding(widened)


def _widened(module: Any, wide: torch.dtype, rounding: _Rounding | None) -> Any:
    if module is None:
        return None
    twin = unkernelize(copy.deepcopy(module)).to(wide)
    if rounding is not None:
        with torch.no_grad():
            for parameter in twin.parameters():
                if parameter.is_floating_point():
                    parameter.copy_(rounding(parameter))
    return twin


class _NoNarrowing(TorchFunctionMode):
    """Turns every request for a narrower floating dtype into one for ``wide``."""

    def __init__(self, wide: torch.dtype) -> None:
        super().__init__()
        narrow = (*_HALVES, torch.float32) if wide is torch.float64 else _HALVES
        casts = {torch.float16: torch.Tensor.half, torch.bfloat16: torch.Tensor.bfloat16}
        casts[torch.float32] = torch.Tensor.float
        self._wide = wide
        self._narrow = frozenset(narrow)
        self._casts = frozenset(casts[dtype] for dtype in narrow)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._casts:
            return args[0].to(self._wide)
        widened = {key: self._dtype(value) for key, value in (kwargs or {}).items()}
        return func(*map(self._dtype, args), **widened)

    def _dtype(self, value: Any) -> Any:
        return self._wide if isinstance(value, torch.dtype) and value in self._narrow else value
