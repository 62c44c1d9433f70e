"""Kernels with parameters of their own, from real repositories, on models of transformers."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
import transformers
from fused_kernel import ATTENTION, FILES, LAYER, MLP, NORM_MLP
from kernel_repository import trust, write_build
from layers.tiny_model import IDS, anatomy, gradients, logits, tiny
from torch import nn

import kernelhub
from kernelhub.blueprint import used_entries
from kernelhub.errors import BrokenFusion, ContractMismatch, UnknownLayer

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable
    from pathlib import Path

    from kernelhub.session import Session

    Bind = Callable[..., Any]

KERNELS: dict[str, Any] = {
    "NormMLP": NORM_MLP,
    "GateUpMLP": MLP,
    "TransposedMLP": MLP,
    "QKVAttention": ATTENTION,
    "AddNormLayer": LAYER,
    "ConfiguredMLP": "MLP",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_build(tmp_path / "local", "acme/fused", "v1", "torch-cpu", FILES)


@pytest.fixture
def bind(folder: Path, hubless: Session) -> Bind:
    """Binds one kernel of the repository to a model."""

    def bound(model: Any, symbol: str = "NormMLP", key: Any = None, **options: Any) -> Any:
        mapping = {key or KERNELS[symbol]: f"{folder}:{symbol}"}
        return kernelhub.kernelize(model, mapping, session=hubless, **options)

    return bound


@pytest.fixture
def calls(folder: Path, hubless: Session) -> Counter[str]:
    """How often each kernel ran."""
    counter: Counter[str] = kernelhub.load_kernel(str(folder), session=hubless).layers.CALLS
    counter.clear()
    return counter


def fresh(config: Any) -> Any:
    make: Any = transformers.Qwen3ForCausalLM
    return make(config).eval()


def reasons(model: nn.Module) -> set[str]:
    return {row.reason for row in kernelhub.report(model).skipped}


@pytest.mark.parametrize(
    ("symbol", "family"), [*((symbol, "Qwen3") for symbol in KERNELS), ("NormMLP", "Llama"), ("QKVAttention", "Llama")]
)
def test_the_model_computes_the_same(symbol: str, family: str, bind: Bind, calls: Counter[str]) -> None:
    model = tiny(family)
    expected, expected_gradients = logits(model), gradients(model)
    parameters = dict(model.named_parameters())
    state = {key: value.clone() for key, value in model.state_dict().items()}
    before = anatomy(model)
    bind(model, symbol)
    assert calls[symbol] == 0
    torch.testing.assert_close(logits(model), expected)
    torch.testing.assert_close(gradients(model), expected_gradients)
    assert calls[symbol] == 4
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    kernelhub.unkernelize(model)
    assert anatomy(model) == before
    assert torch.equal(logits(model), expected)
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in model.parameters())
    assert len(kernelhub.report(model)) == 0


def test_a_fusion_from_the_hub_is_planned_bound_and_reported(hub_root: Path, session: Session) -> None:
    write_build(hub_root, "acme/fused", "v1", "torch-cpu", FILES)
    trust(hub_root, "acme")
    model, mapping = tiny(), {NORM_MLP: "acme/fused:NormMLP"}
    title = "model.layers.{}.post_attention_layernorm + mlp"
    planned = kernelhub.plan(model, mapping, session=session)
    assert [(row.module, row.state) for row in planned] == [(title.format(i), "would bind") for i in range(2)]
    assert not list((session.store.root).glob("**/layers.py"))
    kernelhub.kernelize(model, mapping, session=session)
    report = kernelhub.report(model)
    assert [row.module for row in report.bound] == [title.format(0), title.format(1)]
    assert {(row.layer, row.symbol, row.mode) for row in report} == {
        ("RMSNorm=model.layers.*.post_attention_layernorm + MLP=model.layers.*.mlp", "NormMLP", "any")
    }
    assert report[0].kernel.startswith("acme/fused@")
    assert "model.layers.*.post_attention_layernorm + mlp (2)" in str(report)


def test_an_optimizer_made_before_trains_the_same_parameters(bind: Bind) -> None:
    models = [tiny().train(), tiny().train()]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.05) for model in models]
    bind(models[1])
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            gradients(model)
            optimizer.step()
    torch.testing.assert_close(dict(models[1].named_parameters()), dict(models[0].named_parameters()))
    kernelhub.unkernelize(models[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        gradients(model)
        optimizer.step()
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict())


def test_a_parameter_changed_between_forward_and_backward_is_an_error(bind: Bind) -> None:
    model = bind(tiny())
    loss = model(input_ids=IDS, labels=IDS).loss
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("symbol", ["NormMLP", "TransposedMLP"])
def test_saved_models_are_plain_and_load_everywhere(symbol: str, bind: Bind, tmp_path: Path) -> None:
    """REF huggingface/transformers#45666, #46339: a fusion changed the parameters, and checkpoints no longer loaded."""
    model = bind(tiny(), symbol)
    expected = logits(model)
    model.save_pretrained(tmp_path / "saved")
    plain = tiny()
    with safetensors.safe_open(tmp_path / "saved" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(plain.state_dict())
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(logits(loaded.eval()), expected)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "flat.safetensors")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    for state in (safetensors.torch.load_file(tmp_path / "flat.safetensors"), torch.load(tmp_path / "state.pt")):
        plain = fresh(model.config)
        plain.load_state_dict(state)
        torch.testing.assert_close(logits(plain), expected)


