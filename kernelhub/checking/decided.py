"""Decided: measurements kept in the store, for the machine, Torch, kernels, layer, shapes and mode they hold for."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kernelhub import __version__
from kernelhub.checking.tuning import Trial

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernelhub.store import Store

_KIND = "tuning"
_SCHEMA = 1
_PINNED = re.compile(r".*@[0-9a-f]{7,40}", re.ASCII)
_BUILTIN = "builtin@"


class Decided:
    """The measurements that a store remembers; kernels whose code may change under their name are never kept."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def find(self, facts: dict[str, Any]) -> list[Trial] | None:
        """The trials for exactly these facts, or None."""
        record = self._store.recorded(_KIND, _name(facts))
        if record is None or record.get("facts") != _plain(facts):
            return None
        try:
            return [Trial(**trial) for trial in record["trials"]]
        except (KeyError, TypeError):
            return None

    def keep(self, facts: dict[str, Any], trials: Sequence[Trial]) -> None:
        """Remember trials; atomic, and nothing is written where the store cannot be."""
        if all(map(is_pinned, facts["kernels"])):
            told = {"facts": _plain(facts), "trials": [trial._asdict() for trial in trials]}
            self._store.record(_KIND, _name(facts), told)


def is_pinned(kernel: str) -> bool:
    """Does the name tell which code it is: a commit, or the collection of this release?"""
    name = kernel.partition(":")[0] if kernel.startswith(_BUILTIN) else kernel.rpartition(":")[0]
    return name.startswith(_BUILTIN) or _PINNED.fullmatch(name) is not None


def machine_facts(device: torch.device) -> dict[str, Any]:
    """What the speed of a kernel depends on besides the kernel: device, threads, Torch, and this release."""
    is_cuda = device.type == "cuda"
    return {
        "schema": _SCHEMA,
        "device": torch.cuda.get_device_name(device) if is_cuda else _cpu_name(),
        "threads": None if is_cuda else torch.get_num_threads(),
        "torch": torch.__version__,
        "kernelhub": __version__,
    }


@cache
def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _plain(facts: dict[str, Any]) -> Any:
    """The facts as JSON gives them back."""
    return json.loads(json.dumps(facts, sort_keys=True))


def _name(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
