"""Whether a kernel computes what a module computes.

Names say little: an `RMSNorm` may scale by `1 + weight`, an `MLP` may clamp its gate. So the
forward of the module's class runs once, on a stand-in with a few numbers that holds only what the
kernel would use, and its result is compared with the kernel's formula. A forward that needs more
than the stand-in has, or returns something else, is refused. The module itself is not touched, so
meta, sharded and quantised weights do not matter.
"""

import inspect
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as nn_module

from .gated import Activation, activate
from .rms_norm import plain_rms_norm
from .rotary import plain_rotary

_SHARED_ARGUMENTS = {"input_ids", "attention_mask", "position_ids", "inputs_embeds", "use_cache"}
# Releases of transformers spell the cache differently.
_BASE_ARGUMENTS = [_SHARED_ARGUMENTS | {name} for name in ("past_key_values", "cache")]


def _numbers(*shape: int, seed: int = 0) -> Tensor:
    """Return fixed numbers between 0.3 and 2.3, on the CPU whatever the default device is."""
    count = torch.Size(shape).numel()
    steps = torch.arange(seed + 1, seed + count + 1, dtype=torch.float32, device="cpu")
    return (steps * 0.618034).remainder(1.0).mul(2.0).add(0.3).reshape(shape)


def _attempt(function: Callable[[], Any]) -> Any:
    """Run a stand-in's forward; return its result, or the reason why it has none."""
    try:
        with torch.no_grad(), torch.device("cpu"):
            return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _close(got: Any, expected: Tensor) -> bool:
    same_kind = isinstance(got, Tensor) and got.shape == expected.shape
    return same_kind and torch.allclose(got.float(), expected.float(), rtol=1e-3, atol=1e-3)


def _takes_more(cls: type[nn.Module]) -> str:
    """Return a reason if the forward of `cls` has parameters besides its input."""
    names = list(inspect.signature(cls.forward).parameters)[2:]
    return f"its forward also takes {', '.join(names)}" if names else ""


