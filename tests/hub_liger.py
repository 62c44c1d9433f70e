"""A kernel repository with Liger's names for the CPU, which count their calls, as the local Hub serves it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel_repository import trust, write_build

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

REPOSITORY = "kernels-community/liger-kernels"

LAYERS = """
import torch
from torch import nn
from torch.nn import functional

CALLS = {"norm": 0, "mlp": 0, "rope": 0, "loss": 0}


class LigerRMSNorm(nn.Module):
    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states):
        CALLS["norm"] += 1
        return functional.rms_norm(hidden_states, (hidden_states.shape[-1],), self.weight, self.variance_epsilon)


class LigerSwiGLUMLP(nn.Module):
    def forward(self, x):
        CALLS["mlp"] += 1
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


def _turned(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def liger_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    CALLS["rope"] += 1
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + _turned(q) * sin, k * cos + _turned(k) * sin


def LigerForCausalLMLoss(
    logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **kwargs
):
    CALLS["loss"] += 1
    if shift_labels is None:
        shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = functional.cross_entropy(
        logits.float().view(-1, vocab_size), shift_labels.reshape(-1), ignore_index=ignore_index, reduction=reduction
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch
"""

INIT = "from . import layers\nfrom .layers import CALLS, LigerForCausalLMLoss, liger_rotary_pos_emb\n"


def publish_liger(root: Path, versions: Iterable[int] = (1, 3)) -> None:
    """Write the repository below the folder of a local Hub, by a trusted publisher."""
    trust(root, REPOSITORY.partition("/")[0])
    for version in versions:
        files: dict[str, str | bytes] = {"__init__.py": INIT, "layers.py": LAYERS}
        write_build(root, REPOSITORY, f"v{version}", "torch-cpu", files, version=version)
