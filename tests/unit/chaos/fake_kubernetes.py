"""An API server of Kubernetes on loopback, with the pods of one StatefulSet.

It answers what the harness asks for, and refuses (400) what a real one would not understand: other
paths, verbs and bodies.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "a-token"
PODS = "/api/v1/namespaces/shop/pods"
POLICIES = "/apis/networking.k8s.io/v1/namespaces/shop/networkpolicies"
SELECTOR = "app=log"


class RefusedError(Exception):
    """With a status and a message."""


class FakeKubernetes:
    """Pods that come back when they are deleted, and policies."""

    def __init__(self, pods: int = 3) -> None:
        self.pods = {f"log-{number}": self._pod(f"log-{number}", 0) for number in range(pods)}
        self.policies: dict[str, dict[str, Any]] = {}
        self.requests: list[str] = []
        self.deletions: list[tuple[str, int]] = []
        self.forbidden = False
        self.url = ""
        self._lives = 0

    @staticmethod
    def _pod(name: str, life: int) -> dict[str, Any]:
        return {
            "metadata": {"name": name, "uid": f"{name}/{life}", "labels": {"app": "log"}},
            "spec": {"containers": [{"image": "penstock:1"}]},
            "status": {"phase": "Running"},
        }

    def answer(self, method: str, target: str, body: Any, token: str) -> Any:
        parts = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        self.requests.append(f"{method} {target}")
        if token != f"Bearer {TOKEN}" or self.forbidden:
            raise RefusedError(403, "pods is forbidden: User cannot do that")
        match method, parts.path:
            case "GET", "/version":
                return {"gitVersion": "v1.33.0"}
            case "GET", path if path == PODS:
                self._require(query == {"labelSelector": SELECTOR}, "selector")
                self._replace_deleted()
                return {"kind": "PodList", "items": list(self.pods.values())}
            case "GET", path if path.startswith(PODS) and path.endswith("/log"):
                return f"{self._found(path.split('/')[-2])['metadata']['uid']} says\n"
            case "DELETE", path if path.startswith(PODS + "/"):
                return self._delete_pod(path.rpartition("/")[2], body)
            case "GET", path if path == POLICIES:
                return {"kind": "NetworkPolicyList", "items": list(self.policies.values())}
            case "POST", path if path == POLICIES:
                return self._make_policy(body)
            case "DELETE", path if path == POLICIES:
                name, _, value = query["labelSelector"].partition("=")
                self.policies = {
                    key: one
                    for key, one in self.policies.items()
                    if one["metadata"]["labels"].get(name) != value
                }
                return {"kind": "Status", "status": "Success"}
        raise RefusedError(400, f"{method} {target} is nothing that the harness should ask")

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise RefusedError(400, f"this is no {what}")

    def _found(self, name: str) -> dict[str, Any]:
        if name not in self.pods:
            raise RefusedError(404, f'pods "{name}" not found')
        return self.pods[name]

    def _delete_pod(self, name: str, body: Any) -> Any:
        self._require((body["kind"], body["apiVersion"]) == ("DeleteOptions", "v1"), "options")
        pod = self._found(name)
        if body["preconditions"]["uid"] != pod["metadata"]["uid"]:
            raise RefusedError(409, "the UID in the precondition does not match")
        self.deletions.append((name, body["gracePeriodSeconds"]))
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        # It is seen once more before it is gone.
        pod["left"] = 1
        return pod

    def _replace_deleted(self) -> None:
        for name, pod in list(self.pods.items()):
            if pod.get("left"):
                pod["left"] -= 1
            elif "left" in pod:
                self._lives += 1
                self.pods[name] = self._pod(name, self._lives)

    def _make_policy(self, body: Any) -> Any:
        self._require(
            (body["kind"], body["apiVersion"]) == ("NetworkPolicy", "networking.k8s.io/v1"),
            "policy",
        )
        spec = body["spec"]
        self._require(
            set(spec) == {"podSelector", "policyTypes", "ingress", "egress"}, "policy's spec"
        )
        self._require(body["metadata"]["name"] not in self.policies, "new name")
        self.policies[body["metadata"]["name"]] = body
        return body

    def cut_by_policies(self) -> dict[str, tuple[list[str], list[str]]]:
        """Of each pod that a policy is about: from whom it hears nothing, and to whom it does not
        speak.
        """
        key = "statefulset.kubernetes.io/pod-name"
        found = {}
        for policy in self.policies.values():
            spec = policy["spec"]
            sides = []
            for name, end in (("ingress", "from"), ("egress", "to")):
                ((only,),) = (rule[end] for rule in spec[name])
                (expression,) = only["podSelector"]["matchExpressions"]
                self._require(only["namespaceSelector"] == {}, "selector of all namespaces")
                self._require((expression["key"], expression["operator"]) == (key, "NotIn"), "rule")
                sides.append(expression["values"])
            found[spec["podSelector"]["matchLabels"][key]] = (sides[0], sides[1])
        return found


@contextmanager
def served(kubernetes: FakeKubernetes) -> Iterator[FakeKubernetes]:
    """Have it answer at its ``url``."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            try:
                found = kubernetes.answer(
                    self.command, self.path, body, self.headers.get("Authorization", "")
                )
                status = 200
            except RefusedError as refused:
                status, message = refused.args
                found = {"kind": "Status", "message": message}
            raw = found.encode() if isinstance(found, str) else json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_GET = do_POST = do_PUT = do_DELETE = answer  # noqa: N815 - as the library looks for them.

        def log_message(self, *_: Any) -> None:
            """Nothing: the test says what it saw."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        kubernetes.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield kubernetes
        finally:
            server.shutdown()
            thread.join()
