"""kernelhub.toml: what the user has decided; every unknown word in it is refused, as it may have meant "no"."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelhub.errors import InvalidConfig
from kernelhub.policy import Policy

WHOLE = """
[trust]
publishers = ["my-org"]
repositories = ["other/kernel"]
only = true

[pins]
"org/repo" = "0123456789abcdef0123456789abcdef01234567"

[signatures]
"my-org" = "require"
"*" = "warn"

[digests]
"my-org" = "require"

[identities.my-org]
issuer = "https://token.actions.githubusercontent.com"
signers = ["https://github.com/my-org/kernels/.github/workflows/build.yaml@refs/heads/main"]
source = "https://github.com/my-org/kernels"

[names]
"my-org/relu-kernel" = "relu"

[older]
allow = ["my-org/relu-kernel", "other"]

[trust_root]
file = "/etc/trust-root.json"
warn_days = 30
fail_days = 365
"""


def test_a_whole_policy_is_read() -> None:
    policy = Policy.parse(WHOLE.encode())
    assert policy.publishers == {"my-org"}
    assert policy.repositories == {"other/kernel"}
    assert policy.only
    assert policy.pins == {"org/repo": "0123456789abcdef0123456789abcdef01234567"}
    assert [policy.signature_rule(name) for name in ("my-org/x", "other/x")] == ["require", "warn"]
    assert [policy.digest_rule(name) for name in ("my-org/x", "other/x")] == ["require", "warn"]
    identity = policy.identity_of("my-org/x")
    assert identity is not None
    assert identity.source == "https://github.com/my-org/kernels"
    assert policy.names == {"my-org/relu-kernel": "relu"}
    allowed = {"my-org/relu-kernel": True, "my-org/other": False, "other/x": True}
    assert {name: policy.allows_older(name) for name in allowed} == allowed
    assert (policy.trust_root, policy.root_days) == (Path("/etc/trust-root.json"), (30, 365))


def test_without_a_policy_signatures_are_off_and_digests_told() -> None:
    policy = Policy()
    assert (policy.signature_rule("a/b"), policy.digest_rule("a/b"), policy.root_days) == ("off", "warn", (7, 90))
    assert policy.identity_of("a/b") is None
    assert policy.identity_of("kernels-community/relu") is not None
    assert not policy.allows_older("a/b")


def test_an_entry_replaces_a_known_identity() -> None:
    text = '[identities.kernels-community]\nissuer = "https://x"\nsigners = ["me@x.test"]\n'
    identity = Policy.parse(text.encode()).identity_of("kernels-community/relu")
    assert identity is not None
    assert identity.signers == ("me@x.test",)


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
        ("[signatures]\n'a/b' = 'warn'", "not an organization's name"),
        ("[digests]\n'a' = 'off'", "rule for 'a'"),
        ("[identities]\na = 1", "is not a table"),
        ("[identities.a]\nissuer = 'https://x'\nsigners = ['a']\nsigner = 'b'", "did you mean 'signers'"),
        ("[identities.a]\nissuer = 'https://x'", "key 'signers'"),
        ("[identities.a]\nissuer = 'https://x'\nsigners = ['https://github.com/*']", "that others match too"),
        ("[names]\n'a/b' = 'Not A Name'", "name for 'a/b'"),
        ("[names]\nb = 'b'", "no organization"),
        ("[older]\nallow = 'a'", "is not a list"),
        ("[older]\nalow = []", "did you mean 'allow'"),
        ("[older]\nallow = [1]", "not an organization's name"),
        ("[trust_root]\nfile = 'root.json'", "an absolute path"),
        ("[trust_root]\nwarn_days = 0", "whole days"),
        ("[trust_root]\nfail_days = 1.5", "whole days"),
        ("[trust_root]\nfail_days = true", "whole days"),
        ("[trust_root]\nday = 1", "unknown key"),
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
