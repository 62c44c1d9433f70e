"""A fused kernel with parameters of its own in the company of adapters, hooks, compilers and sharded models."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fused_kernel import FILES, NORM_MLP
from kernel_repository import write_build
from layers.tiny_model import IDS, logits, tiny
from torch import multiprocessing, nn

import kernelhub
from company.distributed_worker import CASES, WORLD
from company.embedded import assert_same_step, step
from company.fusion_worker import KEY, work

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable
    from pathlib import Path

    Tell = Callable[[str, str, str], None]
    Fuse = Callable[..., Any]

WHAT = "fusion of norm and MLP"
ORDERS = ("kernelize, then wrap", "wrap, then kernelize")


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_build(tmp_path_factory.mktemp("fused"), "acme/fused", "v1", "torch-cpu", FILES)


@pytest.fixture
def fuse(build: Path) -> Fuse:
    def bound(model: Any, **options: Any) -> Any:
        return kernelhub.kernelize(model, {KEY: f"{build}:NormMLP"}, **options)

    return bound


@pytest.fixture
def calls(build: Path) -> Counter[str]:
    counter: Counter[str] = kernelhub.load_kernel(str(build)).layers.CALLS
    counter.clear()
    return counter


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, build: Path) -> list[dict[str, Any]]:
    """What each process found, in the order of their ranks."""
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")  # torch can be built without
    folder = tmp_path_factory.mktemp("processes")
    processes: Any = multiprocessing
    processes.spawn(work, args=(folder, str(build)), nprocs=WORLD)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("case", CASES)
def test_sharded_models_compute_the_same(outcomes: list[dict[str, Any]], case: str, tell: Tell) -> None:
    for order in ORDERS:
        found = [outcome[case][order] for outcome in outcomes]
        assert [each.get("error") for each in found] == [None, None]
        assert all(each["same"] for each in found)
    ran, reasons = outcomes[0][case]["calls"], outcomes[0][case]["reasons"]
    assert ran == {"DDP": 8, "FSDP2, a unit per decoder layer": 8, "FSDP1": 4}.get(case, 0)
    tell(
        case,
        WHAT,
        f"{'works' if ran else 'own forwards'}{f', refused if wrapped before: {reasons[0]}' if reasons else ''}",
    )


@pytest.fixture
def lora() -> Callable[..., Any]:
    peft = pytest.importorskip("peft")

    def adapt(model: Any, *targets: str) -> Any:
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False, lora_dropout=0.0)
        return peft.get_peft_model(model, config)

    return adapt


def test_adapters_inside_are_never_left_out(
    lora: Callable[..., Any], fuse: Fuse, calls: Counter[str], tell: Tell
) -> None:
    expected = step(lora(tiny(), "gate_proj", "q_proj").train())
    late = fuse(lora(tiny(), "gate_proj", "q_proj"), strict=False)
    early = lora(fuse(tiny()), "gate_proj", "q_proj")
    for model in (late, early):
        found = step(model.train())
        assert_same_step(found, expected)
        assert all(gradient.any() for gradient in found[1].values())
    assert calls["NormMLP"] == 0
    reasons = [row.reason for row in kernelhub.report(late).skipped]
    assert len(reasons) == 2
    assert all("no place for" in reason for reason in reasons)
    tell("PEFT LoRA inside, added before", WHAT, "refused: the adapter's parameters have no place in the layout")
    tell("PEFT LoRA inside, added later", WHAT, "own forwards at each call")


def test_adapters_elsewhere_train_beside_it(
    lora: Callable[..., Any], fuse: Fuse, calls: Counter[str], tell: Tell
) -> None:
    expected = step(lora(tiny(), "q_proj").train())
    assert_same_step(step(lora(fuse(tiny()), "q_proj").train()), expected)
    assert_same_step(step(fuse(lora(tiny(), "q_proj")).train()), expected)
    assert calls["NormMLP"] == 4
    tell("PEFT LoRA elsewhere", WHAT, "works")


def test_a_merged_adapter_can_be_fused_again(lora: Callable[..., Any], fuse: Fuse, calls: Counter[str]) -> None:
    model = lora(tiny(), "gate_proj").merge_and_unload()
    expected = logits(model)
    torch.testing.assert_close(logits(fuse(model)), expected)
    assert calls["NormMLP"] == 2


def test_hooks_of_accelerate_inside(fuse: Fuse, calls: Counter[str], tell: Tell) -> None:
    accelerate = pytest.importorskip("accelerate")
    late = fuse(accelerate.dispatch_model(tiny(), {"": "cpu"}, main_device="cpu", force_hooks=True), strict=False)
    early = accelerate.dispatch_model(fuse(tiny()), {"": "cpu"}, main_device="cpu", force_hooks=True)
    for model in (late, early):
        torch.testing.assert_close(logits(model), logits(tiny()))
    assert calls["NormMLP"] == 0
    assert all("have hooks or another forward" in row.reason for row in kernelhub.report(late).skipped)
    tell("accelerate device_map hooks", WHAT, "own forwards: hooks inside move weights")


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool, fuse: Fuse, calls: Counter[str], tell: Tell) -> None:
    models = [tiny(), fuse(tiny())]
    for model in models:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    expected, found = (step(model.train(), use_cache=False) for model in models)
    assert_same_step(found, expected)
    assert calls["NormMLP"] == 4
    torch.testing.assert_close(logits(models[1].eval()), logits(models[0].eval()))
    x = torch.randn(2, 3, 32)
    torch.testing.assert_close(models[1].model.layers[0].mlp(x), models[0].model.layers[0].mlp(x))
    tell("gradient checkpointing", WHAT, f"works ({'re-entrant' if reentrant else 'not re-entrant'})")


def test_autocast_and_functional_call_and_export(fuse: Fuse, calls: Counter[str], tell: Tell) -> None:
    steps = []
    for model in (tiny().train(), fuse(tiny().train())):
        with torch.autocast("cpu", torch.bfloat16):
            steps.append(step(model))
    assert_same_step(steps[1], steps[0], rtol=0.1, atol=0.02)
    outputs, gradients = [], []
    for model in (tiny(), fuse(tiny())):
        weights = {name: (weight.detach() * 1.5).requires_grad_() for name, weight in model.named_parameters()}
        out = torch.func.functional_call(model, weights, (), {"input_ids": IDS, "use_cache": False}).logits
        out.square().mean().backward()
        outputs.append(out.detach())
        gradients.append([weight.grad for weight in weights.values()])
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-5)
    assert calls["NormMLP"] == 4
    inputs = {"input_ids": IDS, "use_cache": False}
    exported = torch.export.export(fuse(tiny()), (), inputs, strict=False).module()
    torch.testing.assert_close(exported(**inputs).logits, logits(tiny()), rtol=1e-4, atol=1e-5)
    for company in ("autocast bfloat16", "torch.func.functional_call", "torch.export"):
        tell(company, WHAT, "works")


def test_parametrized_and_quantised_layers_inside(fuse: Fuse, calls: Counter[str], tell: Tell) -> None:
    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    class EightBit(nn.Linear):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__(linear.in_features, linear.out_features, bias=False)
            weight = self._parameters.pop("weight")
            del weight
            self.register_buffer("weight", (linear.weight.detach() * 64).round().to(torch.int8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.weight.to(x.dtype) / 64).T

    def parametrized(model: Any) -> Any:
        nn.utils.parametrize.register_parametrization(model.model.layers[0].mlp.up_proj, "weight", Doubled())
        return model

    def quantised(model: Any) -> Any:
        model.model.layers[0].mlp.down_proj = EightBit(model.model.layers[0].mlp.down_proj)
        return model

    for change in (parametrized, quantised):
        expected = step(change(tiny()).train())
        for model in (fuse(change(tiny())), change(fuse(tiny()))):
            calls.clear()
            assert_same_step(step(model.train()), expected)
            assert calls["NormMLP"] == 1
    tell("parametrize inside", WHAT, "refused, or own forwards if registered later")
    tell("quantised linear layers inside", WHAT, "refused, or own forwards if replaced later")


def test_the_key_of_the_processes_means_the_same_layers(fuse: Fuse) -> None:
    assert len(kernelhub.report(fuse(tiny())).bound) == 2
    assert [name for name, _ in NORM_MLP] == [name for name, _ in KEY]
