from __future__ import annotations

import ntpath
import posixpath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelhub.buildpath import check_path, check_paths, is_bytecode
from kernelhub.errors import InvalidPath


@pytest.mark.parametrize(
    "path",
    [
        "__init__.py",
        "layers/rms_norm.py",
        "_relu_cuda_1a2b3c4.abi3.so",
        "metadata.json",
        "data/libfoo.so.1.2",
        "a/b/c/d/e/f/g/h/i/j/k/l/m/n/o/p",
        "a name.txt",
        "a+b-c.py",
        "console.py",
        "com10",
        "x" * 255,
    ],
)
def test_an_ordinary_path_is_accepted_as_it_is(path: str) -> None:
    assert check_path(path) == path


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", "segment ''"),
        (".", "segment '.'"),
        ("..", "segment '..'"),
        ("/a", "segment ''"),
        ("a/", "segment ''"),
        ("a//b", "segment ''"),
        ("./a", "segment '.'"),
        ("a/../b", "segment '..'"),
        ("a\\b", "backslash"),
        ("\\\\server\\share", "backslash"),
        ("C:/x", "character that is not allowed"),
        ("a:b", "character that is not allowed"),
        (".hidden", "character that is not allowed"),
        ("-x", "character that is not allowed"),
        (" x", "character that is not allowed"),
        ("x ", "character that is not allowed"),
        ("x.", "character that is not allowed"),
        ("a./b", "character that is not allowed"),
        ("a\nb", "segment 'a\\nb'"),
        ("a\x00", "segment 'a\\x00'"),
        ("\u00e9.py", "segment '\\xe9.py'"),
        ("a\u202e.py", "segment 'a\\u202e.py'"),
        ("x" * 256, "length 256 > 255"),
        ("a/" * 16 + "b", "17 levels deep, more than 16"),
        ("x.pyc", "Python bytecode"),
        ("x.pyo", "Python bytecode"),
        ("x.pth", "Python bytecode"),
        ("a/__pycache__/b.py", "Python bytecode"),
        ("con", "reserved device name"),
        ("a/NUL.txt", "reserved device name"),
        ("com1.py", "reserved device name"),
        ("aux", "reserved device name"),
    ],
)
def test_a_path_that_could_lead_elsewhere_is_refused_in_words(path: str, words: str) -> None:
    with pytest.raises(InvalidPath) as caught:
        check_path(path)
    assert words in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (["a.py", "A.py"], "same name as 'a.py' but for letter case"),
        (["a/x.py", "A/x.py"], "same name as 'a' but for letter case"),
        (["a/x.py", "A/y.py"], "same name as 'a' but for letter case"),
        (["A", "a/x.py"], "same name as 'A' but for letter case"),
        (["a", "a/x.py"], "a file and a folder of one name"),
        (["a/x.py", "a"], "a file and a folder of one name"),
        (["a/b", "a/b/c/d"], "a file and a folder of one name"),
        (["a", "b", ".."], "segment '..'"),
    ],
)
def test_paths_that_cannot_lie_side_by_side_are_refused(paths: list[str], words: str) -> None:
    with pytest.raises(InvalidPath) as caught:
        check_paths(paths)
    assert words in str(caught.value)


def test_paths_that_can_lie_side_by_side_are_accepted() -> None:
    check_paths(["a/x.py", "a/y.py", "ab", "a.py", "b/a/x.py", "a/x.py"])
    check_paths([])


@pytest.mark.parametrize(
    ("path", "bytecode"),
    [("a.pyc", True), ("__pycache__/a", True), ("a/__pycache__", True), ("pyc", False), ("a.py", False)],
)
def test_bytecode_is_told_by_name(path: str, bytecode: bool) -> None:
    assert is_bytecode(path) is bytecode


@given(st.text() | st.text("ab./\\:_ -C", max_size=20))
def test_an_accepted_path_stays_below_the_folder_it_is_joined_to(path: str) -> None:
    try:
        assert check_path(path) == path
    except InvalidPath:
        return
    for module, root in ((posixpath, "/srv/x"), (ntpath, "D:\\root\\x")):
        joined = module.normpath(module.join(root, path))
        assert module.commonpath([joined, root]) == root
        assert joined != root
        assert module.relpath(joined, root).replace("\\", "/") == path


@given(st.lists(st.text("aAb/.", min_size=1, max_size=5), max_size=6))
def test_accepted_paths_are_distinct_files_without_letter_case(paths: list[str]) -> None:
    try:
        check_paths(paths)
    except InvalidPath:
        return
    assert len({path.casefold() for path in paths}) == len(set(paths))
    folders = {
        "/".join(path.split("/")[:depth]).casefold() for path in paths for depth in range(1, path.count("/") + 1)
    }
    assert folders.isdisjoint(path.casefold() for path in paths)
