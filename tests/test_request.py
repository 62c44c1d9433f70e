from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kernelhub.errors import InvalidRequest
from kernelhub.request import KernelRequest, checked_repo_id
from kernelhub.revision import Revision, RevisionKind

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "repo_id", "revision", "symbol"),
    [
        ("a/b", "a/b", None, None),
        ("a/b:Fn", "a/b", None, "Fn"),
        ("a/b@v1:Fn", "a/b", "v1", "Fn"),
        ("a/b@1:Fn", "a/b", "v1", "Fn"),
        ("a/b@main:Fn", "a/b", "main", "Fn"),
        ("a/b@>=2,<4", "a/b", "<4,>=2", None),
        ("a/b@latest:layers.Norm", "a/b", "latest", "layers.Norm"),
        ("a/b@refs/pr/3:Fn", "a/b", "refs/pr/3", "Fn"),
        ("A.b_c/d-e.F_9@v3", "A.b_c/d-e.F_9", "v3", None),
        (f"{'x' * 96}/b", f"{'x' * 96}/b", None, None),
        ("a/b:os.system", "a/b", None, "os.system"),  # the loader refuses what the kernel does not define itself
        ("https://huggingface.co/a/b", "a/b", None, None),
        ("https://huggingface.co/a/b/", "a/b", None, None),
        ("https://huggingface.co/kernels/a/b/tree/v3:Fn", "a/b", "v3", "Fn"),
        ("https://hf.co/a/b/tree/v2/build/torch-cpu:Fn", "a/b", "v2", "Fn"),
        ("http://www.huggingface.co/a/b/tree/refs%2Fpr%2F3", "a/b", "refs/pr/3", None),
    ],
)
def test_a_hub_request_is_read(text: str, repo_id: str, revision: str | None, symbol: str | None) -> None:
    request = KernelRequest.parse(text)
    assert (request.repo_id, request.path, request.symbol) == (repo_id, None, symbol)
    assert (str(request.revision) if request.revision else None) == revision
    assert request.name == repo_id
    assert not request.is_builtin


@pytest.mark.parametrize(
    ("text", "path", "symbol"),
    [
        ("/abs/path:Layer", "/abs/path", "Layer"),
        ("/abs/with:colon:Layer", "/abs/with:colon", "Layer"),
        ("/abs/with:colon/k", "/abs/with:colon/k", None),
        ("./rel:Layer", "./rel", "Layer"),
        ("./b", "./b", None),
        ("/", "/", None),
        (".\\rel:Layer", ".\\rel", "Layer"),
        ("~/k:Layer", "~/k", "Layer"),
        ("C:\\k\\rmsnorm:Layer", "C:\\k\\rmsnorm", "Layer"),
        ("C:/k:Layer", "C:/k", "Layer"),
        ("C:/k", "C:/k", None),
        ("\\\\server\\share\\k:Layer", "\\\\server\\share\\k", "Layer"),
        ("file:///k:Layer", "/k", "Layer"),
        ("file://localhost/k%20x:Layer", "/k x", "Layer"),
        ("file:///C:/k:Layer", "C:/k", "Layer"),
        ("/a b/c@v1:Layer", "/a b/c@v1", "Layer"),
    ],
)
def test_a_local_path_is_split_at_its_last_colon(text: str, path: str, symbol: str | None) -> None:
    """REF huggingface/transformers#42800: a path was split at the first two colons."""
    request = KernelRequest.parse(text)
    assert (request.path, request.repo_id, request.revision, request.symbol) == (path, None, None, symbol)
    assert request.name == path


@pytest.mark.parametrize(
    ("text", "revision", "symbol"),
    [("builtin", None, None), ("builtin:RMSNorm", None, "RMSNorm"), ("builtin@v2", 2, None)],
)
def test_the_shipped_collection_is_named_builtin(text: str, revision: int | None, symbol: str | None) -> None:
    request = KernelRequest.parse(text)
    assert request.is_builtin
    assert request.name == "builtin"
    assert (request.revision and request.revision.number, request.symbol) == (revision, symbol)


