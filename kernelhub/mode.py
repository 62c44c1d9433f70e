"""Mode: what a bound layer is used for, and the order in which a mapping is searched for it."""

from __future__ import annotations

from enum import Enum


class Mode(Enum):
    """INFERENCE or TRAINING, each optionally under torch.compile; FALLBACK stands for "any mode"."""

    INFERENCE = "inference"
    TRAINING = "training"
    INFERENCE_COMPILE = "inference|compile"
    TRAINING_COMPILE = "training|compile"
    FALLBACK = "fallback"

    @classmethod
    def of(cls, *, training: bool, compile: bool = False) -> Mode:
        """The mode of a module from its ``training`` flag."""
        if compile:
            return cls.TRAINING_COMPILE if training else cls.INFERENCE_COMPILE
        return cls.TRAINING if training else cls.INFERENCE

    @property
    def training(self) -> bool:
        return self in (Mode.TRAINING, Mode.TRAINING_COMPILE)

    @property
    def compile(self) -> bool:
        return self in (Mode.INFERENCE_COMPILE, Mode.TRAINING_COMPILE)

    @property
    def lookup(self) -> tuple[Mode, ...]:
        """The modes whose entries serve this one, best first (hub-format section 7)."""
        return _LOOKUP[self]


_LOOKUP = {
    Mode.INFERENCE: (
        Mode.INFERENCE,
        Mode.INFERENCE_COMPILE,
        Mode.TRAINING,
        Mode.TRAINING_COMPILE,
        Mode.FALLBACK,
    ),
    Mode.TRAINING: (Mode.TRAINING, Mode.TRAINING_COMPILE, Mode.FALLBACK),
    Mode.INFERENCE_COMPILE: (Mode.INFERENCE_COMPILE, Mode.TRAINING_COMPILE, Mode.FALLBACK),
    Mode.TRAINING_COMPILE: (Mode.TRAINING_COMPILE, Mode.FALLBACK),
    Mode.FALLBACK: (Mode.FALLBACK,),
}

SERVED = (Mode.INFERENCE, Mode.TRAINING, Mode.INFERENCE_COMPILE, Mode.TRAINING_COMPILE)
"""The modes a layer can run in, told at each call by its ``training`` flag and by whether torch.compile traces it."""
