"""Signatures made by an authority on this machine, good and bad in every way; the checks are sigstore's own."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from authority import ISSUER, NOW, SIGNER, SOURCE, Authority
from hypothesis import given, settings
from hypothesis import strategies as st
from time_stamp import TimeAuthority

from kernelhub.errors import BadSignature, InvalidConfig
from kernelhub.identity import Identity
from kernelhub.signer import MAX_BYTES, Signer, find_signer
from kernelhub.trustroot import TrustRoot

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = b'{"name": "relu"}'
EXPECTED = Identity(ISSUER, (SIGNER,))
AUTHORITY = Authority()
ROOT = TrustRoot.parse(json.dumps(AUTHORITY.root).encode(), "test")
BUNDLE = AUTHORITY.sign(DATA)


def find(bundle: bytes, data: bytes = DATA, identity: Identity = EXPECTED, root: TrustRoot = ROOT) -> Signer:
    return find_signer("acme/relu@1 torch-cpu", data, bundle, identity, root)


def test_a_good_signature_tells_who_signed_and_when() -> None:
    assert find(BUNDLE) == Signer(SIGNER, ISSUER, int((NOW + timedelta(seconds=5)).timestamp()))
    assert str(find(BUNDLE)) == f"{SIGNER} (issuer {ISSUER}), 2026-03-01 12:00:05 UTC"


def test_s_24_checking_opens_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert find(AUTHORITY.sign(DATA))


@pytest.mark.parametrize("leaves", range(1, 9))
def test_the_log_may_be_of_any_size(leaves: int) -> None:
    """The authority's tree has to be a real one, whatever its shape."""
    authority = Authority(leaves=[b"%d" % number for number in range(leaves)])
    root = TrustRoot.parse(json.dumps(authority.root).encode(), "test")
    assert find(authority.sign(DATA), root=root)


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ({"signer": SIGNER.replace("main", "evil")}, "expected is https://github.com/acme/kernels"),
        ({"signer": SIGNER.replace("acme", "evil")}, "names 'https://github.com/evil/kernels"),
        ({"issuer": "https://accounts.evil.test"}, "the issuer is not https://token.actions"),
        ({"source": "https://github.com/evil/caller"}, "the workflow did not run for https://github.com/acme/kernels"),
        ({"source": None}, "the workflow did not run for"),
        ({"stamped": False}, "signed certificate timestamp"),
        ({"logged": NOW + timedelta(minutes=11)}, "CertValidationError"),
        ({"logged": NOW - timedelta(minutes=1)}, "CertValidationError"),
    ],
    ids=["branch", "repository", "issuer", "caller", "no-caller", "no-stamp", "expired", "too-early"],
)
def test_a_certificate_for_something_else_is_refused(how: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadSignature) as caught:
        find(AUTHORITY.sign(DATA, **how))
    assert problem in str(caught.value)
    assert "acme/relu@1 torch-cpu" in str(caught.value)


def test_a_log_that_tells_no_time_needs_a_time_stamp() -> None:
    """As newer logs are; the time is then the one at which the signer's certificate began."""
    bundle = AUTHORITY.stamped_bundle(DATA)
    assert find(json.dumps(bundle).encode()).time == int(NOW.timestamp())
    del bundle["verificationMaterial"]["timestampVerificationData"]
    with pytest.raises(BadSignature, match="inclusion promise or signed timestamp"):
        find(json.dumps(bundle).encode())


def test_s_23_a_time_stamp_of_anybody_makes_no_signature_newer() -> None:
    signature = base64.b64decode(AUTHORITY.bundle(DATA)["messageSignature"]["signature"])
    stranger = TimeAuthority(NOW - timedelta(days=1)).stamp(signature, NOW + timedelta(minutes=9))
    bundle = AUTHORITY.stamped_bundle(DATA, stamps=(stranger,))
    assert find(json.dumps(bundle).encode()).time == int(NOW.timestamp())


def test_an_authority_that_is_not_in_the_trust_root_is_refused() -> None:
    with pytest.raises(BadSignature, match="certificate chain"):
        find(Authority().sign(DATA))


@pytest.mark.parametrize("key", ["log_key", "stamp_key"])
def test_a_log_that_is_not_in_the_trust_root_is_refused(key: str) -> None:
    keys = {name: getattr(AUTHORITY, name) for name in ("ca_key", "log_key", "stamp_key")}
    other = Authority(**{**keys, key: getattr(Authority(), key)})
    with pytest.raises(BadSignature):
        find(other.sign(DATA))


def test_changed_bytes_are_refused() -> None:
    with pytest.raises(BadSignature, match="mismatch"):
        find(BUNDLE, DATA + b" ")


