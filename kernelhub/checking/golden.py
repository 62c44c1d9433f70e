"""Golden: what chosen layers of a model got and gave, in one file, to check kernels by on other machines.

For each kind of call: the inputs, the layer's weights and settings, its outputs and gradients in its own dtype and in
the wide one, and the noise that the tolerance is made of. A replay needs neither the model nor its code.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kernelhub import __version__
from kernelhub.checking.archive import Archive, writing
from kernelhub.checking.blank import described, rebuilt
from kernelhub.checking.call import Call, dtype_name
from kernelhub.checking.capture import capture
from kernelhub.checking.evaluation import Evaluation, evaluate
from kernelhub.checking.probe import itself
from kernelhub.checking.reference import Referee, wide_dtype
from kernelhub.checking.sample import made_up
from kernelhub.checking.tolerance import Noise
from kernelhub.config import KernelConfig
from kernelhub.errors import InvalidGolden, UnknownLayer
from kernelhub.layers.decision import Decision
from kernelhub.layers.discovery import discover
from kernelhub.layers.report import Row

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import nn

    from kernelhub.checking.archive import Writer
    from kernelhub.checking.case import Case

MOST_BYTES = 256 << 20
_MOST_CASES = 200
_LITERALS = (bool, int, float, str, type(None))
_DEEPEST = 8


def write_golden(
    path: Path, model: nn.Module, layers: Sequence[str], inputs: Any = None, *, most_bytes: int = MOST_BYTES
) -> int:
    """Run ``model`` once and write what the layers of these names were called with and returned; how many kinds.

    Args:
        layers: layer names or path patterns, as in a config.
        inputs: what to call the model with; made up for language models when None.
        most_bytes: what the tensors may be together.

    Raises:
        UnknownLayer: the model has no layer of a name.
        InvalidGolden: a layer cannot be written (a whole model, an argument that is no tensor), or all are too large.
    """
    cases = capture(model, _decisions(model, layers), made_up(model) if inputs is None else inputs)
    with writing(path, most_bytes) as writer:
        facts = [_written(writer, index, case) for index, case in enumerate(cases[:_MOST_CASES])]
        writer.finish({"model": type(model).__name__, "versions": _versions(), "cases": facts})
    return len(facts)


def _decisions(model: nn.Module, layers: Sequence[str]) -> list[Decision]:
    """Decisions for no kernel: what is captured by them are the layers alone."""
    config = KernelConfig(dict.fromkeys(layers, ""))
    discovery = discover(model, config.entries)
    for layer in layers:
        if not discovery.targets[layer]:
            raise UnknownLayer(layer, discovery.names)
    targets = [target for found in discovery.targets.values() for target in found if not target.owner]
    return [Decision(target, (Row("", target.layer),)) for target in targets if not target.misfit]


def _versions() -> dict[str, str]:
    return {"kernelhub": __version__, "torch": torch.__version__, "python": platform.python_version()}


def _written(writer: Writer, index: int, case: Case) -> dict[str, Any]:
    if case.subject.body:
        raise InvalidGolden(case.title, "a whole model", "a layer; a head is checked where its model is")

    def keep(kind: str, name: str, tensor: torch.Tensor) -> str:
        key = f"{index}/{kind}/{name}"
        writer.add(key, tensor)
        return key

    module = case.subject.module
    differentiate = bool(case.call.differentiable)
    options: dict[str, Any] = {"training": True, "differentiate": differentiate, "only": frozenset()}
    plain = evaluate(case.subject.run_plain, itself(case.call), module, **options)
    referee = Referee(case.subject, wide_dtype(case.dtype, 0), torch.finfo(case.dtype).eps / 2)
    exact = referee.reference(itself(case.call), options)
    results = {}
    for name, tensor in plain.numbers.items():
        if tensor.is_floating_point() and name in exact.exact:
            noise = Noise.of(
                exact.exact[name], tensor, [moved[name] for moved in exact.moved], tensor.dtype, case.longest
            )
            results[name] = {
                "plain": keep("plain", name, tensor),
                "exact": keep("exact", name, exact.exact[name].to(_kept_dtype(case.dtype))),
                "noise": keep("noise", name, noise.rows),
                "rms": noise.rms,
                "longest": case.longest,
                "strides": list(tensor.stride()),
            }
    call = {"args": list(case.call.args), "kwargs": case.call.kwargs}
    return {
        "layer": case.decisions[0].target.layer,
        "path": case.title,
        "modules": len(case.decisions),
        "dtype": dtype_name(case.dtype),
        "sizes": case.sizes,
        "call": _encoded(call, lambda name, tensor: keep("input", name, tensor)),
        "differentiable": sorted(case.call.differentiable),
        "module": None if module is None else described(module, lambda name, each: keep("weight", name, each)),
        "results": results,
        "tracked": sorted(plain.tracked),
    }


def _kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to keep references in: far finer than what they judge."""
    return torch.float64 if torch.finfo(dtype).eps < 1e-5 else torch.float32


