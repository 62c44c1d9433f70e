"""kernelhub.toml: what the user has decided; every unknown word in it is refused, as it may have meant "no"."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelhub.errors import InvalidConfig
from kernelhub.policy import Policy

if TYPE_CHECKING:
    from pathlib import Path

WHOLE = """
[trust]
publishers = ["my-org"]
repositories = ["other/kernel"]
only = true

[pins]
"org/repo" = "0123456789abcdef0123456789abcdef01234567"

[signatures]
"my-org" = "require"
"""


def test_a_whole_policy_is_read() -> None:
    policy = Policy.parse(WHOLE.encode())
    assert policy.publishers == {"my-org"}
    assert policy.repositories == {"other/kernel"}
    assert policy.only
    assert policy.pins == {"org/repo": "0123456789abcdef0123456789abcdef01234567"}
    assert policy.signatures == {"my-org": "require"}


def test_a_policy_covers_its_publishers_and_repositories_only() -> None:
    policy = Policy.parse(WHOLE.encode())
    assert policy.covers("my-org/anything")
    assert policy.covers("other/kernel")
    assert not policy.covers("other/second")
    assert not Policy().covers("my-org/anything")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[trsut]", "did you mean 'trust'"),
        ("[trust]\npublisher = []", "did you mean 'publishers'"),
        ("[trust]\npublishers = 'org'", "is not a list"),
        ("[trust]\npublishers = ['a/b']", "not an organization's name"),
        ("[trust]\nrepositories = ['a']", "no organization"),
        ("[trust]\nrepositories = [1]", "not a string"),
        ("[trust]\nonly = 'yes'", "key 'only'"),
        ("trust = 1", "is not a table"),
        ("[pins]\n'a/b' = 'main'", "not a commit"),
        ("[signatures]\n'a' = 'maybe'", "rule for 'a'"),
        ("[trust", "TOML"),
        ("#" * (1 << 21), "more than"),
    ],
)
def test_a_policy_that_cannot_be_read_is_refused_with_the_reason(text: str, problem: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        Policy.parse(text.encode())
    assert problem in str(caught.value)
    assert "kernelhub.toml" in str(caught.value)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_policy_or_a_named_error(data: bytes) -> None:
    with contextlib.suppress(InvalidConfig):
        Policy.parse(data)


def test_a_policy_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot be read"):
        Policy.read(tmp_path / "kernelhub.toml")