@pytest.mark.parametrize("symbol", ["NormMLP", "TransposedMLP"])
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_loads_into_a_bound_model(symbol: str, assign: bool, bind: Bind, calls: Counter[str]) -> None:
    torch.manual_seed(7)
    other = fresh(tiny().config)
    model = bind(tiny(), symbol)
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
    torch.testing.assert_close(logits(model), logits(other))
    torch.testing.assert_close(gradients(model), gradients(other))
    assert calls[symbol] == 4


def test_joint_parameters_cost_no_copy_and_moved_ones_are_never_stale(bind: Bind, calls: Counter[str]) -> None:
    model = bind(tiny())
    gate, up = (getattr(model.model.layers[0].mlp, name).weight for name in ("gate_proj", "up_proj"))
    assert up.data_ptr() == gate.data_ptr() + gate.nbytes
    model.double().float()
    assert up.data_ptr() != gate.data_ptr() + gate.nbytes
    with torch.no_grad():
        up.mul_(2)
    plain = tiny()
    with torch.no_grad():
        plain.model.layers[0].mlp.up_proj.weight.mul_(2)
    torch.testing.assert_close(logits(model), logits(plain))
    torch.testing.assert_close(gradients(model), gradients(plain))
    bind(model)
    assert up.data_ptr() == gate.data_ptr() + gate.nbytes
    assert calls["NormMLP"] == 4


def test_a_deep_copy_is_bound_on_its_own(bind: Bind, calls: Counter[str]) -> None:
    model = bind(tiny())
    twin = copy.deepcopy(model)
    expected = logits(model)
    with torch.no_grad():
        for parameter in model.model.layers[0].mlp.parameters():
            parameter.zero_()
    calls.clear()
    torch.testing.assert_close(logits(twin), expected)
    assert calls["NormMLP"] == 2
    kernelhub.unkernelize(twin)
    assert len(kernelhub.report(model).bound) == 2
    alone = copy.deepcopy(model.model.layers[1].post_attention_layernorm)
    x = torch.randn(2, 3, 32)
    torch.testing.assert_close(alone(x), tiny().model.layers[1].post_attention_layernorm(x))


def test_a_pickled_model_is_plain_and_can_be_bound_again(bind: Bind, calls: Counter[str]) -> None:
    model = bind(tiny())
    data = io.BytesIO()
    torch.save(model, data)
    data.seek(0)
    loaded = torch.load(data, weights_only=False)
    torch.testing.assert_close(logits(loaded), logits(tiny()))
    assert calls["NormMLP"] == 0
    torch.testing.assert_close(logits(bind(loaded)), logits(tiny()))
    assert calls["NormMLP"] == 2


def test_a_model_and_its_layouts_are_freed(bind: Bind) -> None:
    model = bind(tiny())
    logits(model)
    ref = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    del model
    gc.collect()
    assert ref() is None


