"""A federation's certificate authority: X.509 certificates for its broker and members, and the revocation list.

Certificates have every extension that RFC 5280 asks for: from Python 3.13 on the verifying side insists.
"""

import ipaddress
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from msgspec import Struct

from broker_config.protocol.errors import UsageError

LIFETIME = timedelta(days=3650)
EARLY = timedelta(days=1)  # certificates are valid from yesterday on: clocks of boxes are wrong by hours
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"{_LABEL}(\.{_LABEL})*")


class KeyPair(Struct, frozen=True):
    """A certificate and its private key, both PEM. Its repr shows no secret."""

    certificate: str
    key: str

    def __repr__(self) -> str:
        return f"KeyPair({self.serial})"

    @property
    def serial(self) -> str:
        """The certificate's number, hexadecimal."""
        return f"{_parse(self.certificate).serial_number:x}"

    @property
    def expires(self) -> datetime:
        """When the certificate expires."""
        return _parse(self.certificate).not_valid_after_utc


def create_authority(federation: str, now: datetime) -> KeyPair:
    """A new authority, valid for ten years."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(federation, "authority")
    builder = (
        _builder(name, name, key.public_key(), now, now + LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(authority=True), critical=True)
    )
    return KeyPair(_pem(builder.sign(key, hashes.SHA256())), _pem_key(key))


def issue_member(authority: KeyPair, federation: str, member: str, now: datetime, end: datetime) -> KeyPair:
    """A certificate with which `member` connects to the broker; it expires no later than the authority's."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _leaf(authority, _name(federation, member), key.public_key(), now, end).add_extension(
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
    )
    return _sign(authority, builder, key)


def issue_broker(
    authority: KeyPair, federation: str, hosts: Sequence[str], now: datetime, end: datetime, key: str = ""
) -> KeyPair:
    """A certificate with which the broker proves to be at one of `hosts`; for the private `key` (PEM), else a new one.

    Raises:
        UsageError: one of them is no host name or address.
    """
    private = _load_key(key) if key else ec.generate_private_key(ec.SECP256R1())
    names = x509.SubjectAlternativeName([_alternative(host) for host in hosts])
    builder = (
        _leaf(authority, _name(federation, "broker"), private.public_key(), now, end)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(names, critical=False)
    )
    return _sign(authority, builder, private)


def revocation_list(authority: KeyPair, revoked: Mapping[str, datetime], now: datetime, number: int) -> str:
    """The revocation list (CRL, PEM) of certificates: hexadecimal serial -> when. `number` counts the lists from 1.

    It does not expire before the authority does: a broker whose list has expired admits nobody any more.
    """
    ca = _parse(authority.certificate)
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(ca.subject)
        .last_update(now - EARLY)
        .next_update(ca.not_valid_after_utc)
        .add_extension(_identifies(ca), critical=False)
        .add_extension(x509.CRLNumber(number), critical=False)
    )
    for serial, when in revoked.items():
        entry = x509.RevokedCertificateBuilder().serial_number(int(serial, 16)).revocation_date(when)
        builder = builder.add_revoked_certificate(entry.build())
    return _pem(builder.sign(_load_key(authority.key), hashes.SHA256()))


def _parse(certificate: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(certificate.encode())


def _name(federation: str, common: str) -> x509.Name:
    """The common name is what the broker takes for the user name."""
    attributes = ((NameOID.ORGANIZATION_NAME, federation), (NameOID.COMMON_NAME, common))
    return x509.Name([x509.NameAttribute(*each) for each in attributes])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if _HOST.fullmatch(host) is None:
            raise UsageError(
                f"the broker's host {host!r} is neither a host name nor an address",
                "write it as members will reach it, without port: broker.local, 192.0.2.7",
            ) from None
        return x509.DNSName(host)


def _leaf(
    authority: KeyPair, subject: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, end: datetime
) -> x509.CertificateBuilder:
    ca = _parse(authority.certificate)
    return (
        _builder(subject, ca.subject, key, now, min(end, ca.not_valid_after_utc))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(authority=False), critical=True)
        .add_extension(_identifies(ca), critical=False)
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLY)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _identifies(ca: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    identifier = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _sign(authority: KeyPair, builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> KeyPair:
    return KeyPair(_pem(builder.sign(_load_key(authority.key), hashes.SHA256())), _pem_key(key))


def _load_key(pem: str) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem.encode(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def _pem(signed: x509.Certificate | x509.CertificateRevocationList) -> str:
    return signed.public_bytes(serialization.Encoding.PEM).decode()


def _pem_key(key: ec.EllipticCurvePrivateKey) -> str:
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain).decode()
