"""CarriedConfig: a config of ours in the form that transformers hands from its arguments to its models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import transformers

if TYPE_CHECKING:
    from kernelhub.config import KernelConfig


class CarriedConfig(transformers.KernelConfig):
    """A config for one model; the user's own is never changed.

    Its ``kernel_mapping`` is empty while transformers builds the model: no class of the model has to be patched, as
    kernels that bring other parameters, and fusions, are bound to the finished model too.
    """

    def __init__(self, config: KernelConfig) -> None:
        super().__init__({}, config.use_local_kernel, config.inherit_mapping)  # type: ignore[no-untyped-call]
        self.config = config

    def unpack(self) -> KernelConfig:
        """The config itself, for a finished model; from now on ``kernel_mapping`` shows it."""
        self.kernel_mapping = dict(self.config.kernel_mapping)
        return self.config
