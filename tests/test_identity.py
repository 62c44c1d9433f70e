"""Who may sign: names, patterns that nobody else can match, and the repository that a workflow ran for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelhub.errors import InvalidConfig
from kernelhub.identity import GITHUB_ISSUER, KNOWN_IDENTITIES, Identity

WORKFLOWS = "https://github.com/acme/kernels/.github/workflows"
MAIN = f"{WORKFLOWS}/build.yaml@refs/heads/main"


def checked(signer: object, issuer: object = GITHUB_ISSUER, source: object = None) -> Identity:
    return Identity.checked(issuer, [signer], source, "kernelhub.toml")


@pytest.mark.parametrize(
    ("pattern", "name", "admitted"),
    [
        (MAIN, MAIN, True),
        (MAIN, MAIN.replace(".yaml", "Xyaml"), False),
        (MAIN, f"{MAIN}2", False),
        (MAIN, MAIN.upper(), False),
        (f"{WORKFLOWS}/*@refs/heads/main", MAIN, True),
        (f"{WORKFLOWS}/*@refs/heads/main", f"{WORKFLOWS}/a/b@refs/heads/main", False),
        (f"{WORKFLOWS}/*@refs/heads/main", f"{WORKFLOWS}/a@refs/heads/x@refs/heads/main", False),
        (f"{WORKFLOWS}/build.yaml@refs/tags/v*", f"{WORKFLOWS}/build.yaml@refs/tags/v1.2", True),
        (f"{WORKFLOWS}/build.yaml@refs/tags/v*", MAIN, False),
        (f"{WORKFLOWS}/build.yaml@refs/tags/v*", f"{WORKFLOWS}/build.yaml@refs/tags/v1\x1b[2J", False),
        (f"{WORKFLOWS}/build.yaml@refs/tags/v*", f"{WORKFLOWS}/build.yaml@refs/tags/v1\n", False),
        ("someone@acme.test", "someone@acme.test", True),
        ("someone@acme.test", "someone@acme_test", False),
    ],
)
def test_a_name_is_admitted_by_its_pattern_only(pattern: str, name: str, admitted: bool) -> None:
    assert checked(pattern).admits(name) is admitted


@given(st.text(max_size=40))
def test_a_plain_signer_admits_itself_and_nothing_else(name: str) -> None:
    assert Identity(GITHUB_ISSUER, (MAIN,)).admits(name) is (name == MAIN)


@pytest.mark.parametrize(
    "signer",
    [
        "*",
        "*@acme.test",
        "https://*",
        "https://github.com/*",
        "https://github.com/acme/*",
        "https://github.com/ac*/kernels/.github/workflows/build.yaml@refs/heads/main",
        "https://github.com//kernels/*",
        "http://github.com/acme/kernels/.github/*",
        "",
        "two words",
        "line\nbreak",
        "x" * 600,
        5,
    ],
)
def test_a_pattern_that_others_match_too_is_refused(signer: object) -> None:
    with pytest.raises(InvalidConfig, match="signers"):
        checked(signer)


@pytest.mark.parametrize(
    ("issuer", "signers", "source", "key"),
    [(None, [MAIN], None, "issuer"), (GITHUB_ISSUER, [], None, "signers"), (GITHUB_ISSUER, MAIN, None, "signers")],
)
def test_what_is_missing_is_named(issuer: object, signers: object, source: object, key: str) -> None:
    with pytest.raises(InvalidConfig, match=key):
        Identity.checked(issuer, signers, source, "kernelhub.toml")
    with pytest.raises(InvalidConfig, match="source"):
        checked(MAIN, source=7)


def test_a_workflow_has_to_run_for_its_own_repository_if_nothing_else_is_said() -> None:
    assert checked(MAIN).source_of(MAIN) == "https://github.com/acme/kernels"
    assert checked(MAIN, source="https://github.com/acme/x").source_of(MAIN) == "https://github.com/acme/x"
    assert checked("someone@acme.test", "https://accounts.test").source_of("someone@acme.test") == ""
    assert str(checked(MAIN)) == f"{MAIN} (issuer {GITHUB_ISSUER})"


def test_the_known_identities_pass_the_check_of_a_policy_file() -> None:
    for identity in KNOWN_IDENTITIES.values():
        assert Identity.checked(identity.issuer, list(identity.signers), None, "here") == identity
