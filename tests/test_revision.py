from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelhub.errors import InvalidRequest
from kernelhub.revision import MAX_VERSION, Revision, RevisionKind, version_of_branch

HUGE = pytest.param(10**5000, id="5001 digits")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "kind", "canonical"),
    [
        ("v3", RevisionKind.VERSION, "v3"),
        ("3", RevisionKind.VERSION, "v3"),
        ("0", RevisionKind.VERSION, "v0"),
        ("999999", RevisionKind.VERSION, "v999999"),
        ("latest", RevisionKind.LATEST, "latest"),
        (">=2,<4", RevisionKind.RANGE, "<4,>=2"),
        ("==2", RevisionKind.RANGE, "==2"),
        ("main", RevisionKind.NAME, "main"),
        ("refs/pr/3", RevisionKind.NAME, "refs/pr/3"),
        ("v01", RevisionKind.NAME, "v01"),
        ("v+1", RevisionKind.NAME, "v+1"),
        ("V1", RevisionKind.NAME, "V1"),
        ("v1.0", RevisionKind.NAME, "v1.0"),
        ("1000000", RevisionKind.NAME, "1000000"),
        ("abcdef0", RevisionKind.NAME, "abcdef0"),
        (COMMIT, RevisionKind.COMMIT, COMMIT),
        (COMMIT.upper(), RevisionKind.COMMIT, COMMIT),
    ],
)
def test_a_revision_is_read_as_its_kind(text: str, kind: RevisionKind, canonical: str) -> None:
    revision = Revision.parse(text)
    assert (revision.kind, str(revision)) == (kind, canonical)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty revision"),
        ("HEAD~1", "not a branch, tag or commit name"),
        ("v 1", "not a branch"),
        ("v\uff11", "not a branch"),
        ("-x", "not a branch"),
        ("a..b", "not a branch"),
        ("a//b", "not a branch"),
        ("a/.b", "not a branch"),
        ("a.lock", "not a branch"),
        ("main\n", "not a branch"),
        ("x" * 256, "not a branch"),
        (COMMIT + "0", "41 hex digits; expected 40 for a commit"),
        ("a" * 64, "64 hex digits"),
        (">=2,", "range part ''"),
        (">=2.0", "range part '>=2.0'"),
        ("~=2", "not a branch"),
        (">=1000000", "range part"),
        (None, "a revision is text, not a NoneType"),
        (3, "a revision is text, not a int"),
    ],
)
def test_an_unreadable_revision_is_refused_in_words(text: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Revision.parse(text)
    assert words in str(caught.value)


@pytest.mark.parametrize("number", [True, False, 1.0, "1", None, -1, MAX_VERSION + 1, 10**30, HUGE])
def test_a_version_is_a_small_int_and_nothing_else(number: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Revision.version(number)
    assert "version out of range or not an int; expected an int from 0 to 999999" in str(caught.value)


@pytest.mark.parametrize(
    "branch", ["v01", "v+1", "v 1", "v\uff11", "v1_0", "V1", "v1.0", "v", "1", "v-1", "v1000000", "main"]
)
def test_a_branch_that_only_looks_like_a_version_is_none(branch: str) -> None:
    assert version_of_branch(branch) is None


@pytest.mark.parametrize(("branch", "version"), [("v0", 0), ("v1", 1), ("v999999", 999999)])
def test_a_version_branch_stands_for_its_number(branch: str, version: int) -> None:
    assert version_of_branch(branch) == version


@pytest.mark.parametrize(
    ("text", "admitted"),
    [
        ("v2", [2]),
        ("latest", [1, 2, 3, 4, 10]),
        (">=2,<4", [2, 3]),
        ("!=2", [0, 1, 3, 4, 10]),
        (">3", [4, 10]),
        ("<=1", [0, 1]),
        ("main", []),
        (COMMIT, []),
    ],
)
def test_versions_are_admitted_by_number(text: str, admitted: list[int]) -> None:
    assert [version for version in (0, 1, 2, 3, 4, 10) if Revision.parse(text).admits(version)] == admitted


def test_only_a_commit_stays_where_it_is() -> None:
    assert not Revision.parse(COMMIT).moves
    assert all(Revision.parse(text).moves for text in ("v1", "main", "latest", ">=1", "abcdef0", "refs/pr/3"))


@pytest.mark.parametrize(
    ("text", "short"), [("abcdef0", True), ("a" * 39, True), ("abcdef", False), ("abcdefg", False)]
)
def test_seven_to_thirtynine_hex_digits_may_be_a_short_commit(text: str, short: bool) -> None:
    assert Revision.parse(text).may_be_short_commit is short


def test_a_pull_request_is_told_by_its_reference() -> None:
    assert Revision.parse("refs/pr/3").is_pull_request
    assert not Revision.parse("refs/pr/0").is_pull_request
    assert not Revision.parse("main").is_pull_request


@given(st.text() | st.text("v0123456789abcdef<>=!,./-+ ", max_size=45))
def test_any_text_is_read_canonically_or_refused(text: str) -> None:
    try:
        revision = Revision.parse(text)
    except InvalidRequest:
        return
    assert Revision.parse(str(revision)) == revision


@given(st.integers())
def test_the_number_of_a_version_is_the_one_given(number: int) -> None:
    if 0 <= number <= MAX_VERSION:
        assert Revision.version(number).number == number
        assert version_of_branch(str(Revision.version(number))) == number
    else:
        with pytest.raises(InvalidRequest):
            Revision.version(number)
