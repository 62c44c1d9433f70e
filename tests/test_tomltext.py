"""TOML that somebody else wrote costs no more than its length, and fails in one way."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelhub.errors import InvalidConfig, InvalidLockfile, InvalidMetadata
from kernelhub.lockfile import Lock
from kernelhub.policy import Policy
from kernelhub.redirect import read_redirect
from kernelhub.tomltext import NotToml, parse_toml


def test_ordinary_documents_are_read() -> None:
    text = '# [[[\n[a.b."c.d.e.f.g.h.i.j.k.l"]\nx = "a.b.c.d.e.f.g.h.i.j.k" # a.b.c.d.e.f.g.h.i.j\n'
    text += "y = [[1.5], [{z = '\"'}]]\n"
    document = parse_toml(text.encode())
    assert document["a"]["b"] == {"c.d.e.f.g.h.i.j.k.l": {"x": "a.b.c.d.e.f.g.h.i.j.k", "y": [[1.5], [{"z": '"'}]]}}


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"a = 1\n\xff", "not UTF-8 at byte 6"),
        (b"a = ", "Invalid value"),
        (b"a = 1\na = 2\n", "Cannot overwrite a value (at line 2"),
        pytest.param(b"a = 1\nb = " + b"9" * 5000, "limit", id="5000 digits"),
        pytest.param(b"a = 1\nb = " + b"[" * 10_000, "nested deeper than 32 levels at line 2", id="10000 brackets"),
        pytest.param(b"a = " + b"{b=" * 5_000, "nested deeper than 32 levels at line 1", id="5000 braces"),
        pytest.param(b"\n" + b"a." * 5_000 + b"a = 1", "more than 8 parts at line 2", id="5000 parts"),
        pytest.param(b'["' + b'a"."' * 4_000 + b'"]', "more than 8 parts at line 1", id="4000 quoted parts"),
        pytest.param(b"a = {" + b"b." * 5_000 + b"c = 1}", "more than 8 parts at line 1", id="parts in a brace"),
        pytest.param(
            b"a = 1\nb = '" + b"x" * (1 << 14) + b"'", "more than 16384 characters on line 2", id="a long line"
        ),
        (b'a = """\n"""', "a string of several lines at line 1"),
        (b"a = ['''\n''', {b.b.b.b.b.b.b.b.b.b.b = 1}]", "a string of several lines at line 1"),
        pytest.param(b'a = "' + b'\\"' * 8_000, "Unterminated string", id="a string that never ends"),
    ],
)
def test_what_is_none_or_costly_is_refused_with_its_place(data: bytes, problem: str) -> None:
    with pytest.raises(NotToml) as caught:
        parse_toml(data)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    "data", [b"x = " + b"[" * 4000, b"x" + b".x" * 1500 + b" = 1", b"x = " + b"1" * 4000 + b"1" * 90]
)
def test_the_readers_of_other_peoples_toml_use_it(data: bytes) -> None:
    with contextlib.suppress(InvalidMetadata):
        assert read_redirect(data, "org/repo") is None
    with pytest.raises(InvalidLockfile):
        Lock.parse(data)
    with pytest.raises(InvalidConfig):
        Policy.parse(data)


@given(st.text("ab.[]{}=\"'\\#\n 1,") | st.binary().map(lambda data: data.decode("latin-1")))
def test_any_text_is_a_table_or_a_named_error(text: str) -> None:
    with contextlib.suppress(NotToml):
        assert isinstance(parse_toml(text.encode()), dict)
