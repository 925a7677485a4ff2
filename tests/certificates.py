"""Certificates for tests: an authority of one's own, and what it signs. PEM files in a folder."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key, as files."""

    certificate: Path
    private_key: Path


class Authority:
    """Signs certificates that are good for an hour."""

    def __init__(self, folder: Path, name: str = "test authority") -> None:
        self._folder, self._key, self._name = folder, ec.generate_private_key(ec.SECP256R1()), _name(name)
        self.certificate = folder / f"{name.replace(' ', '-')}.pem"
        self.certificate.write_bytes(_pem(_built(self._name, self._name, self._key, self._key, ca=True)))

    def pair(self, name: str, *addresses: str) -> Pair:
        """A certificate of `name`, which is also a DNS name, for these IP addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives = [x509.DNSName(name), *(x509.IPAddress(ipaddress.ip_address(one)) for one in addresses)]
        made = _built(_name(name), self._name, key, self._key, ca=False, alternatives=alternatives)
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        pair.certificate.write_bytes(_pem(made))
        pair.private_key.touch(0o600)
        pair.private_key.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        return pair


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _built(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signing: ec.EllipticCurvePrivateKey,
    *,
    ca: bool,
    alternatives: list[x509.GeneralName] | None = None,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    )
    if alternatives:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    return builder.sign(signing, hashes.SHA256())
