from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelhub.backend import ACCEPTED_NAMES, Release
from kernelhub.config import ANY_DEVICE, KernelChoice, KernelConfig
from kernelhub.errors import InvalidConfig
from kernelhub.mode import Mode
from kernelhub.request import KernelRequest

NORM = "org/repo@v2:Norm"
OTHER = "org/other:Norm"


def chosen(config: KernelConfig, backend: str, mode: Mode = Mode.INFERENCE) -> str | None:
    (entry,) = config.entries
    choice = entry.choose(backend, mode)
    return None if choice is None else str(choice)


@pytest.mark.parametrize(
    ("value", "text", "trust"),
    [
        ("org/repo:Norm", "org/repo:Norm", False),
        (NORM, NORM, False),
        ("builtin:RMSNorm", "builtin:RMSNorm", False),
        ("/abs/path:Norm", "/abs/path:Norm", False),
        ("./rel:Norm", "./rel:Norm", False),
        (("org/repo:Norm", {"version": 2}), NORM, False),
        (["org/repo:Norm", {"version": 2}], NORM, False),
        (("org/repo:Norm", {"revision": "main"}), "org/repo@main:Norm", False),
        (("org/repo:Norm", {}), "org/repo:Norm", False),
        ((NORM, {"trust_remote_code": True}), NORM, True),
        ((NORM, {"trust_remote_code": ["org/repo", "a/b"]}), NORM, ("org/repo", "a/b")),
        (("org/repo:Norm", {"version": 2, "trust_remote_code": False}), NORM, False),
    ],
)
def test_each_documented_form_of_a_value_is_accepted(value: Any, text: str, trust: bool | tuple[str, ...]) -> None:
    config = KernelConfig({"RMSNorm": value})
    assert list(config.choices()) == [KernelChoice(KernelRequest.parse(text), trust)]
    assert KernelConfig(config.kernel_mapping) == config


@pytest.mark.parametrize("value", ["", None, {"cuda": ""}, {"cuda": None}])
def test_an_empty_value_leaves_the_layer_alone(value: Any) -> None:
    """REF huggingface/transformers#38905: it was all kernels or none."""
    config = KernelConfig({"RMSNorm": value})
    assert len(config) == 1
    assert chosen(config, "cuda") is None
    assert list(config.choices()) == []
    assert KernelConfig(config.kernel_mapping) == config


@pytest.mark.parametrize("device", ACCEPTED_NAMES)
def test_every_documented_device_may_have_its_own_kernel(device: str) -> None:
    """REF huggingface/kernels#131, #132, #669; huggingface/transformers kernel_config: "cpu" was refused."""
    (entry,) = KernelConfig({"RMSNorm": {device: NORM}}).entries
    backend = {"mps": "metal", "npu": "cann"}.get(device, device)
    assert entry.devices == (backend,)
    assert str(entry.choose(backend, Mode.TRAINING)) == NORM
    assert entry.choose("elsewhere", Mode.TRAINING) is None


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("CUDA", "device: unknown name, did you mean 'cuda'? expected one of cann, cpu, cuda"),
        ("cuda:0", "did you mean 'cuda'?"),
        ("hpu", "device: unknown name"),
        ("", "device: unknown name"),
        (0, "device: name is not a string"),
        (None, "device: name is not a string"),
    ],
)
def test_an_unknown_device_is_refused_with_the_layer_and_the_accepted_names(device: Any, words: str) -> None:
    """REF huggingface/kernels#131, #132, #669."""
    with pytest.raises(InvalidConfig) as caught:
        KernelConfig({"RMSNorm": {device: NORM}})
    assert words in str(caught.value)
    assert "(from layer 'RMSNorm')" in str(caught.value)


def test_a_mapping_for_cuda_only_is_not_applied_on_rocm() -> None:
    """REF huggingface/kernels-community#674, #679: torch calls ROCm's devices "cuda"."""
    config = KernelConfig({"RMSNorm": {"cuda": NORM}})
    assert chosen(config, "cuda") == NORM
    assert chosen(config, "rocm") is None