def test_train_and_eval_switch_by_themselves(bind: Bind, calls: Counter[str]) -> None:
    model, plain = bind(tiny(), "InferenceMLP", MLP), tiny()
    torch.testing.assert_close(logits(model), logits(plain))
    assert calls["InferenceMLP"] == 2
    torch.testing.assert_close(gradients(model.train()), gradients(plain.train()))
    assert calls["InferenceMLP"] == 2
    torch.testing.assert_close(logits(model.eval()), logits(plain.eval()))
    assert calls["InferenceMLP"] == 4


def test_a_mode_without_a_kernel_runs_every_layer_of_a_fusion(
    folder: Path, hubless: Session, calls: Counter[str]
) -> None:
    mapping = {NORM_MLP: {"cpu": {"inference": f"{folder}:NormMLP"}}}
    model, plain = tiny(), tiny()
    kernelhub.kernelize(model, mapping, session=hubless)
    torch.testing.assert_close(logits(model), logits(plain))
    torch.testing.assert_close(gradients(model.train()), gradients(plain.train()))
    # The first layer tells: the others may be in another mode.
    model.eval()
    for layer in model.model.layers:
        layer.mlp.train()
    torch.testing.assert_close(logits(model), logits(plain.eval()))
    assert calls["NormMLP"] == 4


def test_one_kernel_for_training_and_another_for_inference(folder: Path, hubless: Session, calls: Counter[str]) -> None:
    mapping = {MLP: {"cpu": {"training": f"{folder}:GateUpMLP", "inference": f"{folder}:TransposedMLP"}}}
    model, plain = kernelhub.kernelize(tiny(), mapping, session=hubless), tiny()
    torch.testing.assert_close(logits(model), logits(plain))
    torch.testing.assert_close(gradients(model.train()), gradients(plain.train()))
    assert dict(calls) == {"TransposedMLP": 2, "GateUpMLP": 2}


def test_the_rules_work_for_the_base_model_too(bind: Bind, calls: Counter[str]) -> None:
    model, plain = tiny().model, tiny().model
    bind(model, "NormMLP", tuple((name, path.removeprefix("model.")) for name, path in NORM_MLP))
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).last_hidden_state, plain(IDS).last_hidden_state)
    assert calls["NormMLP"] == 2


def test_a_fusion_wins_over_layer_names_and_reports_what_it_replaces(folder: Path, hubless: Session) -> None:
    mapping = {
        "RMSNorm": "builtin:RMSNorm",
        NORM_MLP: f"{folder}:NormMLP",
        "SwiGLUMLP": "builtin:SwiGLUMLP",
        "**.up_proj": f"{folder}:WithoutLayout",
    }
    model = kernelhub.kernelize(tiny(), mapping, session=hubless, strict=False)
    assert {row.module for row in kernelhub.report(model).bound if row.layer == "RMSNorm"} >= {"model.norm"}
    assert len(kernelhub.report(model).bound) == 7 + 2
    torch.testing.assert_close(logits(model), logits(tiny()))


def test_layers_inside_a_fusion_are_left_alone_unless_its_kernel_calls_them(folder: Path, hubless: Session) -> None:
    mapping = {LAYER: f"{folder}:AddNormLayer", "RMSNorm": "builtin:RMSNorm"}
    model = kernelhub.kernelize(tiny(), mapping, session=hubless)
    found = {row.module: row.reason for row in kernelhub.report(model)}
    assert found["model.layers.0.post_attention_layernorm"] == (
        "inside a layer that the entry 'DecoderLayer=model.layers.*' replaces"
    )
    assert found["model.layers.0.input_layernorm"] == found["model.layers.1"] == ""
    torch.testing.assert_close(logits(model), logits(tiny()))


