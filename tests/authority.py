"""A signing authority on this machine: certificates, logs and signatures as sigstore's public instance makes them.

Everything is real: a certificate authority issues a short-lived certificate with an embedded certificate timestamp, a
transparency log takes the entry, proves its place in the tree, and signs its head and the time. Only the keys are ours,
and ``Authority.root`` is the trust root that says so.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import cached_property
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier
from time_stamp import TimeAuthority, der

ISSUER = "https://token.actions.githubusercontent.com"
SOURCE = "https://github.com/acme/kernels"
SIGNER = f"{SOURCE}/.github/workflows/build.yaml@refs/heads/main"
NOW = datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)

_MINUTES = timedelta(minutes=10)  # that a certificate lives, as in the public instance
_STAMPS = ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
_SIGSTORE = "1.3.6.1.4.1.57264.1"
_LOG = "log.authority.test"


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _spki(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _sign(key: ec.EllipticCurvePrivateKey, data: bytes) -> bytes:
    return key.sign(data, ec.ECDSA(hashes.SHA256()))


def _canonical(value: Any) -> bytes:
    """JSON as RFC 8785 has it, for values that are plain strings and whole numbers."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _raw(certificate: x509.Certificate) -> dict[str, str]:
    return {"rawBytes": _text(certificate.public_bytes(Encoding.DER))}


def _milliseconds(time: datetime) -> int:
    return int(time.timestamp() * 1000)