def test_a_value_without_devices_serves_all_of_them() -> None:
    config = KernelConfig({"RMSNorm": NORM})
    assert config.entries[0].devices == (ANY_DEVICE,)
    assert all(chosen(config, backend, mode) == NORM for backend in ("cpu", "cuda", "rocm") for mode in Mode)


def test_a_mode_finds_the_kernel_of_the_next_best_mode() -> None:
    config = KernelConfig({"RMSNorm": {"cuda": {"training": NORM, Mode.INFERENCE: OTHER}}})
    assert chosen(config, "cuda", Mode.INFERENCE) == OTHER
    assert chosen(config, "cuda", Mode.TRAINING) == NORM
    assert chosen(config, "cuda", Mode.TRAINING_COMPILE) is None
    assert chosen(config, "cuda", Mode.INFERENCE_COMPILE) is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("RMSNorm", "no organization"),
        ("org/repo", 'names no symbol; expected "org/repo:Symbol"'),
        ("org/repo:", "empty symbol"),
        ("org/repo:a:b", "second ':'"),
        ("paged|org/repo:Norm", "'|' in the name"),
        (" org/repo:Norm", "space at the start or end"),
        (5, 'a int; expected "org/repo:Symbol"'),
        (b"org/repo:Norm", "a bytes"),
        (["org/repo:Norm"], "a list"),
        (("org/repo:Norm", {"version": 1}, 1), "a tuple"),
        (("org/repo:Norm", {"version": True}), "version out of range or not an int"),
        (("org/repo:Norm", {"version": "1"}), "version out of range or not an int"),
        ((NORM, {"version": 2}), "a revision in the string and one beside it"),
        (("org/repo:Norm", {"version": 2, "revision": "main"}), "both version=2 and revision='main'"),
        (
            ("org/repo:Norm", {"versoin": 2}),
            "unknown option, did you mean 'version'? expected one of version, revision",
        ),
        (("org/repo:Norm", {1: 2}), "unknown option; expected one of version"),
        (("/abs:Norm", {"version": 1}), "a local folder has no revision"),
        ((NORM, {"trust_remote_code": "yes"}), "trust_remote_code; expected True, False or a list"),
        ((NORM, {"trust_remote_code": ["org"]}), "trust_remote_code: no organization; expected org/name"),
        ((NORM, {"trust_remote_code": [5]}), "trust_remote_code: a int, not a string"),
        ({"cuda": {"fast": NORM}}, "unknown mode; expected one of inference, training"),
        ({"cuda": {("a",): NORM}}, "unknown mode"),
        ({"npu": NORM, "cann": NORM}, "device 'cann' given twice (aliases count)"),
        ({"cuda": {"training": NORM, Mode.TRAINING: NORM}}, "given twice"),
        ({}, "names no kernel"),
        ({"cuda": {}}, "names no kernel"),
    ],
)
def test_an_unreadable_value_is_refused_with_its_layer(value: Any, words: str) -> None:
    """REF huggingface/transformers#42800, huggingface/transformers#42547."""
    with pytest.raises(InvalidConfig) as caught:
        KernelConfig({"RMSNorm": value})
    assert words in str(caught.value)
    assert "(from layer 'RMSNorm')" in str(caught.value)


@pytest.mark.parametrize("layer", ["", "a b", "model..mlp", "model.", None, 5, "x\n"])
def test_what_is_no_layer_name_is_refused(layer: Any) -> None:
    with pytest.raises(InvalidConfig, match="not a layer name; expected a name such as 'RMSNorm' or a path"):
        KernelConfig({layer: NORM})


