"""A seeded sample of the campaigns, and that a campaign notices what it is for; ``run.py`` runs them at full size."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import campaign
from mutation import Mutator
from target import TARGETS, Target

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limits are those of Linux")

EXECUTIONS = {"elf": 300}
FOUND_BEFORE = {  # by campaigns with seed 1; mended since
    "metadata": (335230,),
    "lock": (763715,),
}


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_damaged_inputs_are_read_or_refused_in_words(name: str) -> None:
    executions = EXECUTIONS.get(name, 2000)
    outcome = campaign.run(TARGETS[name], 20, executions)
    assert outcome.failures == {}
    assert outcome.executions == executions
    assert 0 < outcome.accepted < executions


@pytest.mark.parametrize(("name", "number"), [(name, number) for name, all_ in FOUND_BEFORE.items() for number in all_])
def test_inputs_that_once_failed_do_not(name: str, number: int) -> None:
    assert campaign.run(TARGETS[name], 1, 1, first=number).failures == {}


def test_an_input_is_made_again_from_its_number() -> None:
    for target in TARGETS.values():
        made = [target.mutator.make(3, number) for number in range(50)]
        assert made == [target.mutator.make(3, number) for number in range(50)]
        assert len(set(made)) > 40


def _raise(data: bytes) -> bool:
    raise KeyError("undeclared")


def _allocate(data: bytes) -> bool:
    return bool(bytearray(campaign.MEMORY + (64 << 20)))


def _work(data: bytes) -> bool:
    while True:
        pass


def _sleep(data: bytes) -> bool:
    time.sleep(3600)
    return True


def _die(data: bytes) -> bool:
    os.kill(os.getpid(), signal.SIGKILL)
    return True


@pytest.mark.parametrize(
    ("read", "problem"),
    [
        (_raise, "KeyError: 'undeclared'"),
        (_allocate, "MemoryError"),
        (_work, "more than 1 s of processor time"),
        (_sleep, "more than 60 s"),
        (_die, "the process ended with -9"),
    ],
    ids=["raises", "allocates", "works", "sleeps", "dies"],
)
def test_a_reader_that_fails_is_told_with_the_input(
    read: Callable[[bytes], bool], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if read is _sleep:
        monkeypatch.setattr(campaign, "ASLEEP", 0.5)
    mutator = Mutator([b"data"], lambda data, dice: data, [b"x"])
    outcome = campaign.run(Target(lambda data: data[:1] == b"d" or read(data), mutator), 1, 4)
    bad = [number for number in range(4) if mutator.make(1, number)[:1] != b"d"]
    assert sorted(outcome.failures) == bad
    assert outcome.executions == 4
    assert all(problem in told for told in outcome.failures.values())
