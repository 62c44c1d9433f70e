"""Mode: what a model is kernelized for, as flags that are combined with ``|``."""

from __future__ import annotations

from enum import Flag, auto

from kernelhub.errors import InvalidConfig
from kernelhub.mode import Mode as ServedMode


class Mode(Flag):
    """INFERENCE or TRAINING, each optionally ``| TORCH_COMPILE``; FALLBACK, in mappings only, serves every mode."""

    _NONE = 0
    FALLBACK = auto()
    TRAINING = auto()
    INFERENCE = auto()
    TORCH_COMPILE = auto()

    def __or__(self, other: Mode) -> Mode:
        """Both together.

        Raises:
            InvalidConfig: the two exclude each other.
        """
        union = super().__or__(other)
        if Mode.INFERENCE in union and Mode.TRAINING in union:
            raise InvalidConfig(str(union), "INFERENCE and TRAINING exclude each other", "one of them")
        if Mode.FALLBACK in union and union != Mode.FALLBACK:
            raise InvalidConfig(str(union), "FALLBACK already stands for every mode", "Mode.FALLBACK alone")
        return union

    @property
    def served(self) -> ServedMode:
        """The same mode in kernelhub's own terms.

        Raises:
            InvalidConfig: it names neither INFERENCE nor TRAINING, nor FALLBACK alone.
        """
        found = _SERVED.get(self)
        if found is None:
            raise InvalidConfig(str(self), "not a mode to look kernels up in", "Mode.INFERENCE or Mode.TRAINING")
        return found


_SERVED = {
    Mode.FALLBACK: ServedMode.FALLBACK,
    Mode.INFERENCE: ServedMode.INFERENCE,
    Mode.TRAINING: ServedMode.TRAINING,
    Mode.INFERENCE | Mode.TORCH_COMPILE: ServedMode.INFERENCE_COMPILE,
    Mode.TRAINING | Mode.TORCH_COMPILE: ServedMode.TRAINING_COMPILE,
}
