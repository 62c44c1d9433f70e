"""Compares the build that kernelhub chooses with the one that ``kernels`` chooses, on generated machines and listings.

    python benchmarks/selection_parity.py --peer-python /path/to/python-with-kernels

The other package is asked in its own Python, given by ``--peer-python``, through JSON. A difference is explained by
one of ``KINDS`` when both agree as soon as the names of that kind are taken out of the listing; docs/differences.md
says why each kind exists. Exit code 1 if a difference is not explained.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import random
import re
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernelhub.environment import Environment

PEER = "kernels"
PLATFORMS = [("x86_64", "linux")] * 4 + [("aarch64", "linux")] * 2
PLATFORMS += [("x86_64", "windows"), ("aarch64", "windows"), ("aarch64", "darwin"), ("riscv64", "linux")]
RELEASES = {
    "cuda": ["12.6", "12.8", "12.9", "12.10", "13.0", "13.2", "13.10"],
    "rocm": ["6.3", "7.0", "7.1", "7.14"],
    "xpu": ["2025.3", "2025.10", "2026.0"],
    "cann": ["8.1", "8.3"],
}
BACKENDS = ["cuda"] * 6 + ["rocm"] * 2 + ["xpu", "cann", "metal", "neuron", "tpu"] + ["cpu"] * 3
TOKENS = {"cuda": "cu", "rocm": "rocm", "xpu": "xpu", "cann": "cann"}
TORCHES = ["2.9", "2.10", "2.12", "2.13"]
NOARCH = ["cpu", "cuda", "rocm", "xpu", "npu", "metal", "neuron", "tpu", "universal"]
ODD = [
    "Torch-CPU",
    "TORCH-CUDA",
    "torch-cann",
    "torch-",
    "jax09-cu130-x86_64-linux",
    "torch213",
    "__pycache__",
    "build",
]


class Machine(NamedTuple):
    """What the choice depends on, as plain data; versions are ``major.minor``."""

    backend: str
    release: str | None
    cpu: str
    os: str
    torch: str | None
    cxx11_abi: bool | None
    abi3: bool
    tvm_ffi: str | None
    macos: str | None
    musl: bool


class Pair(NamedTuple):
    machine: Machine
    names: tuple[str, ...]


# Generating


def generate(count: int, seed: int) -> list[Pair]:
    chance = random.Random(seed)
    machines = [make_machine(chance) for _ in range(count)]
    return [Pair(machine, make_listing(chance, machine)) for machine in machines]


def make_machine(chance: random.Random) -> Machine:
    backend = chance.choice(BACKENDS)
    cpu, system = ("aarch64", "darwin") if backend == "metal" else chance.choice(PLATFORMS)
    torch = chance.choice([*TORCHES, *TORCHES, None])
    return Machine(
        backend=backend,
        release=chance.choice(RELEASES[backend]) if backend in RELEASES else None,
        cpu=cpu,
        os=system,
        torch=torch,
        cxx11_abi=chance.random() < 0.8 if torch and system == "linux" else None,
        abi3=chance.random() < 0.95,
        tvm_ffi=chance.choice([None, "0.1", "0.2"]),
        macos=chance.choice(["15.7", "26.0", "26.1", None]) if system == "darwin" else None,
        musl=system == "linux" and chance.random() < 0.05,
    )


def make_listing(chance: random.Random, machine: Machine) -> tuple[str, ...]:
    names = [make_name(chance, machine) for _ in range(chance.randint(1, 24))]
    chance.shuffle(names)
    return tuple(dict.fromkeys(names))


def make_name(chance: random.Random, machine: Machine) -> str:
    """Mostly a name that nearly fits, so that the choice is a close one."""
    draw = chance.random()
    if draw < 0.04:
        return chance.choice(ODD)
    if draw < 0.2:
        return f"torch-{chance.choice(NOARCH)}"
    near = chance.random() < 0.75
    backend = machine.backend if near else chance.choice(BACKENDS)
    cpu, system = (machine.cpu, machine.os) if near else chance.choice(PLATFORMS)
    torch = (machine.torch if near else None) or chance.choice(TORCHES)
    release = chance.choice(RELEASES[backend]).replace(".", "") if backend in RELEASES else ""
    tail = f"{TOKENS.get(backend, backend)}{release}-{cpu}-{system}"
    framework = chance.choice(["torch", "torch", "torch-cxx", "torch-stable-abi", "tvm-ffi"])
    if framework == "tvm-ffi":
        return f"tvm-ffi{(machine.tvm_ffi or '0.1').replace('.', '')}-{tail}"
    if framework == "torch-stable-abi":
        return f"torch-stable-abi{chance.choice(TORCHES).replace('.', '')}-{tail}"
    major, minor = torch.split(".")
    zero = "0" if chance.random() < 0.03 else ""
    tag = chance.choice(["-cxx11", "-cxx11", "-cxx98"]) if framework == "torch-cxx" else ""
    return f"torch{major}{zero}{minor}{tag}-{tail}"


# kernelhub's half


def describe(machine: Machine) -> Environment:
    from kernelhub.backend import Backend, Release  # noqa: PLC0415  # the peer's Python does not have it
    from kernelhub.environment import Environment  # noqa: PLC0415  # as above

    def read(text: str | None) -> Release | None:
        return None if text is None else Release(*map(int, text.split(".")))

    return Environment(
        backend=Backend(machine.backend, read(machine.release)),
        cpu=machine.cpu,
        os=machine.os,
        torch=read(machine.torch),
        cxx11_abi=machine.cxx11_abi,
        python=Release(3, 14),
        free_threaded=not machine.abi3,
        libc=("musl", Release(1, 2)) if machine.musl else None,
        macos=read(machine.macos),
        tvm_ffi=read(machine.tvm_ffi),
    )


def choose(pair: Pair) -> str | None:
    from kernelhub.compatibility import select  # noqa: PLC0415  # as above

    best = select(pair.names, describe(pair.machine)).best
    return None if best is None else str(best)


# The peer's half, run by its own Python


def answer_as_peer() -> None:
    logging.disable()
    pairs = [Pair(Machine(*machine), tuple(names)) for machine, names in json.load(sys.stdin)]
    json.dump([peer_choices(pair) for pair in pairs], sys.stdout)


def peer_choices(pair: Pair) -> list[str | None]:
    """The names that the peer may choose: several where its order has a tie, which the listing's order decides."""
    variants: Any = importlib.import_module(f"{PEER}.variants")
    variants._is_unsupported_free_threaded_build = lambda: not pair.machine.abi3
    read = []
    for name in pair.names:
        try:
            read.append((name, variants.parse_variant(name)))
        except ValueError:
            continue
    names = {id(variant): name for name, variant in read}
    accepted = peer_order([variant for _, variant in read], pair.machine)
    if not accepted:
        return [None]
    first = [peer_order([one, *(other for other in accepted if other is not one)], pair.machine)[0] for one in accepted]
    return [*dict.fromkeys(names[id(variant)] for variant in first)]


