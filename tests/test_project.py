"""Requirements of a pyproject.toml, in our table and the peer's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernelhub.errors import InvalidConfig
from kernelhub.project import read_requirements

if TYPE_CHECKING:
    from pathlib import Path


def requirements(folder: Path, text: str) -> list[str]:
    (folder / "pyproject.toml").write_text(text)
    return [str(request) for request in read_requirements(folder)]


def test_both_tables_are_read_and_ours_has_the_last_word(tmp_path: Path) -> None:
    text = """
    [tool.kernels.dependencies]
    "org/a" = 1
    "org/b" = ">=1,<3"

    [tool.kernelhub.dependencies]
    "org/a" = 2
    "org/c" = "main"
    """
    assert requirements(tmp_path, text) == ["org/a@v2", "org/b@<3,>=1", "org/c@main"]


def test_a_project_without_the_file_or_the_tables_asks_for_nothing(tmp_path: Path) -> None:
    assert read_requirements(tmp_path) == []
    assert requirements(tmp_path, "[project]\nname = 'x'\n") == []


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ('"org/a" = true', "not an int"),
        ('"org/a" = 1.5', "not an int"),
        ('"a" = 1', "no organization"),
        ('"org/a" = ""', "empty"),
    ],
)
def test_an_entry_that_cannot_be_read_is_refused_with_its_place(tmp_path: Path, entry: str, problem: str) -> None:
    with pytest.raises(InvalidConfig, match=problem) as caught:
        requirements(tmp_path, f"[tool.kernelhub.dependencies]\n{entry}\n")
    assert "[tool.kernelhub.dependencies]" in str(caught.value)


def test_broken_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"pyproject\.toml"):
        requirements(tmp_path, "[tool")
