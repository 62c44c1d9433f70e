"""transformers with its own switches, served by kernelhub: ``enable()`` in a process that imported it before."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import importlib.util
import logging
import sys
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from hub_liger import LAYERS, REPOSITORY, publish_liger
from kernel_repository import trust, write_build
from layers.tiny_model import IDS, anatomy, logits, tiny
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Qwen3ForCausalLM
from transformers.utils.import_utils import is_kernels_available, is_liger_kernel_available

import kernelhub
from kernelhub.errors import InvalidConfig, NoCompatibleVariant, UnknownLayer, UntrustedPublisher
from kernelhub.integrations.finder import Finder
from kernelhub.integrations.kernels import LayerRepository, Mode, register_kernel_mapping
from kernelhub.integrations.kernels import __version__ as kernels_interface
from kernelhub.integrations.transformers import disable, enable, from_transformers, is_enabled, to_transformers
from kernelhub.integrations.transformers.release import KERNELS_API, kernels_version

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kernelhub.serve import LocalHub

TheirConfig: Any = transformers.KernelConfig
NORM = f"{REPOSITORY}:LigerRMSNorm"
NORMS = 9  # in the tiny models: two layers with four each (two in Llama), and the last one


@pytest.fixture
def served(
    hub: LocalHub, hub_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget_kernels: object
) -> None:
    """The environment of a user whose Hub is the local one."""
    publish_liger(hub_root)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("KERNELHUB_CACHE", str(tmp_path / "store"))


@pytest.fixture
def switched_on(served: None) -> Iterator[None]:
    enable()
    yield
    disable()
    register_kernel_mapping({}, inherit_mapping=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    tiny().save_pretrained(folder)
    return folder


def bound(model: Any) -> dict[str, int]:
    """How many modules run a kernel, by layer name."""
    layers = [row.layer for row in kernelhub.report(model).bound]
    return {layer: layers.count(layer) for layer in layers}


# On and off


def test_neither_kernels_nor_liger_kernel_is_installed_here() -> None:
    assert not is_enabled()
    assert importlib.util.find_spec("kernels") is None
    assert importlib.util.find_spec("liger_kernel") is None


def test_on_transformers_finds_both_packages_and_off_neither(switched_on: None) -> None:
    assert is_enabled()
    assert is_kernels_available()
    assert is_liger_kernel_available()
    assert importlib.metadata.version("kernels") == kernels_version()
    assert kernels_interface == KERNELS_API
    disable()
    assert not is_enabled()
    assert not is_kernels_available()
    assert not is_liger_kernel_available()
    assert importlib.util.find_spec("kernels") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("kernels")


def everything() -> dict[str, dict[str, int]]:
    """The names of all modules of transformers and of the classes that have to do with kernels."""
    from transformers.models.qwen3 import modeling_qwen3

    owners = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "transformers"}
    classes = (transformers.PreTrainedModel, transformers.KernelConfig, *vars(modeling_qwen3).values())
    found = {name: vars(module) for name, module in owners.items()}
    found |= {repr(cls): dict(vars(cls)) for cls in classes if isinstance(cls, type)}
    return {name: {key: id(value) for key, value in names.items()} for name, names in found.items()}


def test_off_everything_is_as_it_was(served: None, checkpoint: Path) -> None:
    Qwen3ForCausalLM.from_pretrained(checkpoint)  # what Python and transformers keep after a first use
    before, finders = everything(), list(sys.meta_path)
    devices = copy.copy(getattr(transformers.utils.kernel_config, "KERNELS_SUPPORTED_DEVICE_TYPES", None))
    for shadow in (False, True):
        enable(shadow=shadow)
        enable(shadow=shadow)
        Qwen3ForCausalLM.from_pretrained(
            checkpoint, use_kernels=True, kernel_config=kernelhub.KernelConfig({"RMSNorm": NORM})
        )
        disable()
        disable()
        now = everything()
        changed = {(name, key) for name, names in before.items() for key in names if now[name].get(key) != names[key]}
        added = {(name, key) for name, names in before.items() for key in now[name].keys() - names.keys()}
        assert not changed
        assert not added
        assert [finder for finder in sys.meta_path if finder in finders] == finders
        assert not [finder for finder in sys.meta_path if isinstance(finder, Finder)]
    assert getattr(transformers.utils.kernel_config, "KERNELS_SUPPORTED_DEVICE_TYPES", None) == devices
    assert not [name for name in sys.modules if name.partition(".")[0] in ("kernels", "liger_kernel")]
    with pytest.raises(ValueError, match="Kernels are not available"):
        Qwen3ForCausalLM.from_pretrained(checkpoint, use_kernels=True)


def test_models_imported_before_are_marked_while_it_is_on(switched_on: None) -> None:
    modeling_qwen3: Any = importlib.import_module("transformers.models.qwen3.modeling_qwen3")
    assert modeling_qwen3.Qwen3RMSNorm.kernel_layer_name == "RMSNorm"
    assert modeling_qwen3.apply_rotary_pos_emb.kernel_layer_name == "rotary_pos_emb"
    attention = tiny().model.layers[0].self_attn
    assert list(vars(attention)["_kernel_funcs"].values()) == [modeling_qwen3.apply_rotary_pos_emb]
    disable()
    assert "kernel_layer_name" not in vars(modeling_qwen3.Qwen3RMSNorm)
    assert "_kernel_funcs" not in vars(tiny().model.layers[0].self_attn)


def test_functions_and_conditions_of_files_imported_before_count_too(served: None) -> None:
    mamba: Any = importlib.import_module("transformers.models.mamba2.modeling_mamba2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which that file uses
        sam: Any = importlib.import_module("transformers.models.sam3_video.modeling_sam3_video")
    before = [dict(vars(module)) for module in (mamba, sam)]
    enable()
    marked = {name: getattr(vars(mamba)[name], "kernel_layer_name", None) for name in before[0]}
    assert {"causal_conv1d_fn", "causal_conv1d_update", "selective_state_update"} <= set(marked.values())
    assert "get_kernel" in vars(sam)  # behind "if is_kernels_available():" there
    disable()
    assert [dict(vars(module)) for module in (mamba, sam)] == before


# use_kernels and kernel_config


def test_a_config_of_transformers_is_bound_on_a_cpu(switched_on: None, checkpoint: Path) -> None:
    config = TheirConfig(kernel_mapping={"RMSNorm": NORM})
    model = AutoModelForCausalLM.from_pretrained(checkpoint, use_kernels=True, kernel_config=config)
    assert bound(model) == {"RMSNorm": NORMS}
    assert model.use_kernels
    torch.testing.assert_close(logits(model), logits(tiny()))
    assert config.kernel_mapping == {"RMSNorm": NORM}


def test_one_config_serves_two_models(switched_on: None, checkpoint: Path) -> None:
    """REF (mine) src/transformers/utils/kernel_config.py: applying a config replaces the user's dict."""
    config = TheirConfig({"RMSNorm": {"cpu": NORM, "cuda": "org/absent:Norm"}})
    models = [Qwen3ForCausalLM.from_pretrained(checkpoint, use_kernels=True, kernel_config=config) for _ in range(2)]
    assert [bound(model) for model in models] == [{"RMSNorm": NORMS}] * 2