@pytest.mark.parametrize(
    ("layer", "path"), [("RMSNorm", False), ("model.layers.*.mlp", True), ("model.norm", True), ("*", True)]
)
def test_a_path_pattern_is_told_from_a_layer_name(layer: str, path: bool) -> None:
    assert KernelConfig({layer: NORM}).entries[0].is_path is path


@pytest.mark.parametrize("mapping", ["RMSNorm", [("RMSNorm", NORM)], 5])
def test_a_mapping_is_a_dict(mapping: Any) -> None:
    with pytest.raises(InvalidConfig, match="expected a dict of layer name to kernel"):
        KernelConfig(mapping)


def test_local_kernels_have_to_be_paths() -> None:
    config = KernelConfig({"RMSNorm": "/abs:Norm"}, use_local_kernel=True)
    assert (config.use_local_kernel, config.inherit_mapping) == (True, True)
    with pytest.raises(InvalidConfig, match="use_local_kernel=True needs a path"):
        KernelConfig({"RMSNorm": NORM}, use_local_kernel=True)


def test_a_config_cannot_be_changed_and_serves_any_number_of_models() -> None:
    """REF huggingface/transformers kernel_config: applying a config replaced the user's dict; a second use broke."""
    mapping = {"RMSNorm": {"cuda": NORM}}
    config = KernelConfig(mapping)
    mapping["RMSNorm"]["cuda"] = OTHER
    config.kernel_mapping.clear()
    assert config == KernelConfig({"RMSNorm": {"cuda": NORM}})
    for name in ("kernel_mapping", "_entries", "anything"):
        with pytest.raises(AttributeError, match="a KernelConfig is immutable"):
            setattr(config, name, {})


def test_building_a_config_looks_nothing_up() -> None:
    """REF huggingface/transformers#46291, #46681, #46293, #46478; sgl-project/sglang#26704: failure at import."""
    config = KernelConfig({"RMSNorm": "no-such-org/no-such-repo@v99:Nothing", "MLP": "/no/such/folder:Nothing"})
    assert len(config) == 2


def test_equality_ignores_the_order_of_layers_and_sees_the_flags() -> None:
    one = KernelConfig({"RMSNorm": NORM, "MLP": OTHER})
    assert one == KernelConfig({"MLP": OTHER, "RMSNorm": NORM})
    assert hash(one) == hash(KernelConfig({"MLP": OTHER, "RMSNorm": NORM}))
    assert one != KernelConfig({"RMSNorm": NORM, "MLP": OTHER}, inherit_mapping=False)
    assert one != {"RMSNorm": NORM}


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("inherit", [True, False])
def test_a_config_is_shown_as_the_call_that_builds_it(local: bool, inherit: bool) -> None:
    mapping = {"RMSNorm": ("/abs:Norm", {"trust_remote_code": True})}
    config = KernelConfig(mapping, use_local_kernel=local, inherit_mapping=inherit)
    assert eval(repr(config), {"KernelConfig": KernelConfig}) == config


