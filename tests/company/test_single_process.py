"""One process: compilers, adapters, hooks, checkpoints, functional calls, copies in other processes."""

from __future__ import annotations

import copy
import io
import multiprocessing
from typing import TYPE_CHECKING, Any

import pytest
import torch
from layers.tiny_model import IDS, anatomy, logits, tiny
from torch import nn
from torch._dynamo.testing import CompileCounter

import kernelhub
from company.embedded import CONFIG, LABELS, assert_same_step, bound_symbols, kernelized, step
from kernelhub.config import KernelConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    Tell = Callable[[str, str, str], None]

EVERYTHING = {"FusedLinearCrossEntropy", "RMSNorm", "SwiGLUMLP", "rotary_pos_emb"}


def test_torch_compile_makes_one_graph_and_never_again_over_twenty_steps(tell: Tell) -> None:
    """REF huggingface/diffusers#12387, #12475, #12236; huggingface/kernels#85, #87, #607."""
    model, plain = kernelized(), tiny()
    counts = []
    for each in (plain, model):
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(each, backend=counter, fullgraph=True, dynamic=True)
        for index in range(20):
            ids = IDS[:, : (5, 6, 7)[index % 3]]
            with torch.no_grad():
                out = compiled(input_ids=ids, use_cache=False).logits
                torch.testing.assert_close(out, plain(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
        counts.append(counter.frame_count)
    assert counts == [1, 1]
    notes = {row.symbol: row.note for row in kernelhub.report(model).bound}
    assert notes["RMSNorm"] == notes["SwiGLUMLP"] == ""
    assert "does not support torch.compile" in notes["FusedLinearCrossEntropy"]
    tell("torch.compile fullgraph, 20 steps", "RMSNorm, SwiGLUMLP", "works: 1 graph, 3 shapes")
    tell("torch.compile fullgraph, 20 steps", "FusedLinearCrossEntropy, rotary_pos_emb", "own forward while compiled")


def test_torch_compile_in_one_of_several_processes(monkeypatch: pytest.MonkeyPatch, tell: Tell) -> None:
    """There every call looks for sharded tensors, and several devices are entered: neither may break the graph."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    model = kernelized()
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for index in range(6):
        ids = IDS[:, : (5, 6, 7)[index % 3]]
        with torch.no_grad():
            out = compiled(input_ids=ids, use_cache=False).logits
            torch.testing.assert_close(out, tiny()(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1
    tell("torch.compile fullgraph, several processes", "all four", "works: 1 graph, 3 shapes")


def test_torch_compile_of_a_training_step(tell: Tell) -> None:
    model, expected = kernelized().train(), step(tiny().train())
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same_step(step(compiled), expected)
    model = kernelized().train()
    model.model.compile(backend="aot_eager", fullgraph=True)
    assert model(input_ids=IDS, labels=LABELS).logits is None
    assert_same_step(step(model), expected)
    tell("torch.compile, training", "the decoder compiled, the fused loss around it", "works")


def test_torch_export(tell: Tell) -> None:
    model = kernelized()
    inputs = {"input_ids": IDS, "use_cache": False}
    exported = torch.export.export(model, (), inputs, strict=False).module()
    torch.testing.assert_close(exported(**inputs).logits, logits(tiny()), rtol=1e-4, atol=1e-5)
    tell("torch.export", "RMSNorm, SwiGLUMLP", "works")


@pytest.fixture
def lora() -> Callable[..., Any]:
    peft = pytest.importorskip("peft")

    def adapt(model: Any, *targets: str) -> Any:
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False, lora_dropout=0.0)
        return peft.get_peft_model(model, config)

    return adapt


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("targets", [("q_proj", "gate_proj", "down_proj"), ("lm_head", "up_proj")])
def test_lora_adapters_of_bound_layers_train_as_without_kernels(
    lora: Callable[..., Any], targets: tuple[str, ...], late: bool, tell: Tell
) -> None:
    """REF huggingface/trl#4612, #5977, #5808, #6159, #6186, #6277: an adapter on lm_head trained as if frozen."""
    expected = step(lora(tiny(), *targets).train())
    model = kernelized(lora(tiny(), *targets)) if late else lora(kernelized(), *targets)
    found = step(model.train())
    assert_same_step(found, expected)
    assert all(gradient.any() for gradient in found[1].values())
    fused = model(input_ids=IDS, labels=LABELS).logits is None
    assert fused is ("lm_head" not in targets)
    if late and not fused:
        reasons = [row.reason for row in kernelhub.report(model).skipped if row.layer == "FusedLinearCrossEntropy"]
        assert reasons == ["its lm_head is not a plain Linear layer (Linear)"]
        tell("PEFT LoRA on lm_head", "FusedLinearCrossEntropy", f"refused: {reasons[0]}")
    elif not fused:
        tell("PEFT LoRA on lm_head, added later", "FusedLinearCrossEntropy", "own forward at each call")
    else:
        when = "before" if late else "later"
        tell(f"PEFT LoRA on projections, added {when}", "all four", "works: adapters train, fused loss too")


def test_a_merged_adapter_is_fused_again(lora: Callable[..., Any]) -> None:
    model = lora(tiny(), "lm_head").merge_and_unload()
    assert "FusedLinearCrossEntropy" in bound_symbols(kernelized(model))


def test_kernels_run_below_the_hooks_of_accelerate(tell: Tell) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.dispatch_model(tiny(), {"": "cpu"}, main_device="cpu", force_hooks=True)
    before = anatomy(model)
    kernelized(model)
    reasons = [row.reason for row in kernelhub.report(model).skipped if row.layer == "FusedLinearCrossEntropy"]
    assert bound_symbols(model) == EVERYTHING - {"FusedLinearCrossEntropy"}
    assert reasons == ["its lm_head is not a plain Linear layer (Linear)"]
    torch.testing.assert_close(logits(model), logits(tiny()), rtol=1e-4, atol=1e-5)
    kernelhub.unkernelize(model)
    assert anatomy(model) == before
    tell("accelerate device_map hooks", "RMSNorm, SwiGLUMLP, rotary_pos_emb", "works: below the hook")
    tell("accelerate device_map hooks", "FusedLinearCrossEntropy", "refused: the hook of lm_head moves its weight")


@pytest.mark.filterwarnings("ignore::UserWarning:accelerate")
def test_weights_that_accelerate_offloaded_are_postponed_and_loaded_by_its_hooks(tell: Tell) -> None:
    accelerate = pytest.importorskip("accelerate")
    cpu = torch.device("cpu")
    late = kernelized(accelerate.cpu_offload(tiny(), execution_device=cpu))
    assert {row.module for row in kernelhub.report(late).postponed} >= {"model.norm", "(model)"}
    early = accelerate.cpu_offload(kernelized(), execution_device=cpu)
    assert bound_symbols(early) >= {"RMSNorm", "SwiGLUMLP"}
    for model in (late, early):
        torch.testing.assert_close(logits(model), logits(tiny()), rtol=1e-4, atol=1e-5)
    tell("accelerate cpu_offload, then kernelize", "all four", "postponed: weights on the meta device")
    tell("kernelize, then accelerate cpu_offload", "all four", "works: the hook loads the weights")


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool, tell: Tell) -> None:
    models = [tiny(), kernelized()]
    for model in models:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    expected, found = (step(model.train(), use_cache=False) for model in models)
    assert_same_step(found, expected)
    tell("gradient checkpointing", "all four", f"works ({'re-entrant' if reentrant else 'not re-entrant'})")


def test_autocast(tell: Tell) -> None:
    steps = []
    for model in (tiny().train(), kernelized().train()):
        with torch.autocast("cpu", torch.bfloat16):
            steps.append(step(model))
    assert_same_step(steps[1], steps[0], rtol=0.1, atol=0.02)
    tell("autocast bfloat16", "all four", "works, within bfloat16 rounding")


def test_functional_call_uses_the_weights_that_are_given(tell: Tell) -> None:
    outputs, gradients = [], []
    for model in (tiny(), kernelized()):
        weights = {name: (weight.detach() * 1.5).requires_grad_() for name, weight in model.named_parameters()}
        out = torch.func.functional_call(model, weights, (), {"input_ids": IDS, "use_cache": False}).logits
        out.square().mean().backward()
        outputs.append(out.detach())
        gradients.append([weight.grad for weight in weights.values()])
        assert all(weight.grad is None for weight in model.parameters())
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-5)
    tell("torch.func.functional_call", "all four", "works: the weights that are given count")


