"""A time-stamping authority on this machine: signed answers to "these bytes were there at that time" (RFC 3161)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_SEQUENCE, _SET, _INTEGER, _OCTETS, _OID, _TIME = 0x30, 0x31, 0x02, 0x04, 0x06, 0x18
_SIGNED_DATA = "1.2.840.113549.1.7.2"
_STAMP = "1.2.840.113549.1.9.16.1.4"
_CONTENT_TYPE, _DIGEST, _CERTIFICATE = "1.2.840.113549.1.9.3", "1.2.840.113549.1.9.4", "1.2.840.113549.1.9.16.2.47"
_SHA256, _ECDSA_SHA256, _POLICY = "2.16.840.1.101.3.4.2.1", "1.2.840.10045.4.3.2", "1.3.6.1.4.1.57264.2"


def der(tag: int, *parts: bytes) -> bytes:
    """One value of ASN.1 in its distinguished encoding."""
    content = b"".join(parts)
    length = len(content).to_bytes((len(content).bit_length() + 7) // 8 or 1, "big")
    head = length if len(content) < 128 else bytes([0x80 | len(length)]) + length
    return bytes([tag]) + head + content


def _oid(dotted: str) -> bytes:
    first, second, *rest = map(int, dotted.split("."))
    return der(_OID, bytes([40 * first + second]), *map(_base128, rest))


def _base128(number: int) -> bytes:
    digits = [number & 0x7F]
    while number := number >> 7:
        digits.append(0x80 | number & 0x7F)
    return bytes(reversed(digits))


def _integer(number: int) -> bytes:
    return der(_INTEGER, number.to_bytes(number.bit_length() // 8 + 1, "big"))


def _algorithm(dotted: str) -> bytes:
    return der(_SEQUENCE, _oid(dotted))


def _attribute(dotted: str, value: bytes) -> bytes:
    return der(_SEQUENCE, _oid(dotted), der(_SET, value))


@dataclass
class TimeAuthority:
    """One authority; ``certificates`` is its chain, the one that signs first."""

    since: datetime
    root_key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    @cached_property
    def certificates(self) -> list[x509.Certificate]:
        root = self._builder("time root", "time root", self.root_key)
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        root = root.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        leaf = self._builder("time stamps", "time root", self.key)
        stamping = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.TIME_STAMPING])
        builders = [leaf.add_extension(stamping, critical=True), root.add_extension(usage, critical=True)]
        return [builder.sign(self.root_key, hashes.SHA256()) for builder in builders]

    def stamp(self, data: bytes, time: datetime) -> bytes:
        """The bytes of a TimeStampResp for ``data`` at ``time``."""
        imprint = der(_SEQUENCE, _algorithm(_SHA256), der(_OCTETS, hashlib.sha256(data).digest()))
        moment = der(_TIME, time.strftime("%Y%m%d%H%M%SZ").encode())
        info = der(_SEQUENCE, _integer(1), _oid(_POLICY), imprint, _integer(1), moment)
        content = der(_SEQUENCE, _oid(_STAMP), der(0xA0, der(_OCTETS, info)))
        certificate = der(0xA0, self.certificates[0].public_bytes(Encoding.DER))
        signers = der(_SET, self._signer(info))
        signed = der(_SEQUENCE, _integer(3), der(_SET, _algorithm(_SHA256)), content, certificate, signers)
        token = der(_SEQUENCE, _oid(_SIGNED_DATA), der(0xA0, signed))
        return der(_SEQUENCE, der(_SEQUENCE, _integer(0)), token)

    def _signer(self, info: bytes) -> bytes:
        leaf = self.certificates[0]
        hashed = der(_OCTETS, hashlib.sha256(leaf.public_bytes(Encoding.DER)).digest())
        attributes = sorted(
            [
                _attribute(_CONTENT_TYPE, _oid(_STAMP)),
                _attribute(_DIGEST, der(_OCTETS, hashlib.sha256(info).digest())),
                _attribute(_CERTIFICATE, der(_SEQUENCE, der(_SEQUENCE, der(_SEQUENCE, hashed)))),
            ]
        )
        signature = self.key.sign(der(_SET, *attributes), ec.ECDSA(hashes.SHA256()))
        who = der(_SEQUENCE, leaf.issuer.public_bytes(), _integer(leaf.serial_number))
        head = (_integer(1), who, _algorithm(_SHA256), der(0xA0, *attributes), _algorithm(_ECDSA_SHA256))
        return der(_SEQUENCE, *head, der(_OCTETS, signature))

    def _builder(self, name: str, issuer: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        by, to = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, each)]) for each in (issuer, name))
        builder = x509.CertificateBuilder(by, to, key.public_key(), x509.random_serial_number())
        return builder.not_valid_before(self.since).not_valid_after(self.since + timedelta(days=7300))