@pytest.mark.parametrize(
    "mapping",
    [
        {"RMSNorm": f"{REPOSITORY}@v3:LigerRMSNorm"},
        {"RMSNorm": (NORM, {"version": 3})},
        {"RMSNorm": ("builtin:RMSNorm", {"optional": True})},
        {"model.layers.*.*_layernorm": "builtin:RMSNorm", "RMSNorm": NORM},
        {"RMSNorm": {"cpu": {"training": NORM, "inference": "builtin:RMSNorm"}}},
    ],
)
def test_a_config_of_ours_is_taken_in_its_place(switched_on: None, checkpoint: Path, mapping: dict[str, Any]) -> None:
    config = kernelhub.KernelConfig(mapping)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, use_kernels=True, kernel_config=config)
    assert sum(bound(model).values()) >= NORMS
    assert model.kernel_config.kernel_mapping == config.kernel_mapping
    other: Any = Qwen3ForCausalLM.from_pretrained(checkpoint)
    other.set_use_kernels(True, config)
    assert bound(other) == bound(model)


def test_a_config_alone_is_enough(switched_on: None, checkpoint: Path) -> None:
    """REF huggingface/transformers#41657, #41467: it was ignored without the flag."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, kernel_config=kernelhub.KernelConfig({"RMSNorm": NORM}))
    assert bound(model) == {"RMSNorm": NORMS}


def test_a_call_that_allows_all_kernels_is_believed(switched_on: None, checkpoint: Path, hub_root: Path) -> None:
    files: dict[str, str | bytes] = {"__init__.py": "from . import layers\n", "layers.py": LAYERS}
    write_build(hub_root, "nobody/norms", "v1", "torch-cpu", files)
    trust(hub_root, "nobody", trusted=False)
    config = TheirConfig({"RMSNorm": "nobody/norms:LigerRMSNorm"})
    model = Qwen3ForCausalLM.from_pretrained(checkpoint, kernel_config=config, allow_all_kernels=True)
    assert bound(model) == {"RMSNorm": NORMS}


def test_an_empty_value_leaves_a_layer_alone(switched_on: None, checkpoint: Path) -> None:
    config = TheirConfig({"RMSNorm": NORM, "SiLU": ""})
    model = Qwen3ForCausalLM.from_pretrained(checkpoint, use_kernels=True, kernel_config=config)
    assert bound(model) == {"RMSNorm": NORMS}


def test_a_folder_on_this_machine(switched_on: None, checkpoint: Path, hub_root: Path) -> None:
    build = hub_root / REPOSITORY / "v3" / "build" / "torch-cpu"
    config = TheirConfig({"RMSNorm": f"{build}:LigerRMSNorm"}, use_local_kernel=True)
    model = Qwen3ForCausalLM.from_pretrained(checkpoint, use_kernels=True, kernel_config=config)
    assert bound(model) == {"RMSNorm": NORMS}
    assert {row.layer for row in kernelhub.report(model)} == {"RMSNorm"}  # the defaults are not inherited


def test_the_kernels_that_are_registered_are_the_defaults(switched_on: None, checkpoint: Path) -> None:
    """REF huggingface/transformers#48443, #48375: one kernel only, without those that are inherited."""
    register_kernel_mapping({"RMSNorm": {"cpu": LayerRepository(REPOSITORY, layer_name="LigerRMSNorm", version=3)}})
    gate = {"SwiGLUMLP": f"{REPOSITORY}@v3:LigerSwiGLUMLP"}
    plain = Qwen3ForCausalLM.from_pretrained(checkpoint, use_kernels=True)
    assert bound(plain) == {"RMSNorm": NORMS}
    assert {"rotary_pos_emb", "SiLU"} <= {row.layer for row in kernelhub.report(plain).skipped}
    for inherits, expected in ((True, {"RMSNorm": NORMS, "SwiGLUMLP": 2}), (False, {"SwiGLUMLP": 2})):
        config = TheirConfig(gate, inherit_mapping=inherits)
        assert bound(Qwen3ForCausalLM.from_pretrained(checkpoint, use_kernels=True, kernel_config=config)) == expected