def entry(bundle: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = bundle["verificationMaterial"]["tlogEntries"][0]
    return found


def other_signature(bundle: dict[str, Any]) -> None:
    bundle["messageSignature"]["signature"] = AUTHORITY.bundle(DATA)["messageSignature"]["signature"]


def other_entry(bundle: dict[str, Any]) -> None:
    bundle["verificationMaterial"]["tlogEntries"] = [entry(AUTHORITY.bundle(DATA))]


def hidden_time(bundle: dict[str, Any]) -> None:
    """The same time under a second name, where another reader might look for it."""
    entry(bundle)["integrated_time"] = str(int((NOW + timedelta(minutes=9)).timestamp()))


@pytest.mark.parametrize(
    "change",
    [
        lambda bundle: bundle["verificationMaterial"].pop("tlogEntries"),
        lambda bundle: bundle["verificationMaterial"].update(tlogEntries=[]),
        lambda bundle: entry(bundle).pop("inclusionProof"),
        lambda bundle: entry(bundle).pop("inclusionPromise"),
        lambda bundle: entry(bundle).update(integratedTime=str(int((NOW + timedelta(minutes=9)).timestamp()))),
        lambda bundle: entry(bundle)["inclusionProof"].update(rootHash="A" * 43 + "="),
        lambda bundle: entry(bundle)["inclusionProof"].update(hashes=[]),
        lambda bundle: entry(bundle)["inclusionProof"]["checkpoint"].update(envelope="nothing"),
        lambda bundle: bundle.pop("messageSignature"),
        lambda bundle: bundle.update(mediaType="text/plain"),
        other_signature,
        other_entry,
        hidden_time,
    ],
    ids=[
        "no-entries",
        "no-entry",
        "no-proof",
        "no-promise",
        "another-time",
        "another-root",
        "no-path",
        "no-checkpoint",
        "no-signature",
        "another-type",
        "another-signature",
        "another-entry",
        "two-times",
    ],
)
def test_a_bundle_of_which_any_part_is_missing_or_another_is_refused(
    change: Callable[[dict[str, Any]], object],
) -> None:
    bundle = AUTHORITY.bundle(DATA)
    change(bundle)
    with pytest.raises(BadSignature):
        find(json.dumps(bundle).encode())


def test_a_bundle_that_is_too_large_is_refused_before_it_is_read() -> None:
    with pytest.raises(BadSignature, match=f"more than {MAX_BYTES}"):
        find(BUNDLE + b" " * MAX_BYTES)


@pytest.mark.parametrize("data", [b"", b"{", b"null", b"[" * 10_000, b"\xff\xfe", BUNDLE[:-1], BUNDLE + b"x"])
def test_bytes_that_are_no_bundle_are_refused(data: bytes) -> None:
    with pytest.raises(BadSignature):
        find(data)


@settings(max_examples=60)
@given(st.integers(0, len(BUNDLE) - 1), st.integers(1, 255))
def test_a_bundle_with_a_flipped_byte_proves_the_same_or_nothing(place: int, change: int) -> None:
    flipped = bytearray(BUNDLE)
    flipped[place] ^= change
    with contextlib.suppress(BadSignature):
        assert find(bytes(flipped)) == find(BUNDLE)  # white space, or a field that nothing is taken from


def test_a_pattern_admits_a_tag_and_an_e_mail_address_is_an_identity() -> None:
    tagged = SIGNER.replace("refs/heads/main", "refs/tags/v1.2")
    pattern = Identity(ISSUER, (tagged.replace("v1.2", "v*"),))
    assert find(AUTHORITY.sign(DATA, signer=tagged), identity=pattern).name == tagged
    with pytest.raises(BadSignature):
        find(AUTHORITY.sign(DATA), identity=pattern)


def test_a_source_can_be_another_repository_than_the_workflows() -> None:
    caller = "https://github.com/acme/relu"
    bundle = AUTHORITY.sign(DATA, source=caller)
    assert find(bundle, identity=Identity(ISSUER, (SIGNER,), caller))
    with pytest.raises(BadSignature, match=SOURCE):
        find(bundle)


def test_a_trust_root_that_sigstore_cannot_read_is_named() -> None:
    root = TrustRoot({"mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1"}, 0.0, "/etc/root.json")
    with pytest.raises(InvalidConfig, match=r"'/etc/root\.json'"):
        find(BUNDLE, root=root)


def test_the_public_instances_root_knows_nothing_of_this_authority() -> None:
    with pytest.raises(BadSignature, match="certificate chain"):
        find(BUNDLE, root=TrustRoot.bundled())
