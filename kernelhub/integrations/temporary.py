"""Temporary kernels: those that a model has for the time of a training, whatever framework runs it."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import kernelhub
from kernelhub.layers.binding import record_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from kernelhub.config import KernelConfig
    from kernelhub.layers.report import Report

_logger = logging.getLogger("kernelhub")


class TemporaryKernels:
    """Binds a config to a model, again whenever the model was changed, and gives the model back as it was.

    ``report`` is that of the model, as it was when it was bound or ``refresh`` was called.
    """

    def __init__(self, config: KernelConfig | Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self.report: Report | None = None
        self._config = config
        self._options = options
        self._modules: frozenset[int] = frozenset()
        self._record: object = None
        self._bound = ExitStack()

    def bind(self, model: nn.Module) -> None:
        """Bind the model, unless it is bound and has the modules that it had then.

        Raises:
            KernelHubError: as ``kernelhub.kernelize``.
        """
        modules = frozenset(map(id, model.modules()))
        if modules == self._modules and record_of(model) is self._record:
            return
        self.restore()
        self._bound.enter_context(kernelhub.kernelized(model, self._config, **self._options))
        self._modules, self._record = modules, record_of(model)
        self.refresh(model)
        _logger.info("kernels for the training:\n%s", self.report)

    def refresh(self, model: nn.Module) -> None:
        """Report anew: others may have changed a forward since."""
        self.report = kernelhub.report(model)

    def restore(self) -> None:
        """Give the model the kernels, if any, that it had before."""
        self._bound.close()
        self._modules, self._record = frozenset(), None