def test_gradient_accumulation_divides_by_the_tokens_of_all_batches(tell: Tell) -> None:
    """REF linkedin/Liger-Kernel#322, huggingface/transformers#42444."""
    steps = []
    for model in (tiny().train(), kernelized().train()):
        counted = (LABELS[:, 1:] != -100).sum()
        whole = step(model, num_items_in_batch=counted)
        model.zero_grad()
        total = torch.zeros(())
        for row in range(2):
            inputs = {"input_ids": IDS[row : row + 1], "labels": LABELS[row : row + 1]}
            loss = model(**inputs, num_items_in_batch=counted).loss
            loss.backward()
            total += loss.detach()
        parts = total, {name: weight.grad.clone() for name, weight in model.named_parameters()}
        steps += [whole, parts]
    for other in steps[1:]:
        assert_same_step(other, steps[0])
    tell("gradient accumulation, num_items_in_batch", "FusedLinearCrossEntropy", "works: same loss and gradients")


def test_tied_weights_get_the_gradients_of_both_places(tell: Tell) -> None:
    expected = step(tiny(tie_word_embeddings=True).train())
    model = kernelized(tiny(tie_word_embeddings=True)).train()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model(input_ids=IDS, labels=LABELS).logits is None
    assert_same_step(step(model), expected)
    tell("weight tying", "FusedLinearCrossEntropy", "works")


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


