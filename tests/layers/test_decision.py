from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from kernelhub.config import KernelChoice, KernelConfig
from kernelhub.errors import ContractMismatch, DigestMismatch, NotCached, VerificationError
from kernelhub.layers.decider import Decider
from kernelhub.layers.decision import Decision, settle
from kernelhub.layers.discovery import Target, discover
from kernelhub.layers.report import Row
from kernelhub.mode import Mode
from layers.kernel_layer import backend_of, load
from layers.tiny_model import tiny


def decide(model: nn.Module, mapping: Any, mode: Mode | None = Mode.INFERENCE, obtain: Any = load) -> list[Decision]:
    config = KernelConfig(mapping)
    decider = Decider(model, mode, backend_of, obtain, lambda error: not isinstance(error, VerificationError))
    targets = discover(model, config.entries).targets
    return settle(decider.decide([(entry, target) for entry in config.entries for target in targets[entry.layer]]))


def reasons(decisions: list[Decision]) -> set[str]:
    return {row.reason for decision in decisions for row in decision.rows}


def test_a_kernel_is_obtained_once_for_all_its_layers() -> None:
    asked: list[tuple[str, str]] = []

    def obtain(choice: KernelChoice, backend: str) -> Any:
        asked.append((str(choice), backend))
        return load(choice, backend)

    decisions = decide(tiny(), {"RMSNorm": "org/repo:RMSNorm", "model.norm": "org/repo:RMSNorm"}, obtain=obtain)
    assert asked == [("org/repo:RMSNorm", "cpu")]
    assert sum(decision.accepted for decision in decisions) == 9


def test_a_config_without_a_kernel_for_the_backend_or_mode_skips_with_the_reason() -> None:
    cases: list[tuple[Any, Mode, str]] = [
        ("", Mode.INFERENCE, "left alone by the config"),
        ({"cpu": None, "cuda": "org/repo:RMSNorm"}, Mode.INFERENCE, "left alone by the config"),
        ({"cuda": "org/repo:RMSNorm"}, Mode.INFERENCE, "the config has no kernel for cpu"),
        (
            {"cpu": {"inference": "org/repo:RMSNorm"}},
            Mode.TRAINING,
            "the config has no kernel for cpu in training mode",
        ),
    ]
    for value, mode, reason in cases:
        decisions = decide(tiny(), {"model.norm": value}, mode)
        assert reasons(decisions) == {reason}
        assert not any(decisions[0].errors)


def test_each_layer_is_served_for_its_own_device() -> None:
    model = nn.ModuleList([nn.RMSNorm(4), nn.RMSNorm(4, device="meta"), nn.Sequential(nn.RMSNorm(4))])
    model[2].append(nn.RMSNorm(4, device="meta"))
    decisions = decide(model, {"*": {"cpu": "org/repo:TorchRMSNorm"}, "**.1": ""})
    assert [(each.rows[0].module, each.rows[0].reason) for each in decisions] == [
        ("0", ""),
        ("1", "on the meta device: it has no weights yet"),
        ("2", "on the meta device: it has no weights yet"),
        ("1", "served by the entry '*'"),
        ("2.1", "on the meta device: it has no weights yet"),
    ]


def test_a_layer_on_several_kinds_of_device_is_skipped() -> None:
    model = nn.Sequential(nn.RMSNorm(4))
    with FakeTensorMode():
        model[0].bias = nn.Parameter(torch.empty(4, device="cuda:0"))
    assert reasons(decide(model, {"RMSNorm": "org/repo:RMSNorm"})) == {
        "its parameters are on several kinds of device (cpu, cuda)"
    }


def test_a_layer_without_tensors_takes_the_device_of_the_model() -> None:
    assert decide(nn.ModuleList([nn.SiLU(), nn.Linear(1, 1)]), {"SiLU": {"cpu": "org/repo:silu"}})[0].rows[0].variant
    on_meta = nn.ModuleList([nn.SiLU(), nn.Linear(1, 1, device="meta")])
    assert reasons(decide(on_meta, {"SiLU": "org/repo:silu"})) == {"on the meta device: it has no weights yet"}
    assert decide(nn.Sequential(nn.SiLU()), {"SiLU": "org/repo:silu"})[0].rows[0].variant == "torch-cpu"


def test_buffers_tell_the_device_too() -> None:
    model = nn.Sequential(nn.SiLU())
    model[0].register_buffer("table", torch.zeros(1, device="meta"))
    assert reasons(decide(model, {"SiLU": "org/repo:silu"})) == {"on the meta device: it has no weights yet"}


def test_an_error_of_the_loader_becomes_a_reason_unless_it_is_about_trust() -> None:
    missing = NotCached("kernel org/repo", "store", "kernelhub prefetch")  # type: ignore[arg-type]
    broken = DigestMismatch("org/repo", "a.py", "differs")

    def failing(error: Exception) -> Any:
        def obtain(choice: KernelChoice, backend: str) -> Any:
            raise error

        return obtain

    [decision] = decide(tiny(), {"model.norm": "org/repo:RMSNorm"}, obtain=failing(missing))
    assert decision.rows[0].reason == str(missing)
    assert decision.errors == (missing,) * 4
    with pytest.raises(DigestMismatch):
        decide(tiny(), {"model.norm": "org/repo:RMSNorm"}, obtain=failing(broken))
    with pytest.raises(ZeroDivisionError):
        decide(tiny(), {"model.norm": "org/repo:RMSNorm"}, obtain=failing(ZeroDivisionError()))


def test_a_misfit_carries_the_error_with_layer_class_and_kernel() -> None:
    [decision] = decide(tiny(), {"model.norm": "org/repo:TwoInputs"})
    error = decision.errors[0]
    assert isinstance(error, ContractMismatch)
    assert str(error) == (
        "org/repo@0123abc:TwoInputs cannot replace the forward of model.norm (Qwen3RMSNorm): it needs 'residual', "
        "which callers of the original may not give; its signature is (x, residual), that of the original "
        "(hidden_states)"
    )
    near = decide(tiny(), {"GeGLUMLP": "org/repo:SwiGLUMLP"})[0]
    assert "org/repo:SwiGLUMLP cannot replace" in str(near.errors[0])


def test_a_forward_replaced_by_others_is_refused() -> None:
    model = tiny()
    model.model.norm.forward = lambda x: x
    [decision] = decide(model, {"model.norm": "org/repo:RMSNorm"})
    assert "already replaced on the instance" in decision.rows[0].reason
    assert isinstance(decision.errors[0], ContractMismatch)


def test_a_kernel_unfit_for_the_mode_is_no_error() -> None:
    [decision] = decide(tiny(), {"model.norm": "org/repo:ForwardOnlyRMSNorm"}, Mode.TRAINING)
    assert decision.rows[0].reason.startswith("ForwardOnlyRMSNorm has no backward")
    assert not any(decision.errors)


def test_a_function_inside_a_forward_that_is_replaced_is_skipped() -> None:
    target = Target("attn", nn.Module(), "model.*.attn")
    inner = Target("attn", target.module, "rotary_pos_emb", "apply_rotary_pos_emb")
    whole = Decision(target, (Row("attn", "model.*.attn", state="bound"),))
    function = Decision(inner, (Row("attn", "rotary_pos_emb", state="bound"),))
    assert [each.rows[0].reason for each in settle([function, whole])] == [
        "its whole forward is replaced by the entry 'model.*.attn'",
        "",
    ]
    assert settle([function, whole.skip("unfit")])[0].accepted