HUGE = pytest.param(10**5000, id="5001 digits")

REFUSED: list[tuple[Any, str]] = [
    ("a/b@", "empty revision"),
    ("a/b@:Fn", "empty revision"),
    ("a/b@@x", "second '@' at character 5"),
    ("@a/b", "organization '@a' may not start with '@'"),
    ("a/b:Fn:G", "second ':' at character 7"),
    ("a/b:c:d", "second ':'"),
    ("a/b/c", "too many '/': 2"),
    ("a/b/c:L", "too many '/'"),
    ("a b/c", "space in the name"),
    (" a/b", "space at the start or end"),
    ("a/b ", "space at the start or end"),
    (" a/b : L ", "space at the start or end"),
    ("a/b : L", "space at the start or end"),
    ("a/b@x\n", "control character U+000A"),
    ("a/b\x1b[2J", "control character U+001B"),
    ("a/b\x00", "control character U+0000"),
    ("paged|a/b", "'|' in the name"),
    ("../x/y", "segment '..'"),
    ("../x", "segment '..'"),
    ("a/..", "segment '..'"),
    ("a/.", "segment '.'"),
    ("a/b.git", "'b.git' breaks the Hub's name rule"),
    ("a/--x", "'--x' breaks the Hub's name rule"),
    ("a/x--y", "'x--y' breaks the Hub's name rule"),
    ("a/x..y", "'x..y' breaks the Hub's name rule"),
    ("-x/y", "'-x' breaks the Hub's name rule"),
    (f"a/{'x' * 97}", "length 97 > 96"),
    ("a/\u0441", "non-ASCII character in '\\u0441'"),
    ("", "empty"),
    (None, "a NoneType, not a string"),
    (b"a/b", "a bytes, not a string"),
    (5, "a int, not a string"),
    ("a/b:", "empty symbol"),
    ("/a:", "empty symbol"),
    (":L", "no repository before ':'"),
    ("a//b", "segment ''"),
    ("a", "no organization"),
    ("a:b", "no organization"),
    ("a/b:__init__", "symbol '__init__' is not one that a kernel defines"),
    ("a/b:x.__class__", "is not one that a kernel defines"),
    ("a/b:1x", "symbol '1x'"),
    ("a/b:x y", "symbol 'x y'"),
    ("a/b:x.", "symbol 'x.'"),
    ("a/b@HEAD~1", "not a branch, tag or commit name"),
    ("a/b@>=x", "range part '>=x'"),
    ("x" * 5000, "length 5000 > 4096"),
    ("https://example.org/a/b", "not the page of a kernel repository"),
    ("https://huggingface.co/builtin", "not the page of a kernel repository"),
    ("https://huggingface.co/a/b/blob/v1/x.py", "too many '/'"),
    ("ftp://huggingface.co/a/b", "not the page of a kernel repository"),
    ("file://host/k:Layer", "not a local file address"),
    ("file:k:Layer", "not a local file address"),
    ("file:///a?x:Layer", "'?' or '#'"),
    ("file:///a#x", "'?' or '#'"),
    ("file://[/k", "unreadable address"),
    ("file:///a%0Ab", "control character U+000A"),
    ("file:///a%3Ab", "the last colon would read as a symbol"),
    ("/a\ud800", "control character U+D800"),
]


