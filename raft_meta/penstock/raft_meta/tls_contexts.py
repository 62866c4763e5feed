"""A node's credentials for connections that gRPC does not make."""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.raft_meta.credentials import Credentials, NodeTls


class TlsContexts:
    """Contexts for either end of a connection, always of what the node's files hold now.

    Both ends must show a certificate of the authority's. Whose certificate it is the user must
    check, by its DNS names. Ask for a context for each connection: connections that stand keep
    theirs. Used on one thread.
    """

    def __init__(self, tls: NodeTls) -> None:
        self._tls = tls
        self._made: dict[ssl._SSLMethod, tuple[Credentials, ssl.SSLContext]] = {}

    def server(self) -> ssl.SSLContext:
        """For a connection that was accepted."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def client(self) -> ssl.SSLContext:
        """For a connection that is opened."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: ssl._SSLMethod) -> ssl.SSLContext:
        current = self._tls.current()
        made = self._made.get(protocol)
        if made is None or made[0] is not current:
            made = self._made[protocol] = (current, _make(protocol, current))
        return made[1]


def _make(protocol: ssl._SSLMethod, credentials: Credentials) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # OpenSSL knows wildcards and takes letters in either case; our names are compared exactly.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    # As gRPC has it: what stands in tls.ca is trusted, be it signed by another authority or not.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    with (
        _as_file(credentials.ca_pem) as authorities,
        _as_file(credentials.certificate_pem) as certificate,
        _as_file(credentials.key_pem) as key,
    ):
        context.load_verify_locations(authorities)
        context.load_cert_chain(certificate, key)
    return context


@contextmanager
def _as_file(data: bytes) -> Iterator[Path]:
    """A file with these bytes, for OpenSSL takes nothing else: in memory where that can be."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("penstock")
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            yield Path(f"/proc/self/fd/{descriptor}")
    else:
        with tempfile.NamedTemporaryFile() as named:  # Readable by the node's user alone.
            named.write(data)
            named.flush()
            yield Path(named.name)