def test_a_default_that_cannot_be_loaded_is_told_and_no_error(switched_on: None, checkpoint: Path) -> None:
    register_kernel_mapping({"RMSNorm": {"cpu": LayerRepository("kernels-community/gone", layer_name="N", version=1)}})
    model = Qwen3ForCausalLM.from_pretrained(checkpoint, use_kernels=True)
    assert not bound(model)
    assert "kernels-community/gone" in str(kernelhub.report(model))


@pytest.mark.parametrize("kind", [TheirConfig, kernelhub.KernelConfig])
def test_what_the_user_asked_for_and_cannot_be_is_an_error(
    switched_on: None, checkpoint: Path, hub_root: Path, kind: Any
) -> None:
    """REF huggingface/transformers#41010: an explicit kernel request quietly became the plain one."""
    write_build(
        hub_root, "nobody/norms", "v1", "torch-cpu", {"__init__.py": "from . import layers\n", "layers.py": LAYERS}
    )
    write_build(hub_root, REPOSITORY, "v4", "torch29-cu128-x86_64-windows", {"__init__.py": ""})
    trust(hub_root, "nobody", trusted=False)
    for value, error in (
        ("nobody/norms:LigerRMSNorm", UntrustedPublisher),
        (f"{REPOSITORY}@v4:LigerRMSNorm", NoCompatibleVariant),
        ("org/a:b:c", InvalidConfig),
    ):
        with pytest.raises(error):
            Qwen3ForCausalLM.from_pretrained(checkpoint, use_kernels=True, kernel_config=kind({"RMSNorm": value}))
    with pytest.raises(UnknownLayer, match="did you mean 'RMSNorm'"):
        Qwen3ForCausalLM.from_pretrained(checkpoint, use_kernels=True, kernel_config=kind({"RMSNrom": NORM}))
    trusting = kind({"RMSNorm": ("nobody/norms:LigerRMSNorm", {"version": 1, "trust_remote_code": True})})
    assert bound(Qwen3ForCausalLM.from_pretrained(checkpoint, use_kernels=True, kernel_config=trusting))