@pytest.mark.parametrize(("text", "words"), REFUSED)
def test_what_cannot_be_read_is_refused_in_words(text: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        KernelRequest.parse(text)
    assert words in str(caught.value)
    assert caught.value.value == text
    assert len(str(caught.value)) < 500


def test_a_pasted_page_of_another_kind_names_the_accepted_form() -> None:
    """REF huggingface/transformers#39474: the whole address of a page was pasted."""
    with pytest.raises(InvalidRequest, match=r"org/name\[@revision\]\[:Symbol\]"):
        KernelRequest.parse("https://huggingface.co/docs")


def test_a_paged_prefix_is_never_taken_for_part_of_a_repository() -> None:
    """REF huggingface/transformers#42547, #41427, #45399: the prefix was looked up as part of the name."""
    with pytest.raises(InvalidRequest, match="a wrapper prefix is the caller's to strip"):
        KernelRequest.parse("paged|a/b:Fn")


def test_an_existing_folder_named_like_a_repository_does_not_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """REF huggingface/transformers#42800: a local path is told by its form, never by what exists on disk."""
    (tmp_path / "org" / "repo").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert KernelRequest.parse("org/repo").repo_id == "org/repo"


@pytest.mark.parametrize(
    ("text", "kind", "moves"),
    [
        ("a/b@v3", RevisionKind.VERSION, True),
        ("a/b@main:Layer", RevisionKind.NAME, True),
        ("a/b@0123abc", RevisionKind.NAME, True),
        (f"a/b@{'0a' * 20}:Layer", RevisionKind.COMMIT, False),
        ("a/b@v1", RevisionKind.VERSION, True),
    ],
)
def test_a_mapping_string_pins_with_an_at_sign(text: str, kind: RevisionKind, moves: bool) -> None:
    """REF huggingface/transformers#40009, #47863: one grammar for mapping strings and requests."""
    revision = KernelRequest.parse(text).revision
    assert revision is not None
    assert (revision.kind, revision.moves) == (kind, moves)


def test_no_version_given_is_told_apart_from_version_one() -> None:
    """REF huggingface/kernels#450, #427, #529, #234: one default rule, applied where a request is resolved."""
    assert KernelRequest.parse("org/repo:Layer").revision is None
    assert KernelRequest.parse("org/repo@v1:Layer").revision == Revision.version(1)


def test_a_range_of_versions_can_be_asked_for() -> None:
    """REF huggingface/kernels#137, huggingface/kernels#113, #209."""
    revision = KernelRequest.parse("a/b@>=2,<4:Layer").revision
    assert revision is not None
    assert [version for version in range(6) if revision.admits(version)] == [2, 3]


@pytest.mark.parametrize("version", [True, 1.0, "1", -1, 10**30, HUGE, 1_000_000])
def test_a_version_that_is_no_small_int_is_refused(version: Any) -> None:
    with pytest.raises(InvalidRequest, match="version out of range or not an int; expected an int from 0 to 999999"):
        KernelRequest.parse("a/b").at(version=version)


@pytest.mark.parametrize(
    ("revision", "words"),
    [
        ("HEAD~1", "not a branch, tag or commit name"),
        ("", "empty revision"),
        (5, "a revision is text, not a int"),
        (b"main", "a revision is text, not a bytes"),
        ("a" * 41, "41 hex digits; expected 40 for a commit"),
        ("x\n", "not a branch"),
    ],
)
def test_a_revision_beside_the_string_is_refused_in_words(revision: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        KernelRequest.parse("a/b").at(revision=revision)
    assert words in str(caught.value)


@pytest.mark.parametrize("revision", ["refs/pr/3", "main", "a" * 39, "v2", "latest"])
def test_a_revision_beside_the_string_is_the_same_as_in_it(revision: str) -> None:
    assert KernelRequest.parse("a/b:Fn").at(revision=revision) == KernelRequest.parse(f"a/b@{revision}:Fn")


def test_a_version_beside_the_string_is_the_same_as_in_it() -> None:
    assert KernelRequest.parse("a/b:Fn").at(version=2) == KernelRequest.parse("a/b@v2:Fn")


def test_neither_version_nor_revision_changes_nothing() -> None:
    request = KernelRequest.parse("a/b:Fn")
    assert request.at() is request


def test_a_revision_given_twice_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="one beside it"):
        KernelRequest.parse("a/b@v1").at(version=1)
    with pytest.raises(InvalidRequest, match="both version=1 and revision='main'"):
        KernelRequest.parse("a/b").at(version=1, revision="main")


def test_both_with_a_version_too_long_to_show_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="a int too long to show"):
        KernelRequest.parse("a/b").at(version=10**5000, revision="main")


