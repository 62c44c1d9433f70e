"""Devices, shards and meta weights: what is asked at each call, and what must never be computed wrongly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from kernelhub.layers import choosing
from kernelhub.layers.kernelize import report
from kernelhub.layers.symbol import LoadedSymbol
from layers.kernel_layer import RAN, TripleRMSNorm, kernelize
from layers.tiny_model import logits, tiny

if TYPE_CHECKING:
    from kernelhub.config import KernelChoice


class PassOn(nn.Module):
    """Computes nothing: a machine without CUDA can pretend to have its tensors, not to compute with them."""

    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input


def load_pass_on(choice: KernelChoice, backend: str) -> LoadedSymbol:
    return LoadedSymbol(PassOn, "org/repo@0123abc", f"torch-{backend}", "PassOn")


def bind_pass_on(model: nn.Module) -> None:
    kernelize(model, {"RMSNorm": "org/repo:PassOn"}, load=load_pass_on)


def test_a_range_of_capability_is_asked_of_the_device_of_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    mapping = {"RMSNorm": {"cuda>=9.0,<10": "org/hopper:TorchRMSNorm", "cuda<9": "org/old:TorchRMSNorm"}}
    capabilities = {0: (9, 0), 1: (8, 6), 2: (10, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with FakeTensorMode():
        model = nn.ModuleList([nn.RMSNorm(4, device=f"cuda:{index}") for index in range(3)])
    rows = kernelize(model, mapping, strict=False)
    assert [row.kernel for row in rows] == ["org/hopper@0123abc", "org/old@0123abc", ""]
    assert rows[2].reason == "the config has no kernel for cuda 10.0"


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The CUDA devices that were made the current one, on a machine that seems to have two."""
    seen: list[str] = []

    class Device:
        def __init__(self, device: torch.device) -> None:
            seen.append(str(device))

        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return seen


def test_a_kernel_is_launched_on_the_device_of_its_tensors(entered: list[str]) -> None:
    """REF linkedin/Liger-Kernel#1303, #1304, #593; huggingface/kernels-community#1029: launched on the current one."""
    with FakeTensorMode():
        model = nn.Sequential(nn.RMSNorm(4, device="cuda:1"))
        bind_pass_on(model)
        model(torch.empty(2, 4, device="cuda:1"))
        model[0](input=torch.empty(2, 4, device="cuda:0"))
    assert entered == ["cuda:1", "cuda:0"]


def test_layers_on_the_cpu_or_on_the_only_device_enter_nothing(
    entered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.RMSNorm(4))
    bind_pass_on(model)
    assert choosing.several_cuda_devices()
    assert model[0].forward.__func__ is PassOn.forward
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with FakeTensorMode():
        single = nn.Sequential(nn.RMSNorm(4, device="cuda:0"))
        bind_pass_on(single)
        single(torch.empty(2, 4, device="cuda:0"))
    assert entered == []


def test_a_language_model_spread_over_devices_launches_on_that_of_its_head(entered: list[str]) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm_head = nn.RMSNorm(4, device="cuda:1")

        def forward(self, input_ids: Any) -> Any:
            return input_ids

    def kernel(self: nn.Module, input_ids: Any) -> Any:
        return "launched"

    with FakeTensorMode():
        model = Head()
        assert choosing.on_device_of_tensors(kernel)(model, torch.empty(1, device="cuda:0")) == "launched"
        assert choosing.on_device_of_tensors(kernel)(nn.Module(), torch.empty(1)) == "launched"
    assert entered == ["cuda:1"]


@pytest.fixture
def distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")


@pytest.mark.usefixtures("distributed")
def test_an_empty_weight_of_zero3_keeps_the_own_forward_for_that_call() -> None:
    """REF huggingface/trl#5891, #6372, #4544: ZeRO-3 leaves a weight of size 0 outside the call of its module."""
    model = tiny()
    norm = model.model.norm
    kernelize(model, {"model.norm": "org/repo:TripleRMSNorm"})
    x = torch.ones(1, 32)
    assert torch.equal(norm(x), TripleRMSNorm.forward(norm, x))
    whole, norm.weight.data = norm.weight.data, torch.empty(0)
    with pytest.raises(RuntimeError, match="must match"):
        norm(x)  # what the plain layer says, not what a kernel makes of an empty weight
    norm.weight.data = whole
    assert torch.equal(norm(x), TripleRMSNorm.forward(norm, x))


@pytest.mark.usefixtures("distributed")
def test_weights_gathered_by_a_hook_of_the_module_are_there_for_the_kernel() -> None:
    """The way of ZeRO-3: gather before, release after; the bound forward runs in between."""
    model = tiny()
    expected = logits(model)
    for module in [each for each in model.modules() if list(each.parameters(recurse=False))]:
        kept = {name: weight.data for name, weight in module.named_parameters(recurse=False)}

        def gather(module: nn.Module, _: Any, kept: dict[str, torch.Tensor] = kept) -> None:
            for name, weight in module.named_parameters(recurse=False):
                weight.data = kept[name]

        def release(module: nn.Module, *_: Any) -> None:
            for weight in module.parameters(recurse=False):
                weight.data = torch.empty(0)

        module.register_forward_pre_hook(gather)
        module.register_forward_hook(release)
        release(module)
    kernelize(model, {"RMSNorm": "org/repo:RMSNorm", "SwiGLUMLP": "org/repo:SwiGLUMLP"})
    RAN.clear()
    torch.testing.assert_close(logits(model), expected)
    assert (RAN["RMSNorm"], RAN["SwiGLUMLP"]) == (9, 2)


def test_without_other_processes_nothing_is_asked_at_each_call() -> None:
    assert not choosing.among_processes()
    assert not choosing.has_split_weight(nn.RMSNorm(4))
    assert choosing.has_split_weight(nn.RMSNorm(0))
    assert not choosing.is_split("text")


def test_layers_without_weights_are_postponed_and_bound_once_they_have_some() -> None:
    config = {"RMSNorm": "org/repo:RMSNorm"}
    with torch.device("meta"):
        model = tiny()
    result = kernelize(model, config)
    assert result.counts == {"bound": 0, "would bind": 0, "postponed": 9, "skipped": 0}
    assert {row.reason for row in result.postponed} == {"on the meta device: it has no weights yet"}
    assert report(model) == result
    model.to_empty(device="cpu").load_state_dict(tiny().state_dict())
    model.model.rotary_emb = tiny().model.rotary_emb
    assert len(kernelize(model, config).bound) == 9
    torch.testing.assert_close(logits(model), logits(tiny()))
