"""Measure: which of several pieces of work is faster, told from noise.

All take turns in rounds, in another order each time, so that all meet the same machine. A turn is a few short blocks of
calls, of which the fastest counts: what others do on the machine only ever adds time. What is compared are the ratios
inside a round. ``a`` is *clearly faster* than ``b`` when the median of these ratios is below ``CLEAR`` with 99 %
confidence (order statistics, whatever the distribution of the noise). Rounds go on until that is decided, or for a few
seconds: what stays undecided is not clearly faster.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Work = Callable[[], object]

CLEAR = 0.97
_ROUNDS = (11, 21, 31, 51)
_BLOCK = 4e-4  # seconds: far above the resolution of the clock, below a time slice of the system
_BLOCKS = ((5e-3, 5), (5e-2, 3))  # so many blocks for calls shorter than this; else one
_MOST_LOOPS = 1000
_DOUBT = 0.005
_FEWEST = 7
_LONGEST = 4.0  # seconds after which no further round is begun


@dataclass(frozen=True)
class Race:
    """Seconds of one call, for each piece of work and round."""

    samples: tuple[tuple[float, ...], ...]

    def seconds(self, index: int) -> float:
        """The median of one piece of work."""
        return statistics.median(self.samples[index])

    def ratio(self, index: int, other: int) -> float:
        """The median of the ratios inside the rounds."""
        return statistics.median(self._ratios(index, other))

    def is_faster(self, index: int, other: int) -> bool:
        """Is one clearly faster than the other?"""
        return self._bounds(index, other)[1] < CLEAR

    def is_slower(self, index: int, other: int) -> bool:
        """Is one slower than the other, by however little?"""
        return self._bounds(index, other)[0] > 1

    def is_decided(self, index: int, other: int) -> bool:
        low, high = self._bounds(index, other)
        return high < CLEAR or low > CLEAR

    def _ratios(self, index: int, other: int) -> list[float]:
        pairs = zip(self.samples[index], self.samples[other], strict=True)
        return sorted(mine / theirs for mine, theirs in pairs)

    def _bounds(self, index: int, other: int) -> tuple[float, float]:
        ratios = self._ratios(index, other)
        rank = _rank(len(ratios))
        return ratios[rank], ratios[-1 - rank]


def race(works: Sequence[Work], device: torch.device) -> Race:
    """Time pieces of work against the first of them, until it is decided which are clearly faster."""
    for work in works:
        work()  # compilation, caches
    turns = [_Turn(work, device) for work in works]
    samples: list[list[float]] = [[] for _ in works]
    end = time.perf_counter() + _LONGEST
    while True:
        for index in _order(len(works), len(samples[0])):
            samples[index].append(turns[index].seconds())
        rounds = len(samples[0])
        found = Race(tuple(map(tuple, samples)))
        late = rounds >= _ROUNDS[-1] or (rounds >= _FEWEST and time.perf_counter() > end)
        decided = rounds in _ROUNDS and all(found.is_decided(index, 0) for index in range(1, len(works)))
        if late or decided:
            return found


def seconds_of(work: Work, device: torch.device, loops: int = 1) -> float:
    """Seconds of one call: by events on the device, by the clock elsewhere."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(loops):
            work()
        return (time.perf_counter() - start) / loops
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
    begin.record()
    for _ in range(loops):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / loops


class _Turn:
    """One piece of work, and how many blocks of how many calls make a turn of it."""

    def __init__(self, work: Work, device: torch.device) -> None:
        self._work = work
        self._device = device
        once = min(seconds_of(work, device) for _ in range(5))
        self._loops = min(max(math.ceil(_BLOCK / max(once, 1e-7)), 1), _MOST_LOOPS)
        self._blocks = next((blocks for longest, blocks in _BLOCKS if once < longest), 1)

    def seconds(self) -> float:
        return min(seconds_of(self._work, self._device, self._loops) for _ in range(self._blocks))


def _order(count: int, round_number: int) -> Iterable[int]:
    """Another order each round: rotated, and back to front every other time."""
    order = [(index + round_number // 2) % count for index in range(count)]
    return reversed(order) if round_number % 2 else order


@cache
def _rank(count: int) -> int:
    """How many of ``count`` sorted samples lie outside the bounds of the median on one side."""
    rank, below = 0, 0.0
    while (below := below + math.comb(count, rank) / 2**count) <= _DOUBT:
        rank += 1
    return max(rank - 1, 0)