def test_a_local_path_takes_no_revision() -> None:
    with pytest.raises(InvalidRequest, match="a local folder has no revision"):
        KernelRequest.parse("/a:Fn").at(version=1)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"repo_id": "a/b", "path": "/a"}, "both a repository and a path"),
        ({"repo_id": "a"}, "no organization"),
        ({"repo_id": "a/b", "symbol": "__x"}, "not one that a kernel defines"),
        ({"path": "a/b"}, "not the form of a local path"),
        ({"path": "file:///a"}, "not the form of a local path"),
        ({"path": "/a:b"}, "the last colon would read as a symbol"),
        ({"path": ""}, "empty"),
        ({"path": "/a\n"}, "control character U+000A"),
    ],
)
def test_a_request_built_by_hand_is_checked_too(facts: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        KernelRequest(**facts)  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_the_folder_of_a_local_request_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert KernelRequest.parse("./k:Fn").folder == tmp_path / "k"
    assert KernelRequest.parse("~/k:Fn").folder == tmp_path / "home" / "k"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows makes up a home folder for any user")
def test_the_home_of_an_unknown_user_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'~' has no folder"):
        _ = KernelRequest.parse("~no-such-user-here/k").folder


def test_a_repository_id_is_checked_on_its_own() -> None:
    assert checked_repo_id("a/b") == "a/b"
    with pytest.raises(InvalidRequest, match="breaks the Hub's name rule"):
        checked_repo_id("a/b:Fn")


SYMBOLS = st.from_regex(r"[A-Za-z][A-Za-z0-9_]{0,8}(\.[A-Za-z][A-Za-z0-9]{0,8})?", fullmatch=True)
REVISIONS = st.one_of(
    st.builds(Revision.version, st.integers(0, 999_999)),
    st.sampled_from(["latest", "main", "refs/pr/3", "feature/x", ">=2,<4", "!=3", "0123456789", "0f" * 20]).map(
        Revision.parse
    ),
)
STARTS = st.sampled_from(["/", "./", "~/", "C:\\", "C:/", "\\\\server\\"])
REPOSITORIES = st.from_regex(r"[A-Za-z0-9]{1,5}([._-][a-z]{1,5})?/[A-Za-z0-9]{1,9}", fullmatch=True)


@st.composite
def requests(draw: st.DrawFn) -> KernelRequest:
    symbol = draw(st.none() | SYMBOLS)
    if draw(st.booleans()):
        return KernelRequest(draw(st.none() | REPOSITORIES), revision=draw(st.none() | REVISIONS), symbol=symbol)
    characters = "abcXYZ019._-@/\\\u00e9\u6f22" + (":" if symbol else "")
    return KernelRequest(path=draw(STARTS) + draw(st.text(characters, max_size=20)), symbol=symbol)


@given(requests())
def test_a_request_reads_back_from_its_own_text(request: KernelRequest) -> None:
    assert KernelRequest.parse(str(request)) == request


ANY_TEXT = st.text() | st.text("ab/:@.\\~CD|v1<>=,%file-_ \n0") | st.text("ab/:?%#[]3A0").map("file:///{}".format)


@given(ANY_TEXT)
@example("file:///%20")
@example("~:S")
@example("a/b@>=2,>=2")
def test_any_text_is_read_canonically_or_refused(text: str) -> None:
    try:
        request = KernelRequest.parse(text)
    except InvalidRequest:
        return
    assert KernelRequest.parse(str(request)) == request
    assert str(KernelRequest.parse(str(request))) == str(request)
