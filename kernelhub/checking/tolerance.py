"""Tolerance: how far from the wide reference a kernel may be, derived from how far the plain layer itself is.

For each row (the last dimension) of an output or gradient:

- *noise* is the largest of three distances from the reference: of the plain layer in the kernel's dtype, and of two
  references whose inputs and weights were rounded once more. A row that was lucky counts with the noise of the median
  row. This is what one run of an honest computation in this dtype is off by.
- *allowed* is ``FACTOR`` times the noise, plus one rounding step of the row's largest number (the last rounding may go
  the other way), plus what another order of summation does: ``sqrt(n)`` rounding units of the dtype that sums are kept
  in, with ``n`` the longest dimension of the call; and the smallest number that the dtype has, below which it is blind.

``FACTOR`` is 4: an honest kernel may round twice as often as the plain layer, and the largest of many errors varies
from run to run by about as much again. The root mean square over the whole tensor is judged in the same way, which
catches an error that is small everywhere, such as a factor of 1.02 in bfloat16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

FACTOR = 4.0
_SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


@dataclass(frozen=True)
class Deviation:
    """The worst place of one output or gradient: distances from the reference, and what was allowed there."""

    name: str
    probe: str
    plain: float
    kernel: float
    allowed: float
    measure: str = "largest"

    @property
    def ratio(self) -> float:
        """Error over what is allowed: above 1 fails."""
        if self.allowed > 0:
            return self.kernel / self.allowed
        return math.inf if self.kernel > 0 else 0.0

    @property
    def ok(self) -> bool:
        return self.ratio <= 1

    def __str__(self) -> str:
        what = "root mean square error" if self.measure == "rms" else "error"
        told = f"{self.kernel:.3g}, {self.ratio:.3g} times the {self.allowed:.3g} that is allowed"
        return f"{self.name} with {self.probe}: {what} {told} (the plain layer's own error: {self.plain:.3g})"


@dataclass(frozen=True)
class Noise:
    """What the tolerance of one tensor is made of, per row: it can be kept and used on another machine."""

    rows: torch.Tensor
    scale: torch.Tensor
    rms: float
    step: float
    summing: float
    least: float

    @classmethod
    def of(
        cls,
        exact: torch.Tensor,
        plain: torch.Tensor,
        moved: Sequence[torch.Tensor],
        dtype: torch.dtype,
        longest: int,
    ) -> Noise:
        """The noise of ``plain`` (of ``dtype``, at worst), with sums of up to ``longest`` terms."""
        valid = _comparable(exact, plain)
        scale = _masked(as_rows(exact.abs()), valid).amax(-1)
        rows, rms = torch.zeros_like(scale), 0.0
        for other in (plain, *moved):  # one at a time: these may be the logits of a large vocabulary
            error = _error(other, exact, valid)
            rows, rms = torch.maximum(rows, error.amax(-1)), max(rms, _rms(error))
        relative = (rows / scale)[scale > 0]
        typical = float(relative.median()) if relative.numel() else 0.0
        summed = _SUMMED_IN.get(dtype, dtype)
        return cls(
            torch.maximum(rows, typical * scale).cpu(),
            scale.cpu(),
            rms,
            torch.finfo(dtype).eps,
            math.sqrt(longest) * torch.finfo(summed).eps / 2,
            torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps,
        )

    def judge(self, name: str, probe: str, exact: torch.Tensor, plain: torch.Tensor, kernel: torch.Tensor) -> Deviation:
        """Where the kernel is worst, by row or as a whole; all three tensors are on one device."""
        valid = _comparable(exact, plain)
        own = _error(plain, exact, valid)
        own_rows, own_rms = own.amax(-1), _rms(own)
        del own
        ours = _error(kernel, exact, valid)
        allowed = (FACTOR * self.rows + (self.step + self.summing) * self.scale + self.least).to(exact.device)
        errors = ours.amax(-1)
        ratios = (errors / allowed).nan_to_num(0.0)
        worst = int(ratios.argmax())
        largest = Deviation(name, probe, float(own_rows[worst]), float(errors[worst]), float(allowed[worst]))
        whole = _rms(_masked(as_rows(exact), valid))
        typical = FACTOR * self.rms + (self.step / 2 + self.summing) * whole + self.least
        mean = Deviation(name, probe, own_rms, _rms(ours), typical, "rms")
        return max(largest, mean, key=lambda deviation: deviation.ratio)


def all_finite(tensor: torch.Tensor) -> bool:
    """Is every number finite? Told by their sum where that is enough."""
    return bool(tensor.sum(dtype=torch.float64).isfinite()) or bool(tensor.isfinite().all())


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.reshape(1, 1)


def _comparable(exact: torch.Tensor, plain: torch.Tensor) -> torch.Tensor | None:
    """By rows, where the plain layer has a number to compare with; None where it has one everywhere."""
    if all_finite(exact) and all_finite(plain):
        return None
    return as_rows(exact.isfinite() & plain.to(exact.device).isfinite())


def _masked(rows: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    return rows if valid is None else rows.where(valid, 0)


def _error(other: torch.Tensor, exact: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """The distance from the reference, by rows; 0 where there is nothing to compare."""
    return _masked(as_rows((other.to(exact.device, exact.dtype) - exact).abs_()), valid)


def _rms(tensor: torch.Tensor) -> float:
    if not tensor.numel():
        return 0.0
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) / math.sqrt(tensor.numel())