def _encoded(value: Any, keep: Any, name: str = "", depth: int = 0) -> Any:
    if depth > _DEEPEST:
        raise InvalidGolden(name, "arguments inside each other", f"at most {_DEEPEST} deep")
    if isinstance(value, torch.Tensor):
        return {"tensor": keep(name, value), "order": _order(value.stride())}
    if isinstance(value, _LITERALS):
        return {"value": value}
    if isinstance(value, (tuple, list)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_encoded(each, keep, f"{name}[{index}]", depth + 1) for index, each in enumerate(value)]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        start = f"{name}." if name else ""
        return {"dict": {key: _encoded(each, keep, start + key, depth + 1) for key, each in value.items()}}
    problem = f"an argument of class {type(value).__name__}"
    raise InvalidGolden(name, problem, "tensors, numbers, texts, and lists of them")


@dataclass(frozen=True)
class Golden:
    """One kind of call in a file, with the tensors on ``device``."""

    layer: str
    path: str
    sizes: str
    modules: int
    call: Call
    module: nn.Module | None
    plain: Evaluation
    exact: dict[str, torch.Tensor]
    noise: dict[str, Noise]

    @property
    def differentiate(self) -> bool:
        return bool(self.call.differentiable)


def read_golden(archive: Archive, device: torch.device) -> Iterator[Golden]:
    """The cases of a file, one at a time.

    Raises:
        InvalidGolden: the facts are not what ``write_golden`` writes.
    """
    cases = archive.facts.get("cases")
    if not isinstance(cases, list) or len(cases) > _MOST_CASES:
        raise InvalidGolden(str(archive.path), "has no list of cases", f"at most {_MOST_CASES} cases")
    for number, facts in enumerate(cases):
        try:
            yield _read_case(archive, facts, device)
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, RecursionError, IndexError) as error:
            if isinstance(error, InvalidGolden):
                raise
            problem = f"case {number} is damaged ({type(error).__name__}: {str(error)[:200]})"
            raise InvalidGolden(str(archive.path), problem, "a file written by `kernelhub capture`") from None


def layers_in(archive: Archive) -> tuple[str, ...]:
    """The layer names that a file has cases of."""
    cases = archive.facts.get("cases")
    found = [facts.get("layer") for facts in cases if isinstance(facts, dict)] if isinstance(cases, list) else []
    return tuple(dict.fromkeys(str(layer) for layer in found))


def _read_case(archive: Archive, facts: dict[str, Any], device: torch.device) -> Golden:
    def take(name: Any) -> torch.Tensor:
        return archive.tensor(name).to(device)

    decoded = _decoded(facts["call"], take, 0)
    call = Call(tuple(decoded["args"]), decoded["kwargs"], None, frozenset(map(str, facts["differentiable"])))
    results = {str(name): dict(entry) for name, entry in facts["results"].items()}
    plain = {name: _with_strides(take(entry["plain"]), entry["strides"]) for name, entry in results.items()}
    exact = {name: take(entry["exact"]) for name, entry in results.items()}
    noise = {name: _read_noise(archive, entry, plain[name], exact[name]) for name, entry in results.items()}
    module = None if facts["module"] is None else rebuilt(facts["module"], take)
    return Golden(
        str(facts["layer"]),
        str(facts["path"]),
        str(facts["sizes"]),
        int(facts["modules"]),
        call,
        module,
        _evaluation(plain, frozenset(map(str, facts["tracked"]))),
        exact,
        noise,
    )


def _read_noise(archive: Archive, entry: dict[str, Any], plain: torch.Tensor, exact: torch.Tensor) -> Noise:
    rows = archive.tensor(entry["noise"])
    noise = Noise.of(exact, plain, (), plain.dtype, min(max(int(entry["longest"]), 1), 1 << 40))
    if plain.shape != exact.shape or rows.shape != noise.rows.shape:
        raise ValueError("tensors of one result have different shapes")
    return Noise(rows, noise.scale, float(entry["rms"]), noise.step, noise.summing, noise.least)


def _evaluation(numbers: dict[str, torch.Tensor], tracked: frozenset[str]) -> Evaluation:
    start = "gradient of "
    gradients = {name.removeprefix(start): each for name, each in numbers.items() if name.startswith(start)}
    return Evaluation({name: each for name, each in numbers.items() if not name.startswith(start)}, gradients, tracked)


def _with_strides(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The tensor with its dimensions in the order in memory that the strides tell."""
    return _ordered(tensor, _order(strides)) if len(strides) == tensor.dim() else tensor


def _order(strides: Sequence[int]) -> list[int]:
    """The dimensions from the outermost in memory to the innermost."""
    return sorted(range(len(strides)), key=lambda index: -int(strides[index]))


def _ordered(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    if sorted(order) != list(range(tensor.dim())):
        raise ValueError("no order of dimensions")
    back = [order.index(index) for index in range(tensor.dim())]
    return tensor.permute(*order).contiguous().permute(*back) if tensor.dim() else tensor


def _decoded(value: Any, take: Any, depth: int) -> Any:
    if depth > _DEEPEST or len(value) not in (1, 2):
        raise ValueError("arguments are not what is written")
    if "tensor" in value:
        return _ordered(take(value["tensor"]), list(value["order"]))
    if "value" in value and isinstance(value["value"], _LITERALS):
        return value["value"]
    for kind, make in (("tuple", tuple), ("list", list)):
        if kind in value:
            return make(_decoded(each, take, depth + 1) for each in value[kind])
    return {str(key): _decoded(each, take, depth + 1) for key, each in value["dict"].items()}
