"""Calls that make values: modes, devices, metadata, repositories, marks."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

DOCUMENT = {
    "name": "my-kernel",
    "id": "_my_kernel_cpu_0000000",
    "version": 3,
    "license": "MIT",
    "upstream": "https://example.com/up",
    "source": "https://example.com/source",
    "python-depends": ["einops"],
    "kernel-depends": [{"repo-id": "a/b", "version": 2}, {"repo-id": "c/d", "revision": "main"}],
    "backend": {"type": "cuda", "archs": ["9.0", "10.0f"]},
    "digest": {"algorithm": "sha256", "files": {"__init__.py": "A" * 43 + "="}},
    "provenance": {
        "kernel-builder": {"version": "0.1", "commit": "a" * 40, "dirty": True},
        "kernel": {"commit": "b" * 40, "dirty": False},
    },
    "kernels-minver": "0.17.0",
}


def metadata(api: Any, **changes: Any) -> Any:
    kept = {name: part for name, part in {**DOCUMENT, **changes}.items() if part is not None}
    return api.Metadata.from_bytes(json.dumps(kept).encode())


def facts_of_metadata(api: Any, facts: dict[str, Any]) -> Any:
    found = metadata(api)
    texts = [found.id, str(found.name), found.name.python_name, found.license, found.upstream, found.source]
    return [*texts, found.version, str(found.kernels_minver), found.python_depends]


def needs_of_metadata(api: Any, facts: dict[str, Any]) -> Any:
    first, second = metadata(api).kernel_depends
    return [first.repo_id, first.version.version, second.repo_id, second.version.revision]


def made_by(api: Any, facts: dict[str, Any]) -> Any:
    found = metadata(api).provenance
    builder = found.kernel_builder
    return [
        builder.version,
        builder.git.commit,
        builder.git.dirty,
        found.kernel.commit,
        found.kernel.dirty,
        found.dirty,
    ]


def published(api: Any, facts: dict[str, Any]) -> Any:
    path = Path(facts["root"], "acme/relu/v1/build/torch-cpu/metadata.json")
    found = api.Metadata.read_from_file(path)
    return [str(found.name), found.version, sorted(found.digest.files)]


def layer(api: Any, **changes: Any) -> Any:
    return api.LayerRepository("acme/relu", **{"layer_name": "Relu", "version": 1, **changes})


def equal_repositories(api: Any, facts: dict[str, Any]) -> Any:
    others = [
        layer(api, version=2),
        layer(api, layer_name="Silu"),
        layer(api, version=None, revision="v1"),
        layer(api, trust_remote_code=True),
        api.LocalLayerRepository(Path("acme/relu"), layer_name="Relu"),
    ]
    same = layer(api) == layer(api) and hash(layer(api)) == hash(layer(api))
    return [same, [layer(api) == other for other in others]]


def locked_repository(api: Any, facts: dict[str, Any]) -> Any:
    found = api.LockedLayerRepository("acme/relu", lockfile=Path(facts["lock"]), layer_name="Relu")
    commit = found.kernel_locks[found.kernel_dep].commit
    parts = [found.kernel_dep.repo_id, found.kernel_dep.version.version, commit == facts["commits"]["acme/relu"]]
    return [*parts, found.layer_name, found.load().__name__]


def function_repository(api: Any, facts: dict[str, Any]) -> Any:
    loaded = api.FuncRepository("acme/relu", func_name="relu", version=1).load()
    return [issubclass(loaded, nn.Module), list(inspect.signature(loaded.forward).parameters)]


def locked_function(api: Any, facts: dict[str, Any]) -> Any:
    found = api.LockedFuncRepository("acme/relu", lockfile=Path(facts["lock"]), func_name="relu")
    return [found.kernel_dep.repo_id, issubclass(found.load(), nn.Module)]


def marked_class(api: Any, facts: dict[str, Any]) -> Any:
    @api.use_kernel_forward_from_hub("Relu")
    class Layer(nn.Module):
        pass

    marked: Any = Layer
    return [marked.__name__, marked.kernel_layer_name, marked.kernel_condition(marked())]


def marked_with_a_condition(api: Any, facts: dict[str, Any]) -> Any:
    class Layer(nn.Module):
        pass

    returned = api.replace_kernel_forward_from_hub(Layer, "Relu", lambda module: module.training)
    module: Any = Layer()
    return [returned, module.kernel_condition(module), module.kernel_condition(module.eval())]


def marked_function(api: Any, facts: dict[str, Any]) -> Any:
    def double(x: int, *, times: int = 2) -> int:
        return times * x

    found = api.use_kernel_forward_from_hub("double")(double)
    signature = str(inspect.signature(type(found).forward)).replace("'", "")
    return [isinstance(found, nn.Module), found.kernel_layer_name, found(2, times=3), signature]


def attached_function(api: Any, facts: dict[str, Any]) -> Any:
    double = api.use_kernel_func_from_hub("double")(lambda x: 2 * x)

    @api.use_kernelized_func(double)
    class Layer(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.size = size

    found: Any = Layer(3)
    return [found.size, list(found._kernel_funcs), list(found.children()), double(4)]


def unmarked_function(api: Any, facts: dict[str, Any]) -> Any:
    def plain() -> None:
        pass

    return api.use_kernelized_func(plain)(nn.Identity)


def flags(enum: Any) -> dict[str, int]:
    return {name: member.value for name, member in enum.__members__.items()}


def parse(api: Any, name: str) -> Any:
    found = importlib.import_module(f"{api.__name__}.variants").parse_variant(name)
    arch = found.arch
    built = [arch.backend.name, str(getattr(arch.backend, "version", "")), arch.platform, arch.os]
    return [type(found).__name__, type(found.framework).__name__, found.variant_str, built]


CALLS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "modes": lambda api, facts: flags(api.Mode),
    "modes together": lambda api, facts: (api.Mode.TRAINING | api.Mode.TORCH_COMPILE).value,
    "modes that exclude each other": lambda api, facts: (api.Mode.TRAINING | api.Mode.INFERENCE).value,
    "fallback with a mode": lambda api, facts: (api.Mode.FALLBACK | api.Mode.TORCH_COMPILE).value,
    "cases": lambda api, facts: flags(api.KernelizeFallback),
    "a device": lambda api, facts: repr(api.Device("cuda")),
    "equal devices": lambda api, facts: len({api.Device("cuda"), api.Device(type="cuda"), api.Device("cpu")}),
    "a device with properties": lambda api, facts: repr(api.Device("cuda", api.CUDAProperties(75, 90))),
    "a device with others' properties": lambda api, facts: repr(api.Device("xpu", api.CUDAProperties(75, 90))),
    "a device with the other properties": lambda api, facts: repr(api.Device("cuda", api.ROCMProperties(75, 90))),
    "a changed device": lambda api, facts: setattr(api.Device("cuda"), "type", "cpu"),
    "an empty range": lambda api, facts: repr(api.CUDAProperties(90, 75)),
    "a range in words": lambda api, facts: repr(api.CUDAProperties("7.5", "9.0")),
    "metadata": facts_of_metadata,
    "metadata's needs": needs_of_metadata,
    "metadata's backend": lambda api, facts: [str(metadata(api).backend.backend_type), metadata(api).backend.archs],
    "metadata's digest": lambda api, facts: metadata(api).digest.files,
    "metadata's provenance": made_by,
    "metadata without provenance": lambda api, facts: metadata(api, provenance=None).provenance,
    "published metadata": published,
    "missing metadata": lambda api, facts: api.Metadata.read_from_file("nowhere.json"),
    "no metadata": lambda api, facts: api.Metadata.from_bytes(b"[]"),
    "unreadable metadata": lambda api, facts: api.Metadata.from_bytes(b"{"),
    "metadata made by hand": lambda api, facts: repr(api.Metadata()),
    "repositories": equal_repositories,
    "a repository without version": lambda api, facts: layer(api, version=None),
    "a repository with both": lambda api, facts: layer(api, revision="main"),
    "a repository in a set": lambda api, facts: len({layer(api), layer(api), layer(api, trust_remote_code=["a/b"])}),
    "a layer": lambda api, facts: layer(api).load().__name__,
    "a missing layer": lambda api, facts: layer(api, layer_name="Nothing").load(),
    "a layer of a missing version": lambda api, facts: layer(api, version=9).load(),
    "a layer without a build": lambda api, facts: api.LayerRepository(
        "acme/gpu-only", layer_name="Relu", version=1
    ).load(),
    "a layer of a kernel without layers": lambda api, facts: api.LayerRepository(
        "acme/without-layers", layer_name="Relu", version=1
    ).load(),
    "a layer beside its module": lambda api, facts: (
        api.LayerRepository("acme/flat", layer_name="Relu", version=1).load().__name__
    ),
    "an untrusted layer": lambda api, facts: api.LayerRepository("evil/relu", layer_name="Relu", version=1).load(),
    "a local layer": lambda api, facts: (
        api.LocalLayerRepository(Path(facts["root"], "acme/relu/v1"), layer_name="Relu").load().__name__
    ),
    "a locked layer": locked_repository,
    "a layer that nobody locked": lambda api, facts: api.LockedLayerRepository(
        "acme/newer", lockfile=Path(facts["lock"]), layer_name="Relu"
    ),
    "a function": function_repository,
    "a missing function": lambda api, facts: api.FuncRepository("acme/relu", func_name="nothing", version=1).load(),
    "a local function": lambda api, facts: issubclass(
        api.LocalFuncRepository(Path(facts["root"], "acme/relu/v1"), func_name="relu").load(), nn.Module
    ),
    "a locked function": locked_function,
    "a marked class": marked_class,
    "a mark with a condition": marked_with_a_condition,
    "a marked function": marked_function,
    "a marked number": lambda api, facts: repr(api.use_kernel_forward_from_hub("Relu")(3)),
    "an attached function": attached_function,
    "an attached function without mark": unmarked_function,
    "a benchmark": lambda api, facts: [api.Benchmark.seed, api.Benchmark.device, vars(api.Benchmark())],
    "a variant": lambda api, facts: parse(api, "torch213-cxx11-cu130-x86_64-linux"),
    "a stable variant": lambda api, facts: parse(api, "torch-stable-abi210-rocm63-x86_64-linux"),
    "a tvm variant": lambda api, facts: parse(api, "tvm-ffi01-metal-aarch64-darwin"),
    "no variant": lambda api, facts: parse(api, "jax04-cpu"),
}