def test_what_is_no_fusion_of_this_model(folder: Path, hubless: Session) -> None:
    def bound(key: Any, symbol: str = "NormMLP") -> Any:
        return kernelhub.kernelize(tiny(), {key: f"{folder}:{symbol}"}, session=hubless)

    with pytest.raises(UnknownLayer):
        bound((("RMSNorm", "model.blocks.*.norm"), ("MLP", "model.blocks.*.mlp")))
    with pytest.raises(ContractMismatch, match="there is no 'feed_forward' beside it"):
        bound((NORM_MLP[0], ("MLP", "model.layers.*.feed_forward")))
    with pytest.raises(ContractMismatch, match="is a Qwen3RMSNorm, which 'LayerNorm' does not name"):
        bound((("LayerNorm", NORM_MLP[0][1]), NORM_MLP[1]))
    with pytest.raises(ContractMismatch, match="its activation is SiLUActivation"):
        bound((NORM_MLP[0], ("GeGLUMLP", NORM_MLP[1][1])))
    with pytest.raises(ContractMismatch, match="there is no WithoutLayoutLayout beside it"):
        bound(NORM_MLP, "WithoutLayout")
    with pytest.raises(ContractMismatch, match="takes hidden_states, position_embeddings, attention_mask, not"):
        bound((("RMSNorm", "model.layers.*.input_layernorm"), ("Attention", "model.layers.*.self_attn")))
    with pytest.raises(ContractMismatch, match="SizedNormLayout needs hidden_size, eps, which a Qwen3RMSNorm was"):
        bound("model.norm", "SizedNorm")


def test_a_layer_with_more_state_than_the_layout_is_refused(bind: Bind) -> None:
    with pytest.raises(ContractMismatch, match=r"no place for model\.layers\.0\.mlp\.gate_proj\.bias"):
        bind(tiny("Llama", mlp_bias=True))
    with pytest.raises(ContractMismatch, match="its activation is GELU"):
        bind(tiny("Llama", hidden_act="gelu"), "GateUpMLP")


def test_a_model_that_does_not_hand_the_result_on_is_told(bind: Bind) -> None:
    """Gemma2 adds the residual between these two: a fused kernel would compute something else."""
    model = tiny("Gemma2")
    for layer in model.model.layers:
        layer.post_attention_layernorm.variance_epsilon = 1e-6
    bind(model)
    with pytest.raises(BrokenFusion, match="does not hand the result of one to the next"):
        logits(model)
    expected = logits(kernelhub.unkernelize(model))
    torch.testing.assert_close(expected, logits(tiny("Gemma2")))


def test_hooks_and_changes_inside_make_the_kernel_give_way(bind: Bind, calls: Counter[str]) -> None:
    model, expected = bind(tiny()), logits(tiny())
    layer = model.model.layers[0]
    handle = layer.mlp.up_proj.register_forward_hook(lambda module, args, output: output * 2)
    plain = tiny()
    plain.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, output: output * 2)
    torch.testing.assert_close(logits(model), logits(plain))
    assert calls["NormMLP"] == 1
    handle.remove()
    torch.testing.assert_close(logits(model), expected)
    assert calls["NormMLP"] == 3
    layer.mlp = copy.deepcopy(tiny().model.layers[0].mlp)
    torch.testing.assert_close(logits(model), expected)
    assert calls["NormMLP"] == 4


def test_hooks_of_the_layers_themselves_run(bind: Bind) -> None:
    model = bind(tiny())
    seen = []
    layer = model.model.layers[0]
    layer.post_attention_layernorm.register_forward_hook(lambda module, args, output: seen.append(output))
    layer.mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    logits(model)
    assert seen[0] is seen[1]


def test_a_layer_called_by_itself_is_itself(bind: Bind) -> None:
    model, plain, x = bind(tiny()), tiny(), torch.randn(2, 3, 32)
    torch.testing.assert_close(model.model.layers[0].mlp(x), plain.model.layers[0].mlp(x))
    logits(model)
    torch.testing.assert_close(model.model.layers[0].mlp(x), plain.model.layers[0].mlp(x))


def test_threads_share_a_model(bind: Bind) -> None:
    model, expected = bind(tiny()), logits(tiny())
    found: list[torch.Tensor] = []

    def work() -> None:
        found.extend(logits(model) for _ in range(10))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 40
    for each in found:
        torch.testing.assert_close(each, expected)


