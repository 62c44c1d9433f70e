from __future__ import annotations

import copy
import functools
import inspect
import logging
import pickle
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kernelhub.layers import binding
from kernelhub.layers.report import Report, Row

if TYPE_CHECKING:
    import pytest


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((), 2.0))

    def forward(self, x: Any) -> Any:
        return x * self.weight


def forward(self: nn.Module, x: Any) -> Any:
    return x + self.weight * 100


def bound() -> Scale:
    module = Scale()
    binding.bind(module, forward)
    return module


def test_bind_gives_one_module_another_forward_and_unbind_takes_it_away() -> None:
    module, other = Scale(), Scale()
    before = list(vars(module).items())
    binding.bind(module, forward, (Row("m", "Scale"),))
    assert (module(1.0).item(), other(1.0).item()) == (201.0, 2.0)
    assert binding.is_bound(module)
    record = binding.record_of(module)
    assert record is not None
    assert record.rows == (Row("m", "Scale"),)
    binding.unbind(module)
    assert list(vars(module).items()) == before
    assert module(1.0).item() == 2.0


def test_unbind_of_a_module_that_is_not_bound_does_nothing() -> None:
    module = Scale()
    before = dict(vars(module))
    binding.unbind(module)
    assert vars(module) == before
    assert not binding.is_bound(module)
    assert binding.record_of(module) is None


def test_a_report_is_kept_beside_a_binding_and_removed_with_it() -> None:
    module, empty = bound(), Scale()
    for each in (module, empty):
        binding.keep_report(each, Report())
        record = binding.record_of(each)
        assert record is not None
        assert record.report == Report()
    assert (binding.is_bound(module), binding.is_bound(empty)) == (True, False)
    binding.unbind(module)
    binding.unbind(empty)
    assert not {"forward", "_kernelhub"} & {*vars(module), *vars(empty)}


def test_suspended_modules_can_be_bound_again_exactly() -> None:
    module = bound()
    state = list(vars(module).items())
    kept = binding.suspend(module)
    assert module(1.0).item() == 2.0
    vars(module).update(kept)
    assert list(vars(module).items()) == state


def test_a_deep_copy_is_bound_to_itself_and_unbound_on_its_own() -> None:
    module = bound()
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.weight.fill_(5.0)
    assert (module(1.0).item(), twin(1.0).item()) == (201.0, 501.0)
    binding.unbind(twin)
    assert (module(1.0).item(), twin(1.0).item()) == (201.0, 5.0)
    assert "_kernelhub" not in vars(twin)


def test_a_shallow_copy_is_unbound_without_touching_the_original() -> None:
    module = bound()
    twin = copy.copy(module)
    binding.unbind(twin)
    assert (module(1.0).item(), twin(1.0).item()) == (201.0, 2.0)


def test_an_unpickled_module_runs_its_own_forward_and_can_be_cleaned_or_bound_again() -> None:
    data = pickle.dumps(bound())
    assert b"kernelhub.layers" not in data.replace(b"layers.test_binding", b"")
    module = pickle.loads(data)
    assert module(1.0).item() == 2.0
    assert not binding.is_bound(module)
    assert pickle.loads(pickle.dumps(module))(1.0).item() == 2.0
    binding.unbind(module)
    assert list(vars(module)) == list(vars(Scale()))
    binding.bind(module, forward)
    assert module(1.0).item() == 201.0


def test_a_forward_of_any_name_can_be_pickled() -> None:
    def renamed(self: nn.Module, x: Any, *, y: int = 1) -> Any:
        return x + y

    module = Scale()
    named = binding.named_forward(renamed)
    assert (named.__name__, named.__kwdefaults__, named.__module__) == ("forward", {"y": 1}, __name__)
    assert binding.named_forward(forward) is forward
    binding.bind(module, named)
    assert module(1) == 2
    assert pickle.loads(pickle.dumps(module))(1.0).item() == 2.0


def test_a_forward_replaced_by_others_is_refused_by_name() -> None:
    module = Scale()
    assert binding.occupied(module) is None
    module.forward = functools.partial(forward, module)
    assert binding.occupied(module) == (
        "its forward was already replaced on the instance (by partial), undo that first"
    )
    module.forward = MethodType(forward, module)
    assert f"(by {__name__}.forward)" in str(binding.occupied(module))
    assert binding.occupied(bound()) is None