def is_bare_linear(module: object) -> bool:
    """Tell whether calling `module` is the same as using its weight and bias.

    False for adapters, quantised layers, hooks, sharded weights and replaced forwards.
    """
    return (
        type(module) is nn.Linear
        and type(module.weight) is nn.Parameter
        and "forward" not in vars(module)
        and not any(vars(module)[name] for name in _HOOKS)
        and not any(getattr(nn_module, f"_global{name}") for name in _HOOKS)
    )


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def fits_rms_norm(module: nn.Module) -> bool | str:
    """Return True if `module` scales x / rms(x) by its weight, else the reason why not."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        return "it has no weight"
    if weight.dim() != 1:
        return f"its weight has {weight.dim()} dimensions, not 1"
    if type(module).forward is nn.RMSNorm.forward:
        return True
    if not hasattr(module, "variance_epsilon"):
        return "it has no variance_epsilon"
    return _takes_more(type(module)) or _norm_order(type(module))[1] or True


def casts_last(cls: type[nn.Module]) -> bool:
    """Tell whether the norm class rounds to the input dtype after scaling instead of before."""
    return cls.forward is nn.RMSNorm.forward or _norm_order(cls)[0]


@cache
def _norm_order(cls: type[nn.Module]) -> tuple[bool, str]:
    """Return whether the class casts last, and why it is not a root mean square norm, if so."""
    x, weight = _numbers(3, 8), _numbers(8, seed=5)
    stand_in = SimpleNamespace(weight=weight, variance_epsilon=0.125, training=False)
    got = _attempt(lambda: cls.forward(stand_in, x))
    if isinstance(got, str):
        return False, f"its forward needs more than a weight and an epsilon ({got})"
    if not _close(got, plain_rms_norm(x, weight, 0.125)):
        return False, "its forward is not weight * x / rms(x)"
    half = _attempt(lambda: cls.forward(stand_in, x.bfloat16()))
    return isinstance(half, Tensor) and half.dtype == torch.bfloat16, ""


def fits_layer_norm(module: nn.Module) -> bool | str:
    """Return True if `module` is a layer norm over its last dimension, else the reason why not."""
    if type(module).forward is not nn.LayerNorm.forward:
        return "it is not torch.nn.LayerNorm"
    if len(module.normalized_shape) != 1:
        return f"it normalises {len(module.normalized_shape)} dimensions, not 1"
    return True


def activation_of(act_fn: object) -> Activation | None:
    """Name the activation function or module, or None if it is not a known one."""
    if act_fn is functional.silu or isinstance(act_fn, nn.SiLU) or _is_class(act_fn, "SiLUActivation"):
        return "silu"
    if isinstance(act_fn, nn.GELU):
        return "gelu_tanh" if act_fn.approximate == "tanh" else "gelu"
    if act_fn is functional.gelu or _is_class(act_fn, "GELUActivation"):
        return "gelu"
    if _is_class(act_fn, "GELUTanh", "PytorchGELUTanh", "NewGELUActivation"):
        return "gelu_tanh"
    return None


def _is_class(value: object, *names: str) -> bool:
    # By name: transformers need not be installed for the kernels to load.
    return type(value).__name__ in names


def fits_gated_mlp(module: nn.Module, accepted: tuple[Activation, ...]) -> bool | str:
    """Return True if `module` is down(act(gate(x)) * up(x)) with an accepted activation."""
    for name in ("gate_proj", "up_proj", "down_proj"):
        if not isinstance(getattr(module, name, None), nn.Module):
            return f"it has no module {name}"
    act_fn = getattr(module, "act_fn", None)
    activation = activation_of(act_fn)
    if activation not in accepted:
        name = getattr(act_fn, "__name__", type(act_fn).__name__)
        return f"its activation is {name}, not one of {', '.join(accepted)}"
    return _takes_more(type(module)) or _gated_mlp_reason(type(module), activation) or True


@cache
def _gated_mlp_reason(cls: type[nn.Module], activation: Activation) -> str:
    x, gate, up, down = (_numbers(*shape) for shape in ((3, 4), (4, 6), (4, 6), (6, 4)))
    stand_in = SimpleNamespace(
        gate_proj=lambda value: value @ gate - 7,
        up_proj=lambda value: value @ up - 5,
        down_proj=lambda value: value @ down,
        act_fn=lambda value: activate(value, activation),
    )
    got = _attempt(lambda: cls.forward(stand_in, x))
    if isinstance(got, str):
        return f"its forward needs more than three projections and an activation ({got})"
    expected = stand_in.down_proj(stand_in.act_fn(stand_in.gate_proj(x)) * stand_in.up_proj(x))
    return "" if _close(got, expected) else "its forward is not down(act(gate(x)) * up(x))"


def fits_rotary(original: Callable[..., Any]) -> bool | str:
    """Return True if calling `original` rotates halves as `rotary_pos_emb` does, else why not."""
    q, k = _numbers(1, 2, 3, 8), _numbers(1, 1, 3, 8, seed=3)
    cos, sin = _numbers(1, 3, 8, seed=7), _numbers(1, 3, 8, seed=11)
    got = _attempt(lambda: original(q, k, cos, sin))
    if isinstance(got, str):
        return f"it does not take (q, k, cos, sin) ({got})"
    expected = tuple(plain_rotary(x, cos.unsqueeze(1), sin.unsqueeze(1)) for x in (q, k))
    if not (isinstance(got, tuple) and len(got) == 2 and all(map(_close, got, expected))):
        return "it does not rotate the two halves of the last dimension"
    mixed = original(q.bfloat16(), k.bfloat16(), cos, sin)
    return mixed[0].dtype == cos.dtype or "it rounds to the dtype of the queries"


def fits_fused_loss(module: nn.Module) -> bool | str:
    """Return True if `module` is a causal language model whose loss can skip the logits."""
    base = getattr(module, "base_model_prefix", "")
    if not base or not isinstance(getattr(module, base, None), nn.Module):
        return "it has no base model"
    if getattr(getattr(module, "config", None), "vocab_size", None) is None:
        return "its config has no vocab_size"
    return head_reason(module) or _causal_lm_reason(module, base) or True


def head_reason(module: nn.Module) -> str:
    """Return why the output projection or loss of `module` cannot be fused now, or nothing."""
    head = getattr(module, "lm_head", None)
    if not is_bare_linear(head):
        return f"its lm_head is not a plain Linear layer ({type(head).__name__})"
    loss = getattr(module, "loss_function", None)
    name = getattr(loss, "__name__", type(loss).__name__)
    return "" if name == "ForCausalLMLoss" else f"its loss is {name}, not ForCausalLMLoss"


def _causal_lm_reason(module: nn.Module, base: str) -> str:
    """Run the class's forward around a tiny base model and watch what it does with the logits."""
    hidden, weight = _numbers(1, 3, 4), _numbers(6, 4, seed=9)
    labels = torch.zeros(1, 3, dtype=torch.long, device="cpu")
    calls: dict[str, Any] = {}

    def run_base(**arguments: object) -> SimpleNamespace:
        calls["base"] = set(arguments)
        return _Outputs(last_hidden_state=hidden)

    def run_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: object) -> Tensor:
        calls["loss"] = logits, labels, vocab_size
        return hidden.sum()

    stand_in = SimpleNamespace(
        lm_head=lambda value: value @ weight.t(),
        loss_function=run_loss,
        config=module.config,
        vocab_size=module.config.vocab_size,
        training=True,
        **{base: run_base},
    )
    out = _attempt(lambda: type(module).forward(stand_in, labels=labels, return_dict=True))
    if isinstance(out, str):
        return f"its forward does more than base model, lm_head and loss ({out})"
    if type(out).__name__ != "CausalLMOutputWithPast":
        return f"its forward returns {type(out).__name__}, not CausalLMOutputWithPast"
    if calls.get("base") not in _BASE_ARGUMENTS or "loss" not in calls:
        return "its forward calls its base model or its loss in another way"
    logits, given, vocabulary = calls["loss"]
    if not _close(logits, hidden @ weight.t()):
        return "its forward changes the logits (soft cap or scale)"
    same = given is labels and vocabulary == module.config.vocab_size
    return "" if same and _close(out.loss, hidden.sum()) else "its forward changes the loss"


class _Outputs(SimpleNamespace):
    """The outputs of a base model: whatever was not given is None."""

    def __getattr__(self, name: str) -> None:
        return None
