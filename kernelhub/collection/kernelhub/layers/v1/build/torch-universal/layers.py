"""Layers to bind to modules of a model, and functions to use in place of its own.

A layer is stateless: only its `forward` is used, and `self` is the module it was bound to.
`kernel_condition` returns True, or the reason why a module must keep its own forward.
"""

import inspect
from dataclasses import fields
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from . import checks
from .fused_linear_cross_entropy import fused_linear_cross_entropy
from .labels import causal_labels
from .rms_norm import rms_norm
from .rotary import rotary_pos_emb
from .swiglu import silu_mul

__all__ = [
    "FusedLinearCrossEntropy",
    "RMSNorm",
    "SwiGLUMLP",
    "rotary_pos_emb",
]

rotary_pos_emb.kernel_condition = checks.fits_rotary  # type: ignore[attr-defined]


class RMSNorm(nn.Module):
    """Root mean square norm with `weight` and `variance_epsilon`, or `torch.nn.RMSNorm`."""

    can_torch_compile: ClassVar[bool] = True
    has_backward: ClassVar[bool] = True
    kernel_condition = staticmethod(checks.fits_rms_norm)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise `hidden_states` `(..., hidden)`; the result has the same shape."""
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        if eps is None:
            eps = torch.finfo(hidden_states.dtype).eps
        return rms_norm(hidden_states, self.weight, eps, _casts_last(type(self)))


@torch.compiler.assume_constant_result
def _casts_last(cls: type[nn.Module]) -> bool:
    return checks.casts_last(cls)


class SwiGLUMLP(nn.Module):
    """`down_proj(silu(gate_proj(x)) * up_proj(x))`."""

    can_torch_compile: ClassVar[bool] = True
    has_backward: ClassVar[bool] = True

    kernel_condition = staticmethod(checks.fits_swiglu)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to `x` `(..., hidden)`; the result is `(..., hidden)`."""
        return self.down_proj(silu_mul(self.gate_proj(x), self.up_proj(x)))


class FusedLinearCrossEntropy(nn.Module):
    """Forward of a `*ForCausalLM` model that computes its training loss without the logits."""

    can_torch_compile: ClassVar[bool] = False
    has_backward: ClassVar[bool] = True
    kernel_condition = staticmethod(checks.fits_fused_loss)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Take what the model's own forward takes; return its output with `logits` None.

        Without labels, in evaluation, with `logits_to_keep`, or once the head is no longer a plain
        layer, the model's own forward runs instead.
        """
        # By the names of the class: releases of transformers spell and order them differently.
        inputs = {**dict(zip(_parameters(type(self)), args)), **kwargs}  # noqa: B905  # fewer arguments than names
        labels, logits_to_keep = inputs.pop("labels", None), inputs.pop("logits_to_keep", 0)
        if not _wants_loss_only(self, labels, logits_to_keep):
            return type(self).forward(self, *args, **kwargs)
        return_dict = inputs.pop("return_dict", None)
        outputs = getattr(self, self.base_model_prefix)(**inputs)
        loss = _loss(self.lm_head, outputs.last_hidden_state, labels, **inputs)
        result = _causal_lm_output(loss, outputs)
        as_dict = self.config.return_dict if return_dict is None else return_dict
        return result if as_dict else result.to_tuple()


@cache
def _parameters(cls: type[nn.Module]) -> tuple[str, ...]:
    """Name what the forward of `cls` takes, in order, without `self`."""
    return tuple(inspect.signature(cls.forward).parameters)[1:]


def _wants_loss_only(module: nn.Module, labels: Tensor | None, logits_to_keep: object) -> bool:
    whole = isinstance(logits_to_keep, int) and logits_to_keep == 0
    return module.training and labels is not None and whole and not checks.head_reason(module)


def _loss(
    head: nn.Linear,
    hidden: Tensor,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_kwargs: object,
) -> Tensor:
    """Return the loss of `hidden` `(batch, sequence, hidden)` as transformers defines it."""
    targets = causal_labels(labels, ignore_index) if shift_labels is None else shift_labels
    return fused_linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        head.weight,
        targets.reshape(-1).to(hidden.device),
        head.bias,
        ignore_index,
        num_items_in_batch,
    )


def _causal_lm_output(loss: Tensor, outputs: Any) -> Any:
    # Imported here: the kernels load without transformers, only models of it come this far.
    from transformers.modeling_outputs import CausalLMOutputWithPast  # noqa: PLC0415

    names = {field.name for field in fields(CausalLMOutputWithPast)} - {"loss", "logits"}
    shared = {name: getattr(outputs, name, None) for name in names}
    return CausalLMOutputWithPast(loss=loss, logits=None, **shared)
