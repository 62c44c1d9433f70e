"""`kernelize` of the package `kernels` on kernelhub's binding: what the recorded calls do not show."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kernel_repository import trust, write_build
from torch import nn

import kernelhub
import kernelhub.integrations.kernels as api
from kernelhub.errors import ContractMismatch, InvalidBackend, InvalidConfig, NoKernel
from kernelhub.integrations.kernels.layer.choice import Chooser, MarkedLayer, Place
from kernelhub.integrations.kernels.layer.mapping import KernelMapping
from kernelhub.mode import Mode

if TYPE_CHECKING:
    from pathlib import Path

    from kernelhub.serve import LocalHub

LAYERS = """
from torch import nn
class Scale(nn.Module):
    can_torch_compile = True
    def forward(self, x):
        return 10 * x * self.weight
class Quick(nn.Module):
    has_backward = False
    def forward(self, x):
        return 20 * x * self.weight
class Wants(nn.Module):
    def forward(self, x):
        return x * self.eps
class turn(nn.Module):
    def forward(self, x, angle):
        return 30 * x + angle
"""
ONE = torch.ones(1)


@api.use_kernel_forward_from_hub("Scale")
class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class OtherScale(Scale):
    """Inherits the mark, and computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.weight


@api.use_kernel_forward_from_hub("turn")
def turn(x: torch.Tensor, angle: float) -> Any:
    return x + angle


@api.use_kernelized_func(turn)
class Turning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> Any:
        return turn(x, 1.0)


@pytest.fixture
def model(hub_root: Path, online: LocalHub) -> nn.Sequential:
    trust(hub_root, "acme")
    files: dict[str, str | bytes] = {"__init__.py": "from . import layers\n", "layers.py": LAYERS}
    write_build(hub_root, "acme/layers", "v1", "torch-cpu", files)
    write_build(hub_root, "acme/gpu", "v1", "torch-cuda", files)
    return nn.Sequential(Scale())


def layer(name: str = "Scale", repo_id: str = "acme/layers") -> api.LayerRepository:
    return api.LayerRepository(repo_id, layer_name=name, version=1)


def kernelized(model: nn.Module, layers: dict[str, Any], mode: api.Mode = api.Mode.INFERENCE, **options: Any) -> Any:
    with api.use_kernel_mapping({name: {"cpu": found} for name, found in layers.items()}, inherit_mapping=False):
        return api.kernelize(model, mode=mode, **options)


def test_the_report_tells_what_was_bound_and_everything_can_be_undone(model: nn.Sequential) -> None:
    kernelized(model, {"Scale": layer()})
    assert model(ONE).item() == 10
    (row,) = kernelhub.report(model).bound
    assert (row.module, row.layer, row.symbol, row.variant) == ("0", "Scale", "Scale", "torch-cpu")
    assert row.kernel.startswith("acme/layers@")
    kernelhub.unkernelize(model)
    assert model(ONE).item() == 1
    assert "forward" not in vars(model[0])