def peer_order(found: list[Any], machine: Machine) -> list[Any]:
    backends, variants = (importlib.import_module(f"{PEER}.{name}") for name in ("backends", "variants"))
    version = importlib.import_module("packaging.version").Version
    classes = {
        "cpu": backends.CPU,
        "cuda": backends.CUDA,
        "rocm": backends.ROCm,
        "xpu": backends.XPU,
        "cann": backends.CANN,
        "metal": backends.Metal,
        "neuron": backends.Neuron,
        "tpu": backends.TPU,
    }

    def read(text: str | None) -> Any:
        return None if text is None else version(text)

    release = read(machine.release)
    ordered, _ = variants._resolve_variant_for_system(
        variants=found,
        selected_backend=classes[machine.backend](*([release] if release else [])),
        cpu=machine.cpu,
        os=machine.os,
        torch_version=read(machine.torch),
        torch_cxx11_abi=machine.cxx11_abi,
        tvm_ffi_version=read(machine.tvm_ffi),
        macos_version=read(machine.macos),
    )
    return list(ordered)


def ask_peer(python: str, pairs: list[Pair]) -> list[list[str | None]]:
    command = [python, "-W", "ignore", __file__, "--peer"]
    done = subprocess.run(command, input=json.dumps(pairs), stdout=subprocess.PIPE, text=True, check=True)
    return [list(names) for names in json.loads(done.stdout)]


