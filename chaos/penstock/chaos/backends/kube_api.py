"""The API of a Kubernetes cluster, as far as the harness needs it: pods and network policies."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

from penstock.chaos.errors import FaultError, PlanError

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""What a pod is given, to speak to the API."""
_ANSWER_S: Final = 30.0
_GONE: Final = 404


class KubeApi:
    """Requests, each over a connection of its own. Each raises FaultError where it is refused."""

    def __init__(self, server: str, *, token: str = "", authority: Path | None = None) -> None:
        """``server`` is http:// or https://; ``authority`` has the certificates to be trusted."""
        parts = urlsplit(server)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise PlanError(f"{server!r} is no address of an API; next: name http://HOST:PORT")
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
            raise FaultError(f"{method} {self._server}{path} answers no JSON: {error}") from None

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
            raise FaultError(f"the API at {self._server} does not answer: {error!r}") from error
        finally:
            connection.close()
        if response.status == _GONE:
            return None
        if response.status >= 300:
            raise FaultError(f"{method} {self._server}{path}: {response.status}: {_reason(raw)}")
        return raw

    def _connection(self) -> HTTPConnection:
        if self._trust is None:
            return HTTPConnection(self._host, self._port, timeout=_ANSWER_S)
        return HTTPSConnection(self._host, self._port, timeout=_ANSWER_S, context=self._trust)

    # --- what we ask for

    def version(self) -> str:
        """The cluster's."""
        return str((self.call("GET", "/version") or {}).get("gitVersion", "unknown"))

    def pods(self, namespace: str, selector: str) -> Sequence[Mapping[str, Any]]:
        """The pods with these labels."""
        path = f"/api/v1/namespaces/{namespace}/pods?labelSelector={quote(selector)}"
        found = self.call("GET", path)
        return [] if found is None else found["items"]

    def delete_pod(self, namespace: str, name: str, uid: str, grace_s: int) -> None:
        """Delete that very pod, not one that has its name by now; nothing where it is gone."""
        self.call(
            "DELETE",
            f"/api/v1/namespaces/{namespace}/pods/{name}",
            {
                "apiVersion": "v1",
                "kind": "DeleteOptions",
                "gracePeriodSeconds": grace_s,
                "preconditions": {"uid": uid},
            },
        )

    def log(self, namespace: str, name: str) -> bytes:
        """What a pod's container has written; nothing where it is gone."""
        return self.read("GET", f"/api/v1/namespaces/{namespace}/pods/{name}/log") or b""

    def make_policy(self, namespace: str, policy: Mapping[str, Any]) -> None:
        """Have a network policy hold."""
        self.call("POST", _policies(namespace), policy)

    def delete_policies(self, namespace: str, selector: str) -> None:
        """Delete all network policies with these labels."""
        self.call("DELETE", f"{_policies(namespace)}?labelSelector={quote(selector)}")


def api_within(account: Path = ACCOUNT) -> KubeApi:
    """The API of the cluster in which this process is a pod. Raises PlanError."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    try:
        token = (account / "token").read_text(encoding="utf-8").strip()
    except OSError:
        token = ""
    if not host or not token:
        raise PlanError(
            "the backend kubernetes does not know which cluster is meant; next: run it in a pod "
            "with a service account, or run `kubectl proxy` and name it with --backend-set "
            "api=http://127.0.0.1:8001"
        )
    name = f"[{host}]" if ":" in host else host
    return KubeApi(f"https://{name}:{port}", token=token, authority=account / "ca.crt")


def _policies(namespace: str) -> str:
    return f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"


def _reason(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["message"])
    except (ValueError, KeyError, TypeError):
        return raw[:200].decode(errors="replace")
