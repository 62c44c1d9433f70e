"""Which is faster, told from noise: the same answer every time, and never for a kernel that is not clearly faster."""

from __future__ import annotations

import time
from itertools import count

import pytest
import torch

from kernelhub.checking.measure import CLEAR, Race, race, seconds_of

CPU = torch.device("cpu")


def spin(microseconds: float) -> None:
    """Keep the core busy, as a kernel does."""
    end = time.perf_counter() + microseconds * 1e-6
    while time.perf_counter() < end:
        pass


def test_the_answer_is_the_same_20_times() -> None:
    """While the load of this machine is what it is: one is much faster, one is much slower, one is the same."""
    works = [lambda: spin(80), lambda: spin(30), lambda: spin(160), lambda: spin(80)]
    for _ in range(20):
        found = race(works, CPU)
        assert [found.is_faster(index, 0) for index in range(4)] == [False, True, False, False]
        assert found.is_slower(2, 0)


def noisy(ratio: float, rounds: int = 31, noise: float = 0.2) -> Race:
    """A race in which one takes ``ratio`` of the other's time, and noise is added to both."""
    generator = torch.Generator().manual_seed(3)
    drawn = (1 + noise * torch.rand(2, rounds, generator=generator)).tolist()
    return Race((tuple(drawn[0]), tuple(ratio * each for each in drawn[1])))


@pytest.mark.parametrize(
    ("ratio", "faster", "slower"),
    [(0.5, True, False), (0.8, True, False), (0.97, False, False), (1.0, False, False), (1.3, False, True)],
)
def test_only_what_is_clear_through_the_noise_is_called_faster(ratio: float, faster: bool, slower: bool) -> None:
    found = noisy(ratio)
    assert found.is_faster(1, 0) is faster
    assert found.is_slower(1, 0) is slower


def test_without_noise_the_border_is_the_documented_one() -> None:
    for ratio, faster in ((CLEAR - 0.01, True), (CLEAR + 0.01, False)):
        found = Race(((1.0,) * 11, (ratio,) * 11))
        assert found.is_faster(1, 0) is faster
        assert found.is_decided(1, 0)
        assert found.ratio(1, 0) == pytest.approx(ratio)


def test_a_few_disturbed_rounds_change_nothing() -> None:
    disturbed = tuple(0.5 if index % 5 else 50.0 for index in range(31))
    assert Race(((1.0,) * 31, disturbed)).is_faster(1, 0)


def test_a_race_ends_although_nothing_can_be_decided() -> None:
    calls = count()
    found = race([lambda: None, lambda: next(calls)], CPU)
    assert 7 <= len(found.samples[0]) <= 51


def test_seconds_are_those_of_one_call() -> None:
    assert 50e-6 <= seconds_of(lambda: spin(50), CPU, loops=20) < 5e-3
