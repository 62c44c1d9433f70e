"""The first N real calls of bound layers: checked while they run, with the own forward back when a kernel fails."""

from __future__ import annotations

import copy
import io
from typing import TYPE_CHECKING, Any

import pytest
import torch
from layers.tiny_model import IDS, gradients, logits, tiny

from checking import planted
from checking.small import Small, batch, bind
from kernelhub.checking.choosing import Chooser
from kernelhub.checking.when import When
from kernelhub.layers.binding import is_bound, record_of
from kernelhub.layers.kernelize import report, unkernelize
from kernelhub.reporter import Reporter
from kernelhub.session import Session

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn


class Warned(Reporter):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def warn(self, message: str) -> None:
        self.messages.append(message)


@pytest.fixture
def warned() -> Warned:
    return Warned()


@pytest.fixture
def watching(tmp_path: Path, warned: Warned) -> Session:
    return Session(cache_dir=tmp_path / "store", offline=True, reporter=warned)


def function_of(module: nn.Module) -> Any:
    """The function that a module runs."""
    forward: Any = module.forward
    return forward.__func__


def watched(session: Session, model: nn.Module, mapping: Any, calls: int = 2) -> None:
    chooser = Chooser(session, When(calls=calls), None, fastest=False, strict=True)
    bind(model, mapping, judge=chooser)
    chooser.watch()


def test_after_the_watch_a_layer_runs_the_kernel_itself(watching: Session, warned: Warned) -> None:
    model, unwatched = Small(), Small()
    watched(watching, model, {"Norm": "org/right:Right"})
    bind(unwatched, {"Norm": "org/right:Right"})
    assert function_of(model.norm) is not function_of(unwatched.norm)
    for _ in range(2):
        assert torch.equal(model(batch()), Small()(batch()))
    assert function_of(model.norm) is function_of(unwatched.norm) is planted.Right.forward
    assert function_of(model.last) is planted.Right.forward
    assert not warned.messages
    unkernelize(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_kernel_that_fails_is_taken_away_before_it_does_harm(watching: Session, warned: Warned) -> None:
    model = Small()
    watched(watching, model, {"Norm": "org/wrong:IgnoresWeight"})
    assert torch.equal(model(batch()), Small()(batch()))
    assert not any(map(is_bound, model.modules()))
    [message] = warned.messages
    assert message.startswith("org/wrong@0123abc0123abc:IgnoresWeight computes other numbers than norm: output with ")
    assert message.endswith("2 layers run their own forward again.")
    assert [(row.module, row.state) for row in report(model)] == [("norm", "skipped"), ("last", "skipped")]
    assert all("failed a check while it ran" in row.reason for row in report(model))


def test_a_wrong_gradient_is_noticed_while_training(watching: Session, warned: Warned) -> None:
    model = Small().train()
    watched(watching, model, {"Norm": "org/wrong:ScalesWeightGradient"})
    model(batch()).sum().backward()
    plain = Small().train()
    plain(batch()).sum().backward()
    torch.testing.assert_close(
        [each.grad for each in model.parameters()], [each.grad for each in plain.parameters()], rtol=0, atol=0
    )
    assert len(warned.messages) == 1
    assert "gradient of weight" in warned.messages[0]


def test_an_input_that_a_kernel_would_change_is_not_changed(watching: Session) -> None:
    model = Small()
    watched(watching, model, {"norm": "org/wrong:InPlace"})
    x = batch()
    expected = x.clone()
    with torch.no_grad():
        model.norm(x)
    assert torch.equal(x, expected)


def test_a_kernel_that_goes_wrong_later_is_caught_while_it_is_watched(watching: Session, warned: Warned) -> None:
    """Right for the first shape only."""
    model = Small().eval()
    watched(watching, model, {"norm": "org/wrong:StaleCache"}, calls=5)
    with torch.no_grad():
        model(batch()[:1])
        assert is_bound(model.norm)
        model(batch())
    assert not is_bound(model.norm)
    assert len(warned.messages) == 1


def test_functions_heads_and_losses_are_watched(watching: Session, warned: Warned) -> None:
    plain = tiny().train()
    for mapping in (
        {"rotary_pos_emb": "org/wrong:swaps_sines"},
        {"ForCausalLM": "org/wrong:UnshiftedHead"},
        {"ForCausalLMLoss": "org/wrong:mean_over_all"},
    ):
        model = tiny().train()
        watched(watching, model, mapping)
        labels = IDS.clone()
        labels[:, :3] = -100
        ours, theirs = (each(input_ids=IDS, labels=labels).loss for each in (model, plain))
        assert torch.equal(ours, theirs), mapping
        assert not report(model).bound, mapping
        assert len(report(model).skipped) == (2 if "rotary_pos_emb" in mapping else 1)
    assert len(warned.messages) == 3


def test_a_watched_model_that_is_right_computes_what_it_does_unwatched(watching: Session, warned: Warned) -> None:
    model, unwatched = tiny(), tiny()
    mapping = {"rotary_pos_emb": "org/right:rotary", "model.norm": "org/right:NormOfQwen"}
    watched(watching, model, mapping, calls=1)
    bind(unwatched, mapping)
    assert torch.equal(logits(model), logits(unwatched))
    ours, theirs = gradients(model.train()), gradients(unwatched.train())
    assert all(torch.equal(each, theirs[name]) for name, each in ours.items())
    assert len(report(model).bound) == 3
    assert not warned.messages


def test_copies_and_pickles_of_a_watched_model_work(watching: Session, warned: Warned) -> None:
    model = Small()
    watched(watching, model, {"Norm": "org/wrong:IgnoresWeight"})
    twin = copy.deepcopy(model)
    assert torch.equal(twin(batch()), Small()(batch()))
    assert not is_bound(twin.norm)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(batch()), Small()(batch()))


def test_a_compiler_does_not_trace_the_watch(watching: Session) -> None:
    model = Small()
    watched(watching, model, {"norm": "org/right:Right"}, calls=3)
    compiled = torch.compile(model.norm, backend="eager", fullgraph=True)
    assert torch.equal(compiled(batch()), Small().norm(batch()))
    record = record_of(model.norm)
    assert record is not None


def test_off_adds_nothing(session: Session) -> None:
    model, plain = Small(), Small()
    bind(model, {"Norm": "org/right:Right"}, judge=Chooser(session, When(), None, fastest=False, strict=True))
    bind(plain, {"Norm": "org/right:Right"})
    assert function_of(model.norm) is function_of(plain.norm) is planted.Right.forward
