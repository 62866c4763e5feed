"""TLS for connectors: the options that they share, and what they mean."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from penstock.pipeline.errors import ConnectorError
from penstock.pipeline.option_map import OptionMap


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """Files by name, as they are on the machine that connects. It pickles."""

    ca_file: str | None
    certificate_file: str | None
    key_file: str | None
    verify: bool

    @classmethod
    def load(cls, options: OptionMap) -> TlsOptions:
        """Options caFile, certificateFile, keyFile, verifyCertificates. Raises OptionError."""
        certificate, key = options.text("certificateFile"), options.text("keyFile")
        if (certificate is None) != (key is None):
            raise options.contradiction("certificateFile and keyFile go together; one is missing")
        verify = options.flag("verifyCertificates", True)
        ca_file = options.text("caFile")
        if ca_file is not None and not verify:
            raise options.contradiction("caFile is of no use with verifyCertificates=false")
        return cls(ca_file, certificate, key, verify)

    def context(self, where: str) -> ssl.SSLContext:
        """Raises ConnectorError where a file cannot be used; ``where`` says whose options."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.certificate_file is not None:
                context.load_cert_chain(self.certificate_file, self.key_file)
        except OSError as error:  # Of which SSLError is one.
            raise ConnectorError(
                f"{where}: caFile, certificateFile or keyFile cannot be used: {error}; next: see "
                "that the files are there, on every machine that connects"
            ) from error
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context
