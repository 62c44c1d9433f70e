"""KernelTrainerCallback: kernels for the time of a training, for transformers' Trainer and those built on it (TRL)."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

import kernelhub
from kernelhub.layers.binding import record_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from kernelhub.config import KernelConfig
    from kernelhub.layers.report import Report

_logger = logging.getLogger("kernelhub")


class KernelTrainerCallback(TrainerCallback):
    """Binds kernels before the first step, again when the model was changed (adapters, wrappers), and restores it.

    Args:
        config: a KernelConfig, or the mapping to build one from.
        options: as for ``kernelhub.kernelize``: ``mode``, ``strict``, ``trust_remote_code``, ``session`` ...

    For that time they replace kernels that the model has already. Works with and without ``enable()``. Raises, from
    the training, what ``kernelhub.kernelize`` does. When a training ends by an error the model keeps its kernels,
    until ``restore`` or ``kernelhub.unkernelize``.

    Example:
        >>> trainer = Trainer(model, args, callbacks=[KernelTrainerCallback(KernelConfig.from_liger())])
    """

    def __init__(self, config: KernelConfig | Mapping[str, Any], **options: Any) -> None:
        self.report: Report | None = None
        self._config = config
        self._options = options
        self._modules: frozenset[int] = frozenset()
        self._record: object = None
        self._bound = ExitStack()

    def on_init_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Bind before the trainer wraps the model."""
        self._bind(model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        """Bind again if the model is not the one that was bound any more; a trainer may have changed its forward."""
        self._bind(model)
        if model is not None:
            self.report = kernelhub.report(model)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """The same, before each step."""
        self._bind(model)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give the model back as it was before."""
        self.restore()

    def restore(self) -> None:
        """Give the model the kernels, if any, that it had before this callback."""
        self._bound.close()
        self._modules, self._record = frozenset(), None

    def _bind(self, model: nn.Module | None) -> None:
        if model is None:
            return
        modules = frozenset(map(id, model.modules()))
        if modules == self._modules and record_of(model) is self._record:
            return
        self.restore()
        self._bound.enter_context(kernelhub.kernelized(model, self._config, **self._options))
        self._modules, self._record = modules, record_of(model)
        self.report = kernelhub.report(model)
        _logger.info("kernels for the training:\n%s", self.report)
