"""The API of a Kubernetes cluster: requests and their answers."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from penstock.wire.errors import ConfigurationError, NetworkError

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""What a pod is given, to speak to the API."""
_ANSWER_S: Final = 30.0
_GONE: Final = 404


class Access(NamedTuple):
    """Where an API is, http:// or https://; what lets us in; and the certificates to be trusted."""

    server: str
    token: str = ""
    authority: Path | None = None


class KubeApi:
    """Requests, each over a connection of its own. Each raises NetworkError where it is refused."""

    def __init__(self, access: Access) -> None:
        """Raises ConfigurationError."""
        server, token, authority = access
        parts = urlsplit(server)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(
                f"{server!r} is no address of an API; next: name http://HOST:PORT"
            )
        self._server: Final = server
        self._host: Final = parts.hostname
        self._port: Final = parts.port
        self._token: Final = token
        self._trust: Final = (
            ssl.create_default_context(cafile=authority) if parts.scheme == "https" else None
        )

    def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """What the API answers; None where there is no such thing (404)."""
        raw = self.read(method, path, body)
        try:
            return None if raw is None else dict(json.loads(raw))
        except ValueError as error:
            raise NetworkError(f"{method} {self._server}{path} answers no JSON: {error}") from None

    def read(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes | None:
        """The same, as it comes."""
        headers = {"Accept": "*/*"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection = self._connection()
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            raw = response.read()
        except (OSError, HTTPException) as error:
            raise NetworkError(f"the API at {self._server} does not answer: {error!r}") from error
        finally:
            connection.close()
        if response.status == _GONE:
            return None
        if response.status >= 300:
            raise NetworkError(f"{method} {self._server}{path}: {response.status}: {_reason(raw)}")
        return raw

    def _connection(self) -> HTTPConnection:
        if self._trust is None:
            return HTTPConnection(self._host, self._port, timeout=_ANSWER_S)
        return HTTPSConnection(self._host, self._port, timeout=_ANSWER_S, context=self._trust)


def address_within(account: Path = ACCOUNT) -> Access:
    """The API of the cluster in which this process is a pod. Raises ConfigurationError."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    try:
        token = (account / "token").read_text(encoding="utf-8").strip()
    except OSError:
        token = ""
    if not host or not token:
        raise ConfigurationError(
            f"there is no account of Kubernetes in {account}; next: run this in a pod whose "
            "service account is mounted there"
        )
    name = f"[{host}]" if ":" in host else host
    return Access(f"https://{name}:{port}", token, account / "ca.crt")


def _reason(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["message"])
    except (ValueError, KeyError, TypeError):
        return raw[:200].decode(errors="replace")
