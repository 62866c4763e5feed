"""TLS in a client: the files of its settings, read, checked, and read again when they change."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import grpc

from penstock.wire.errors import ConfigurationError

_ANSWER_S: Final = 0.5
_OF_A_NODE: Final = "see docs/operating/security.md"

Stamp = tuple[tuple[int, int, int], ...]


class Diagnosis(NamedTuple):
    """What is wrong, and what to do about it; both empty for nothing."""

    what: str = ""
    step: str = ""


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """A client's ``tls_ca``, and ``tls_certificate`` with ``tls_key`` or neither (empty)."""

    ca: str
    certificate: str = ""
    key: str = ""

    def check(self) -> None:
        """Raise ConfigurationError for files that cannot be used, and say which and why."""
        ca, _, _ = self._read()
        _check(self, ca)

    def _read(self) -> tuple[bytes, bytes | None, bytes | None]:
        ca = _read("tls_ca", self.ca)
        if not self.certificate:
            return ca, None, None
        return ca, _read("tls_certificate", self.certificate), _read("tls_key", self.key)

    def credentials(self) -> grpc.ChannelCredentials:
        """What a channel is made with. Raises ConfigurationError as ``check`` does."""
        ca, certificate, key = self._read()
        _check(self, ca)
        return grpc.ssl_channel_credentials(ca, key, certificate)

    def stamp(self) -> Stamp:
        """What changes when one of the files does."""
        return tuple(_stamp_of(path) for path in (self.ca, self.certificate, self.key) if path)

    def context(self) -> ssl.SSLContext:
        """The same for Python's own TLS, which says better than gRPC what is wrong."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.ca)
        if self.certificate:
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
        return context


class ClientTls:
    """The credentials that new channels are made with, renewed when the files change."""

    def __init__(self, settings: TlsSettings) -> None:
        """Read the files. Raises ConfigurationError."""
        self.settings = settings
        self._stamp = settings.stamp()
        self._credentials = settings.credentials()

    def credentials(self) -> grpc.ChannelCredentials:
        """The credentials in force; another object after a change. Never raises: files that
        cannot be used, as between two that are being written, leave the former in force.
        """
        stamp = self.settings.stamp()
        if stamp != self._stamp:
            try:
                self._credentials = self.settings.credentials()
            except ConfigurationError:
                return self._credentials
            self._stamp = stamp
        return self._credentials


def tls_settings(ca: str, certificate: str, key: str) -> TlsSettings | None:
    """The settings that a client was given, None for no TLS. Raises ConfigurationError."""
    if bool(certificate) != bool(key):
        given, missing = (
            ("tls_certificate", "tls_key") if certificate else ("tls_key", "tls_certificate")
        )
        raise ConfigurationError(f"{given} is set and {missing} is not; next: set both, or neither")
    if certificate and not ca:
        raise ConfigurationError(
            "tls_certificate is set and tls_ca is not; next: name the certificate of the "
            "authority that signed the brokers'"
        )
    return TlsSettings(ca, certificate, key) if ca else None


def _no_password() -> bytes:
    return b""  # Else a person would be asked at the terminal.


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"{name}: cannot read {path}: {error.strerror}; next: name a PEM file that this user "
            "may read"
        ) from None


def _check(settings: TlsSettings, ca: bytes) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=ca.decode("ascii"))
        found = bool(context.get_ca_certs())
    except (ssl.SSLError, ValueError):
        found = False
    if not found:
        raise ConfigurationError(
            f"tls_ca: {settings.ca} holds no authority's certificate that can be read; next: "
            "name the PEM file (-----BEGIN CERTIFICATE-----) that the brokers have as tls.ca"
        )
    if not settings.certificate:
        return
    try:
        # The files again: Python's TLS takes no key from memory.
        context.load_cert_chain(settings.certificate, settings.key, password=_no_password)
    except (ssl.SSLError, OSError) as error:
        reason = (getattr(error, "reason", None) or str(error)).lower().replace("_", " ")
        raise ConfigurationError(
            f"tls_certificate {settings.certificate} and tls_key {settings.key} cannot be used "
            f"together ({reason}); next: name a certificate and its own key, both PEM, the key "
            "not encrypted"
        ) from None


def _stamp_of(path: str) -> tuple[int, int, int]:
    try:
        found = Path(path).stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_size, found.st_ino)


async def explain(
    number: str, port: int, host: str, settings: TlsSettings | None, timeout_s: float
) -> Diagnosis:
    """What is wrong with TLS between this client and who listens there.

    ``number`` is an IP address of ``host``.
    """
    try:
        async with asyncio.timeout(timeout_s):
            if settings is None:
                return await _met_without(number, port)
            return await _met_with(number, port, host, settings)
    except (TimeoutError, OSError, ConfigurationError):
        return Diagnosis()


async def _met_without(number: str, port: int) -> Diagnosis:
    """Why a client without TLS fails: the other end has it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        await _handshake(number, port, None, context)
    except ssl.SSLError as error:
        if "ALERT" not in (error.reason or ""):
            return Diagnosis()  # It speaks something else.
    return Diagnosis(
        "it speaks TLS and this client does not",
        "set tls_ca, and tls_certificate and tls_key where brokers ask clients for a certificate "
        f"({_OF_A_NODE})",
    )


async def _met_with(number: str, port: int, host: str, settings: TlsSettings) -> Diagnosis:
    """Why a client with TLS fails: the other end has none, or one does not trust the other."""
    try:
        is_welcome = await _handshake(number, port, host, settings.context())
    except ssl.SSLCertVerificationError as error:
        return Diagnosis(
            f"its certificate is not accepted: {error.verify_message.rstrip('.')}",
            "check that tls_ca is the authority of this cluster and that the certificate is made "
            f"out to {host}",
        )
    except ConnectionResetError:
        is_welcome = False
    except ssl.SSLError as error:
        reason = error.reason or ""
        if "ALERT" not in reason:
            return Diagnosis(
                f"it does not speak TLS ({reason.lower().replace('_', ' ')})",
                "leave tls_ca, tls_certificate and tls_key out, or turn TLS on at the broker",
            )
        is_welcome = False
    if is_welcome:
        return Diagnosis()
    if not settings.certificate:
        return Diagnosis(
            "it ends the TLS handshake, as brokers do that ask clients for a certificate",
            f"set tls_certificate and tls_key ({_OF_A_NODE})",
        )
    return Diagnosis(
        f"it does not accept the certificate in {settings.certificate}",
        "check that the authority of the brokers' tls.ca has signed it, and that it has not "
        "expired (openssl x509 -in FILE -noout -issuer -enddate)",
    )


async def _handshake(number: str, port: int, host: str | None, context: ssl.SSLContext) -> bool:
    """Connect; whether the other end stays. With TLS 1.3 it refuses after the handshake."""
    context.set_alpn_protocols(["h2"])
    reader, writer = await asyncio.open_connection(
        number, port, ssl=context, server_hostname=host or number
    )
    try:
        async with asyncio.timeout(_ANSWER_S):
            return bool(await reader.read(1))
    except TimeoutError:
        return True
    finally:
        writer.close()
