"""Probe: the ways in which the inputs of a real call are varied, each to catch another kind of mistake.

A probe takes a call and returns a fresh one. Masks keep their numbers; integers (token ids, labels) keep theirs too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from kernelhub.checking.call import copied, is_mask

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernelhub.checking.call import Call

_LARGE = 1e5  # beyond the range of float16
_LARGE_HALF = 300.0  # in float16 itself: its square is beyond
_MOST_ROWS = 128


class Probe(NamedTuple):
    """``judges`` says that accuracy is judged, not only that no NaN or infinity appears; ``strides`` that the strides
    of the outputs are; ``same_values`` that the numbers are those of the call itself.
    """

    name: str
    vary: Callable[[Call], Call]
    judges: bool = True
    strides: bool = False
    same_values: bool = False


def itself(call: Call) -> Call:
    """The call as it was."""
    return call.map(lambda _, tensor: copied(tensor))


def transposed(call: Call) -> Call:
    """The same numbers with the last two dimensions swapped in memory."""
    return _each_float(call, lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else copied(x))


def strided(call: Call) -> Call:
    """The same numbers with gaps between them."""
    return _each_float(call, _with_gaps)


def scaled(largest: float | None) -> Callable[[Call], Call]:
    """All numbers scaled so that the largest is ``largest``; None: more than float16 holds, or than it can square."""

    def vary(call: Call) -> Call:
        large = {torch.float16: _LARGE_HALF}
        return _each_float(call, lambda x: _scaled(x, largest or large.get(x.dtype, _LARGE)))

    return vary


def zeroed(call: Call) -> Call:
    """Nothing but zeros."""
    return _each_float(call, torch.zeros_like)


def emptied(call: Call) -> Call:
    """No rows at all: a batch of zero."""
    return _resized(call, lambda size, first: 0 if size == first else size, only_leading=True)


def ragged(call: Call) -> Call:
    """One less in every dimension but the last: sizes that no block size divides."""
    return _resized(call, lambda size, _: max(size - 1, 1), only_leading=False)


def doubled(call: Call) -> Call:
    """The batch twice: more rows than anything that was sized by the call itself."""
    first = call.first
    batch = 0 if first is None or first.dim() < 2 else first.shape[0]

    def vary(_: str, tensor: torch.Tensor) -> torch.Tensor:
        grows = batch and tensor.dim() > 1 and tensor.shape[0] == batch
        return torch.cat((tensor.detach(),) * 2) if grows else copied(tensor)

    return call.map(vary)


def cut(call: Call) -> Call:
    """At most 128 rows, by cutting the longest dimensions: enough for all but the call itself."""
    first = call.first
    leading = () if first is None else tuple(first.shape[:-1])
    longest = max(leading, default=1)
    while longest > 1 and math.prod(min(size, longest) for size in leading) > _MOST_ROWS:
        longest -= 1 if longest < 16 else longest // 8
    return _resized(call, lambda size, _: min(size, longest), only_leading=False)


PROBES = (
    Probe("transposed in memory", transposed, same_values=True),
    Probe("strided", strided, same_values=True),
    Probe("large numbers", scaled(None), judges=False),
    Probe("small numbers (1e-3)", scaled(1e-3)),
    Probe("tiny numbers (1e-6)", scaled(1e-6)),
    Probe("zeros", zeroed),
    Probe("other sizes", ragged),
    Probe("twice the batch", doubled),
    Probe("empty batch", emptied),
)
REAL = Probe("the real inputs", itself, strides=True, same_values=True)


def _each_float(call: Call, change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    def vary(_: str, tensor: torch.Tensor) -> torch.Tensor:
        return change(tensor.detach()) if tensor.is_floating_point() and not is_mask(tensor) else copied(tensor)

    return call.map(vary)


def _with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() == 0:
        return copied(tensor)
    wider = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]))
    view = wider[..., ::2]
    view.copy_(tensor)
    return view


def _scaled(tensor: torch.Tensor, largest: float) -> torch.Tensor:
    top = tensor.double().abs().max() if tensor.numel() else 0
    return copied(tensor) if not top else (tensor.double() * (largest / top)).to(tensor.dtype)


def _resized(call: Call, resize: Callable[[int, int], int], *, only_leading: bool) -> Call:
    """Resize by size: dimensions that are equally long in the first tensor and in another change together."""
    shape = () if call.first is None else tuple(call.first.shape[:-1])
    sizes = {size: resize(size, shape[0]) for size in (shape[:1] if only_leading else shape)}

    def vary(_: str, tensor: torch.Tensor) -> torch.Tensor:
        last = max(tensor.dim() - tensor.is_floating_point(), 0)
        leading = tensor.shape[: min(last, 1) if only_leading else last]
        index = tuple(slice(sizes.get(size, size)) for size in leading)
        return copied(tensor[index])

    return call.map(vary)
