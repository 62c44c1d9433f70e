#!/usr/bin/env python3
"""What a call of a bound layer costs over calling the kernel layer's forward itself, in microseconds on one CPU thread.

The kernel passes its input on, so the rest is host cost alone. The calls take turns in small batches, so that all of
them meet the same machine; the quickest batch of each counts, as others may use the machine too.
"""

from __future__ import annotations

import argparse
import time
from types import MethodType
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import nn

from kernelhub.config import KernelConfig
from kernelhub.layers.kernelize import kernelize
from kernelhub.layers.symbol import LoadedSymbol

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH = 2000


class Layer(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Kernel(nn.Module):
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Other(Kernel):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class EagerOnly(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class ForwardOnly(nn.Module):
    has_backward = False
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


KERNELS = {cls.__name__: cls for cls in (Kernel, Other, EagerOnly, ForwardOnly)}


def bound(value: Any, **environment: str) -> nn.Module:
    model = nn.Sequential(Layer())

    def load(choice: Any, backend: str) -> LoadedSymbol:
        symbol = str(choice.request.symbol)
        return LoadedSymbol(KERNELS[symbol], "org/repo@0123abc", "torch-cpu", symbol)

    with patch.dict("os.environ", environment):
        kernelize(model, KernelConfig({"Layer": value}), load=load, backend_of=lambda device: device.type)
    return model[0].eval()


def direct() -> nn.Module:
    """The least that any binding does: the kernel layer's forward as a method of the module."""
    module = Layer().eval()
    module.forward = MethodType(Kernel.forward, module)  # type: ignore[method-assign]
    return module


def seconds(call: Callable[[torch.Tensor], Any], x: torch.Tensor) -> float:
    start = time.perf_counter()
    for _ in range(BATCH):
        call(x)
    return (time.perf_counter() - start) / BATCH


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds

    per_mode = {"cpu": {"training": "org/repo:Kernel", "inference": "org/repo:Other"}}
    cases = {
        "kernel layer's forward on the module": direct(),
        "one kernel for every mode": bound("org/repo:Kernel"),
        "another kernel in training": bound({"cpu": {**per_mode["cpu"], "inference|compile": "org/repo:Other"}}),
        "kernel without torch.compile": bound("org/repo:EagerOnly"),
        "kernel without backward": bound("org/repo:ForwardOnly"),
        "one kernel, several processes": bound("org/repo:Kernel", WORLD_SIZE="2"),
    }
    x = torch.ones(1)
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, module in cases.items():
            times[name].append(seconds(module, x))
    base = min(times["kernel layer's forward on the module"])
    for name, values in times.items():
        best = min(values)
        print(f"{name:<38}{best * 1e6:7.3f} us  over the first {1e6 * (best - base):+7.3f} us")


if __name__ == "__main__":
    main()
