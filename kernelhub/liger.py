"""Liger switches: the options of Liger Kernel (and of transformers' ``liger_kernel_config``) as a kernel mapping.

=============================  ==========================  =====================  ========================
switch (default)               layer name                  of a Hub repository    of the builtin collection
=============================  ==========================  =====================  ========================
rope (on)                      rotary_pos_emb              liger_rotary_pos_emb   rotary_pos_emb
rms_norm (on)                  RMSNorm                     LigerRMSNorm           RMSNorm
swiglu (on)                    SwiGLUMLP                   LigerSwiGLUMLP         SwiGLUMLP
geglu (on)                     GeGLUMLP                    LigerGEGLUMLP          GeGLUMLP
layer_norm (off)               LayerNorm                   -                      LayerNorm
cross_entropy (off)            ForCausalLMLoss             LigerForCausalLMLoss   ForCausalLMLoss
fused_linear_cross_entropy     FusedLinearCrossEntropy     (the builtin one)      FusedLinearCrossEntropy
  (on without cross_entropy)
=============================  ==========================  =====================  ========================

What is on by default is optional: a model has SwiGLU or GeGLU layers, not both, and a default that does not fit is
reported, not an error. A switch that is given as True has to bind something. The Hub's Liger repositories have no layer
that takes the place of a whole language model with its head, so the fused loss always is the builtin one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernelhub.errors import InvalidConfig, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

BUILTIN = "builtin"
DEFAULT_SOURCE = "kernels-community/liger-kernels@v3"

_LAYERS = {
    "rope": "rotary_pos_emb",
    "rms_norm": "RMSNorm",
    "swiglu": "SwiGLUMLP",
    "geglu": "GeGLUMLP",
    "layer_norm": "LayerNorm",
    "cross_entropy": "ForCausalLMLoss",
    "fused_linear_cross_entropy": "FusedLinearCrossEntropy",
}
_HUB_SYMBOLS = {
    "rope": "liger_rotary_pos_emb",
    "rms_norm": "LigerRMSNorm",
    "swiglu": "LigerSwiGLUMLP",
    "geglu": "LigerGEGLUMLP",
    "cross_entropy": "LigerForCausalLMLoss",
}
_FUSED = "fused_linear_cross_entropy"
_ON = ("rope", "rms_norm", "swiglu", "geglu")
_EXPECTED = f"switches {', '.join(_LAYERS)}, each True or False"


def liger_mapping(switches: Mapping[str, Any], source: str = DEFAULT_SOURCE) -> dict[str, Any]:
    """The mapping for the switches that are given, and the defaults for the others; None means "not given".

    Raises:
        InvalidConfig: an unknown switch, a value that is not True or False, both kinds of cross entropy, or a layer
            that the source does not have.
    """
    given = {name: value for name, value in switches.items() if value is not None}
    _check(given, source)
    mapping: dict[str, Any] = {}
    for switch, layer in _LAYERS.items():
        if given.get(switch, _by_default(switch, given)):
            kernel = _kernel(switch, source)
            mapping[layer] = kernel if switch in given else (kernel, {"optional": True})
    return mapping


def _check(given: Mapping[str, Any], source: str) -> None:
    for name, value in given.items():
        if name not in _LAYERS:
            problem = f"unknown Liger switch{did_you_mean(str(name), tuple(_LAYERS))}"
            raise InvalidConfig(name, problem, _EXPECTED)
        if not isinstance(value, bool):
            raise InvalidConfig(value, f"Liger switch {name}", "True or False")
        if value and name not in _HUB_SYMBOLS and name != _FUSED and source != BUILTIN:
            raise InvalidConfig(name, f"{source} has no {_LAYERS[name]} layer", f'source="{BUILTIN}", which has one')
    if given.get("cross_entropy") and given.get(_FUSED):
        problem = "Liger switches that exclude each other: the fused loss never makes the logits that the other takes"
        raise InvalidConfig(f"cross_entropy and {_FUSED}", problem, "one of them")


def _by_default(switch: str, given: Mapping[str, Any]) -> bool:
    return switch in _ON or (switch == _FUSED and not given.get("cross_entropy"))


def _kernel(switch: str, source: str) -> str:
    if source == BUILTIN or switch == _FUSED:
        return f"{BUILTIN}:{_LAYERS[switch]}"
    return f"{source}:{_HUB_SYMBOLS[switch]}"
