"""Bulk requests over HTTP: one connection, kept open, to one node at a time."""

from __future__ import annotations

import base64
import gzip
import http.client
import ssl
from typing import Final
from urllib.parse import quote, urlsplit

from penstock.pipeline.connectors.elasticsearch.bulk import Answer, UnreachableError
from penstock.pipeline.connectors.elasticsearch.options import WHERE, Access
from penstock.pipeline.errors import ConnectorError

# Of a result only this is looked at; the rest would be most of the answer.
_WANTED: Final = "filter_path=items.*.status,items.*.error"


class HttpTransport:
    """Of one task; not for several threads. ``close`` it."""

    def __init__(self, access: Access, ingest_pipeline: str | None) -> None:
        self._access = access
        self._headers = _headers(access)
        self._query = _WANTED
        if ingest_pipeline is not None:
            self._query += f"&pipeline={quote(ingest_pipeline, safe='')}"
        is_tls = any(urlsplit(url).scheme == "https" for url in access.urls)
        self._tls = access.tls.context(WHERE) if is_tls else None
        self._turn = 0
        self._connection: http.client.HTTPConnection | None = None

    def post(self, body: bytes) -> Answer:
        """As ``bulk.Transport`` says."""
        url = self._access.urls[self._turn % len(self._access.urls)]
        if self._access.gzip:
            body = gzip.compress(body, compresslevel=3)
        path = f"{urlsplit(url).path.rstrip('/')}/_bulk?{self._query}"
        try:
            if self._connection is None:
                self._connection = self._connect(url)
            self._connection.request("POST", path, body, self._headers)
            response = self._connection.getresponse()
            data = response.read()
            if response.headers.get("Content-Encoding") == "gzip":
                data = gzip.decompress(data)
        except ssl.SSLCertVerificationError as error:
            self.close()
            raise ConnectorError(
                f"{WHERE}: the certificate of {url} is not trusted: {error.verify_message}; "
                "next: name the authority's certificate as caFile"
            ) from error
        except (OSError, EOFError, http.client.HTTPException) as error:
            # The server may have closed the connection while nobody looked, or died: which of
            # them it was nobody can tell, and all that we send may be sent again.
            self.close()
            self._turn += 1
            raise UnreachableError(f"{url}: {type(error).__name__}: {error}") from error
        if response.status >= 500 or response.will_close:
            self.close()
            self._turn += 1
        return Answer(response.status, data, url)

    def close(self) -> None:
        """Idempotent; ``post`` connects anew."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self, url: str) -> http.client.HTTPConnection:
        parts = urlsplit(url)
        timeout = self._access.request_timeout_s
        host = parts.hostname or ""
        if parts.scheme == "https":
            return http.client.HTTPSConnection(
                host, parts.port or 443, timeout=timeout, context=self._tls
            )
        return http.client.HTTPConnection(host, parts.port or 80, timeout=timeout)


def _headers(access: Access) -> dict[str, str]:
    headers = {"Content-Type": "application/x-ndjson", "Accept": "application/json"}
    if access.gzip:
        headers |= {"Content-Encoding": "gzip", "Accept-Encoding": "gzip"}
    if access.api_key is not None:
        headers["Authorization"] = f"ApiKey {access.api_key}"
    elif access.username is not None:
        pair = f"{access.username}:{access.password}".encode()
        headers["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"
    return headers
