"""Calls that map kernels to the layers of a model and bind them.

Every kernel answers with a number of its own, so that the number tells which one ran; 0 is the layer itself.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable


turned: Any = None


def model_of(api: Any, name: str = "Relu", condition: Any = None) -> Any:
    """A model with one marked layer; it runs in evaluation mode."""

    @api.use_kernel_forward_from_hub(name, condition)
    class Layer(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 0

    return nn.Sequential(Layer()).eval()


def ran(model: Any) -> float:
    return float(model(torch.ones(1)))


def layer(api: Any, name: str = "Relu", repo_id: str = "acme/relu") -> Any:
    return api.LayerRepository(repo_id, layer_name=name, version=1)


def bound(layers: Any, mode: str = "INFERENCE", device: Any = "cpu", train: bool = False, **options: Any) -> Any:
    """What runs after ``kernelize`` under a mapping, which ``layers`` makes for the name Relu."""

    def call(api: Any, facts: dict[str, Any]) -> float:
        model = model_of(api).train(train)
        with api.use_kernel_mapping({"Relu": layers(api)}, inherit_mapping=False):
            api.kernelize(model, mode=_mode(api, mode), device=device, **_options(api, options))
        return ran(model)

    return call


def _mode(api: Any, names: str) -> Any:
    first, *others = (getattr(api.Mode, name) for name in names.split("|"))
    for other in others:
        first = first | other
    return first


def _options(api: Any, options: dict[str, Any]) -> dict[str, Any]:
    fallback = options.get("use_fallback")
    return {"use_fallback": getattr(api.KernelizeFallback, fallback)} if isinstance(fallback, str) else options


def on(device: str, name: str = "Relu", repo_id: str = "acme/relu") -> Any:
    return lambda api: {device: layer(api, name, repo_id)}


def by_mode(**names: str) -> Any:
    """Kernels by mode: ``by_mode(TRAINING="Relu")``; two underscores join modes."""
    return lambda api: {"cpu": {_mode(api, mode.replace("__", "|")): layer(api, name) for mode, name in names.items()}}


EVERY = by_mode(INFERENCE="Relu", TRAINING="Silu")
COMPILED = by_mode(INFERENCE__TORCH_COMPILE="Relu", TRAINING__TORCH_COMPILE="Silu", FALLBACK="Eager")


def misfit(name: str, **options: Any) -> Any:
    return bound(on("cpu", name), **options)


def the_same_model(api: Any, facts: dict[str, Any]) -> bool:
    model = model_of(api)
    with api.use_kernel_mapping({"Relu": {"cpu": layer(api)}}, inherit_mapping=False):
        return api.kernelize(model, mode=api.Mode.INFERENCE, device="cpu") is model


def the_device_of_the_model(api: Any, facts: dict[str, Any]) -> list[float]:
    model = nn.Sequential(nn.Linear(1, 1), model_of(api)).eval()
    found = []
    for device in (None, torch.device("cpu"), api.Device("cpu")):
        with api.use_kernel_mapping({"Relu": {"cpu": layer(api)}}, inherit_mapping=False):
            found.append(ran(api.kernelize(model, mode=api.Mode.INFERENCE, device=device)))
    return found


def without_a_device(api: Any, facts: dict[str, Any]) -> Any:
    return api.kernelize(model_of(api), mode=api.Mode.INFERENCE)


def under_conditions(api: Any, facts: dict[str, Any]) -> list[float]:
    found = []
    for allowed in (True, False):
        model = model_of(api, condition=lambda module, allowed=allowed: allowed)
        with api.use_kernel_mapping({"Relu": {"cpu": layer(api)}}, inherit_mapping=False):
            found.append(ran(api.kernelize(model, mode=api.Mode.INFERENCE, device="cpu")))
    return found


def kernelized(api: Any, model: Any) -> float:
    return ran(api.kernelize(model, mode=api.Mode.INFERENCE, device="cpu"))


def mappings_in_blocks(api: Any, facts: dict[str, Any]) -> list[float]:
    """Outside, in a block, in a block inside that inherits or does not, and outside again."""
    model, other = model_of(api, "First"), model_of(api, "Second")
    found = [kernelized(api, model)]
    with api.use_kernel_mapping({"First": {"cpu": layer(api)}}):
        found.append(kernelized(api, model))
        with api.use_kernel_mapping({"Second": {"cpu": layer(api, "Silu")}}):
            found += [kernelized(api, model), kernelized(api, other)]
        with api.use_kernel_mapping({"Second": {"cpu": layer(api, "Silu")}}, inherit_mapping=False):
            found += [kernelized(api, model), kernelized(api, other)]
        found.append(kernelized(api, other))
    return [*found, kernelized(api, model)]


def a_registered_mapping(api: Any, facts: dict[str, Any]) -> list[float]:
    """Registered, seen by another thread, extended for one device, replaced, and forgotten."""
    model = model_of(api, "Registered")
    api.register_kernel_mapping({"Registered": {"cpu": layer(api)}})
    found = [kernelized(api, model)]
    thread = threading.Thread(target=lambda: found.append(kernelized(api, model)))
    thread.start()
    thread.join()
    api.register_kernel_mapping({"Registered": {"xpu": layer(api, "Eager")}})
    found.append(kernelized(api, model))
    api.register_kernel_mapping({"Registered": {"cpu": layer(api, "Silu")}})
    found.append(kernelized(api, model))
    api.register_kernel_mapping({}, inherit_mapping=False)
    return [*found, kernelized(api, model)]


def registered_in_a_block(api: Any, facts: dict[str, Any]) -> list[float]:
    model = model_of(api, "Inside")
    with api.use_kernel_mapping({}):
        api.register_kernel_mapping({"Inside": {"cpu": layer(api)}})
        found = [kernelized(api, model)]
    return [*found, kernelized(api, model)]


def a_later_kernelize(api: Any, facts: dict[str, Any]) -> list[float]:
    """Bound, bound to another kernel, and back to the layer itself."""
    model = model_of(api)
    found = []
    for mapping in ({"Relu": on("cpu")(api)}, {"Relu": on("cpu", "Silu")(api)}, {}):
        with api.use_kernel_mapping(mapping, inherit_mapping=False):
            found.append(kernelized(api, model))
    return found


def an_inherited_mark(api: Any, facts: dict[str, Any]) -> float:
    model = model_of(api)

    class Other(type(model[0])):  # type: ignore[misc]  # a class that is made at run time
        def forward(self, x: Any) -> Any:
            return x * 0 - 1

    with api.use_kernel_mapping({"Relu": {"cpu": layer(api)}}, inherit_mapping=False):
        return kernelized(api, nn.Sequential(Other()).eval())


def another_name(api: Any, facts: dict[str, Any]) -> float:
    @api.use_kernel_forward_from_hub("Relu")
    class Layer(nn.Module):
        def forward(self, x: Any, angle: float = 0.0) -> Any:
            return x * angle

    with api.use_kernel_mapping({"Relu": {"cpu": layer(api, "OtherName")}}, inherit_mapping=False):
        return kernelized(api, nn.Sequential(Layer()).eval())


def device_as_object(api: Any, facts: dict[str, Any]) -> float:
    model = model_of(api)
    with api.use_kernel_mapping({"Relu": {api.Device("cpu"): layer(api)}}, inherit_mapping=False):
        return kernelized(api, model)


def unknown_device(api: Any, facts: dict[str, Any]) -> Any:
    return api.register_kernel_mapping({"Relu": {"bogus": layer(api)}})


def unknown_device_in_a_block(api: Any, facts: dict[str, Any]) -> Any:
    with api.use_kernel_mapping({"Relu": {"cuda:0": layer(api)}}):
        return "entered"


class Own:
    """A repository that is neither of the Hub nor of a folder."""

    def load(self) -> type[nn.Module]:
        class Layer(nn.Module):
            def forward(self, x: Any) -> Any:
                return x * 0 + 9

        return Layer

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own)

    def __hash__(self) -> int:
        return 9


def attached(api: Any, name: str) -> Any:
    """A model whose forward calls a marked function, under the names of transformers' rotary embeddings."""

    def turn(x: Any, angle: Any) -> Any:
        return x * 0

    global turned  # as a modelling file has it
    turned = api.use_kernel_forward_from_hub(name)(turn)

    @api.use_kernelized_func(turned)
    class Layer(nn.Module):
        def forward(self, x: Any) -> Any:
            return turned(x, 1.0)

    return nn.Sequential(Layer()).eval()


