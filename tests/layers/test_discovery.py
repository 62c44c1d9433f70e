from __future__ import annotations

from typing import Any

from torch import nn

from kernelhub.config import KernelConfig
from kernelhub.layers.discovery import Target, discover, layer_names
from kernelhub.layers.marker import use_kernel
from layers.tiny_model import tiny


def found(model: nn.Module, *keys: str) -> dict[str, list[Target]]:
    config = KernelConfig(dict.fromkeys(keys, "org/repo:Symbol"))
    return {key: list(targets) for key, targets in discover(model, config.entries).targets.items()}


def paths(model: nn.Module, key: str) -> list[str]:
    return [target.path for target in found(model, key)[key]]


NORMS = [
    "model.layers.0.self_attn.q_norm",
    "model.layers.0.self_attn.k_norm",
    "model.layers.0.input_layernorm",
    "model.layers.0.post_attention_layernorm",
    "model.layers.1.self_attn.q_norm",
    "model.layers.1.self_attn.k_norm",
    "model.layers.1.input_layernorm",
    "model.layers.1.post_attention_layernorm",
    "model.norm",
]


def test_a_layer_name_finds_modules_by_the_end_of_their_class_name_in_model_order() -> None:
    assert paths(tiny("Qwen3"), "RMSNorm") == NORMS
    assert paths(tiny("Llama"), "RMSNorm") == [path for path in NORMS if "self_attn" not in path]
    assert paths(nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 4)), "RMSNorm") == ["0"]


def test_mlps_heads_and_rotary_functions_are_found_by_structure() -> None:
    model = tiny("Mistral")
    assert paths(model, "SwiGLUMLP") == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert paths(model, "FusedLinearCrossEntropy") == [""]
    [first, _] = found(model, "rotary_pos_emb")["rotary_pos_emb"]
    assert (first.path, first.function, first.kind) == ("model.layers.0.self_attn", "apply_rotary_pos_emb", "function")


def test_marks_win_over_class_names() -> None:
    @use_kernel("RMSNorm")
    class Odd(nn.Module):
        def forward(self, x: Any) -> Any:
            return x

    assert paths(nn.Sequential(nn.RMSNorm(4), Odd()), "RMSNorm") == ["1"]


def test_path_patterns_match_modules_of_any_class() -> None:
    model = tiny()
    assert paths(model, "model.layers.*.mlp") == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert paths(model, "**.q_proj") == ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]
    assert paths(model, "model.layers.1.mlp") == ["model.layers.1.mlp"]
    assert paths(model, "model.layers.9.mlp") == []


def test_a_key_that_means_nothing_as_a_name_may_be_a_path() -> None:
    assert paths(tiny().model, "norm") == ["norm"]
    assert paths(tiny(), "lm_head") == ["lm_head"]


def test_a_module_at_two_paths_is_one_target_under_either_path() -> None:
    model = tiny()
    model.model.layers[1].mlp = model.model.layers[0].mlp
    assert paths(model, "SwiGLUMLP") == ["model.layers.0.mlp"]
    assert paths(model, "model.layers.*.mlp") == ["model.layers.0.mlp"]
    assert paths(model, "model.layers.1.mlp") == ["model.layers.1.mlp"]


def test_the_most_explicit_entry_owns_a_module() -> None:
    targets = found(tiny(), "RMSNorm", "model.layers.*.input_layernorm", "model.layers.0.input_layernorm")
    owners = {target.path: target.owner for target in targets["RMSNorm"]}
    assert owners["model.layers.0.input_layernorm"] == "model.layers.0.input_layernorm"
    assert owners["model.layers.1.input_layernorm"] == "model.layers.*.input_layernorm"
    assert owners["model.norm"] == ""
    assert [target.owner for target in targets["model.layers.*.input_layernorm"]] == [
        "model.layers.0.input_layernorm",
        "",
    ]


def test_among_names_the_first_entry_owns_a_module() -> None:
    targets = found(tiny(), "MLP", "SwiGLUMLP")
    assert {target.owner for target in targets["MLP"]} == {""}
    assert {target.owner for target in targets["SwiGLUMLP"]} == {"MLP"}


def mixed() -> Any:
    model = tiny()
    model.model.layers[1].mlp.act_fn = nn.GELU()
    return model


def test_near_misses_are_told_unless_another_entry_serves_them() -> None:
    alone = found(mixed(), "SwiGLUMLP")["SwiGLUMLP"]
    assert [target.misfit for target in alone] == ["", "its activation is GELU, not SiLU"]
    both = found(mixed(), "SwiGLUMLP", "GeGLUMLP")
    assert {key: [target.path for target in targets] for key, targets in both.items()} == {
        "SwiGLUMLP": ["model.layers.0.mlp"],
        "GeGLUMLP": ["model.layers.1.mlp"],
    }


def test_an_entry_with_near_misses_only_keeps_them() -> None:
    targets = found(tiny(), "SwiGLUMLP", "GeGLUMLP")["GeGLUMLP"]
    assert [target.misfit for target in targets] == ["its activation is SiLUActivation, not GELU"] * 2


def test_layer_names_are_short_and_say_what_the_model_answers_to() -> None:
    names = layer_names(tiny())
    assert {"RMSNorm", "MLP", "Attention", "Linear", "SwiGLUMLP", "rotary_pos_emb", "ForCausalLM"} <= set(names)
    assert not {"GeGLUMLP", "ModuleList"} & set(names)
    assert len(set(names)) == len(names)


class Function(nn.Module):
    """As transformers wraps a function when the peer package is installed."""

    kernel_layer_name = "scale"

    def forward(self, x: Any) -> Any:
        return x * 2


wrapped_scale = Function()


class Direct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.__dict__["_kernel_funcs"] = {"scale": wrapped_scale}

    def forward(self, x: Any) -> Any:
        return wrapped_scale(x)


class Indirect(Direct):
    def forward(self, x: Any) -> Any:
        return self._step(x)

    def _step(self, x: Any) -> Any:
        return wrapped_scale(x)


def test_a_wrapped_function_is_replaced_where_the_forward_loads_it() -> None:
    [target] = found(nn.Sequential(Direct()), "scale")["scale"]
    assert (target.path, target.function) == ("0", "wrapped_scale")


def test_a_wrapped_function_that_no_forward_loads_is_the_target_itself_with_each_path() -> None:
    targets = found(nn.Sequential(Indirect(), Indirect()), "scale")["scale"]
    assert [(target.path, target.module, target.kind) for target in targets] == [
        ("0.scale", wrapped_scale, "module"),
        ("1.scale", wrapped_scale, "module"),
    ]
