"""Blueprint: the layers of a transformers model from its configuration alone: no weights, no remote code, no network.

The model is built on the meta device, so that its size does not matter. A ``config.json`` is data of somebody else:
it may name kernels and classes of its own, which are dropped before transformers sees it (S-07).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kernelhub.config import KernelConfig
from kernelhub.document import read_document
from kernelhub.errors import InvalidConfig

if TYPE_CHECKING:
    from pathlib import Path

SHIPPED = {
    "RMSNorm": "builtin:RMSNorm",
    "SwiGLUMLP": "builtin:SwiGLUMLP",
    "rotary_pos_emb": "builtin:rotary_pos_emb",
    "ForCausalLM": "builtin:FusedLinearCrossEntropy",
}
"""The mapping to the collection that is shipped with kernelhub."""

_CONFIG = "config.json"
_MOST_LAYERS = 1000
_COUNTS = ("layer", "expert", "depth", "block")
# What makes transformers load code of others, or change how layers are built in ways that need more packages.
_DROPPED = ("auto_map", "quantization_config", "kernel_config", "use_kernels", "trust_remote_code")


def used_entries(path: Path, config: KernelConfig) -> KernelConfig:
    """The part of ``config`` that layers of the model described at ``path`` answer to.

    Args:
        path: a model's folder, or its ``config.json``.
        config: the mapping to look through.

    Raises:
        InvalidConfig: no such file, or one that the installed transformers cannot build a model from.
    """
    model = build(path)
    discovery = importlib.import_module("kernelhub.layers.discovery").discover(model, config.entries)
    used = {
        layer
        for layer, targets in discovery.targets.items()
        if any(not target.owner and not target.misfit for target in targets)
    }
    mapping = {layer: value for layer, value in config.kernel_mapping.items() if layer in used}
    return KernelConfig(mapping, config.use_local_kernel, config.inherit_mapping)


def build(path: Path, device: str = "meta") -> Any:
    """The model that a configuration describes, on the meta device, or on another one with random weights.

    Raises:
        InvalidConfig: as in ``used_entries``.
    """
    path = path / _CONFIG if path.is_dir() else path
    facts = _plain_facts(read_document(path))
    _refuse_huge(facts, path)
    torch, transformers = _libraries(path)
    try:
        config = transformers.AutoConfig.for_model(facts.pop("model_type", None), **facts)
        config._attn_implementation = "eager"
        with torch.device(device):
            named = _named_class(transformers, config)
            return named(config) if named else transformers.AutoModel.from_config(config, trust_remote_code=False)
    except Exception as error:  # whatever a model's code says about a configuration that it does not like
        raise InvalidConfig(str(path), _one_line(error), "the config.json of a model that transformers has") from error


def _libraries(path: Path) -> tuple[Any, Any]:
    try:
        return importlib.import_module("torch"), importlib.import_module("transformers")
    except ImportError as error:
        needed = "torch and kernelhub[transformers]; or name the kernels themselves"
        raise InvalidConfig(str(path), f"a model cannot be built here ({error})", needed) from error


def _plain_facts(facts: Any) -> Any:
    """The same without any key that names code; also in nested configurations."""
    if isinstance(facts, list):
        return [_plain_facts(item) for item in facts]
    if not isinstance(facts, dict):
        return facts
    return {key: _plain_facts(value) for key, value in facts.items() if not _names_code(key)}


def _names_code(key: str) -> bool:
    return key in _DROPPED or key.endswith(("_implementation", "_implementation_internal"))


def _refuse_huge(facts: Any, path: Path, key: str = "") -> None:
    """Layers cost time even without weights; a model of thousands of them is a mistake or worse."""
    if isinstance(facts, int) and facts > _MOST_LAYERS and any(word in key for word in _COUNTS):
        raise InvalidConfig(facts, f"key {key!a}", f"at most {_MOST_LAYERS}", str(path))
    pairs = (
        facts.items() if isinstance(facts, dict) else ((key, item) for item in facts) if isinstance(facts, list) else ()
    )
    for name, value in pairs:
        _refuse_huge(value, path, str(name))


def _named_class(transformers: Any, config: Any) -> Any:
    """The class that the configuration names, if transformers itself has it."""
    for name in config.architectures or ():
        found = getattr(transformers, str(name), None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    return None


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
