"""Tuning: slow and wrong candidates are never chosen, the fastest right one is, and the decision is kept."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from layers.tiny_model import tiny
from torch import nn

import kernelhub
from checking import planted
from checking.small import Norm, Small, batch, bind
from kernelhub.checking.choosing import Chooser, Tuner
from kernelhub.checking.decided import is_pinned
from kernelhub.checking.when import When, checked_selection
from kernelhub.errors import InvalidConfig
from kernelhub.layers.binding import is_bound
from kernelhub.session import Session

if TYPE_CHECKING:
    from kernelhub.checking.tuning import Tuning


class Wasteful(Norm):
    """A plain layer that does everything five times: there is something to win."""

    def forward(self, x: torch.Tensor) -> Any:
        for _ in range(4):
            planted.rms(x, self.weight, self.eps)
        return planted.rms(x, self.weight, self.eps)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = Wasteful(24), Norm(24)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.norm(x))


def tuned(session: Session, model: nn.Module, mapping: Any, inputs: Any, **options: Any) -> Tuning:
    """What ``kernelhub.tune`` does, with the kernels of ``planted.py``."""
    tuner = Tuner(session, inputs, **options)
    bind(model, mapping, judge=tuner, strict=False)
    return tuner.tuning


def fastest(session: Session, model: nn.Module, mapping: Any, inputs: Any) -> Any:
    return bind(model, mapping, judge=Chooser(session, When(), inputs, fastest=True, strict=True))


def test_slow_kernels_are_never_chosen(session: Session) -> None:
    names = [f"org/slow:{kernel.__name__}" for kernel in planted.SLOW_NORMS]
    assert len(set(names)) == 6
    found = tuned(session, Small(), {"Norm": names}, batch())
    assert len(found) == 12
    assert not found.chosen
    assert {row.trial.state for row in found} <= {"slower", "same"}
    model = Small()
    report = fastest(session, model, {"Norm": names}, batch())
    assert not any(map(is_bound, model.modules()))
    assert {row.reason for row in report} == {
        "no candidate is right and clearly faster than its own forward for these inputs"
    }


def test_the_fastest_right_candidate_is_bound(session: Session) -> None:
    model = Model()
    names = ["org/a:IgnoresWeight", "org/b:Sleeps", "org/c:Right", "org/d:ComputesTwice"]
    report = fastest(session, model, {"norm": names}, batch())
    assert [row.symbol for row in report.bound] == ["Right"]
    assert torch.equal(model(batch()), Model()(batch()))


def test_the_table_tells_what_was_measured_and_why(session: Session) -> None:
    found = tuned(session, Model(), {"norm": ["org/a:IgnoresWeight", "org/c:Right"]}, batch())
    wrong, right = (next(row for row in found if row.trial.kernel.endswith(name)) for name in ("Weight", "Right"))
    assert (wrong.trial.state, wrong.chosen) == ("wrong", False)
    assert "times the" in wrong.trial.problem
    assert (right.trial.state, right.chosen) == ("faster", True)
    assert 0 < right.trial.seconds < right.trial.plain_seconds
    assert right.trial.plain_bytes > 0
    assert "org/c@0123abc0123abc:Right" in str(found)
    assert found.to_dict()["rows"][0]["trial"]["kernel"] == "org/a@0123abc0123abc:IgnoresWeight"


def test_a_decision_is_kept_and_used_again(session: Session) -> None:
    mapping = {"norm": ["org/b:Sleeps", "org/c:Right"]}
    first = tuned(session, Model(), mapping, batch())
    again = tuned(Session(cache_dir=session.cache_dir, offline=True), Model(), mapping, batch())
    assert not any(row.reused for row in first)
    assert all(row.reused for row in again)
    assert [row.trial for row in again] == [row.trial for row in first]
    assert not any(row.reused for row in tuned(session, Model(), mapping, batch(), again=True))


@pytest.mark.parametrize("change", ["shapes", "dtype", "kernels", "settings", "threads"])
def test_a_decision_holds_for_what_it_was_made_for_only(session: Session, change: str) -> None:
    tuned(session, Model(), {"norm": "org/c:Right"}, batch())
    model, mapping, inputs = Model(), {"norm": "org/c:Right"}, batch()
    if change == "shapes":
        inputs = inputs[:2]
    elif change == "dtype":
        model, inputs = model.bfloat16(), inputs.bfloat16()
    elif change == "kernels":
        mapping = {"norm": "org/c:ScaledFirst"}
    elif change == "settings":
        model.norm.eps = 1e-3
    else:
        torch.set_num_threads(2)
    assert not any(row.reused for row in tuned(session, model, mapping, inputs))


def test_damaged_decisions_are_measured_again(session: Session) -> None:
    tuned(session, Model(), {"norm": "org/c:Right"}, batch())
    records = [path for path in Path(session.store.root).rglob("*.json") if "tuning" in path.parts]
    assert len(records) == 2
    for path in records:
        path.write_text(path.read_text().replace('"trials"', '"trails"'))
    assert not any(row.reused for row in tuned(session, Model(), {"norm": "org/c:Right"}, batch()))


def test_a_store_that_cannot_be_written_costs_only_the_memory(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    session = Session(cache_dir=tmp_path / "store", offline=True)
    assert tuned(session, Model(), {"norm": "org/c:Right"}, batch()).chosen


@pytest.mark.parametrize(
    ("kernel", "pinned"),
    [
        ("org/repo@0123abcdef01:Layer", True),
        ("builtin@v2:RMSNorm", True),
        ("/home/me/kernel:Layer", False),
        ("org/repo@main:Layer", False),
        ("org/repo:Layer", False),
    ],
)
def test_only_kernels_that_cannot_change_are_remembered(kernel: str, pinned: bool) -> None:
    assert is_pinned(kernel) is pinned


def test_the_public_functions_tune_and_select(session: Session) -> None:
    mapping = {"last": ["builtin:RMSNorm", "builtin@v1:RMSNorm"]}
    model = nn.Sequential()
    model.add_module("last", nn.RMSNorm(32))
    found = kernelhub.tune(model, mapping, torch.randn(4, 32), session=session)
    assert {row.trial.kernel for row in found} == {"builtin@v2:RMSNorm", "builtin@v1:RMSNorm"}
    assert not any(map(is_bound, model.modules()))
    bound = kernelhub.kernelize(model, mapping, select="fastest", inputs=torch.randn(4, 32), session=session)
    assert is_bound(model.get_submodule("last")) is bool(found.chosen)
    assert bound is model


def test_an_unknown_way_to_select_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="'first' or 'fastest'"):
        checked_selection("best")


def test_inputs_are_made_up_for_a_language_model(session: Session) -> None:
    found = kernelhub.tune(tiny(), {"model.norm": "builtin:RMSNorm"}, session=session)
    assert {row.input for row in found} == {"2x256x32 float32"}
