"""Kernels for the layers of ``small.py``: wrong ones, each in its own way, honest ones, and slow ones.

The wrong ones are right wherever they are not wrong: they would pass a comparison of one output with ``allclose``.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.nn import functional


def rms(x: torch.Tensor, weight: torch.Tensor | float, eps: float) -> torch.Tensor:
    """The right answer, in the dtype of ``x``."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * normed).to(x.dtype)


class Right(nn.Module):
    can_torch_compile = True

    def forward(self: Any, x: torch.Tensor) -> Any:
        return rms(x, self.weight, self.eps)


# Wrong norms


class IgnoresEps(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        return rms(x, self.weight, 1e-30)


class IgnoresWeight(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        return rms(x, 1.0 + 0.0 * self.weight, self.eps)


class InPlace(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        out = rms(x, self.weight, self.eps)
        x.data.mul_(0.5)
        return out


class ChangesWeight(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        out = rms(x, self.weight.clone(), self.eps)
        self.weight.data[0] += 1e-3
        return out


class HalfInside(nn.Module):
    """Overflows beyond 65504."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        if x.abs().max() > 65504 if x.numel() else False:
            return rms(x.half().to(x.dtype), self.weight, self.eps)
        return rms(x, self.weight, self.eps)


class Transposed(nn.Module):
    """The right numbers in another order in memory."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        return rms(x, self.weight, self.eps).transpose(0, 1).contiguous().transpose(0, 1)


class WrongShape(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        return rms(x, self.weight, self.eps).flatten(0, 1)


class WrongDtype(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        return rms(x, self.weight, self.eps).double()


class MisreadsStrides(nn.Module):
    """Takes the memory as if it were contiguous."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        plain = x if x.is_contiguous() else x.as_strided(x.shape, torch.empty(x.shape).stride())
        return rms(plain, self.weight, self.eps)


class NoEmpty(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        if not x.numel():
            raise RuntimeError("invalid configuration argument")
        return rms(x, self.weight, self.eps)


class NoTail(nn.Module):
    """Blocks of four rows: what does not fill one is left out."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        rows = rms(x, self.weight, self.eps).reshape(-1, x.shape[-1])
        whole = len(rows) // 4 * 4
        return torch.cat([rows[:whole], rows[whole:] * 0]).view(x.shape)


class NoLastRow(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        rows = rms(x, self.weight, self.eps).reshape(-1, x.shape[-1])
        return torch.cat([rows[:-1], rows[-1:] * 0]).view(x.shape)


_calls = itertools.count()


class Nondeterministic(nn.Module):
    """The last bit differs from call to call, as when threads add in the order in which they finish."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        return rms(x, self.weight, self.eps) * (1 + 2.4e-7 * (next(_calls) % 2))


class WrongUnderAutocast(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        scale = 1.1 if torch.is_autocast_enabled("cpu") else 1.0
        return rms(x, self.weight, self.eps) * scale


class DtypeUnderAutocast(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        out = rms(x, self.weight, self.eps)
        return out.bfloat16() if torch.is_autocast_enabled("cpu") else out


_first_rows: dict[int, int] = {}
_seen: Counter[int] = Counter()


class StaleCache(nn.Module):
    """Keeps the scratch memory of the first shape that it sees."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        known = _first_rows.setdefault(id(self), x[..., 0].numel())
        rows = rms(x, self.weight, self.eps).reshape(-1, x.shape[-1])
        return torch.cat([rows[:known], rows[known:] * 0]).view(x.shape)


class WrongInHalf(nn.Module):
    """Accumulates in the dtype of its input."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        if x.dtype is torch.bfloat16:
            total = torch.zeros_like(x[..., :1])
            for column in x.detach().unbind(-1):
                total = total + column.square().unsqueeze(-1)
            return self.weight * (x * torch.rsqrt(total / x.shape[-1] + self.eps)).to(x.dtype)
        return rms(x, self.weight, self.eps)


class NanForZeros(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        out = rms(x, self.weight, self.eps)
        return out.masked_fill((x == 0).all(-1, keepdim=True), float("nan"))


class WrongSecondCall(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        _seen[id(self)] += 1
        return rms(x, self.weight, self.eps) * (1.0 if _seen[id(self)] == 1 else 1.001)


class WrongWithoutGradients(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        out = rms(x, self.weight, self.eps)
        return out if torch.is_grad_enabled() else out * 1.01


class _Norm(torch.autograd.Function):
    """A norm whose gradients are scaled by two factors; None for no gradient at all."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, factors: tuple[float | None, float | None]
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.factors = eps, factors
        return rms(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = (each.detach().requires_grad_() for each in ctx.saved_tensors)
        with torch.enable_grad():
            found = torch.autograd.grad(rms(x, weight, ctx.eps), (x, weight), grad)
        scaled = (None if factor is None else each * factor for each, factor in zip(found, ctx.factors, strict=True))
        return (*scaled, None, None)


_norm: Any = _Norm.apply


class ScalesGradient(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        return _norm(x, self.weight, self.eps, (1.02, 1.0))


class ScalesWeightGradient(nn.Module):
    """Wrong only in backward, and only for the weight."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        return _norm(x, self.weight, self.eps, (1.0, 0.5))


class NoWeightGradient(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        return _norm(x, self.weight, self.eps, (1.0, None))


class NoGradientAtAll(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        return rms(x, self.weight, self.eps).detach()


WRONG_NORMS = (
    IgnoresEps,
    IgnoresWeight,
    InPlace,
    ChangesWeight,
    HalfInside,
    Transposed,
    WrongShape,
    WrongDtype,
    MisreadsStrides,
    NoEmpty,
    NoTail,
    NoLastRow,
    Nondeterministic,
    WrongUnderAutocast,
    DtypeUnderAutocast,
    StaleCache,
    WrongInHalf,
    NanForZeros,
    WrongSecondCall,
    WrongWithoutGradients,
    ScalesGradient,
    ScalesWeightGradient,
    NoWeightGradient,
    NoGradientAtAll,
)


# Wrong in other layers


class WrongActivation(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class SwapsProjections(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        return self.down_proj(functional.gelu(self.up_proj(x)) * self.gate_proj(x))


class ForgetsGradientOfUp(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        return self.down_proj(functional.gelu(self.gate_proj(x)) * self.up_proj(x).detach())


def swaps_sines(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def turned(x: torch.Tensor, sign: float) -> torch.Tensor:
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat((-high, low), -1) * sin * sign

    return turned(q, 1.0), turned(k, -1.0)


def mean_over_all(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
    """Counts masked tokens in the mean."""
    shifted = functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
    total = functional.cross_entropy(logits.float().view(-1, vocab_size), shifted, ignore_index=-100, reduction="sum")
    return total / shifted.numel()


class UnshiftedHead(nn.Module):
    """A whole head whose loss compares each token with itself."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels")
        if labels is not None and self.training:
            kwargs["labels"] = functional.pad(labels, (1, 0), value=-100)[..., :-1]
        return type(self).forward(self, *args, **kwargs)


# Honest norms: the same mathematics in another order


class ManyPasses(nn.Module):
    """Adds column by column."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        wide: Any = x.float()
        total: Any = 0.0
        for column in wide.unbind(-1):
            total = total + column.square()
        return (self.weight * (wide * torch.rsqrt(total / x.shape[-1] + self.eps).unsqueeze(-1))).to(x.dtype)


class Backwards(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        mean = x.float().flip(-1).square().mean(-1, keepdim=True)
        return (self.weight * (x.float() * torch.rsqrt(mean + self.eps))).to(x.dtype)


class Blocked(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        parts = [part.square().sum(-1, keepdim=True) for part in torch.split(x.float(), 3, -1)]
        mean = torch.stack(parts).sum(0) / x.shape[-1]
        return (self.weight * (x.float() * torch.rsqrt(mean + self.eps))).to(x.dtype)


class ByNorm(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        norm = torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True)
        return (self.weight * (x.float() * torch.rsqrt(norm * norm / x.shape[-1] + self.eps))).to(x.dtype)


class ByDivision(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        root = (x.float().square().mean(-1, keepdim=True) + self.eps).sqrt()
        return (self.weight * (x.float() / root)).to(x.dtype)


class ScaledFirst(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        inverse = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return (x.float() * self.weight * inverse).to(x.dtype)


class WithMatmul(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        wide = x.float()
        mean = (wide.unsqueeze(-2) @ wide.unsqueeze(-1)).squeeze(-1) / x.shape[-1]
        return (self.weight * (wide * torch.rsqrt(mean + self.eps))).to(x.dtype)


class InDouble(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        wide = x.double()
        return (self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps))).to(x.dtype)


class Library(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class HandwrittenBackward(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        return _norm(x, self.weight, self.eps, (1.0, 1.0))


class RowByRow(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        rows = [rms(row, self.weight, self.eps) for row in torch.split(x.reshape(-1, x.shape[-1]), 5)]
        return torch.cat(rows).view(x.shape)


class OverMantissa(nn.Module):
    """Scales by a power of two first, as kernels do against overflow."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        wide = x.float() / 16
        mean = wide.square().mean(-1, keepdim=True) * 256
        return (self.weight * (wide * torch.rsqrt(mean + self.eps) * 16)).to(x.dtype)


HONEST_NORMS = (
    ManyPasses,
    Backwards,
    Blocked,
    ByNorm,
    ByDivision,
    ScaledFirst,
    WithMatmul,
    InDouble,
    Library,
    HandwrittenBackward,
    RowByRow,
    OverMantissa,
)


# Slow norms: right, and never worth it


class Sleeps(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        time.sleep(1e-4)
        return rms(x, self.weight, self.eps)


class ComputesTwice(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        return rms(x, self.weight, self.eps) + 0 * rms(x, self.weight, self.eps)


SLOW_NORMS = (Sleeps, ComputesTwice, ManyPasses, RowByRow, WithMatmul, HandwrittenBackward)


# Right, for models of transformers


class NormOfQwen(nn.Module):
    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        wide = hidden_states.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * normed.to(hidden_states.dtype)


def rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def turned(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat((-high, low), -1) * sin

    return turned(q), turned(k)


class PlainGated(nn.Module):
    def forward(self: Any, x: torch.Tensor) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
