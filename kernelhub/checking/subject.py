"""Subject: a plain layer and the kernel that would stand in for it, each as something that can make a call."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from kernelhub.checking.chain import Chain, bound_chain, plain_chain
from kernelhub.checking.lookup import SOUGHT, kernel_attention, own_attention
from kernelhub.layers.binding import BoundLoss
from kernelhub.layers.decision import NO_KERNELS, original_of
from kernelhub.layers.kernelize import forward_of
from kernelhub.mode import SERVED, Mode

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernelhub.checking.call import Call
    from kernelhub.layers.decision import Decision, Kernel
    from kernelhub.layers.report import Row

EAGER = (Mode.INFERENCE, Mode.TRAINING)
LOSS = frozenset({"loss"})
_COMPILED = {Mode.INFERENCE: Mode.INFERENCE_COMPILE, Mode.TRAINING: Mode.TRAINING_COMPILE}


@dataclass(frozen=True)
class Subject:
    """What is compared. ``module`` is the layer itself, or None for a function; ``body`` names the part of a whole
    language model whose answer is held fixed. ``chain`` is a copy of the layers, with their kernel, where that needs a
    layout of its own or replaces several layers.
    """

    decision: Decision
    module: nn.Module | None
    plain: Callable[..., Any]
    body: str = ""
    chain: Chain | None = None

    @classmethod
    def of(cls, decision: Decision) -> Subject:
        """The subject of a decision that accepts at least one kernel."""
        target = decision.target
        if decision.is_attention:
            return cls(decision, None, _without_module(own_attention(target)))
        if target.function:
            return cls(decision, None, _without_module(original_of(target)))
        if decision.is_loss:
            return cls(decision, None, _without_module(loss_function_of(target.module)))
        if decision.layouts:
            return cls(decision, plain_chain(decision), Chain.forward, chain=bound_chain(decision))
        body = body_name(target.module)
        module = _with_held_body(target.module, body) if body else target.module
        return cls(decision, module, type(target.module).forward, body)

    @property
    def is_layer(self) -> bool:
        return self.module is not None

    @property
    def sought(self) -> frozenset[str]:
        """The outputs that matter, where not all do: a head may give its loss without the logits while it trains."""
        return LOSS if self.body else SOUGHT if self.decision.is_attention else frozenset()

    def serves(self, mode: Mode) -> bool:
        """Is there a kernel for this mode (of ``EAGER``), be it only for compiled layers?"""
        return self._kernel(mode) is not None

    def row(self, mode: Mode) -> Row:
        """The facts about the kernel of a mode."""
        names = (mode.value, _COMPILED[mode].value, "any")
        rows = self.decision.rows
        return next((row for row in rows if set(names) & set(row.mode.split(", "))), rows[0])

    @property
    def kernel_module(self) -> nn.Module | None:
        """The module with the parameters that the kernel computes with."""
        return self.module if self.chain is None else self.chain

    def with_module(self, module: nn.Module | None) -> Subject:
        return replace(self, module=module)

    def run_plain(self, call: Call) -> Any:
        return self._run(self.plain, call)

    def run_kernel(self, mode: Mode, call: Call) -> Any:
        return self.kernel_runner(mode)(call)

    def kernel_runner(self, mode: Mode) -> Callable[[Call], Any]:
        """What makes calls with the kernel of a mode, prepared once."""
        if self.chain is not None:
            chain = self.chain
            return lambda call: chain(*call.args, **call.kwargs)
        return functools.partial(self._run, self._kernel_forward(mode))

    def _run(self, forward: Callable[..., Any], call: Call) -> Any:
        if self.body:
            assert self.module is not None
            held = self.module._modules[self.body]
            assert isinstance(held, HeldBody)
            held.answer = call.held
        return forward(self.module, *call.args, **call.kwargs)

    def _kernel_forward(self, mode: Mode) -> Callable[..., Any]:
        kernel = self._kernel(mode)
        assert kernel is not None
        target = self.decision.target
        if self.decision.is_attention:
            return _without_module(kernel_attention(target, kernel))
        if target.function or self.decision.is_loss:
            return _without_module(kernel.value() if isinstance(kernel.value, type) else kernel.value)
        return _layer_forward(self.decision, kernel)

    def _kernel(self, mode: Mode) -> Kernel | None:
        kernels = self.decision.kernels
        return kernels[SERVED.index(mode)] or kernels[SERVED.index(_COMPILED[mode])]


def _layer_forward(decision: Decision, kernel: Kernel) -> Callable[..., Any]:
    return forward_of(decision._replace(kernels=(kernel,) * len(NO_KERNELS)))


def loss_function_of(model: nn.Module) -> Any:
    """The loss function that a transformers model uses by itself, whether or not it is bound."""
    found: Any = model.loss_function
    return found.original if isinstance(found, BoundLoss) else found


def body_name(module: nn.Module) -> str:
    """The name of the body inside a whole language model (``model``), or empty for any other module."""
    name = getattr(module, "base_model_prefix", None)
    is_model = isinstance(name, str) and name in module._modules and "lm_head" in module._modules
    return str(name) if is_model else ""


class HeldBody(nn.Module):
    """Stands in for the body of a language model and answers every call with what it is told to."""

    answer: Any = None

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.__dict__["_body"] = body  # not a submodule: neither its weights nor its mode are touched

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_body"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> HeldBody:
        return HeldBody(self.__dict__["_body"])


def _with_held_body(module: nn.Module, body: str) -> nn.Module:
    twin = copy.copy(module)
    twin.__dict__["_modules"] = {**module._modules, body: HeldBody(module._modules[body])}  # type: ignore[arg-type]
    return twin


def _without_module(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def forward(_module: None, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return forward