# Explaining


def has_long_cuda(name: str, machine: Machine, names: tuple[str, ...]) -> bool:
    return re.search(r"-cu[0-9]{4}-", name) is not None


def has_leading_zero(name: str, machine: Machine, names: tuple[str, ...]) -> bool:
    return re.match(r"torch[0-9]0[0-9]", name) is not None


def is_outside_the_table(name: str, machine: Machine, names: tuple[str, ...]) -> bool:
    return "-riscv64-" in name


def is_compiled_under_musl(name: str, machine: Machine, names: tuple[str, ...]) -> bool:
    return machine.musl and name.endswith("-linux")


def has_abi_tag_off_linux(name: str, machine: Machine, names: tuple[str, ...]) -> bool:
    return machine.os != "linux" and "-cxx" in name


def has_twin(name: str, machine: Machine, names: tuple[str, ...]) -> bool:
    return sum(other.casefold() == name.casefold() for other in names) > 1


KINDS: dict[str, Callable[[str, Machine, tuple[str, ...]], bool]] = {
    "two-digit CUDA minor": has_long_cuda,
    "leading zero in a version": has_leading_zero,
    "CPU outside the table": is_outside_the_table,
    "musl": is_compiled_under_musl,
    "ABI tag off Linux": has_abi_tag_off_linux,
    "names equal but for case": has_twin,
}
TIE = "tie that the listing's order decides"
SEVERAL = "several kinds at once"
UNEXPLAINED = "not explained"


def without(pair: Pair, kinds: list[str]) -> Pair:
    kept = [name for name in pair.names if not any(KINDS[kind](name, *pair) for kind in kinds)]
    return Pair(pair.machine, tuple(kept))


def explain(pairs: list[Pair], python: str) -> list[str]:
    """The kind of each difference: the first one whose names make it."""
    trials = [*([kind] for kind in KINDS), list(KINDS)]
    reduced = [[without(pair, trial) for trial in trials] for pair in pairs]
    answers = iter(ask_peer(python, [pair for row in reduced for pair in row]))
    agreements = [[choose(pair) in next(answers) for pair in row] for row in reduced]
    labels = [*KINDS, SEVERAL]
    return [
        next((label for label, agrees in zip(labels, row, strict=True) if agrees), UNEXPLAINED) for row in agreements
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", default=sys.executable, help=f"a Python that has {PEER}")
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=20260101)
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        answer_as_peer()
        return 0
    pairs = generate(arguments.pairs, arguments.seed)
    ours = [choose(pair) for pair in pairs]
    theirs = ask_peer(arguments.peer_python, pairs)
    rows = list(zip(pairs, ours, theirs, strict=True))
    differing = [(pair, name, names) for pair, name, names in rows if name not in names]
    kinds = explain([pair for pair, _, _ in differing], arguments.peer_python)
    counts = Counter(kinds)
    counts[TIE] = sum(name in names and len(names) > 1 for _, name, names in rows)
    show(len(pairs), sum(names == [name] for _, name, names in rows), sum(name is not None for name in ours), counts)
    for (pair, name, names), kind in zip(differing, kinds, strict=True):
        if kind == UNEXPLAINED:
            print(f"\n{pair}\n  kernelhub {name}\n  {PEER} {names}")
    return 1 if counts[UNEXPLAINED] else 0


def show(total: int, same: int, chosen: int, counts: Counter[str]) -> None:
    print(f"{total:7} pairs of a machine and a listing; kernelhub chose a build for {chosen}")
    print(f"{same:7} same choice")
    for kind in [TIE, *KINDS, SEVERAL, UNEXPLAINED]:
        print(f"{counts[kind]:7} {kind}")


if __name__ == "__main__":
    sys.exit(main())
