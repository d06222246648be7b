"""A member's request for certificates: public keys,
with a proof that its sender has the private ones.

The file holds two PKCS#10 requests (RFC 2986, PEM), for the key of its TLS certificate and for that
of its signatures. Each is signed with its own key, and has in the attribute unstructuredName the
SHA-256 of the other's, so that halves of two requests do not make one. `openssl req -in FILE -noout
-text -verify` shows the first.
"""

import hashlib
import re
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.x509.oid import AttributeOID, NameOID
from msgspec import Struct

from broker_config.protocol.errors import UsageError
from broker_config.security.certificate_authority import load_private, pem_public, subject
from broker_config.security.kit import Keys, Kit
from broker_config.security.received_file import read_bytes
from broker_config.security.signing import fingerprint

_REQUEST = re.compile(
    r"-----BEGIN CERTIFICATE REQUEST-----.*?-----END CERTIFICATE REQUEST-----", re.DOTALL
)
_AGAIN = "have it sent again: it is the file that edge-node request has written there"


class CertificateRequest(Struct, frozen=True, kw_only=True):
    """Whose keys are to be certified."""

    federation: str
    name: str
    public: str  # PEM, of the TLS key
    signing: str  # the public key of signatures, hexadecimal
    source: str  # the file

    @property
    def fingerprint(self) -> str:
        """What is compared by voice."""
        return request_fingerprint(self.public, self.signing)


def request_fingerprint(public: str, signing: str) -> str:
    """The fingerprint of two public keys: PEM of the TLS key, hexadecimal of the signing key."""
    return fingerprint(f"{public}{signing}".encode())


def encode(keys: Keys | Kit) -> str:
    """The file that asks for the certificates of these keys."""
    tls = load_private(keys.key)
    signing = ed25519.Ed25519PrivateKey.from_private_bytes(keys.signing)
    builder = x509.CertificateSigningRequestBuilder().subject_name(
        subject(keys.federation, keys.name)
    )
    pair = (
        builder.add_attribute(AttributeOID.UNSTRUCTURED_NAME, _digest(signing.public_key())).sign(
            tls, hashes.SHA256()
        ),
        builder.add_attribute(AttributeOID.UNSTRUCTURED_NAME, _digest(tls.public_key())).sign(
            signing, None
        ),
    )
    return "".join(each.public_bytes(serialization.Encoding.PEM).decode() for each in pair)


def read(path: Path) -> CertificateRequest:
    """Read a request and check what it proves.

    Raises:
        UsageError: it is none, was changed, or has keys of another kind; whether the name is free
            is not known here.
    """
    found = _REQUEST.findall(read_bytes(path, "request", _AGAIN).decode(errors="replace"))
    if len(found) != len(("TLS", "signing")):
        raise UsageError(f"{path} is no request (it should hold two, in PEM)", _AGAIN)
    try:
        tls, signing = (x509.load_pem_x509_csr(each.encode()) for each in found)
        return _check(tls, signing, str(path))
    except (ValueError, UnsupportedAlgorithm, x509.AttributeNotFound) as error:
        raise UsageError(f"the request {path} cannot be relied on: {error}", _AGAIN) from None


def _check(
    tls: x509.CertificateSigningRequest, signing: x509.CertificateSigningRequest, source: str
) -> CertificateRequest:
    key = tls.public_key()
    signing_key = signing.public_key()
    if not (isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)):
        raise ValueError("its first key is not one of the curve P-256")
    if not isinstance(signing_key, ed25519.Ed25519PublicKey):
        raise ValueError("its second key is not one of Ed25519")
    if not (tls.is_signature_valid and signing.is_signature_valid):
        raise ValueError("it is not signed with the keys that it names")
    if (_named(tls), _named(signing)) != (_digest(signing_key), _digest(key)):
        raise ValueError("its two halves do not belong together")
    attribute_texts = []
    for oid in (NameOID.ORGANIZATION_NAME, NameOID.COMMON_NAME):
        attribute_texts.append(
            "".join(str(each.value) for each in tls.subject.get_attributes_for_oid(oid))
        )
    federation, name = attribute_texts
    if not tls.subject == signing.subject == subject(federation, name):
        raise ValueError("its two halves have not the same plain name")
    return CertificateRequest(
        federation=federation,
        name=name,
        public=pem_public(key),
        signing=signing_key.public_bytes_raw().hex(),
        source=source,
    )


def _digest(key: PublicKeyTypes) -> bytes:
    return hashlib.sha256(pem_public(key).encode()).hexdigest().encode()


def _named(request: x509.CertificateSigningRequest) -> bytes:
    return request.attributes.get_attribute_for_oid(AttributeOID.UNSTRUCTURED_NAME).value