def a_function(api: Any, facts: dict[str, Any]) -> list[float]:
    model = attached(api, "turn")
    found = [ran(model)]
    with api.use_kernel_mapping({"turn": {"cpu": layer(api, "turn")}}, inherit_mapping=False):
        found.append(kernelized(api, model))
    with api.use_kernel_mapping({}, inherit_mapping=False):
        return [*found, kernelized(api, model)]


def two_models(api: Any, facts: dict[str, Any]) -> list[float]:
    first, second = model_of(api), model_of(api)
    with api.use_kernel_mapping({"Relu": {"cpu": layer(api)}}, inherit_mapping=False):
        return [kernelized(api, first), ran(second)]


CALLS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "bound": bound(on("cpu")),
    "bound by a local repository": lambda api, facts: bound(
        lambda api: {"cpu": api.LocalLayerRepository(Path(facts["root"], "acme/relu/v1"), layer_name="Silu")}
    )(api, facts),
    "bound by a repository of one's own": bound(lambda api: {"cpu": Own()}),
    "bound for a device as an object": device_as_object,
    "bound for the device of the model": the_device_of_the_model,
    "bound for no device": without_a_device,
    "bound for an unknown device": bound(on("cpu"), device="bogus"),
    "bound for a numbered device": bound(on("cpu"), device="cpu:0"),
    "bound for a device that is not there": bound(on("xpu"), device="xpu"),
    "the same model": the_same_model,
    "two models": two_models,
    "conditions": under_conditions,
    "nothing mapped": bound(lambda api: {}),
    "nothing mapped, no fallback": bound(lambda api: {}, use_fallback=False),
    "no name mapped, no fallback": lambda api, facts: api.kernelize(
        model_of(api, "Unmapped"), mode=api.Mode.INFERENCE, device="cpu", use_fallback=False
    ),
    "another device mapped": bound(on("xpu")),
    "another device mapped, no fallback": bound(on("xpu"), use_fallback=False),
    "another device mapped, one case": bound(on("xpu"), use_fallback="NO_DEVICE"),
    "another device mapped, other case": bound(on("xpu"), use_fallback="NO_LAYER"),
    "inference": bound(EVERY),
    "training": bound(EVERY, "TRAINING", train=True),
    "inference takes training": bound(by_mode(TRAINING="Silu")),
    "training takes no inference": bound(by_mode(INFERENCE="Relu"), "TRAINING", train=True),
    "training takes no inference, no fallback": bound(by_mode(INFERENCE="Relu"), "TRAINING", use_fallback=False),
    "inference takes compiled": bound(COMPILED),
    "training takes compiled": bound(COMPILED, "TRAINING", train=True),
    "compiled inference": bound(by_mode(INFERENCE__TORCH_COMPILE="Relu", FALLBACK="Silu"), "INFERENCE|TORCH_COMPILE"),
    "the fallback kernel": bound(by_mode(FALLBACK="Silu")),
    "mode fallback": bound(EVERY, "FALLBACK"),
    "mode compile alone": bound(EVERY, "TORCH_COMPILE"),
    "no backward": bound(on("cpu", "NoBackward"), "TRAINING", train=True),
    "no backward, no fallback": bound(on("cpu", "NoBackward"), "TRAINING", train=True, use_fallback=False),
    "no backward, in inference": bound(on("cpu", "NoBackward")),
    "no backward, in inference, while it trains": bound(on("cpu", "NoBackward"), train=True),
    "no backward, mapped for training": bound(by_mode(TRAINING="NoBackward"), "TRAINING", train=True),
    "no compile, no fallback": bound(on("cpu", "Eager"), "INFERENCE|TORCH_COMPILE", use_fallback=False),
    "no compile, mapped for it": bound(by_mode(INFERENCE__TORCH_COMPILE="Eager")),
    "no build": bound(on("cpu", repo_id="acme/gpu-only")),
    "no build, all cases": bound(on("cpu", repo_id="acme/gpu-only"), use_fallback="ALL"),
    "untrusted": bound(on("cpu", repo_id="evil/relu")),
    "untrusted, all cases": bound(on("cpu", repo_id="evil/relu"), use_fallback="ALL"),
    "a missing layer": misfit("Nothing"),
    "a kernel with a constructor": misfit("WithInit"),
    "a kernel with a member": misfit("WithMember"),
    "a kernel with more arguments": misfit("TwoArguments"),
    "a kernel with another kind of argument": misfit("KeywordOnly"),
    "a kernel that needs an attribute": misfit("Scaled"),
    "a kernel with another name": another_name,
    "a kernel that is no layer": misfit("NotALayer"),
    "a kernel that does not fit, all cases": misfit("TwoArguments", use_fallback="ALL"),
    "an inherited mark": an_inherited_mark,
    "mappings in blocks": mappings_in_blocks,
    "a registered mapping": a_registered_mapping,
    "registered in a block": registered_in_a_block,
    "a later kernelize": a_later_kernelize,
    "registered for an unknown device": unknown_device,
    "mapped for a numbered device": unknown_device_in_a_block,
    "a function": a_function,
}