FUSED = """
from torch import nn
from torch.nn import functional


class Renaming:
    def __init__(self, source, target):
        self.source_patterns, self.target_patterns = [source], [target]


class NormMLPLayout(nn.Module):
    conversion_mapping = [
        Renaming("post_attention_layernorm.weight", "post_attention_layernorm.scale"),
        Renaming("mlp.(gate|up|down)_proj.weight", r"post_attention_layernorm.\\1.weight"),
    ]

    def __init__(self, norm, mlp):
        super().__init__()
        self.scale = nn.Parameter(norm.weight.new_empty(norm.weight.shape))
        self.eps = norm.variance_epsilon
        self.gate, self.up, self.down = mlp.gate_proj, mlp.up_proj, mlp.down_proj


class NormMLP(nn.Module):
    def forward(self, hidden_states):
        x = functional.rms_norm(hidden_states, (hidden_states.shape[-1],), self.scale, self.eps)
        return self.down(functional.silu(self.gate(x)) * self.up(x))
"""


@pytest.mark.parametrize("kind", [TheirConfig, kernelhub.KernelConfig])
def test_a_fusion_is_bound_to_the_finished_model(
    switched_on: None, checkpoint: Path, hub_root: Path, kind: Any
) -> None:
    files: dict[str, str | bytes] = {"__init__.py": "from . import layers\n", "layers.py": FUSED}
    write_build(hub_root, "kernels-community/fused", "v1", "torch-cpu", files)
    layers = "model.layers.*"
    key = (("RMSNorm", f"{layers}.post_attention_layernorm"), ("MLP", f"{layers}.mlp"))
    config = kind({key: "kernels-community/fused:NormMLP", "RMSNorm": NORM})
    model = Qwen3ForCausalLM.from_pretrained(checkpoint, use_kernels=True, kernel_config=config)
    assert {row.symbol for row in kernelhub.report(model).bound} == {"NormMLP", "LigerRMSNorm"}
    assert model.state_dict().keys() == tiny().state_dict().keys()
    torch.testing.assert_close(logits(model), logits(tiny()))
    model.use_kernels = False
    torch.testing.assert_close(logits(model), logits(tiny()), rtol=0, atol=0)
    assert type(Qwen3ForCausalLM.from_pretrained(checkpoint).model.layers[0]).__name__ == "Qwen3DecoderLayer"


# Switching models


def test_a_model_is_switched_off_and_on_again(switched_on: None) -> None:
    model = tiny()
    before, numbers = anatomy(model.model), logits(model)
    model.set_use_kernels(True, TheirConfig({"RMSNorm": NORM}))
    assert bound(model) == {"RMSNorm": NORMS}
    model.use_kernels = False
    assert not model.use_kernels
    assert anatomy(model.model) == before
    torch.testing.assert_close(logits(model), numbers, rtol=0, atol=0)
    model.use_kernels = True
    assert bound(model) == {"RMSNorm": NORMS}


def test_kernels_stay_when_the_model_trains_and_evaluates(switched_on: None, caplog: pytest.LogCaptureFixture) -> None:
    """REF huggingface/transformers#40459: train() and eval() have to bind again, and lost the kernels of a config."""
    model = tiny("Llama")
    model.set_use_kernels(True, TheirConfig({"RMSNorm": NORM}))
    caplog.set_level(logging.INFO, "kernelhub")
    for change in (model.train, model.eval, model.train):
        change()
        assert bound(model) == {"RMSNorm": 5}
    assert not caplog.records  # nothing had to be bound again
    model.set_use_kernels(True, mode=Mode.INFERENCE)
    assert {row.mode for row in kernelhub.report(model).bound} == {"inference"}


def test_a_copy_of_a_model_is_switched_off_alone(switched_on: None) -> None:
    model = tiny()
    model.set_use_kernels(True, kernelhub.KernelConfig({"RMSNorm": NORM}))
    other = copy.deepcopy(model)
    other.use_kernels = False
    assert not bound(other)
    assert bound(model) == {"RMSNorm": NORMS}


@pytest.mark.parametrize(("variable", "value"), [("USE_HUB_KERNELS", "0"), ("DISABLE_KERNEL_MAPPING", "1")])
def test_a_variable_switches_everything_off(
    switched_on: None,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variable: str,
    value: str,
) -> None:
    monkeypatch.setenv(variable, value)
    config = kernelhub.KernelConfig({"RMSNorm": NORM})
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, use_kernels=True, kernel_config=config)
    model.set_use_kernels(True, config)
    assert not model.use_kernels
    assert not bound(model)
    assert f"the variable {variable} switches them off" in caplog.text


# Attention kernels

ATTENTION = """
import torch

CALLS = []


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
    CALLS.append(q.shape)
    groups = q.shape[2] // k.shape[2]
    q, k, v = (each.transpose(1, 2) for each in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale)
    return out.transpose(1, 2)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False):
    raise AssertionError("transformers looks for it, and calls it for packed sequences only, which no test here has")
"""


