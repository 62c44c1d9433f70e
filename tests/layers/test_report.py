from __future__ import annotations

import json
import pickle

import pytest

from kernelhub.layers.report import Report, Row, one_line

ROWS = (
    *(
        Row(f"model.layers.{i}.norm", "RMSNorm", "org/repo@0123abc", "torch-cuda", "Norm", "bound", "", "any")
        for i in range(12)
    ),
    Row("model.norm", "RMSNorm", "org/repo@0123abc", "torch-cuda", "Norm", "bound", "", "inference", "own one else"),
    Row("(model)", "ForCausalLM", reason="left alone by the config"),
    Row("", "MPL", reason="no layer of this model answers to 'MPL'\nat all"),
)


def test_a_report_is_a_sequence_of_rows() -> None:
    report = Report(ROWS)
    assert list(report) == list(ROWS)
    assert (len(report), report[0], report[-2:]) == (15, ROWS[0], ROWS[-2:])
    assert (len(report.bound), len(report.skipped)) == (13, 2)
    assert report.counts == {"bound": 13, "would bind": 0, "postponed": 0, "skipped": 2}


def test_the_table_groups_layers_that_differ_in_their_number_only() -> None:
    assert str(Report(ROWS)).splitlines() == [
        "STATE    MODULE                    LAYER        MODE       KERNEL                 VARIANT OR REASON",
        "bound    model.layers.*.norm (12)  RMSNorm      any        org/repo@0123abc:Norm  torch-cuda",
        "bound    model.norm                RMSNorm      inference  org/repo@0123abc:Norm  torch-cuda; own one else",
        "skipped  (model)                   ForCausalLM  -          -                      left alone by the config",
        "skipped  -                         MPL          -          -                      "
        "no layer of this model answers to 'MPL' at all",
        "13 bound, 2 skipped",
    ]


def test_a_group_of_one_keeps_its_number() -> None:
    assert "model.layers.3.norm " in str(Report((Row("model.layers.3.norm", "RMSNorm"),)))


def test_an_empty_report_says_so() -> None:
    assert str(Report()) == "nothing to bind"


def test_plain_data_and_pickle_carry_everything() -> None:
    report = Report(ROWS)
    data = json.loads(report.to_json())
    assert data == report.to_dict()
    assert data["rows"][0]["module"] == "model.layers.0.norm"
    assert Report(tuple(Row(**row) for row in data["rows"])) == report == pickle.loads(pickle.dumps(report))


@pytest.mark.parametrize(
    ("text", "line"),
    [("a\n b", "a b"), ("\x1b[2J", "\\x1b[2J"), ("x" * 400, "x" * 300 + "..."), ("é", "é")],
)  # fmt: skip
def test_text_of_others_becomes_one_printable_line(text: str, line: str) -> None:
    assert one_line(text) == line
