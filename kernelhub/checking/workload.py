"""Workload: one call of a layer, prepared so that it can be run many times, with its backward or without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kernelhub.checking.call import copied
from kernelhub.checking.evaluation import mode_of_module, upstream
from kernelhub.checking.nest import tensors
from kernelhub.layers.memory import peak_memory

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from kernelhub.checking.call import Call
    from kernelhub.checking.subject import Subject
    from kernelhub.mode import Mode


class Workload:
    """``kernel`` True runs the kernel of the subject, False the plain layer."""

    def __init__(self, subject: Subject, call: Call, mode: Mode, *, kernel: bool) -> None:
        self._subject = subject
        self._training = mode.training
        self._call = call.map(lambda _, tensor: copied(tensor))
        self._run: Callable[[Call], Any] = subject.kernel_runner(mode) if kernel else subject.run_plain
        self._module = module = subject.kernel_module if kernel else subject.module
        leaves = [each for name, each in self._call.tensors.items() if name in call.differentiable]
        weights = [] if module is None else [each for each in module.parameters() if each.requires_grad]
        self._leaves = [each for each in (*leaves, *weights) if each.is_floating_point()] if self._training else []
        for leaf in leaves if self._training else ():
            leaf.requires_grad_()
        self._upper: list[torch.Tensor] = []

    def __call__(self) -> None:
        """Run it once."""
        if not self._training:
            with torch.no_grad():
                self._run(self._call)
            return
        with torch.enable_grad():
            outputs = self._wanted(tensors(self._run(self._call)))
            if not outputs or not self._leaves:
                return
            if not self._upper:
                self._upper = [upstream(each, index) for index, each in enumerate(outputs)]
            torch.autograd.grad(outputs, self._leaves, self._upper, allow_unused=True)

    def mode(self) -> AbstractContextManager[None]:
        """The layer in the mode of this workload, until the end of a block."""
        return mode_of_module(self._module, self._training)

    def peak_bytes(self, device: torch.device) -> int:
        """The largest number of bytes held at once beyond inputs and weights."""
        with self.mode():
            return peak_memory(self, device)

    def _wanted(self, outputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        sought = self._subject.sought
        return [each for name, each in outputs.items() if each.requires_grad and (not sought or name in sought)]