def test_an_instance_forward_that_is_the_own_one_is_kept_and_restored() -> None:
    module = Scale()
    own = MethodType(Scale.forward, module)
    module.forward = own
    assert binding.occupied(module) is None
    binding.bind(module, forward)
    restored = pickle.loads(pickle.dumps(module))
    binding.unbind(restored)
    assert restored.forward == MethodType(Scale.forward, restored)
    binding.unbind(module)
    assert vars(module)["forward"] is own


def add_hook(module: nn.Module, calls: list[str]) -> None:
    """Replace the forward the way accelerate does for its hooks (names and order are its own)."""
    module._old_forward = module.forward
    module._hf_hook = object()

    def hooked(module: Any, *args: Any) -> Any:
        calls.append("hook")
        return module._old_forward(*args)

    module.forward = functools.partial(hooked, module)


def remove_hook(module: nn.Module) -> None:
    del module._hf_hook
    module.forward = module._old_forward
    del module._old_forward


def test_a_kernel_goes_below_the_hook_of_accelerate() -> None:
    module, calls = Scale(), []
    add_hook(module, calls)
    before = list(vars(module).items())
    assert binding.occupied(module) is None
    binding.bind(module, forward)
    assert (module(1.0).item(), calls) == (201.0, ["hook"])
    twin = copy.deepcopy(module)
    binding.unbind(module)
    assert list(vars(module).items()) == before
    assert module(1.0).item() == 2.0
    binding.unbind(twin)
    assert vars(twin)["_old_forward"].__self__ is twin


def test_a_hook_removed_while_bound_leaves_the_own_forward() -> None:
    module = Scale()
    add_hook(module, [])
    binding.bind(module, forward)
    remove_hook(module)
    assert module(1.0).item() == 201.0
    binding.unbind(module)
    assert module.forward == MethodType(Scale.forward, module)


def test_a_hook_added_while_bound_keeps_working_after_unbind() -> None:
    module, calls = bound(), []
    add_hook(module, calls)
    assert binding.is_bound(module)
    binding.unbind(module)
    assert (module(1.0).item(), calls) == (2.0, ["hook"])
    remove_hook(module)
    assert module.forward == MethodType(Scale.forward, module)


def test_a_forward_that_others_replaced_later_is_kept_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    module = bound()
    theirs = functools.partial(forward, module)
    module.forward = theirs
    assert not binding.is_bound(module)
    with caplog.at_level(logging.WARNING, logger="kernelhub"):
        binding.unbind(module)
    assert module.forward is theirs
    assert "replaced later" in caplog.text


def test_a_kernel_below_a_wrapper_of_others_stays_bound_until_the_wrapper_is_undone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = bound()
    ours = module.forward
    module.forward = functools.wraps(ours)(lambda x: ours(x) / 2)
    assert binding.is_bound(module)
    assert "already replaced" in str(binding.occupied(module))
    with caplog.at_level(logging.WARNING, logger="kernelhub"):
        binding.unbind(module)
    assert "still runs its kernel" in caplog.text
    assert (binding.is_bound(module), module(1.0).item()) == (True, 100.5)
    module.forward = ours
    binding.unbind(module)
    assert list(vars(module)) == list(vars(Scale()))


factor = 2


class Calls(nn.Module):
    def forward(self, x: Any, *, add: int = 1) -> Any:
        """Documented."""
        return (lambda: x * factor + add)()


def test_a_forward_can_be_copied_with_other_globals() -> None:
    twin = binding.forward_calling(Calls.forward, {"factor": 10})
    assert (twin(Calls(), 3), Calls()(3)) == (31, 7)
    assert "__name__" not in twin.__globals__
    assert (twin.__qualname__, twin.__module__, twin.__doc__) == ("Calls.forward", __name__, "Documented.")
    assert inspect.signature(twin) == inspect.signature(Calls.forward)


def test_a_function_becomes_a_forward() -> None:
    module = nn.SiLU()
    binding.bind(module, binding.forward_from(lambda x: x + 1))
    assert module(1) == 2
