"""A throw-away authority and its certificates, for clusters on one machine.

The authority's key is never written anywhere: when its object is gone, nobody signs with it any
more. For clusters that last, docs/operating/security.md makes certificates with one that is kept.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from penstock.raft_meta.authentication import node_name
from penstock.raft_meta.exposure import TlsFiles

VALID: Final = timedelta(days=3650)
_CLOCK_DIFFERENCE: Final = timedelta(hours=1)
_OWNER_ONLY: Final = 0o600


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its key, PEM."""

    certificate: bytes
    key: bytes


class Authority:
    """Signs certificates with a key made for it."""

    def __init__(self, name: str = "penstock dev") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = _name(name)
        now = datetime.now(UTC)
        self._certificate = (
            _builder(self._subject, self._subject, self._key.public_key())
            .not_valid_before(now - _CLOCK_DIFFERENCE)
            .not_valid_after(now + VALID)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )

    @property
    def pem(self) -> bytes:
        """The authority's certificate: what others are to trust."""
        return self._certificate.public_bytes(Encoding.PEM)

    def issue(
        self,
        name: str,
        hosts: Sequence[str] = (),
        *,
        begins: datetime | None = None,
        ends: datetime | None = None,
        usage: Sequence[x509.ObjectIdentifier] = (
            ExtendedKeyUsageOID.SERVER_AUTH,
            ExtendedKeyUsageOID.CLIENT_AUTH,
        ),
    ) -> Issued:
        """A certificate and a new key. ``hosts`` are DNS names and IP addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        builder = (
            _builder(_name(name), self._subject, key.public_key())
            .not_valid_before(begins or now - _CLOCK_DIFFERENCE)
            .not_valid_after(ends or now + VALID)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )
        if hosts:
            names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        return Issued(
            certificate.public_bytes(Encoding.PEM),
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        )


def issue_node(
    authority: Authority, node_id: int, cluster_id: str, hosts: Sequence[str] = ()
) -> Issued:
    """The certificate of a node of the cluster, at these hosts."""
    return authority.issue(f"node-{node_id}", [node_name(node_id, cluster_id), *hosts])


def write_files(directory: Path, name: str, authority: Authority, issued: Issued) -> TlsFiles:
    """Write ``ca.pem``, ``NAME.pem`` and ``NAME-key.pem``, which its owner alone may read."""
    directory.mkdir(parents=True, exist_ok=True)
    files = files_in(directory, name)
    files.ca.write_bytes(authority.pem)
    files.certificate.write_bytes(issued.certificate)
    files.key.unlink(missing_ok=True)
    descriptor = os.open(files.key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OWNER_ONLY)
    with os.fdopen(descriptor, "wb") as file:
        file.write(issued.key)
    return files


def make_cluster_files(
    directory: Path, cluster_id: str, node_ids: Sequence[int], hosts: Sequence[str]
) -> None:
    """Write the files of every node, and a client's, with an authority made for them."""
    authority = Authority()
    for node_id in node_ids:
        issued = issue_node(authority, node_id, cluster_id, hosts)
        write_files(directory, f"node-{node_id}", authority, issued)
    write_files(directory, "client", authority, authority.issue("client", ["client"]))


def files_in(directory: Path, name: str) -> TlsFiles:
    """Where ``write_files`` puts them."""
    return TlsFiles(directory / "ca.pem", directory / f"{name}.pem", directory / f"{name}-key.pem")


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
