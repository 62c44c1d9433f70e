"""Capture: run a model once on its own forwards, and keep what its layers were called with, one call of each kind."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kernelhub.checking.call import Call, copied
from kernelhub.checking.case import Case, case_key
from kernelhub.checking.lookup import Listening
from kernelhub.checking.nest import replaced
from kernelhub.checking.sample import run_model
from kernelhub.checking.subject import Subject, body_name, loss_function_of
from kernelhub.layers import binding
from kernelhub.layers.decision import original_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from kernelhub.layers.decision import Decision


def capture(model: nn.Module, decisions: Iterable[Decision], inputs: Any) -> list[Case]:
    """Run ``model`` once in evaluation mode and return the cases of the layers that ``decisions`` are about.

    No layer may be bound. The model is left as it was: mode, gradients, random numbers. Gradients are tracked, to know
    where they flow, but nothing is saved for a backward.

    Raises:
        whatever the model raises for these inputs.
    """
    recorder = _Recorder()
    modes = [(module, module.training) for module in model.modules()]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_recording(decisions, recorder))
        stack.enter_context(torch.random.fork_rng(sorted(_cuda_indices(model))))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_nothing, _nothing))
        model.eval()
        try:
            run_model(model, inputs)
        finally:
            for module, flag in modes:
                module.training = flag
    return list(recorder.cases.values())


def _cuda_indices(model: nn.Module) -> set[int]:
    """The CUDA devices that a model is on: those whose random numbers a run of it may take."""
    devices = {each.device for each in (*model.parameters(), *model.buffers())}
    return {
        torch.cuda.current_device() if each.index is None else each.index for each in devices if each.type == "cuda"
    }


def _nothing(_: Any) -> Any:
    """What is kept of a tensor that a backward would need: there will be none."""


class _Recorder:
    """Keeps the first call of each case, and counts the others."""

    def __init__(self) -> None:
        self.cases: dict[tuple[object, ...], Case] = {}

    def record(self, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any], held: Any = None) -> None:
        if torch.compiler.is_compiling():
            return
        call = Call(args, kwargs, held)
        key = case_key(decision, (call.shapes, call.settings))
        case = self.cases.get(key)
        if case is None:
            case = self.cases[key] = Case(key, Subject.of(decision), Call.of(args, kwargs, held))
        case.count += 1
        if all(known.target is not decision.target for known in case.decisions):
            case.decisions.append(decision)


@contextlib.contextmanager
def _recording(decisions: Iterable[Decision], recorder: _Recorder) -> Iterator[None]:
    """Listen at every layer, and put recording functions where functions are meant, until the end of the block."""
    handles: list[RemovableHandle] = []
    functions: dict[int, list[Decision]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        for decision in decisions:
            if decision.target.function:
                functions[id(decision.target.module)].append(decision)
            elif decision.is_loss:
                stack.enter_context(_recorded_loss(decision, recorder))
            else:
                handles += _listen(decision, recorder)
        for group in functions.values():
            stack.enter_context(_recorded_functions(group, recorder))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _listen(decision: Decision, recorder: _Recorder) -> list[RemovableHandle]:
    module = decision.target.module
    body = body_name(module)
    if body:
        return _listen_to_head(decision, body, recorder)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder.record(decision, args, kwargs)

    return [module.register_forward_pre_hook(before, with_kwargs=True)]


def _listen_to_head(decision: Decision, body: str, recorder: _Recorder) -> list[RemovableHandle]:
    answers: list[Any] = []

    def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], __: Any) -> None:
        if answers:
            recorder.record(decision, args, kwargs, answers.pop())

    module = decision.target.module
    return [_keep_answers(module, body, answers), module.register_forward_hook(after, with_kwargs=True)]


@contextlib.contextmanager
def answers_of(module: nn.Module, body: str) -> Iterator[list[Any]]:
    """Copies of what the body of a language model returns inside the block."""
    answers: list[Any] = []
    handle = _keep_answers(module, body, answers)
    try:
        yield answers
    finally:
        handle.remove()


def _keep_answers(module: nn.Module, body: str, answers: list[Any]) -> RemovableHandle:
    def after_body(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        # A copy: what comes after may write into it.
        answers.append(replaced(output, lambda _, each: copied(each).requires_grad_(each.requires_grad)))

    listening: nn.Module = module._modules[body]  # type: ignore[assignment]  # body_name has seen it
    return listening.register_forward_hook(after_body)


@contextlib.contextmanager
def _recorded_functions(decisions: Sequence[Decision], recorder: _Recorder) -> Iterator[None]:
    module = decisions[0].target.module
    recorded = {each.target.function: _stand_in(each, recorder) for each in decisions}
    forward: Any = type(module).forward
    kept = binding.suspend(module)
    binding.bind(module, binding.forward_calling(forward, recorded))
    try:
        yield
    finally:
        binding.unbind(module)
        vars(module).update(kept)


@contextlib.contextmanager
def _recorded_loss(decision: Decision, recorder: _Recorder) -> Iterator[None]:
    model = decision.target.module
    function = loss_function_of(model)
    recording = _recording_function(decision, function, recorder)
    kept = binding.suspend(model)
    binding.bind_loss(model, binding.BoundLoss(recording, function, compiles=False))
    try:
        yield
    finally:
        binding.unbind(model)
        vars(model).update(kept)


def _stand_in(decision: Decision, recorder: _Recorder) -> Any:
    """What stands for the function, or the table of functions, that a decision is about."""
    original = original_of(decision.target)
    if decision.is_attention:
        return Listening(original, partial(recorder.record, decision))
    return _recording_function(decision, original, recorder)


def _recording_function(decision: Decision, original: Callable[..., Any], recorder: _Recorder) -> Callable[..., Any]:
    def recording(*args: Any, **kwargs: Any) -> Any:
        recorder.record(decision, args, kwargs)
        return original(*args, **kwargs)

    return recording
