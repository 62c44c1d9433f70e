"""Golden files: what layers got and gave, replayed without the model, and hostile files that are refused."""

from __future__ import annotations

import contextlib
import json
import struct
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layers.tiny_model import IDS, tiny
from safetensors import safe_open

from checking import planted
from checking.small import Small, batch
from kernelhub.checking.archive import Archive
from kernelhub.checking.golden import read_golden, write_golden
from kernelhub.checking.replay import replay
from kernelhub.errors import InvalidGolden, UnknownLayer
from kernelhub.layers.symbol import LoadedSymbol

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kernelhub.checking.outcome import CheckReport

CPU = torch.device("cpu")


def replayed(path: Path, name: str, layer: str | None = None) -> CheckReport:
    kernel = LoadedSymbol(getattr(planted, name), "org/repo@0123abc", "torch-cpu", name)
    return replay(path, kernel, CPU, layer)


@pytest.fixture(scope="module")
def norms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("golden") / "norms.safetensors"
    assert write_golden(path, Small(), ["Norm"], batch()) == 1
    return path


@pytest.mark.parametrize("name", ["Right", "ManyPasses", "HandwrittenBackward", "Library", "InDouble"])
def test_an_honest_kernel_passes_without_the_model(norms: Path, name: str) -> None:
    report = replayed(norms, name)
    assert report.ok, report
    [row] = report
    assert (row.module, row.layer, row.modules, row.input) == ("norm", "Norm", 2, "3x7x24 float32")
    assert row.kernel == f"org/repo@0123abc:{name}"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("IgnoresWeight", "output with the recorded inputs"),
        ("ScalesGradient", "gradient of args[0] with the recorded inputs"),
        ("ScalesWeightGradient", "gradient of weight with the recorded inputs"),
        ("NoWeightGradient", "the gradient of weight is missing"),
        ("NoGradientAtAll", "output has no gradient"),
        ("InPlace", "changes its input args[0] in place"),
        ("Transposed", "has strides"),
        ("WrongDtype", "is float64, not float32"),
        ("WrongShape", "has shape"),
        ("Nondeterministic", "is another one at the second call"),
        ("NoLastRow", "output with the recorded inputs"),
    ],
)
def test_a_wrong_kernel_is_told(norms: Path, name: str, problem: str) -> None:
    report = replayed(norms, name)
    assert not report.ok
    assert problem in report[0].problem


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_layers_with_layers_inside_and_functions_are_written(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "file.safetensors"
    model = tiny().to(dtype)
    write_golden(path, model, ["SwiGLUMLP", "rotary_pos_emb", "model.norm"], {"input_ids": IDS})
    assert replayed(path, "rotary", "rotary_pos_emb").ok
    assert replayed(path, "NormOfQwen", "model.norm").ok
    assert not replayed(path, "swaps_sines", "rotary_pos_emb").ok
    assert replayed(path, "PlainGated", "SwiGLUMLP").ok
    assert not replayed(path, "SwapsProjections", "SwiGLUMLP").ok


def test_the_file_tells_where_it_comes_from(norms: Path) -> None:
    with safe_open(str(norms), "pt") as file:
        facts = json.loads(file.metadata()["facts"])
    assert facts["model"] == "Small"
    assert facts["versions"]["torch"] == torch.__version__
    assert [(case["path"], case["dtype"]) for case in facts["cases"]] == [("norm", "float32")]


def test_inputs_keep_their_order_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    model = Small().norm
    write_golden(path, torch.nn.Sequential(model), ["0"], batch().transpose(0, 1).contiguous().transpose(0, 1))
    [case] = read_golden(Archive.open(path), CPU)
    assert case.call.first is not None
    assert case.call.first.stride() == (24, 72, 1)


def test_what_does_not_fit_or_is_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    with pytest.raises(InvalidGolden, match="needs more than 1000 bytes"):
        write_golden(path, Small(), ["Norm"], batch(), most_bytes=1000)
    with pytest.raises(UnknownLayer, match="did you mean 'Norm'"):
        write_golden(path, Small(), ["Nrom"], batch())
    with pytest.raises(InvalidGolden, match="a whole model"):
        write_golden(path, tiny(), ["ForCausalLM"], {"input_ids": IDS})
    with pytest.raises(InvalidGolden, match="cannot be written"):
        write_golden(tmp_path / "no" / "file.safetensors", Small(), ["Norm"], batch())
    assert list(tmp_path.iterdir()) == []


def test_a_layer_has_to_be_named_where_there_are_several(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    write_golden(path, Small(), ["Norm", "mlp"], batch())
    with pytest.raises(InvalidGolden, match="one of Norm, mlp"):
        replayed(path, "Right")
    with pytest.raises(InvalidGolden, match="has no layer 'RMSNorm'"):
        replayed(path, "Right", "RMSNorm")


def test_the_layer_that_is_called_as_the_kernel_is_need_not_be_named(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    write_golden(path, Small(), ["Norm", "mlp"], batch())
    kernel = LoadedSymbol(planted.Right, "acme/norm", "torch-cpu", "layers.Norm")
    rows = replay(path, kernel, CPU)
    assert {row.layer for row in rows} == {"Norm"}


# Hostile files


def changed(path: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], stamp: dict[str, str] = {}) -> Path:  # noqa: B006  # not changed
    """A copy of a golden file with other facts in its header."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    facts = json.loads(header["__metadata__"]["facts"])
    change(facts)
    header["__metadata__"] |= {"facts": json.dumps(facts), **stamp}
    body = json.dumps(header).encode()
    target = tmp_path / "changed.safetensors"
    target.write_bytes(struct.pack("<Q", len(body)) + body + data[8 + size :])
    return target


def case_of(facts: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = facts["cases"][0]
    return found


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "no cases": lambda facts: facts.update(cases=None),
    "many cases": lambda facts: facts.update(cases=facts["cases"] * 201),
    "a case that is a list": lambda facts: facts.update(cases=[[]]),
    "no call": lambda facts: case_of(facts).pop("call"),
    "another tensor": lambda facts: case_of(facts)["call"]["dict"]["args"]["list"][0].update(tensor="none"),
    "a number as tensor": lambda facts: case_of(facts)["call"]["dict"]["args"]["list"][0].update(tensor=3),
    "no order": lambda facts: case_of(facts)["call"]["dict"]["args"]["list"][0].update(order=[0, 0, 0]),
    "an order of text": lambda facts: case_of(facts)["call"]["dict"]["args"]["list"][0].update(order="abc"),
    "an object as value": lambda facts: case_of(facts)["call"]["dict"]["args"].update(list=[{"value": {}}]),
    "deep arguments": lambda facts: case_of(facts).update(call=deep(50)),
    "a parameter named forward": lambda facts: renamed(case_of(facts), "forward"),
    "a parameter with a dot": lambda facts: renamed(case_of(facts), "a.b"),
    "a parameter named __class__": lambda facts: renamed(case_of(facts), "__class__"),
    "a setting named forward": lambda facts: case_of(facts)["module"]["settings"].update(forward=1),
    "a setting named __class__": lambda facts: case_of(facts)["module"]["settings"].update(__class__="x"),
    "a setting that is an object": lambda facts: case_of(facts)["module"]["settings"].update(eps={"a": 1}),
    "a long setting": lambda facts: case_of(facts)["module"]["settings"].update(eps=[1] * 1000),
    "a module that is text": lambda facts: case_of(facts).update(module="x"),
    "deep modules": lambda facts: case_of(facts).update(module=nested(40)),
    "many modules": lambda facts: case_of(facts)["module"].update(children={f"m{i}": {} for i in range(501)}),
    "results that are a list": lambda facts: case_of(facts).update(results=[1]),
    "a result of another shape": lambda facts: case_of(facts)["results"]["output"].update(exact="0/weight/weight"),
    "noise of another shape": lambda facts: case_of(facts)["results"]["output"].update(noise="0/weight/weight"),
    "noise that is text": lambda facts: case_of(facts)["results"]["output"].update(rms="x"),
    "strides that are text": lambda facts: case_of(facts)["results"]["output"].update(strides=["x", "y", "z"]),
    "a length that is text": lambda facts: case_of(facts)["results"]["output"].update(longest=[]),
}


def deep(levels: int) -> dict[str, Any]:
    return {"list": [deep(levels - 1)]} if levels else {"value": 1}


def nested(levels: int) -> dict[str, Any]:
    return {"class": "x", "frozen": [], "absent": [], "children": {"m": nested(levels - 1)} if levels else {}}


def renamed(case: dict[str, Any], name: str) -> None:
    case["module"]["parameters"] = {name: "0/weight/weight"}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_a_hostile_file_is_refused(norms: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidGolden):
        replayed(changed(norms, tmp_path, HOSTILE[name]), "Right", "Norm")


def test_a_class_in_a_file_is_never_imported(norms: Path, tmp_path: Path) -> None:
    def change(facts: dict[str, Any]) -> None:
        case_of(facts)["module"]["class"] = "checking.planted.Sleeps"

    [case] = read_golden(Archive.open(changed(norms, tmp_path, change)), CPU)
    assert type(case.module).__name__ == "Blank"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x00" * 7,
        b"\xff" * 64,
        struct.pack("<Q", 1 << 62) + b"{}",
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        b"\x80\x04\x95" + b"pickle" * 20,
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(body)
    with pytest.raises(InvalidGolden):
        Archive.open(path)


def test_other_versions_links_folders_and_large_files_are_refused(norms: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidGolden, match="version '2'"):
        Archive.open(changed(norms, tmp_path, lambda facts: None, {"version": "2"}))
    with pytest.raises(InvalidGolden, match="no JSON"):
        Archive.open(changed(norms, tmp_path, lambda facts: None, {"facts": "["}))
    (tmp_path / "link").symlink_to(norms)
    for path in (tmp_path / "link", tmp_path, tmp_path / "absent"):
        with pytest.raises(InvalidGolden, match="cannot be read"):
            Archive.open(path)
    with pytest.raises(InvalidGolden, match="at most"):
        Archive.open(norms, most_bytes=-(16 << 20))


@given(data=st.data())
def test_a_damaged_file_is_an_invalid_one_or_a_wrong_kernel(
    norms: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever is flipped: an error of ours, never another exception."""
    body = bytearray(norms.read_bytes())
    size = struct.unpack("<Q", body[:8])[0]
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, min(size + 40, len(body) - 1)))
        body[place] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(body)
    with contextlib.suppress(InvalidGolden):
        assert len(replayed(path, "Right", "Norm")) <= 1