@dataclass
class Authority:
    """One instance with its own keys; what it signs is good for nobody who does not have its ``root``."""

    ca_key: ec.EllipticCurvePrivateKey = field(default_factory=_key)
    log_key: ec.EllipticCurvePrivateKey = field(default_factory=_key)
    stamp_key: ec.EllipticCurvePrivateKey = field(default_factory=_key)
    clock: TimeAuthority = field(default_factory=lambda: TimeAuthority(NOW - timedelta(days=3650)))
    leaves: list[bytes] = field(default_factory=lambda: [b"an entry of somebody else", b"and one more"])

    @cached_property
    def ca(self) -> x509.Certificate:
        """The certificate of the certificate authority, signed by itself."""
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kernelhub test authority")])
        public = self.ca_key.public_key()
        builder = x509.CertificateBuilder(name, name, public, x509.random_serial_number())
        builder = builder.not_valid_before(NOW - timedelta(days=3650)).not_valid_after(NOW + timedelta(days=3650))
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        return (
            builder.add_extension(x509.BasicConstraints(ca=True, path_length=1), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(self.ca_key, hashes.SHA256())
        )

    @property
    def root(self) -> dict[str, Any]:
        """The trust root, as sigstore's ``trusted_root.json``."""
        since = {"start": "2020-01-01T00:00:00Z"}
        return {
            "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
            "tlogs": [self._log("https://log.authority.test", self.log_key)],
            "certificateAuthorities": [
                {
                    "subject": {"organization": "authority.test", "commonName": "kernelhub test authority"},
                    "uri": "https://ca.authority.test",
                    "certChain": {"certificates": [_raw(self.ca)]},
                    "validFor": since,
                }
            ],
            "ctlogs": [self._log("https://stamps.authority.test", self.stamp_key)],
            "timestampAuthorities": [
                {
                    "subject": {"organization": "authority.test", "commonName": "time"},
                    "uri": "https://time.authority.test",
                    "certChain": {"certificates": [_raw(each) for each in self.clock.certificates]},
                    "validFor": since,
                }
            ],
        }

    def sign(self, data: bytes, **how: Any) -> bytes:
        """The bytes of a bundle for ``data``; keywords as in ``certificate``, and ``logged`` for the time of entry."""
        return json.dumps(self.bundle(data, **how)).encode()

    def bundle(
        self, data: bytes, *, logged: datetime | None = None, time: datetime = NOW, **who: Any
    ) -> dict[str, Any]:
        """A bundle over ``data`` signed at ``time``."""
        key = _key()
        certificate = self.certificate(key, time=time, **who)
        signature, digest = _sign(key, data), hashlib.sha256(data).digest()
        body = _entry_body(certificate, signature, digest)
        return {
            "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
            "verificationMaterial": {
                "certificate": _raw(certificate),
                "tlogEntries": [self._entry(body, int((logged or time + timedelta(seconds=5)).timestamp()))],
            },
            "messageSignature": {
                "messageDigest": {"algorithm": "SHA2_256", "digest": _text(digest)},
                "signature": _text(signature),
            },
        }

    def stamped_bundle(self, data: bytes, *, time: datetime = NOW, stamps: tuple[bytes, ...] = ()) -> dict[str, Any]:
        """A bundle as newer logs make it: the log tells no time, a time stamp over the signature does.

        ``stamps`` are others that lie beside the good one.
        """
        bundle = self.bundle(data, time=time)
        material, signed = bundle["verificationMaterial"], bundle["messageSignature"]
        verifier = {"keyDetails": "PKIX_ECDSA_P256_SHA_256", "x509Certificate": material["certificate"]}
        body = {
            "data": {"algorithm": "SHA2_256", "digest": signed["messageDigest"]["digest"]},
            "signature": {"content": signed["signature"], "verifier": verifier},
        }
        version = "0.0.2"
        entry = {"apiVersion": version, "kind": "hashedrekord", "spec": {"hashedRekordV002": body}}
        logged = self._entry(_canonical(entry), 0)
        del logged["integratedTime"], logged["inclusionPromise"]
        logged["kindVersion"]["version"] = version
        good = self.clock.stamp(base64.b64decode(signed["signature"]), time + timedelta(seconds=5))
        given = [{"signedTimestamp": _text(stamp)} for stamp in (*stamps, good)]
        material |= {"tlogEntries": [logged], "timestampVerificationData": {"rfc3161Timestamps": given}}
        return bundle

    def certificate(
        self,
        key: ec.EllipticCurvePrivateKey,
        *,
        time: datetime = NOW,
        signer: str = SIGNER,
        issuer: str = ISSUER,
        source: str | None = SOURCE,
        stamped: bool = True,
    ) -> x509.Certificate:
        """A certificate that says who holds ``key``, valid for ten minutes from ``time``."""
        public = key.public_key()
        builder = x509.CertificateBuilder(self.ca.subject, x509.Name([]), public, x509.random_serial_number())
        builder = builder.not_valid_before(time).not_valid_after(time + _MINUTES)
        usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
        keys = x509.SubjectKeyIdentifier.from_public_key(self.ca_key.public_key())
        extensions: list[tuple[x509.ExtensionType, bool]] = [
            (usage, True),
            (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), False),
            (x509.SubjectKeyIdentifier.from_public_key(public), False),
            (x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(keys), False),
            (x509.SubjectAlternativeName([x509.UniformResourceIdentifier(signer)]), True),
            (_claim(1, issuer.encode()), False),
            (_claim(8, der(0x0C, issuer.encode())), False),
        ]
        if source is not None:
            extensions.append((_claim(12, der(0x0C, source.encode())), False))
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical=critical)
        if stamped:
            before = builder.sign(self.ca_key, hashes.SHA256())
            builder = builder.add_extension(self._stamp(before, time), critical=False)
        return builder.sign(self.ca_key, hashes.SHA256())

    def _stamp(self, certificate: x509.Certificate, time: datetime) -> x509.UnrecognizedExtension:
        """The certificate log's signed timestamp over a certificate that has none yet (RFC 6962, section 3.2)."""
        body = certificate.tbs_certificate_bytes
        issuer = hashlib.sha256(_spki(self.ca_key)).digest()
        head = struct.pack("!BBQH", 0, 0, _milliseconds(time), 1)
        signed = head + issuer + struct.pack("!I", len(body))[1:] + body + b"\0\0"
        signature = _sign(self.stamp_key, signed)
        stamp = b"\0" + hashlib.sha256(_spki(self.stamp_key)).digest() + struct.pack("!QH", _milliseconds(time), 0)
        stamp += struct.pack("!BBH", 4, 3, len(signature)) + signature
        listed = struct.pack("!H", len(stamp)) + stamp
        return x509.UnrecognizedExtension(_STAMPS, der(0x04, struct.pack("!H", len(listed)) + listed))

    def _entry(self, body: bytes, time: int) -> dict[str, Any]:
        """Log ``body``: its place, the proof, the signed head of the tree, and the signed promise with the time."""
        self.leaves.append(body)
        index, log_id = len(self.leaves) - 1, hashlib.sha256(_spki(self.log_key)).digest()
        root = _tree(self.leaves)
        promise = {"body": _text(body), "integratedTime": time, "logID": log_id.hex(), "logIndex": index}
        return {
            "logIndex": str(index),
            "logId": {"keyId": _text(log_id)},
            "kindVersion": {"kind": "hashedrekord", "version": "0.0.1"},
            "integratedTime": str(time),
            "inclusionPromise": {"signedEntryTimestamp": _text(_sign(self.log_key, _canonical(promise)))},
            "inclusionProof": {
                "logIndex": str(index),
                "rootHash": _text(root),
                "treeSize": str(len(self.leaves)),
                "hashes": [_text(node) for node in _path(self.leaves, index)],
                "checkpoint": {"envelope": self._checkpoint(root, log_id)},
            },
            "canonicalizedBody": _text(body),
        }

    def _checkpoint(self, root: bytes, log_id: bytes) -> str:
        note = f"{_LOG} - 1\n{len(self.leaves)}\n{_text(root)}\n"
        signature = log_id[:4] + _sign(self.log_key, note.encode())
        return f"{note}\n\N{EM DASH} {_LOG} {_text(signature)}\n"

    def _log(self, url: str, key: ec.EllipticCurvePrivateKey) -> dict[str, Any]:
        return {
            "baseUrl": url,
            "hashAlgorithm": "SHA2_256",
            "publicKey": {
                "rawBytes": _text(_spki(key)),
                "keyDetails": "PKIX_ECDSA_P256_SHA_256",
                "validFor": {"start": "2020-01-01T00:00:00Z"},
            },
            "logId": {"keyId": _text(hashlib.sha256(_spki(key)).digest())},
        }


