"""Evaluation: one forward and backward of a plain layer or a kernel on one call, with its traces on the inputs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kernelhub.checking.nest import tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn

    from kernelhub.checking.call import Call

_SEED = 20_260


@dataclass(frozen=True)
class Evaluation:
    """What came out: outputs and gradients by name, and which inputs or parameters were written to.

    A gradient is None where autograd found no way to that input; ``tracked`` names the outputs that have a history.
    """

    outputs: Mapping[str, torch.Tensor]
    gradients: Mapping[str, torch.Tensor | None] = field(default_factory=dict)
    tracked: frozenset[str] = frozenset()
    modified: tuple[str, ...] = ()

    @property
    def numbers(self) -> dict[str, torch.Tensor]:
        """All that has a value, under names for people."""
        found = {f"gradient of {name}": each for name, each in self.gradients.items() if each is not None}
        return {**self.outputs, **found}


def evaluate(
    run: Callable[[Call], Any],
    call: Call,
    module: nn.Module | None,
    *,
    differentiate: bool,
    training: bool,
    only: frozenset[str] = frozenset(),
) -> Evaluation:
    """Run once on the tensors of ``call``, which are not copied: ``modified`` tells what was done to them.

    Args:
        run: makes the call.
        module: its floating parameters that require gradients are differentiated too.
        differentiate: run backward from seeded random gradients of the outputs; else run under ``no_grad``.
        training: what the ``training`` flag of the module says meanwhile.
        only: names of the outputs to differentiate; empty: all that have a history.
    """
    inputs = {name: each for name, each in call.tensors.items() if each.is_floating_point()}
    leaves = {name: each for name, each in inputs.items() if differentiate and name in call.differentiable}
    parameters = _parameters(module) if differentiate else {}
    watched = {**call.tensors, **({} if module is None else dict(module.named_parameters()))}
    before = {name: each.detach().clone() for name, each in watched.items()}
    for leaf in leaves.values():
        leaf.requires_grad_()
    try:
        with mode_of_module(module, training), _seeded(call), torch.set_grad_enabled(differentiate):
            outputs = tensors(run(call))
            tracked = frozenset(name for name, each in outputs.items() if each.requires_grad)
            chosen = {name: outputs[name] for name in outputs if name in tracked and (not only or name in only)}
            gradients = _gradients(chosen, {**leaves, **parameters}) if differentiate else {}
    finally:
        for leaf in leaves.values():
            leaf.requires_grad_(False)
    modified = tuple(name for name, each in watched.items() if not same_bits(each, before[name]))
    return Evaluation({name: each.detach() for name, each in outputs.items()}, gradients, tracked, modified)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Are two tensors equal, NaN being equal to itself?"""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if bool(torch.equal(left, right)):
        return True
    return left.is_floating_point() and bool(((left == right) | (left.isnan() & right.isnan())).all())


def _parameters(module: nn.Module | None) -> dict[str, torch.Tensor]:
    named = [] if module is None else list(module.named_parameters())
    return {name: each for name, each in named if each.requires_grad and each.is_floating_point()}


def _gradients(
    outputs: Mapping[str, torch.Tensor], leaves: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor | None]:
    if not outputs or not leaves:
        return {}
    upper = [upstream(each, index) for index, each in enumerate(outputs.values())]
    before = [each.clone() for each in upper]
    found = torch.autograd.grad(list(outputs.values()), list(leaves.values()), upper, allow_unused=True)
    if not all(map(same_bits, upper, before)):
        raise RuntimeError("its backward writes into the gradient that it is given")
    return dict(zip(leaves, found, strict=True))


def upstream(output: torch.Tensor, index: int) -> torch.Tensor:
    """The gradient that arrives at an output: 1 for a loss, else the same random numbers whatever the dtype."""
    if output.dim() == 0:
        return torch.ones_like(output)
    generator = torch.Generator(output.device).manual_seed(_SEED + index)
    # Multiples of 1/64 up to 2: every dtype holds them exactly.
    drawn = torch.randint(-128, 129, output.shape, generator=generator, device=output.device)
    return drawn.to(output.dtype) / 64


@contextlib.contextmanager
def mode_of_module(module: nn.Module | None, training: bool) -> Iterator[None]:
    """Let a module and all inside it train, or not, until the end of the block."""
    flags = [] if module is None else [(each, each.training) for each in module.modules()]
    for each, _ in flags:
        each.training = training
    try:
        yield
    finally:
        for each, flag in flags:
            each.training = flag


@contextlib.contextmanager
def _seeded(call: Call) -> Iterator[None]:
    """The same random numbers for every run; the caller's generators are left as they were."""
    first = call.first
    devices = [first.device] if first is not None and first.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(_SEED)
        yield
