"""Sample: inputs for one run of a model, the user's own or made up from its configuration."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from kernelhub.errors import InputsNeeded

if TYPE_CHECKING:
    from torch import nn

_SEED = 0
BATCH, TOKENS = 2, 37  # a number of tokens that is no multiple of anything


def run_model(model: nn.Module, inputs: Any) -> Any:
    """Call a model with a mapping of keywords, a tuple or list of arguments, or a single one."""
    if isinstance(inputs, Mapping):
        return model(**_without_cache(model, inputs))
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def made_up(model: nn.Module, batch: int = BATCH, tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    """Random token ids, which are the labels too where the model takes some.

    Raises:
        InputsNeeded: this is no language model that tells its vocabulary.
    """
    takes = inspect.signature(type(model).forward).parameters
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = getattr(config, "vocab_size", None)
    if "input_ids" not in takes or not isinstance(vocabulary, int):
        raise InputsNeeded(type(model).__name__)
    first = next(model.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    ids = torch.randint(vocabulary, (batch, tokens), generator=torch.Generator().manual_seed(_SEED)).to(device)
    return {"input_ids": ids, **({"labels": ids} if "labels" in takes else {})}


def _without_cache(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A cache of keys and values would be filled by plain layer and kernel in turn."""
    takes = inspect.signature(type(model).forward).parameters
    return {"use_cache": False, **inputs} if "use_cache" in takes else dict(inputs)
