#!/usr/bin/env python3
"""How long kernelize() takes for a model with many marked layers, kernels loaded, and the peer `kernels` beside it.

Each package runs in its own process, in turns; the best of many calls on fresh models counts, and medians over the
processes. --peer-python names an interpreter that has the package `kernels` (default: this one).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

SHARED = """
import sys, time
import torch
from torch import nn

class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.variance_epsilon = 1e-6
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states

class Kernel(nn.Module):
    can_torch_compile = True
    weight: torch.Tensor
    variance_epsilon: float
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.weight * hidden_states * self.variance_epsilon

def best(kernelize):
    times = []
    for _ in range(int(sys.argv[2])):
        model = MODEL()
        start = time.perf_counter()
        kernelize(model)
        times.append(time.perf_counter() - start)
        assert float(model[0](torch.ones(8))[0]) == torch.tensor(1e-6)
    print(min(times))

def MODEL():
    return nn.Sequential(*(RMSNorm() for _ in range(int(sys.argv[1])))).eval()
"""
OURS = """
import logging
from kernelhub.config import KernelConfig
from kernelhub.layers.kernelize import kernelize
from kernelhub.layers.marker import use_kernel
from kernelhub.layers.symbol import LoadedSymbol
logging.disable(logging.CRITICAL)
use_kernel("RMSNorm")(RMSNorm)
loaded = LoadedSymbol(Kernel, "org/repo@0123abc", "torch-cpu", "Kernel")
config = KernelConfig({"RMSNorm": "org/repo:Kernel"})
best(lambda model: kernelize(
    model, config, load=lambda choice, backend: loaded, backend_of=lambda device: device.type
))
"""
PEERS = """
import logging
from types import SimpleNamespace
import kernels
logging.disable(logging.CRITICAL)
kernels.use_kernel_forward_from_hub("RMSNorm")(RMSNorm)
class Loaded:
    \"\"\"A repository whose layer is in memory, as after the first load.\"\"\"
    layer_name = "Kernel"
    def load(self):
        return Kernel
    def __hash__(self):
        return 1
    def __eq__(self, other):
        return isinstance(other, Loaded)
repository = Loaded()
kernels.register_kernel_mapping({"RMSNorm": {"cpu": repository}}, inherit_mapping=False)
best(lambda model: kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="cpu"))
"""


def milliseconds(python: str, code: str, layers: int, calls: int) -> float:
    command = [python, "-c", SHARED + code, str(layers), str(calls)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(answer.stdout.split()[-1]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has the package `kernels`")
    parser.add_argument("--layers", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=20, help="models per process")
    parser.add_argument("--runs", type=int, default=3, help="processes per package")
    arguments = parser.parse_args()

    cases = {"kernelhub": (sys.executable, OURS), "kernels": (arguments.peer_python, PEERS)}
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(arguments.runs):
        for name, (python, code) in cases.items():
            times[name].append(milliseconds(python, code, arguments.layers, arguments.calls))
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, value in medians.items():
        print(f"{name:<12}{value:8.2f} ms for {arguments.layers} layers")
    print(f"ratio {medians['kernelhub'] / medians['kernels']:.2f}")


if __name__ == "__main__":
    main()