def test_mappings_are_switched_off_by_their_variable(model: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    kernelized(model, {"Scale": layer()})
    monkeypatch.setenv("DISABLE_KERNEL_MAPPING", "1")
    assert kernelized(model, {"Scale": layer()})(ONE).item() == 1


def test_a_class_with_a_forward_of_its_own_does_not_inherit_the_mark(model: nn.Sequential) -> None:
    model.append(OtherScale())
    assert kernelized(model, {"Scale": layer()})(ONE).item() == 9


def test_a_kernel_without_backward_does_not_run_while_the_layer_trains(model: nn.Sequential) -> None:
    kernelized(model, {"Scale": layer("Quick")})
    assert model.train()(ONE).item() == 1
    assert model.eval()(ONE).item() == 20


def test_a_kernel_that_needs_an_attribute_is_refused_before_it_runs(model: nn.Sequential) -> None:
    with pytest.raises(ContractMismatch, match="eps"):
        kernelized(model, {"Scale": layer("Wants")})
    assert kernelized(model, {"Scale": layer("Wants")}, use_fallback=api.KernelizeFallback.ALL)(ONE).item() == 1


def test_a_repository_of_another_kind_is_named_in_the_report(model: nn.Sequential) -> None:
    class Own:
        def load(self) -> type[nn.Module]:
            return layer().load()

        def __str__(self) -> str:
            return "my own"

    kernelized(model, {"Scale": Own()})
    assert kernelhub.report(model).bound[0].kernel == "my own"


def test_a_layer_on_another_device_is_left_alone_unless_the_caller_names_one(model: nn.Sequential) -> None:
    model.append(Scale().to("meta"))
    kernelized(model, {"Scale": layer()})
    assert [row.module for row in kernelhub.report(model).bound] == ["0"]


def test_an_error_in_a_mapping_changes_nothing(model: nn.Sequential) -> None:
    api.register_kernel_mapping({"Scale": {"cpu": layer()}})
    wrongs: list[Any] = [{"bogus": layer()}, {"cpu": {"training": layer()}}, layer()]
    for wrong in wrongs:
        with pytest.raises(InvalidConfig, match="layer 'Scale'"):
            api.register_kernel_mapping({"Other": {"cpu": layer()}, "Scale": wrong}, inherit_mapping=False)
    assert api.kernelize(model, mode=api.Mode.INFERENCE)(ONE).item() == 10


def test_another_thread_does_not_see_the_mapping_of_a_block(model: nn.Sequential) -> None:
    found: list[float] = []

    def elsewhere() -> None:
        found.append(api.kernelize(model, mode=api.Mode.INFERENCE)(ONE).item())

    with api.use_kernel_mapping({"Scale": {"cpu": layer()}}):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        elsewhere()
    assert found == [1, 10]


@pytest.mark.parametrize("name", ["", "rms norm", "a.b", 3])
def test_a_mark_is_a_python_name(name: Any) -> None:
    with pytest.raises(InvalidConfig, match="not the name of a layer"):
        api.use_kernel_forward_from_hub(name)(nn.Identity)


@pytest.mark.parametrize("mode", [api.Mode.FALLBACK, api.Mode.TORCH_COMPILE, "inference"])
def test_a_mode_to_run_in_is_needed(model: nn.Sequential, mode: Any) -> None:
    with pytest.raises(InvalidConfig, match=r"Mode\.INFERENCE or Mode\.TRAINING"):
        api.kernelize(model, mode=mode)


def test_a_model_without_parameters_needs_a_device() -> None:
    with pytest.raises(InvalidBackend, match="no parameters that tell its device"):
        api.kernelize(nn.Identity(), mode=api.Mode.INFERENCE)


def test_a_missing_build_names_the_layer_only_when_that_is_no_case(model: nn.Sequential) -> None:
    with pytest.raises(FileNotFoundError, match="acme/gpu@v1 fits this environment"):
        kernelized(model, {"Scale": layer(repo_id="acme/gpu")})
    elsewhere = api.use_kernel_mapping({"Scale": {"xpu": layer()}}, inherit_mapping=False)
    with elsewhere, pytest.raises(NoKernel, match="layer 'Scale': nothing is mapped to it for cpu"):
        api.kernelize(model, mode=api.Mode.INFERENCE, use_fallback=False)


def test_a_device_that_is_not_there_is_an_error(model: nn.Sequential) -> None:
    """Its kernels would be those of another backend."""
    with (
        api.use_kernel_mapping({"Scale": {"xpu": layer()}}, inherit_mapping=False),
        pytest.raises(InvalidBackend, match="not available in this process"),
    ):
        api.kernelize(model, mode=api.Mode.INFERENCE, device="xpu")


# Functions


def test_a_function_is_replaced_in_one_model_and_not_in_another(model: nn.Sequential) -> None:
    first, second = Turning(), Turning()
    kernelized(first, {"turn": layer("turn")})
    assert (first(ONE).item(), second(ONE).item(), turn(ONE, 1.0).item()) == (31, 2, 2)
    assert kernelhub.unkernelize(first)(ONE).item() == 2


def test_a_model_with_functions_can_be_copied_and_pickled(model: nn.Sequential) -> None:
    assert copy.deepcopy(turn) is turn
    assert pickle.loads(pickle.dumps(turn)) is turn
    module = Turning()
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert vars(other)["_kernel_funcs"] == {"turn": turn}
        assert kernelized(other, {"turn": layer("turn")})(ONE).item() == 31


# Capabilities, on a machine that has some


class Named:
    """A repository whose layer has its name; nothing is downloaded."""

    def __init__(self, name: str) -> None:
        self._name = name

    def load(self) -> type[nn.Module]:
        return type(self._name, (Scale,), {"can_torch_compile": True})


def chosen(mapping: dict[Any, Any], fallback: api.KernelizeFallback = api.KernelizeFallback.NONE) -> Any:
    """The name that a mapping of one layer has for CUDA, or None."""
    known = KernelMapping()
    known.add({"Scale": mapping})
    layers = {"Scale": MarkedLayer([Scale()], all_functions=False)}
    entries = list(Chooser(known, Place("cuda"), Mode.INFERENCE, fallback).entries(layers))
    return next((getattr(choice, "found").symbol for entry in entries for _, choice in entry.choices), None)  # noqa: B009


def cuda(low: int, high: int) -> api.Device:
    return api.Device("cuda", api.CUDAProperties(low, high))


@pytest.mark.parametrize(
    ("capability", "expected"), [((7, 5), "quick"), ((8, 0), "broad"), ((9, 0), "exact"), ((12, 1), "newest")]
)
def test_the_narrowest_range_that_holds_the_device_wins(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    ranges = {cuda(80, 100): Named("broad"), cuda(90, 90): Named("exact"), cuda(121, 121): Named("newest")}
    assert chosen({"cuda": Named("quick"), **ranges}) == expected


def test_a_device_of_unknown_capability_is_in_no_range() -> None:
    assert chosen({cuda(0, 999): Named("broad")}, api.KernelizeFallback.DEFAULT) is None
    with pytest.raises(NoKernel, match="a cuda of unknown capability"):
        chosen({cuda(0, 999): Named("broad")})
    assert chosen({cuda(0, 999): Named("broad"), "cuda": Named("quick")}) == "quick"


def test_the_widest_range_is_not_asked_when_a_narrower_one_has_no_kernel_for_the_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    narrow = {api.Mode.INFERENCE | api.Mode.TORCH_COMPILE: Named("broad")}
    assert chosen({"cuda": Named("quick"), cuda(90, 90): narrow}) == "broad"
    known = {"cuda": Named("quick"), cuda(90, 90): {}}
    with pytest.raises(NoKernel, match="for inference mode"):
        chosen(known)