def _claim(number: int, value: bytes) -> x509.UnrecognizedExtension:
    return x509.UnrecognizedExtension(ObjectIdentifier(f"{_SIGSTORE}.{number}"), value)


def _entry_body(certificate: x509.Certificate, signature: bytes, digest: bytes) -> bytes:
    return _canonical(
        {
            "apiVersion": "0.0.1",
            "kind": "hashedrekord",
            "spec": {
                "data": {"hash": {"algorithm": "sha256", "value": digest.hex()}},
                "signature": {
                    "content": _text(signature),
                    "publicKey": {"content": _text(certificate.public_bytes(Encoding.PEM))},
                },
            },
        }
    )


def _leaf(data: bytes) -> bytes:
    return hashlib.sha256(b"\0" + data).digest()


def _split(count: int) -> int:
    """The largest power of two below ``count``."""
    return 1 << (count - 1).bit_length() - 1


def _tree(leaves: list[bytes]) -> bytes:
    """The head of a Merkle tree (RFC 6962, section 2.1)."""
    if len(leaves) == 1:
        return _leaf(leaves[0])
    split = _split(len(leaves))
    return hashlib.sha256(b"\1" + _tree(leaves[:split]) + _tree(leaves[split:])).digest()


def _path(leaves: list[bytes], index: int) -> list[bytes]:
    """The hashes that lead from a leaf to the head (RFC 6962, section 2.1.1)."""
    if len(leaves) == 1:
        return []
    split = _split(len(leaves))
    if index < split:
        return [*_path(leaves[:split], index), _tree(leaves[split:])]
    return [*_path(leaves[split:], index - split), _tree(leaves[:split])]
