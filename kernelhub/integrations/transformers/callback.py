"""KernelTrainerCallback: kernels for the time of a training, for transformers' Trainer and those built on it (TRL)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from kernelhub.integrations.temporary import TemporaryKernels

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from kernelhub.config import KernelConfig
    from kernelhub.layers.report import Report


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
        self._kernels = TemporaryKernels(config, options)

    @property
    def report(self) -> Report | None:
        """What is bound in the model for the training; None before it begins."""
        return self._kernels.report

    def on_init_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Bind before the trainer wraps the model."""
        self._bind(model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        """Bind again if the model is not the one that was bound any more; a trainer may have changed its forward."""
        self._bind(model)
        if model is not None:
            self._kernels.refresh(model)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """The same, before each step."""
        self._bind(model)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give the model back as it was before."""
        self.restore()

    def restore(self) -> None:
        """Give the model the kernels, if any, that it had before this callback."""
        self._kernels.restore()

    def _bind(self, model: nn.Module | None) -> None:
        if model is not None:
            self._kernels.bind(model)
