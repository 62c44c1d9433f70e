"""KernelCallback: kernels for the time of a training, for Lightning's Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernelhub.integrations.temporary import TemporaryKernels

try:
    from lightning.pytorch import Callback  # type: ignore[import-not-found, unused-ignore]  # need not be installed
except ModuleNotFoundError:  # the same, by its older name
    try:
        from pytorch_lightning import Callback  # type: ignore[import-not-found, unused-ignore]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("KernelCallback needs Lightning: pip install lightning", name="lightning") from error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernelhub.config import KernelConfig
    from kernelhub.layers.report import Report


class KernelCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Binds kernels before the first step, when the model is on its device, and restores it at the end or on an error.

    Args:
        config: a KernelConfig, or the mapping to build one from.
        options: as for ``kernelhub.kernelize``: ``mode``, ``strict``, ``trust_remote_code``, ``session`` ...

    Binds again when the modules change during a training. For that time they replace kernels that the model has
    already; checkpoints are as without. Raises, from the training, what ``kernelhub.kernelize`` does.

    Example:
        >>> trainer = lightning.Trainer(callbacks=[KernelCallback(KernelConfig.from_liger())])
    """

    def __init__(self, config: KernelConfig | Mapping[str, Any], **options: Any) -> None:
        self._kernels = TemporaryKernels(config, options)

    @property
    def report(self) -> Report | None:
        """What is bound in the model for the training; None before it begins."""
        return self._kernels.report

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Bind the model, which is on its device, and wrapped if it is to be, by now."""
        self._kernels.bind(pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Bind again if the model is not the one that was bound any more."""
        self._kernels.bind(pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Give the model the kernels, if any, that it had before."""
        self._kernels.restore()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The same."""
        self._kernels.restore()
