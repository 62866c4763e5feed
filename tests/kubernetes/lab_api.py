"""Requests to the API of the lab's Kubernetes, for its helpers; the standard library is enough."""

from __future__ import annotations

import json
import ssl
import subprocess
import urllib.request
from base64 import b64decode
from typing import Any


class LabApi:
    """The cluster that a kubeconfig names, by its token."""

    def __init__(self, kubeconfig: str) -> None:
        shown = subprocess.run(
            ["kubectl", "config", "view", "--raw", "--flatten", "--output=json"],
            env={"KUBECONFIG": kubeconfig, "PATH": "/usr/local/bin:/usr/bin:/bin"},
            check=True,
            capture_output=True,
        ).stdout
        config = json.loads(shown)
        cluster = config["clusters"][0]["cluster"]
        self._server = cluster["server"]
        self._token = config["users"][0]["user"]["token"]
        authority = b64decode(cluster["certificate-authority-data"]).decode()
        self._trust = ssl.create_default_context(cadata=authority)

    def items(self, path: str) -> list[dict[str, Any]]:
        """What there is of a kind."""
        found = self.call("GET", path)["items"]
        assert isinstance(found, list)
        return found

    def call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """The answer. Raises OSError, as urllib does."""
        request = urllib.request.Request(
            self._server + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {self._token}",
                "Content-Type": "application/json",
            },
        )
        with urllib.request.urlopen(request, timeout=10, context=self._trust) as answer:
            found = json.load(answer)
        assert isinstance(found, dict)
        return found
