"""The repository that wraps liger-kernel: resolved, refused without the package, bound with a stand-in for it.

The real package needs a GPU. The stand-in has the functions that the repository calls, with Liger's parameters, written
in plain torch; so what is tested is the repository and the way it is bound, not Liger's kernels.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from layers.tiny_model import gradients, logits, tiny

import kernelhub
from kernelhub.errors import LoadError, NoCompatibleVariant

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from kernelhub.session import Session

FUNCTIONS = """
from collections import Counter

import torch
from torch.nn import functional as F

CALLS = Counter()


def liger_rms_norm(X, W, eps, offset=0.0, casting_mode="llama", in_place=True):
    CALLS["rms_norm"] += 1
    wide = X.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (W + offset) * normed.to(X.dtype) if casting_mode == "llama" else ((W + offset) * normed).to(X.dtype)


def liger_swiglu(a, b):
    CALLS["swiglu"] += 1
    return F.silu(a) * b


def liger_geglu(a, b):
    CALLS["geglu"] += 1
    return F.gelu(a, approximate="tanh") * b


def liger_layer_norm(X, W, B, eps):
    CALLS["layer_norm"] += 1
    return F.layer_norm(X, W.shape, W, B, eps)


def liger_rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    CALLS["rope"] += 1
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def rotated(x):
        left, right = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-right, left), dim=-1) * sin

    return rotated(q), rotated(k)


def liger_cross_entropy(
    input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean"
):
    CALLS["cross_entropy"] += 1
    return F.cross_entropy(input.float(), target, weight, ignore_index=ignore_index, reduction=reduction)


def liger_fused_linear_cross_entropy(
    input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0,
    reduction="mean",
):
    CALLS["fused_linear_cross_entropy"] += 1
    logits = F.linear(input, weight, bias).float()
    return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)
"""


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "gpu" / "liger_repository.py"
    spec = importlib.util.spec_from_file_location("liger_repository", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    package = tmp_path / "installed" / "liger_kernel" / "transformers"
    package.mkdir(parents=True)
    for path, text in ((package.parent, ""), (package, ""), (package / "functional.py", FUNCTIONS)):
        (path if path.suffix else path / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    known = set(sys.modules)
    yield importlib.import_module("liger_kernel.transformers.functional")
    for name in [name for name in sys.modules if name.startswith("liger_kernel") and name not in known]:
        del sys.modules[name]


def test_it_resolves_for_a_gpu_and_not_for_this_machine(writer: ModuleType, hub_root: Path, session: Session) -> None:
    writer.write(hub_root)
    explanation = kernelhub.explain(writer.MAPPING["RMSNorm"], target="h100,torch=2.11", session=session)
    assert "torch-cuda" in str(explanation)
    with pytest.raises(NoCompatibleVariant, match="torch-cuda"):
        kernelhub.kernelize(tiny(), writer.MAPPING, session=session)


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is not None, reason="liger-kernel is installed here")
def test_without_the_package_the_error_names_it(writer: ModuleType, hub_root: Path, session: Session) -> None:
    writer.write(hub_root, "torch-universal")
    with pytest.raises(LoadError, match="liger_kernel"):
        kernelhub.load_kernel(f"{writer.REPOSITORY}@v1", session=session)


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is not None, reason="liger-kernel is installed here")
def test_its_layers_are_bound_by_mapping_strings(
    writer: ModuleType, hub_root: Path, session: Session, stand_in: Any
) -> None:
    writer.write(hub_root, "torch-universal")
    model, plain = tiny(), tiny()
    kernelhub.kernelize(model, writer.MAPPING, session=session)
    assert {row.symbol for row in kernelhub.report(model).bound} == set(writer.MAPPING)
    torch.testing.assert_close(logits(model), logits(plain))
    torch.testing.assert_close(gradients(model.train()), gradients(plain.train()), rtol=1e-4, atol=1e-6)
    assert dict(stand_in.CALLS) == {"rms_norm": 18, "swiglu": 4, "rope": 4, "fused_linear_cross_entropy": 1}
    assert model(input_ids=torch.ones(1, 3, dtype=torch.long), labels=torch.ones(1, 3, dtype=torch.long)).logits is None


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is not None, reason="liger-kernel is installed here")
def test_what_liger_computes_otherwise_is_refused(
    writer: ModuleType, hub_root: Path, session: Session, stand_in: Any
) -> None:
    writer.write(hub_root, "torch-universal")
    mapping = {
        name: f"{writer.REPOSITORY}@v1:{name}" for name in ("GeGLUMLP", "LayerNorm", "ForCausalLMLoss", "RMSNorm")
    }
    exact = kernelhub.kernelize(tiny("Llama", hidden_act="gelu"), mapping, session=session, strict=False)
    found = {row.layer: row.reason for row in kernelhub.report(exact).skipped}
    assert "not one of gelu_tanh" in found["GeGLUMLP"]
    by_tanh = kernelhub.kernelize(
        tiny("Llama", hidden_act="gelu_pytorch_tanh"), mapping, session=session, strict=False
    ).train()
    plain = tiny("Llama", hidden_act="gelu_pytorch_tanh").train()
    torch.testing.assert_close(gradients(by_tanh), gradients(plain), rtol=1e-4, atol=1e-6)
    assert dict(stand_in.CALLS) == {"geglu": 2, "rms_norm": 5, "cross_entropy": 1}
    gemma = kernelhub.kernelize(tiny("Gemma"), mapping, session=session, strict=False)
    assert "it has no variance_epsilon" in {
        row.reason for row in kernelhub.report(gemma).skipped if row.layer == "RMSNorm"
    }