def test_the_same_kernel_for_two_layers_is_one_choice() -> None:
    config = KernelConfig({"RMSNorm": NORM, "Norm": {"cuda": NORM, "cpu": OTHER}})
    assert [str(choice) for choice in config.choices()] == [NORM, OTHER]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"kernel_maping": {}}, "unknown key, did you mean 'kernel_mapping'? expected one of kernel_mapping"),
        ({5: {}}, "unknown key"),
        ([("kernel_mapping", {})], "a list; expected a dict with kernel_mapping"),
        (None, "a NoneType"),
    ],
)
def test_data_of_another_shape_is_refused(data: Any, words: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        KernelConfig.from_dict(data)
    assert words in str(caught.value)


VALUES = st.sampled_from(
    ["", None, NORM, OTHER, ("org/repo:Norm", {"revision": "main"}), (NORM, {"trust_remote_code": ["org/repo"]})]
)
MODES = st.dictionaries(st.sampled_from(list(Mode)), VALUES, min_size=1, max_size=3)
DEVICES = st.dictionaries(
    st.sampled_from(["cuda", "rocm", "npu", "mps", "cpu"]), VALUES | MODES, min_size=1, max_size=3
)
MAPPINGS = st.dictionaries(st.sampled_from(["RMSNorm", "MLP", "model.layers.*.mlp", "*"]), VALUES | DEVICES, max_size=4)


@given(MAPPINGS, st.booleans())
def test_a_config_survives_every_way_of_writing_it_down(mapping: dict[str, Any], inherit: bool) -> None:
    config = KernelConfig(mapping, inherit_mapping=inherit)
    assert KernelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    assert KernelConfig(config.kernel_mapping, inherit_mapping=inherit) == config


RANGES = {"cuda>=9.0,<10": "org/hopper:Norm", "cuda>=8.0": "org/new:Norm", "cuda": "org/any:Norm", "cpu": ""}


@pytest.mark.parametrize(
    ("capability", "repo"),
    [
        (Release(9, 0), "org/hopper"),
        (Release(10, 0), "org/new"),
        (Release(8, 0), "org/new"),
        (Release(7, 5), "org/any"),
        (None, "org/any"),
    ],
)
def test_the_narrowest_range_of_capability_wins(capability: Release | None, repo: str) -> None:
    """REF huggingface/kernels#106, #715: each caller checked the capability by hand."""
    (entry,) = KernelConfig({"RMSNorm": RANGES}).entries
    assert str(entry.choose("cuda", Mode.INFERENCE, capability)) == f"{repo}:Norm"
    assert entry.choose("rocm", Mode.INFERENCE, capability) is None


def test_a_range_without_a_kernel_for_the_mode_leaves_it_to_the_next_wider_one() -> None:
    (entry,) = KernelConfig({"RMSNorm": {"cuda==9.0": {"inference": NORM}, "cuda": OTHER}}).entries
    assert str(entry.choose("cuda", Mode.INFERENCE, Release(9, 0))) == NORM
    assert str(entry.choose("cuda", Mode.TRAINING, Release(9, 0))) == OTHER
    (entry,) = KernelConfig({"RMSNorm": {"cuda==9.0": "", "cuda": OTHER}}).entries
    assert entry.choose("cuda", Mode.INFERENCE, Release(9, 0)) is None


def test_ranges_are_written_down_and_read_back() -> None:
    config = KernelConfig({"RMSNorm": {**RANGES, "rocm<9.5": {"training": NORM}}})
    assert list(config.kernel_mapping["RMSNorm"]) == ["cuda>=9.0,<10.0", "cuda>=8.0", "cuda", "cpu", "rocm<9.5"]
    assert KernelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert eval(repr(config), {"KernelConfig": KernelConfig}) == config


def test_one_range_in_two_spellings_is_given_twice() -> None:
    with pytest.raises(InvalidConfig, match="given twice"):
        KernelConfig({"RMSNorm": {"cuda<=9.0": NORM, "cuda<9.1": OTHER}})


def test_attributes_and_optional_are_written_down_and_read_back() -> None:
    value = (NORM, {"attributes": {"variance_epsilon": "eps"}, "optional": True})
    config = KernelConfig({"RMSNorm": value})
    assert config.kernel_mapping == {"RMSNorm": value}
    assert KernelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.entries[0].is_optional
    assert not KernelConfig({"RMSNorm": {"cuda": value, "cpu": NORM}}).entries[0].is_optional
    assert not KernelConfig({"RMSNorm": ""}).entries[0].is_optional


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attributes": ["eps"]}, "attributes; expected names of attributes"),
        ({"attributes": {"eps": 5}}, "attributes; expected names of attributes"),
        ({"attributes": {"eps": "a.b"}}, "attributes; expected names of attributes"),
        ({"optional": "yes"}, "optional; expected True or False"),
    ],
)
def test_unreadable_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        KernelConfig({"RMSNorm": (NORM, options)})
    assert words in str(caught.value)
