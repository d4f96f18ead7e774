# SPDX-License-Identifier: Apache-2.0
"""Certificates of a federation's own authority, and the key pairs that prove who a node is.

The second module that touches a cryptographic library (``ciphers`` is the first): X.509 with P-384
throughout, the curve that Flower's SuperLink asks of its nodes.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedloom.errors import Refusal

_NAME = re.compile(r"(\*\.)?([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)*[A-Za-z0-9-]{1,63}")
_SLACK = timedelta(hours=1)  # a box without a battery may wake up in the past


@dataclass(frozen=True)
class Issued:
    """A certificate and its private key, both PEM."""

    certificate: bytes
    key: bytes


def authority(days: int, name: str = "Fedloom CA") -> Issued:
    """Make a certificate authority that signs servers and nothing below itself."""
    key = ec.generate_private_key(ec.SECP384R1())
    usage = _usage(key_cert_sign=True, crl_sign=True)
    constraints = x509.BasicConstraints(ca=True, path_length=0)
    made = (
        _builder(_named(name), _named(name), key.public_key(), days)
        .add_extension(constraints, critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA384())
    )
    return Issued(made.public_bytes(serialization.Encoding.PEM), _private(key))


def server(ca: Issued, hosts: Sequence[str], days: int) -> Issued:
    """Make a server's certificate for all names and addresses that clients may dial.

    Raises
    ------
    Refusal
        If a host is neither an IP address nor a name.
    """
    signer = x509.load_pem_x509_certificate(ca.certificate)
    signing = serialization.load_pem_private_key(ca.key, None)
    if not isinstance(signing, ec.EllipticCurvePrivateKey):
        raise Refusal("the authority's key is no elliptic-curve key: expected what init made")
    key = ec.generate_private_key(ec.SECP384R1())
    authority_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key())
    made = (
        _builder(_named(hosts[0]), signer.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_host(h) for h in hosts]), critical=False)
        .add_extension(authority_key, critical=False)
        .sign(signing, hashes.SHA384())
    )
    return Issued(made.public_bytes(serialization.Encoding.PEM), _private(key))


def node_keys(comment: str) -> tuple[bytes, bytes]:
    """Return a node's private and public key, as ``ssh-keygen -t ecdsa -b 384`` writes them."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return private, public + b" " + comment.encode() + b"\n"


def check_server(certificate: bytes, ca: bytes, host: str, now: datetime | None = None) -> datetime:
    """Hold a server's certificate against its authority and a host; return its last day.

    Raises
    ------
    Refusal
        If another authority signed it, it does not name the host, or its time is over.
    """
    made = x509.load_pem_x509_certificate(certificate)
    signer = x509.load_pem_x509_certificate(ca)
    try:
        made.verify_directly_issued_by(signer)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise Refusal(
            "the server's certificate is of another authority: expected the one of the ca.crt"
            " beside it; make a new deployment or bring the files that belong together"
        ) from error
    named = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    if _host(host) not in list(named):
        raise Refusal(
            f"the server's certificate does not name {host}: expected one of"
            f" {', '.join(str(name.value) for name in named)}; init again with --host {host}"
        )
    last = made.not_valid_after_utc
    if (now or datetime.now(UTC)) > last:
        raise Refusal(f"the server's certificate ended on {last:%Y-%m-%d}: init a new deployment")
    return last


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SLACK)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _NAME.fullmatch(host) or len(host) > 253:
            raise Refusal(
                f'--host "{host}": expected a DNS name or an IP address, without port or scheme'
            ) from None
        return x509.DNSName(host)


def _named(name: str) -> x509.Name:
    # A common name holds 64 characters at most; what counts is the alternative names.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        encipher_only=False,
        decipher_only=False,
    )
