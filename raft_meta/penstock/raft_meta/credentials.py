"""A node's certificate, its key, and the authority that it trusts: read, checked, renewed.

Whatever is wrong with the files is found when they are read, and said in terms of settings and
files: a handshake that fails later tells neither side why.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc
import structlog
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID

from penstock.raft_meta.authentication import node_name
from penstock.raft_meta.denied import what_to_do
from penstock.raft_meta.exposure import TlsFiles
from penstock.wire.errors import ConfigurationError

log = structlog.get_logger()

_Extension = TypeVar("_Extension", bound=x509.ExtensionType)

_GROUP_MAY: Final = 0o070
_OTHERS_MAY: Final = 0o007
_SOON_DAYS: Final = 14
_LONGEST_CHAIN: Final = 10
_DNS_LABEL: Final = re.compile("[A-Za-z0-9_-]{1,63}")


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials that were checked, as gRPC takes them."""

    ca_pem: bytes
    certificate_pem: bytes
    key_pem: bytes
    expires: datetime


def load_credentials(files: TlsFiles, *, name: str, now: datetime) -> Credentials:
    """Read and check the files of the node that is called ``name``.

    Raises ConfigurationError that names the setting and the file: one that cannot be read or is
    no PEM, an encrypted key, a key of another certificate, a certificate that is out of its
    time, not signed by the authority, not made out to this node, or not for both sides of TLS, or
    one that cannot be made sense of.
    """
    ca_pem = _read("tls.ca", files.ca)
    certificate_pem = _read("tls.certificate", files.certificate)
    key_pem = _read("tls.key", files.key)
    try:
        return _checked(files, ca_pem, certificate_pem, key_pem, name=name, now=now)
    except ConfigurationError:
        raise
    except Exception as error:
        # A certificate is taken apart only when it is asked, and each kind of nonsense in one has
        # an exception class of its own.
        raise ConfigurationError(
            f"tls.certificate, tls.ca: a certificate in {files.certificate} or {files.ca} is "
            f"malformed ({type(error).__name__}: {error}); have it issued anew"
        ) from error


def _checked(
    files: TlsFiles,
    ca_pem: bytes,
    certificate_pem: bytes,
    key_pem: bytes,
    *,
    name: str,
    now: datetime,
) -> Credentials:
    authorities = _certificates("tls.ca", files.ca, ca_pem)
    leaf, *others = _certificates("tls.certificate", files.certificate, certificate_pem)
    if _spki(leaf.public_key()) != _spki(_public_key(files.key, key_pem)):
        raise ConfigurationError(
            f"tls.key: {files.key} is not the key of the certificate in {files.certificate}; name "
            "the key that the certificate was requested with"
        )
    _check_time("tls.certificate", files.certificate, leaf, now)
    _check_signed(files, leaf, others, authorities, now)
    _check_name(files.certificate, leaf, name)
    _check_usage(files.certificate, leaf)
    return Credentials(ca_pem, certificate_pem, key_pem, leaf.not_valid_after_utc)


