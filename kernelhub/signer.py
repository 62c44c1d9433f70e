"""Signer: who signed the bytes of a ``metadata.json`` and when, as a sigstore bundle proves it; nobody is asked.

A bundle holds a certificate that was given to the signer for ten minutes, the signature, and the entry of both in a
public log, with the log's own signatures. All of it is checked here, against a trust root that is on this machine.
sigstore-python does that; it is the extra ``sign``, and is imported when the first signature is checked.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from kernelhub.errors import BadSignature, InvalidConfig, shown

if TYPE_CHECKING:
    from sigstore.models import Bundle, TrustedRoot
    from sigstore.verify.policy import VerificationPolicy

    from kernelhub.identity import Identity
    from kernelhub.trustroot import TrustRoot

MAX_BYTES = 256 << 10
INSTALL = "pip install 'kernelhub[sign]'"

_TRUST_CONFIG = "application/vnd.dev.sigstore.clienttrustconfig.v0.1+json"
_SIGNING_CONFIG = "application/vnd.dev.sigstore.signingconfig.v0.2+json"


@dataclass(frozen=True)
class Signer:
    """Who signed, who vouched for that, and when: the time of the log entry, in whole seconds since 1970."""

    name: str
    issuer: str
    time: int

    def __str__(self) -> str:
        return f"{self.name} (issuer {self.issuer}), {told(self.time)}"


def told(time: int) -> str:
    """A signing time for people, in UTC."""
    return datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def missing_verifier() -> str:
    """Why no signature can be checked here, with the command that changes it; empty when all is there."""
    try:
        # Imported when a signature is checked: it takes half a second and is an extra.
        import sigstore.verify  # noqa: F401, PLC0415
    except ImportError as error:
        return f"checking a signature needs sigstore, which is not installed ({error}): run `{INSTALL}`"
    return ""


def find_signer(build: str, data: bytes, bundle: bytes, identity: Identity, root: TrustRoot) -> Signer:
    """Who signed ``data``, if the bundle proves that it is somebody whom ``identity`` expects.

    Args:
        build: the build that both belong to, for messages.
        data: the signed bytes.
        bundle: the bytes of a sigstore bundle.
        identity: who may have signed.
        root: whose word counts.

    Raises:
        BadSignature: anything about the bundle is not as it has to be.
        InvalidConfig: the trust root is none that sigstore can read.
    """
    from sigstore.models import Bundle  # noqa: PLC0415  # an extra, as above

    if len(bundle) > MAX_BYTES:
        raise BadSignature(build, f"the bundle has {len(bundle)} bytes, more than {MAX_BYTES}")
    trusted = checked_root(root)
    try:
        parsed = Bundle.from_json(bundle)
        name = _name_in(parsed, identity)
        _verify(data, parsed, _expected(parsed, name, identity), trusted)
        return Signer(name, identity.issuer, _signing_time(parsed))
    except _Unexpected as error:
        raise BadSignature(build, str(error)) from error
    except Exception as error:  # whatever goes wrong in reading what a stranger wrote is a refusal, never a pass
        raise BadSignature(build, f"{type(error).__name__}: {shown(str(error))}") from error


class _Unexpected(Exception):
    """The certificate is for somebody else than expected."""


def _name_in(bundle: Bundle, identity: Identity) -> str:
    """The name in the certificate that is an expected one; what vouches for the certificate is checked later."""
    from cryptography.x509 import RFC822Name, SubjectAlternativeName, UniformResourceIdentifier  # noqa: PLC0415

    names = bundle.signing_certificate.extensions.get_extension_for_class(SubjectAlternativeName).value
    found = [*names.get_values_for_type(UniformResourceIdentifier), *names.get_values_for_type(RFC822Name)]
    for name in found:
        if identity.admits(name):
            return name
    raise _Unexpected(f"it names {', '.join(map(shown, found)) or 'nobody'} as the signer, expected is {identity}")


def _expected(bundle: Bundle, name: str, identity: Identity) -> VerificationPolicy:
    """What the certificate has to say, after a look whether it does: that tells more than the verifier's own error."""
    from sigstore.errors import VerificationError  # noqa: PLC0415
    from sigstore.verify import policy  # noqa: PLC0415

    issuer = policy.AnyOf([policy.OIDCIssuerV2(identity.issuer), policy.OIDCIssuer(identity.issuer)])
    expected: dict[str, VerificationPolicy] = {
        f"the issuer is not {identity.issuer}": issuer,
        f"the signer is not {shown(name)}": policy.Identity(identity=name),
    }
    if source := identity.source_of(name):
        expected[f"the workflow did not run for {source}"] = policy.OIDCSourceRepositoryURI(source)
    for problem, each in expected.items():
        try:
            each.verify(bundle.signing_certificate)
        except VerificationError as error:
            raise _Unexpected(problem) from error
    return policy.AllOf(list(expected.values()))


def _verify(data: bytes, bundle: Bundle, expected: VerificationPolicy, trusted: TrustedRoot) -> None:
    from sigstore.verify import Verifier  # noqa: PLC0415

    Verifier(trusted_root=trusted).verify_artifact(data, bundle, expected)


def checked_root(root: TrustRoot) -> TrustedRoot:
    """sigstore's own form of a trust root; its way to take one from memory wants a signing config beside it.

    Raises:
        InvalidConfig: it is none that sigstore can read.
    """
    from sigstore.models import ClientTrustConfig  # noqa: PLC0415

    config = {
        "mediaType": _TRUST_CONFIG,
        "trustedRoot": root.keys,
        "signingConfig": {"mediaType": _SIGNING_CONFIG},
    }
    try:
        return ClientTrustConfig.from_json(json.dumps(config)).trusted_root
    except ValueError as error:
        raise InvalidConfig(root.origin, "not a trust root of sigstore", "its trusted_root.json") from error


def _signing_time(bundle: Bundle) -> int:
    """When the log took the entry, if it promised that time; else when the certificate, valid for minutes, began.

    Both are signed, by the log and by the authority. A time stamp beside them may be anybody's and is not taken.
    """
    # Written anew by the verifier: in the bytes as they came, a key may stand twice or under two names.
    entry = json.loads(bundle.to_json())["verificationMaterial"]["tlogEntries"][0]
    if entry.get("inclusionPromise") and int(entry.get("integratedTime", 0)):
        return int(entry["integratedTime"])
    return int(bundle.signing_certificate.not_valid_before_utc.timestamp())
