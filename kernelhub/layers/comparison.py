"""Comparison: the same model with and without kernels, on the same data: numbers, time, memory."""

from __future__ import annotations

import copy
import statistics
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from kernelhub.layers.memory import peak_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    Batch = Mapping[str, torch.Tensor]

# How much further from the float64 result than the plain layers a kernel may be: another order of summation
# moves results by about the rounding error that the plain layers have themselves.
_ALLOWED_RATIO = 4.0


@dataclass(frozen=True)
class Deviation:
    """Largest absolute distance from the same computation in float64, of the plain model and with kernels.

    ``scale`` is the largest absolute value of the float64 result, ``epsilon`` the rounding unit of the dtype, and
    ``noise`` what rounding typically does in this model: the plain model's error relative to ``scale``, the median
    over all gradients, as a single tensor's own error may be small by luck.
    """

    name: str
    plain: float
    kernels: float
    between: float
    scale: float
    epsilon: float
    noise: float = 0.0

    @property
    def allowed(self) -> float:
        """A few times the plain layers' own error, and at least one rounding step of the largest value."""
        return _ALLOWED_RATIO * max(self.plain, self.noise * self.scale) + self.epsilon * self.scale

    @property
    def ok(self) -> bool:
        return self.kernels <= self.allowed


@dataclass(frozen=True)
class Numbers:
    """What one training step computes: the logits in evaluation mode, the loss and every parameter's gradient."""

    logits: torch.Tensor
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]

    def gradient(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """A parameter's gradient; zeros where the computation gave none."""
        return self.gradients.get(name, torch.zeros_like(like, dtype=self.logits.dtype))


@dataclass(frozen=True)
class Cost:
    """Seconds a training step takes (median), and the peak of memory above the weights in bytes."""

    seconds: float
    peak_bytes: int


def compare_numbers(plain: nn.Module, bound: nn.Module, batch: Batch) -> list[Deviation]:
    """Judge a bound model against the plain one, both against the plain model in float64."""
    exact = numbers(copy.deepcopy(plain).double(), batch, _float64_loss)
    ours, theirs = numbers(bound, batch, _own_loss), numbers(plain, batch, _own_loss)
    gradients = [
        _deviation(f"gradient of {name}", gradient, theirs.gradient(name, gradient), ours.gradient(name, gradient))
        for name, gradient in exact.gradients.items()
    ]
    noise = statistics.median(deviation.plain / (deviation.scale or 1.0) for deviation in gradients)
    return [
        _deviation("logits", exact.logits, theirs.logits, ours.logits),
        _deviation("loss", exact.loss, theirs.loss, ours.loss),
        *(replace(deviation, noise=noise) for deviation in gradients),
    ]


def _own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss that a model computes by itself, or the mean of its output where it computes none."""
    output = model(**batch)
    loss: torch.Tensor = output.float().mean() if isinstance(output, torch.Tensor) else output.loss
    return loss


def _float64_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The causal language modelling loss from logits: transformers' own loss works in float32 whatever the model."""
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def numbers(model: nn.Module, batch: Batch, loss_of: Callable[[nn.Module, Batch], torch.Tensor]) -> Numbers:
    """One evaluation and one training forward and backward; the model is left in training mode, without gradients."""
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"]).logits.detach()
    model.train()
    model.zero_grad(set_to_none=True)
    loss = loss_of(model, batch)
    torch.autograd.backward(loss)
    gradients = {
        name: parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return Numbers(logits, loss.detach(), gradients)


def compare_costs(
    models: Mapping[str, nn.Module], batch: Batch, steps: int, advance: Callable[[], object]
) -> dict[str, Cost]:
    """Train each model a little, taking turns so that all meet the same machine; ``advance`` is called per step."""
    trainers = {name: _Trainer(model, batch) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    peaks: dict[str, int] = {}
    for name, trainer in trainers.items():
        trainer.step()  # warm-up: compilation, allocator
        peaks[name] = peak_memory(trainer.step, trainer.device)
    for _ in range(steps):
        for name, trainer in trainers.items():
            seconds[name].append(trainer.timed_step())
            advance()
    return {name: Cost(statistics.median(seconds[name]), peaks[name]) for name in models}


class _Trainer:
    """A model with its optimizer and its batch."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        self._model = model.train()
        self._batch = batch
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.device = next(model.parameters()).device

    def step(self) -> Any:
        self._optimizer.zero_grad(set_to_none=True)
        loss = _own_loss(self._model, self._batch)
        torch.autograd.backward(loss)
        self._optimizer.step()
        return loss

    def timed_step(self) -> float:
        self._synchronize()
        start = time.perf_counter()
        self.step()
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _deviation(name: str, exact: torch.Tensor, plain: torch.Tensor, kernels: torch.Tensor) -> Deviation:
    def distance(left: torch.Tensor, right: torch.Tensor) -> float:
        return (left.double() - right.double()).abs().max().item()

    epsilon = torch.finfo(plain.dtype).eps
    scale = exact.abs().max().item()
    return Deviation(name, distance(plain, exact), distance(kernels, exact), distance(kernels, plain), scale, epsilon)
