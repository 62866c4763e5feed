"""What the harness asks of the API of a Kubernetes cluster: pods and network policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from penstock.chaos.errors import FaultError, PlanError
from penstock.cli.kube_api import ACCOUNT, Access, KubeApi, address_within
from penstock.wire.errors import ConfigurationError, NetworkError


class KubePods(KubeApi):
    """Each request raises FaultError where it is refused."""

    def __init__(self, access: Access) -> None:
        """Raises PlanError."""
        try:
            super().__init__(access)
        except ConfigurationError as error:
            raise PlanError(error.message) from None

    def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """See KubeApi."""
        try:
            return super().call(method, path, body)
        except NetworkError as error:
            raise FaultError(error.message) from error

    def read(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes | None:
        """See KubeApi."""
        try:
            return super().read(method, path, body)
        except NetworkError as error:
            raise FaultError(error.message) from error

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

    def policies(self, namespace: str) -> Sequence[Mapping[str, Any]]:
        """All network policies there."""
        found = self.call("GET", _policies(namespace))
        return [] if found is None else found["items"]

    def make_policy(self, namespace: str, policy: Mapping[str, Any]) -> None:
        """Have a network policy hold."""
        self.call("POST", _policies(namespace), policy)

    def delete_policies(self, namespace: str, selector: str) -> None:
        """Delete all network policies with these labels."""
        self.call("DELETE", f"{_policies(namespace)}?labelSelector={quote(selector)}")


def pods_within(account: Path = ACCOUNT) -> KubePods:
    """Those of the cluster in which this process is a pod. Raises PlanError."""
    try:
        return KubePods(address_within(account))
    except ConfigurationError:
        raise PlanError(
            "the backend kubernetes does not know which cluster is meant; next: run it in a pod "
            "with a service account, or run `kubectl proxy` and name it with --backend-set "
            "api=http://127.0.0.1:8001"
        ) from None


def _policies(namespace: str) -> str:
    return f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"