def test_kernelized_for_a_while_restores_an_earlier_fusion(bind: Bind, folder: Path, hubless: Session) -> None:
    model = bind(tiny())
    before = anatomy(model)
    gate, up = (getattr(model.model.layers[0].mlp, name).weight for name in ("gate_proj", "up_proj"))
    with kernelhub.kernelized(model, {MLP: f"{folder}:TransposedMLP"}, session=hubless):
        torch.testing.assert_close(logits(model), logits(tiny()))
    assert anatomy(model) == before
    assert up.data_ptr() == gate.data_ptr() + gate.nbytes
    torch.testing.assert_close(logits(model), logits(tiny()))


def test_tied_parameters_stay_tied(bind: Bind) -> None:
    model = tiny()
    first, second = model.model.layers[0].mlp, model.model.layers[1].mlp
    second.up_proj.weight = first.up_proj.weight
    second.gate_proj.weight = nn.Parameter(first.gate_proj.weight.data)
    expected = copy.deepcopy(model)
    expected.model.layers[1].mlp.gate_proj.weight.data = expected.model.layers[0].mlp.gate_proj.weight.data
    bind(model)
    assert second.up_proj.weight is first.up_proj.weight
    assert second.gate_proj.weight.data_ptr() == first.gate_proj.weight.data_ptr()
    for each in (model, expected):
        with torch.no_grad():
            each.model.layers[0].mlp.up_proj.weight.mul_(2)
            each.model.layers[0].mlp.gate_proj.weight.mul_(3)
    torch.testing.assert_close(logits(model), logits(expected))


def test_binding_draws_no_random_numbers_and_a_meta_model_is_postponed(bind: Bind) -> None:
    model = tiny()
    state = torch.random.get_rng_state()
    bind(model, "ConfiguredMLP")
    assert torch.equal(torch.random.get_rng_state(), state)
    with torch.device("meta"):
        ghost = fresh(model.config)
    bind(ghost)
    assert {row.state for row in kernelhub.report(ghost)} == {"postponed"}


def test_one_graph_without_breaks_when_the_kernel_can_be_compiled(bind: Bind, calls: Counter[str]) -> None:
    torch._dynamo.reset()
    linears: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        linears.append(sum(node.target is torch._C._nn.linear for node in graph.graph.nodes))
        return graph.forward

    model, plain = bind(tiny()), tiny()
    compiled: Any = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for index in range(6):
        ids = IDS[:, : (5, 6, 7)[index % 3]]
        with torch.no_grad():
            out = compiled(input_ids=ids, use_cache=False).logits
            torch.testing.assert_close(out, plain(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    assert linears == [2 * 6 + 1]  # gate and up are one
    torch._dynamo.reset()
    compiled = torch.compile(bind(tiny(), "TransposedMLP"), backend=backend, fullgraph=True)
    torch.testing.assert_close(logits(compiled), logits(plain), rtol=1e-4, atol=1e-5)
    assert linears[1:] == [2 * 7 + 1]
    assert not calls


def test_a_compiled_training_step(bind: Bind) -> None:
    torch._dynamo.reset()
    expected = gradients(tiny().train())
    compiled: Any = torch.compile(bind(tiny().train()), backend="eager", fullgraph=True)
    found = gradients(compiled)
    torch.testing.assert_close({key.removeprefix("_orig_mod."): value for key, value in found.items()}, expected)


def test_layers_compiled_apart_are_never_wrong(bind: Bind) -> None:
    torch._dynamo.reset()
    model = bind(tiny())
    model.model.layers[0].mlp.compile(backend="eager")
    torch.testing.assert_close(logits(model), logits(tiny()))
    model = bind(tiny())
    model.model.layers[0].post_attention_layernorm.compile(backend="eager")
    with pytest.raises(BrokenFusion, match="one of them is compiled"):
        logits(model)


def test_a_model_that_is_only_described_answers_to_fusions(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    wanted = kernelhub.KernelConfig({NORM_MLP: "acme/fused:NormMLP", "MLP=model.blocks.*.mlp": "acme/fused:GateUpMLP"})
    assert list(used_entries(tmp_path, wanted).kernel_mapping) == [wanted.entries[0].layer]
