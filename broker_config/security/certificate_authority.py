"""A federation's certificate authority: X.509 certificates for its broker and members,
and the revocation list.

Certificates have every extension that RFC 5280 asks for: from Python 3.13 on the verifying side
insists.
"""

import ipaddress
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from msgspec import Struct

from broker_config.protocol.errors import UsageError

LIFETIME = timedelta(days=3650)
# certificates are valid from yesterday on: clocks of boxes are wrong by hours
EARLY = timedelta(days=1)
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"{_LABEL}(\.{_LABEL})*")


class KeyPair(Struct, frozen=True):
    """A certificate and its private key, both PEM; no key where its owner keeps it.

    Its repr shows no secret.
    """

    certificate: str
    key: str = ""

    def __repr__(self) -> str:
        return f"KeyPair({self.serial})"

    @property
    def serial(self) -> str:
        """The certificate's number, hexadecimal."""
        return f"{parse(self.certificate).serial_number:x}"

    @property
    def public(self) -> str:
        """The certificate's public key, PEM."""
        return pem_public(parse(self.certificate).public_key())

    @property
    def expires(self) -> datetime:
        """When the certificate expires."""
        return parse(self.certificate).not_valid_after_utc


def create_authority(federation: str, now: datetime) -> KeyPair:
    """Return a new authority, valid for ten years."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = subject(federation, "authority")
    builder = (
        _builder(name, name, key.public_key(), now, now + LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(authority=True), critical=True)
    )
    return KeyPair(_pem(builder.sign(key, hashes.SHA256())), pem_private(key))


def issue_member(
    authority: KeyPair, federation: str, member: str, now: datetime, end: datetime, public: str = ""
) -> KeyPair:
    """A certificate with which `member` connects to the broker;
    it expires no later than the authority's.

    It is for the `public` key (PEM), whose owner keeps the private one, else for a new one.
    """
    private = "" if public else new_private()
    key = _load_public(public or public_of(private))
    builder = _leaf(authority, subject(federation, member), key, now, end).add_extension(
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
    )
    return KeyPair(_sign(authority, builder), private)


def issue_broker(
    authority: KeyPair,
    federation: str,
    hosts: Sequence[str],
    now: datetime,
    end: datetime,
    before: KeyPair | None = None,
) -> KeyPair:
    """A certificate with which the broker proves to be at one of `hosts`;
    for its key `before`, else for a new one.

    Raises:
        UsageError: one of them is no host name or address.
    """
    private = before.key if before else new_private()
    pem = before.public if before else public_of(private)
    key = _load_public(pem)
    names = x509.SubjectAlternativeName([_alternative(host) for host in hosts])
    builder = (
        _leaf(authority, subject(federation, "broker"), key, now, end)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(names, critical=False)
    )
    return KeyPair(_sign(authority, builder), private)


def check_issued(certificate: str, ca: str, federation: str, member: str) -> None:
    """Raise ValueError unless the certificate is this member's,
    and issued by the authority `ca` (PEM).
    """
    found = parse(certificate)
    if found.subject != subject(federation, member):
        raise ValueError("its certificate is somebody else's")
    issuer = parse(ca)
    try:
        found.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        raise ValueError("its certificate is of another authority") from None


def revocation_list(
    authority: KeyPair, revoked: Mapping[str, datetime], now: datetime, number: int
) -> str:
    """The revocation list (CRL, PEM) of certificates: hexadecimal serial -> when.

    `number` counts the lists from 1.

    It does not expire before the authority does: a broker whose list has expired admits nobody any
    more.
    """
    ca = parse(authority.certificate)
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(ca.subject)
        .last_update(now - EARLY)
        .next_update(ca.not_valid_after_utc)
        .add_extension(_identifies(ca), critical=False)
        .add_extension(x509.CRLNumber(number), critical=False)
    )
    for serial, when in revoked.items():
        entry = (
            x509.RevokedCertificateBuilder().serial_number(int(serial, 16)).revocation_date(when)
        )
        builder = builder.add_revoked_certificate(entry.build())
    return _pem(builder.sign(load_private(authority.key), hashes.SHA256()))


def parse(certificate: str) -> x509.Certificate:
    """A certificate (PEM). ValueError if it is none."""
    return x509.load_pem_x509_certificate(certificate.encode())


def subject(federation: str, common: str) -> x509.Name:
    """The name of whom a certificate is for.

    The common name is what the broker takes for the user name.
    """
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
    authority: KeyPair,
    subject: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime,
    end: datetime,
) -> x509.CertificateBuilder:
    ca = parse(authority.certificate)
    return (
        _builder(subject, ca.subject, key, now, min(end, ca.not_valid_after_utc))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(authority=False), critical=True)
        .add_extension(_identifies(ca), critical=False)
    )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime,
    end: datetime,
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


def _sign(authority: KeyPair, builder: x509.CertificateBuilder) -> str:
    return _pem(builder.sign(load_private(authority.key), hashes.SHA256()))


def new_private() -> str:
    """A new private key for a certificate, PEM."""
    return pem_private(ec.generate_private_key(ec.SECP256R1()))


def public_of(private: str) -> str:
    """The public key of a private one, both PEM."""
    return pem_public(load_private(private).public_key())


def load_private(pem: str) -> ec.EllipticCurvePrivateKey:
    """A private key of ours (PEM)."""
    key = serialization.load_pem_private_key(pem.encode(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def _load_public(pem: str) -> ec.EllipticCurvePublicKey:
    key = serialization.load_pem_public_key(pem.encode())
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return key


def _pem(signed: x509.Certificate | x509.CertificateRevocationList) -> str:
    return signed.public_bytes(serialization.Encoding.PEM).decode()


def pem_private(key: ec.EllipticCurvePrivateKey) -> str:
    """A private key, PEM."""
    plain = serialization.NoEncryption()
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain
    ).decode()


def pem_public(key: PublicKeyTypes) -> str:
    """A public key, PEM."""
    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    ).decode()
