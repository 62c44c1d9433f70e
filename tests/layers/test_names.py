from __future__ import annotations

import pytest

from kernelhub.layers.names import matches_path, names_class, short_names


@pytest.mark.parametrize(
    ("key", "class_name"),
    [
        ("RMSNorm", "RMSNorm"),
        ("RMSNorm", "Qwen3RMSNorm"),
        ("RMSNorm", "LlamaRMSNorm"),
        ("MLP", "Qwen3MLP"),
        ("Norm", "RMSNorm"),
        ("ForCausalLM", "LlamaForCausalLM"),
        ("SiLU", "SiLU"),
        ("SiLU", "SiLUActivation"),
        ("GeLU", "GELUActivation"),
    ],
)
def test_a_layer_name_names_a_class_by_its_end(key: str, class_name: str) -> None:
    assert names_class(key, class_name)


@pytest.mark.parametrize(
    ("key", "class_name"),
    [
        ("RMSNorm", "RMSNormGated"),
        ("RMSNorm", "XRMSNorm"),
        ("RMSNorm", "Norm"),
        ("orm", "RMSNorm"),
        ("GeLU", "QuickGELUActivation"),
    ],
)
def test_a_layer_name_does_not_name_a_class_in_the_middle_of_a_word(key: str, class_name: str) -> None:
    assert not names_class(key, class_name)


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("model.layers.*.mlp", "model.layers.0.mlp", True),
        ("model.layers.*.mlp", "model.layers.0.self_attn", False),
        ("model.layers.*.mlp", "model.layers.0.x.mlp", False),
        ("model.*", "model.layers.0", False),
        ("**.mlp", "model.layers.0.mlp", True),
        ("**.mlp", "mlp", True),
        ("model.**", "model", True),
        ("model.**.*_proj", "model.layers.0.mlp.up_proj", True),
        ("model.layers.1*.mlp", "model.layers.12.mlp", True),
        ("*", "", False),
        ("**", "", True),
    ],
)
def test_path_patterns_match_by_segment(pattern: str, path: str, matches: bool) -> None:
    assert matches_path(pattern, path) is matches


def test_short_names_drop_the_prefix_of_a_source_file() -> None:
    from transformers.models.llama import modeling_llama as llama

    found = short_names([llama.LlamaRMSNorm, llama.LlamaMLP, llama.LlamaAttention, int])
    assert found == ("RMSNorm", "MLP", "Attention", "int")


def test_short_names_keep_a_class_that_is_alone_in_its_file() -> None:
    from torch import nn

    assert short_names([nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm]) == (
        "Linear",
        "Embedding",
        "LayerNorm",
        "RMSNorm",
    )