@pytest.mark.parametrize("suffix", ["", "@v1", ":flash_attn_func", "@v1:flash_attn_func"])
def test_attention_kernels_come_from_the_hub(
    switched_on: None, checkpoint: Path, hub_root: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import modeling_flash_attention_utils as flash

    write_build(hub_root, "kernels-community/attention", "v1", "torch-cpu", {"__init__.py": ATTENTION})
    name = f"kernels-community/attention{suffix}"
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation=name)
    assert model.config._attn_implementation == name
    torch.testing.assert_close(logits(model), logits(tiny()))
    kernel = kernelhub.load_kernel("kernels-community/attention@v1")
    assert len(kernel.CALLS) == 2
    # transformers remembers the last one by its name, and the next test is another Hub.
    monkeypatch.setattr(flash, "_loaded_implementation", None)


def test_the_prefix_of_a_paged_attention_is_no_part_of_the_name(switched_on: None, hub_root: Path) -> None:
    """REF huggingface/transformers#42547."""
    write_build(hub_root, "kernels-community/attention", "v1", "torch-cpu", {"__init__.py": ATTENTION})
    model = tiny()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # some releases call the prefix outdated
        model.set_attn_implementation("paged|kernels-community/attention")
    assert "kernels-community/attention" in model.config._attn_implementation


# Conversion


@pytest.mark.parametrize(
    "mapping",
    [
        {"RMSNorm": "org/repo:Norm"},
        {"RMSNorm": ("org/repo:Norm", {"version": 2})},
        {"RMSNorm": ("org/repo:Norm", {"revision": "main", "trust_remote_code": True})},
        {"RMSNorm": {"cuda": "org/repo:Norm", "rocm": ("org/repo:Norm", {"version": 2})}, "MLP": ""},
        {(("RMSNorm", "model.layers.*.norm"), ("MLP", "model.layers.*.mlp")): "org/repo:Fused"},
    ],
)
@pytest.mark.parametrize("inherits", [True, False])
def test_configs_are_converted_both_ways(mapping: dict[Any, Any], inherits: bool) -> None:
    theirs = TheirConfig(mapping, inherit_mapping=inherits)
    ours = from_transformers(theirs)
    assert ours.inherit_mapping is inherits
    again = to_transformers(ours)
    assert (again.kernel_mapping, again.use_local_kernel, again.inherit_mapping) == (mapping, False, inherits)
    assert from_transformers(again) == ours


def test_local_configs_are_converted_both_ways() -> None:
    theirs = TheirConfig({"RMSNorm": "/abs/path:Norm"}, use_local_kernel=True)
    ours = from_transformers(theirs)
    assert ours.use_local_kernel
    assert to_transformers(ours).kernel_mapping == theirs.kernel_mapping


def test_a_config_that_transformers_has_resolved_is_read_too() -> None:
    repository = LayerRepository("org/repo", layer_name="Norm", version=2, trust_remote_code=True)
    theirs = TheirConfig({"RMSNorm": {"cuda": {Mode.INFERENCE | Mode.TORCH_COMPILE: repository}}})
    value = ("org/repo@v2:Norm", {"trust_remote_code": True})
    assert from_transformers(theirs).kernel_mapping == {"RMSNorm": {"cuda": {"inference|compile": value}}}


@pytest.mark.parametrize(
    "mapping",
    [
        {"model.layers.*.mlp": "org/repo:MLP"},
        {"RMSNorm": "builtin:RMSNorm"},
        {"RMSNorm": "org/repo@>=2,<4:Norm"},
        {"RMSNorm": "/abs:Norm"},
        {"RMSNorm": ("org/repo:Norm", {"optional": True})},
        {"RMSNorm": ("org/repo:Norm", {"attributes": {"eps": "epsilon"}})},
        {"RMSNorm": {"cuda>=9.0": "org/repo:Norm"}},
        {"RMSNorm": {"cuda": {"training": "org/repo:Norm"}}},
    ],
)
def test_what_transformers_has_no_words_for_is_refused(mapping: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match="without attributes or optional"):
        to_transformers(kernelhub.KernelConfig(mapping))


def test_an_architecture_without_an_auto_class_works_too(switched_on: None, tmp_path: Path) -> None:
    tiny("Llama").save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(
        tmp_path, use_kernels=True, kernel_config=kernelhub.KernelConfig({"RMSNorm": NORM})
    )
    assert bound(model) == {"RMSNorm": 5}
    assert torch.equal(model(IDS).logits.argmax(-1), tiny("Llama")(IDS).logits.argmax(-1))