@pytest.mark.parametrize("late", [True, False])
def test_parametrized_weights_are_computed_for_the_kernel(late: bool, tell: Tell) -> None:
    def parametrized(model: Any) -> Any:
        layer = model.model.layers[0]
        for module in (model.model.norm, layer.mlp.down_proj, model.lm_head):
            nn.utils.parametrize.register_parametrization(module, "weight", Doubled())
        return model

    plain = parametrized(tiny()).train()
    expected = step(plain)
    model = kernelized(parametrized(tiny())) if late else parametrized(kernelized())
    assert_same_step(step(model.train()), expected)
    assert not torch.allclose(logits(model), logits(tiny()))
    kernelhub.unkernelize(model)
    assert_same_step(step(model.train()), expected)
    when = "before" if late else "later"
    tell(f"parametrize, registered {when}", "RMSNorm, SwiGLUMLP", "works: the computed weight counts")
    tell(f"parametrize, registered {when}", "FusedLinearCrossEntropy", "own forward (lm_head is no plain Linear)")


def test_quantised_projections_are_called_as_modules(tell: Tell) -> None:
    class EightBit(nn.Module):
        """A linear layer that keeps its weight as integers, as quantisation libraries replace it."""

        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.scale = float(linear.weight.detach().abs().max()) / 127
            self.register_buffer("weight", (linear.weight.detach() / self.scale).round().to(torch.int8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.weight.to(x.dtype) * self.scale).T

    def quantised(model: Any) -> Any:
        for layer in model.model.layers:
            for name in ("gate_proj", "up_proj", "down_proj"):
                setattr(layer.mlp, name, EightBit(getattr(layer.mlp, name)))
        model.lm_head = EightBit(model.lm_head)
        return model

    expected = step(quantised(tiny()).train())
    model = kernelized(quantised(tiny())).train()
    assert bound_symbols(model) == EVERYTHING - {"FusedLinearCrossEntropy"}
    assert_same_step(step(model), expected)
    tell("quantised linear layers", "SwiGLUMLP", "works: projections are called")
    tell("quantised linear layers", "FusedLinearCrossEntropy", "refused: its lm_head is not a plain Linear layer")


def in_another_process(model: Any, answers: Any) -> None:
    answers.put((logits(model).numpy(), len(kernelhub.report(model))))
    kernelized(model)
    answers.put((logits(model).numpy(), len(kernelhub.report(model).bound)))


def test_a_model_sent_to_another_process_is_plain_there_and_can_be_bound_again(tell: Tell) -> None:
    """REF huggingface/accelerate#1598; NVIDIA/warp#413."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    model = kernelized()
    data = io.BytesIO()
    torch.save(model, data)
    process = context.Process(target=load_and_answer, args=(data.getvalue(), answers))
    process.start()
    try:
        found = [answers.get(timeout=120) for _ in range(2)]
    finally:
        process.join(180)
    bound = len(kernelhub.report(model).bound)
    assert [count for _, count in found] == [0, bound]
    for array, _ in found:
        torch.testing.assert_close(torch.from_numpy(array), logits(tiny()), rtol=1e-4, atol=1e-5)
    tell("multiprocessing spawn, torch.save", "all four", "works: plain there until kernelize")


def load_and_answer(data: bytes, answers: Any) -> None:
    in_another_process(torch.load(io.BytesIO(data), weights_only=False), answers)


def test_copies_hooks_and_optimizers(tell: Tell) -> None:
    plain, model = tiny().train(), tiny().train()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    kernelized(model)
    for _ in range(3):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            step(each)
            optimizer.step()
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-3, atol=1e-4)
    twin = copy.deepcopy(model)
    assert bound_symbols(twin) == bound_symbols(model) == EVERYTHING
    tell("deepcopy, optimizer made before", "all four", "works")


def test_the_config_of_the_test_is_the_one_of_the_switches() -> None:
    assert isinstance(CONFIG, KernelConfig)
    assert bound_symbols(kernelized()) == EVERYTHING
