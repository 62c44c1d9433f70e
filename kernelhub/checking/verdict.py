"""Verdict: what one evaluation of a kernel has that the plain layer's does not, in words with numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernelhub.checking.call import dtype_name
from kernelhub.checking.evaluation import same_bits
from kernelhub.checking.tolerance import Noise, all_finite

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernelhub.checking.evaluation import Evaluation
    from kernelhub.checking.probe import Probe
    from kernelhub.checking.reference import Reference
    from kernelhub.checking.tolerance import Deviation


def form_findings(plain: Evaluation, kernel: Evaluation, probe: Probe, sought: frozenset[str]) -> Iterator[str]:
    """What is wrong with the form: missing or extra results, dtype, shape, device, strides, lost gradients, writes."""
    where = f"with {probe.name}"
    for name in kernel.modified:
        if name not in plain.modified:
            yield f"it changes its input {name} in place ({where})"
    for name, expected in plain.outputs.items():
        got = kernel.outputs.get(name)
        if got is None:
            if not sought or name in sought:
                yield f"{name} is missing from its results ({where})"
            continue
        yield from (f"{name} {what} ({where})" for what in _form(expected, got, strides=probe.strides))
        if name in plain.tracked and name not in kernel.tracked and (not sought or name in sought):
            yield f"{name} has no gradient, the plain layer's has ({where})"
    for name, gradient in plain.gradients.items():
        got = kernel.gradients.get(name)
        if gradient is not None and got is None and bool(gradient.any()):
            yield f"the gradient of {name} is missing ({where})"
        elif gradient is not None and got is not None:
            yield from (f"gradient of {name} {what} ({where})" for what in _form(gradient, got, strides=False))


def finite_findings(plain: Evaluation, kernel: Evaluation, probe: Probe) -> Iterator[str]:
    """NaN and infinities where the plain layer has numbers."""
    for name, expected, got in _pairs(plain, kernel):
        if all_finite(got):
            continue
        lost = expected.isfinite() & ~got.isfinite()
        if bool(lost.any()):
            kind = "NaN" if bool(got[lost].isnan().any()) else "infinity"
            yield f"{name} has {kind} in {int(lost.sum())} places where the plain layer has none (with {probe.name})"


def repeat_findings(once: Evaluation, again: Evaluation, when: str) -> Iterator[str]:
    """Results that differ although nothing differed that went in."""
    for name, first, second in _pairs(once, again):
        if not same_bits(first, second):
            distance = (first.double() - second.double()).abs().nan_to_num(0.0).max().item()
            yield f"{name} is another one {when} (by {distance:.3g})"


def deviations(
    exact: Reference, plain: Evaluation, kernel: Evaluation, probe: Probe, dtype: torch.dtype | None, longest: int
) -> Iterator[Deviation]:
    """How far every output and gradient is from the reference, beside how far it may be."""
    for name, expected, got in _pairs(plain, kernel):
        truth = exact.exact.get(name)
        if truth is None or truth.shape != expected.shape or not expected.numel():
            continue
        judged = coarser(expected.dtype, dtype)
        noise = Noise.of(truth, expected, [moved[name] for moved in exact.moved], judged, longest)
        yield noise.judge(name, probe.name, truth, expected, got)


def coarser(dtype: torch.dtype, other: torch.dtype | None) -> torch.dtype:
    """Of two dtypes the one with larger steps: that of the data, that of autocast, or that of a result."""
    return dtype if other is None or torch.finfo(dtype).eps >= torch.finfo(other).eps else other


def _form(expected: torch.Tensor, got: torch.Tensor, *, strides: bool) -> Iterator[str]:
    if got.shape != expected.shape:
        yield f"has shape {tuple(got.shape)}, not {tuple(expected.shape)}"
        return
    if got.dtype != expected.dtype:
        yield f"is {dtype_name(got.dtype)}, not {dtype_name(expected.dtype)}"
    if got.device != expected.device:
        yield f"is on {got.device}, not {expected.device}"
    if strides and _strides(got) != _strides(expected):
        yield f"has strides {got.stride()}, not {expected.stride()}"


def _strides(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """The strides that matter: those of dimensions with more than one element, in a tensor that has any."""
    if not tensor.numel():
        return []
    pairs = enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    return [(index, stride) for index, (size, stride) in pairs if size > 1]


def _pairs(left: Evaluation, right: Evaluation) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Floating results that both have, where their form allows a comparison."""
    numbers = right.numbers
    for name, expected in left.numbers.items():
        got = numbers.get(name)
        if got is not None and got.shape == expected.shape and expected.is_floating_point() and got.is_floating_point():
            yield name, expected, got.to(expected.device)