def _read(setting: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        rights = what_to_do(error, path)
        step = f"next: {rights}" if rights else "name a PEM file that the node's user may read"
        raise ConfigurationError(
            f"{setting}: cannot read {path}: {error.strerror}; {step}"
        ) from None


def _certificates(setting: str, path: Path, pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ConfigurationError(
            f"{setting}: {path} holds no certificate that can be read ({error}); name a file of "
            "PEM certificates (-----BEGIN CERTIFICATE-----)"
        ) from None


def _public_key(path: Path, pem: bytes) -> PublicKeyTypes:
    try:
        return load_pem_private_key(pem, password=None).public_key()
    except TypeError:
        raise ConfigurationError(
            f"tls.key: the key in {path} is encrypted, and a node has nobody to ask for the "
            f"password; write it without: openssl pkey -in {path} -out PLAIN, readable by the "
            "node's user alone"
        ) from None
    except Exception as error:  # Each kind of broken key has an exception class of its own.
        raise ConfigurationError(
            f"tls.key: {path} holds no private key that can be read ({error}); name the PEM file "
            "of the certificate's key"
        ) from None


def _spki(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _check_time(setting: str, path: Path, certificate: x509.Certificate, now: datetime) -> None:
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    subject = certificate.subject.rfc4514_string() or "no subject"
    if now > ends:
        raise ConfigurationError(
            f"{setting}: the certificate in {path} ({subject}) has expired at "
            f"{ends:%Y-%m-%d %H:%M} UTC; have a new one signed"
        )
    if now < begins:
        raise ConfigurationError(
            f"{setting}: the certificate in {path} ({subject}) is not valid before "
            f"{begins:%Y-%m-%d %H:%M} UTC; check this machine's clock, or wait"
        )


def _check_signed(
    files: TlsFiles,
    leaf: x509.Certificate,
    others: Sequence[x509.Certificate],
    authorities: Sequence[x509.Certificate],
    now: datetime,
) -> None:
    """Follow the signatures from the node's certificate to an authority."""
    certificate = leaf
    for _ in range(_LONGEST_CHAIN):
        for authority in authorities:
            if _signed_by(certificate, authority):
                _check_time("tls.ca", files.ca, authority, now)
                return
        issuer = next((other for other in others if _signed_by(certificate, other)), None)
        if issuer is None or issuer == certificate:
            break
        _check_time("tls.certificate", files.certificate, issuer, now)
        certificate = issuer
    raise ConfigurationError(
        f"tls.certificate: no authority in tls.ca ({files.ca}) has signed the certificate in "
        f"{files.certificate}, which names its issuer as "
        f"{certificate.issuer.rfc4514_string() or 'nobody'}; name that authority's certificate in "
        "tls.ca, or have the certificate signed by the one named there"
    )


def _signed_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _extension(certificate: x509.Certificate, kind: type[_Extension]) -> _Extension | None:
    try:
        return certificate.extensions.get_extension_for_class(kind).value
    except x509.ExtensionNotFound:
        return None


def _check_name(path: Path, leaf: x509.Certificate, name: str) -> None:
    names = _extension(leaf, x509.SubjectAlternativeName)
    found = [] if names is None else names.get_values_for_type(x509.DNSName)
    if name not in found:
        raise ConfigurationError(
            f"tls.certificate: the certificate in {path} is made out to "
            f"{', '.join(found) or 'no DNS name'} and not to this node, which is {name}; have one "
            f"signed with subjectAltName=DNS:{name} and the host names that clients use"
        )


def _check_usage(path: Path, leaf: x509.Certificate) -> None:
    usage = _extension(leaf, x509.ExtendedKeyUsage)
    if usage is None:
        return
    wanted = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
    if ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE not in usage and not set(wanted) <= set(usage):
        raise ConfigurationError(
            f"tls.certificate: the certificate in {path} may not be used for both sides of a "
            "connection, and nodes are servers and clients to each other; have one signed with "
            "extendedKeyUsage=serverAuth,clientAuth"
        )


def _check_cluster_id(cluster_id: str) -> None:
    if not _DNS_LABEL.fullmatch(cluster_id):
        raise ConfigurationError(
            f"the cluster id {cluster_id!r} cannot be a part of a node's name in a certificate; "
            "only a cluster that is formatted with an id of at most 63 letters, digits, '-' and "
            "'_' can have TLS: leave tls.ca, tls.certificate and tls.key out"
        )


def _stamp(files: TlsFiles) -> tuple[tuple[int, int, int], ...]:
    """What changes when one of the files does, symbolic links that are swung over included."""
    return tuple(_stamp_of(path) for path in (files.ca, files.certificate, files.key))


def _stamp_of(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_size, found.st_ino)


def utc_now() -> datetime:
    """The time of day."""
    return datetime.now(UTC)


class NodeTls:
    """One node's credentials, always those that the files hold now. Safe on any thread.

    The files are looked at whenever a connection is made, never in between: a renewed certificate
    is shown to the next peer, and connections that stand are not disturbed. Files that cannot be
    used are reported once, and the last good ones stay in force.
    """

    def __init__(
        self,
        files: TlsFiles,
        *,
        cluster_id: str,
        node_id: int,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        """Read the files. Raises ConfigurationError; see :func:`load_credentials`."""
        _check_cluster_id(cluster_id)
        self._files = files
        self.cluster_id = cluster_id
        self._name = node_name(node_id, cluster_id)
        self._clock = clock
        self._lock = threading.Lock()
        self._stamp = _stamp(files)
        self._credentials = load_credentials(files, name=self._name, now=clock())
        self._channel_credentials: tuple[Credentials, grpc.ChannelCredentials] | None = None
        self._report("TLS is on")
        self._warn_of_readers()

    def current(self) -> Credentials:
        """The credentials in force, read anew when the files have changed. Never raises."""
        with self._lock:
            stamp = _stamp(self._files)
            if stamp == self._stamp:
                return self._credentials
            self._stamp = stamp
            try:
                renewed = load_credentials(self._files, name=self._name, now=self._clock())
            except ConfigurationError as error:
                log.error("changed TLS files cannot be used, the old stay", reason=error.message)
                return self._credentials
            if renewed != self._credentials:
                self._credentials = renewed
                self._report("TLS files were read anew")
            return self._credentials

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """What a new channel to another node is to be made with."""
        current = self.current()
        with self._lock:
            if self._channel_credentials is None or self._channel_credentials[0] is not current:
                made = grpc.ssl_channel_credentials(
                    current.ca_pem, current.key_pem, current.certificate_pem
                )
                self._channel_credentials = (current, made)
            return self._channel_credentials[1]

    def server_credentials(self, *, client_certificates: bool) -> grpc.ServerCredentials:
        """What a port is to be bound with; renewed by itself.

        With ``client_certificates`` a peer that shows none of the authority's is turned away in
        the handshake; without, peers are not even asked for one.
        """
        served = self.current()

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            # Called by gRPC, on a thread of its own, for each handshake.
            nonlocal served
            current = self.current()
            if current is served:
                return None
            served = current
            return _server_configuration(current)

        # The type stubs do not know that None leaves things as they are.
        fetcher: Any = renewed
        return grpc.dynamic_ssl_server_credentials(
            _server_configuration(served), fetcher, client_certificates
        )

    def _report(self, what: str) -> None:
        expires = self._credentials.expires
        left = expires - self._clock()
        write = log.warning if left.days < _SOON_DAYS else log.info
        write(what, name=self._name, certificate_expires=expires.isoformat(), days=left.days)

    def _warn_of_readers(self) -> None:
        try:
            status = self._files.key.stat()
        except OSError:
            return
        if os.name == "posix" and _may_others_read(status):
            log.warning(
                "others than the node's user may read tls.key",
                path=str(self._files.key),
                next_step=f"chmod 600 {self._files.key}",
            )


def _may_others_read(status: os.stat_result) -> bool:
    """Whether more than the node's user may read a file, but where only its group lets the node.

    So Kubernetes hands out a Secret: root's, with the group of the pod.
    """
    by_group = status.st_uid != os.geteuid() and status.st_gid in (os.getegid(), *os.getgroups())
    return bool(status.st_mode & (_OTHERS_MAY if by_group else _GROUP_MAY | _OTHERS_MAY))


def _server_configuration(credentials: Credentials) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(credentials.key_pem, credentials.certificate_pem)],
        root_certificates=credentials.ca_pem,
    )
