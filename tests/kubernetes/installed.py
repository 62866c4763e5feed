"""overlays/dev in a namespace of its own, on the cluster that a kubeconfig names."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.support import wait_until

ROOT = Path(__file__).resolve().parents[2]
DEV = ROOT / "deploy" / "kubernetes" / "overlays" / "dev"
LOAD = Path(__file__).with_name("load.py")
TOPIC, PARTITIONS = "load", 6
ROLLED_S = 900.0
COMMAND_S = 120.0

Object = dict[str, Any]


class Installed:
    """Three nodes, and what is asked of them by kubectl. Removed by ``remove``."""

    def __init__(self, kubeconfig: str, image: str) -> None:
        self.namespace = f"penstock-test-{secrets.token_hex(3)}"
        self.image = image
        self._environment = {**os.environ, "KUBECONFIG": kubeconfig}
        version = json.loads(self.kubectl("version", "--output=json"))["serverVersion"]
        self.version = str(version["gitVersion"])
        self._is_old = int(re.sub(r"\D", "", version["minor"])) < 25

    def kubectl(self, *arguments: str, given: str = "", timeout_s: float = COMMAND_S) -> str:
        """What it prints. Raises AssertionError with what it complains about."""
        done = subprocess.run(
            ["kubectl", *arguments],
            env=self._environment,
            input=given,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def within(self, *arguments: str, timeout_s: float = COMMAND_S) -> str:
        """The same, of the namespace."""
        return self.kubectl("--namespace", self.namespace, *arguments, timeout_s=timeout_s)

    def penstock(self, *arguments: str) -> Any:
        """What a command in the first pod answers, as JSON."""
        command = ("penstock", *arguments, "--output", "json")
        said = self.within("exec", "penstock-0", "--container", "penstock", "--", *command)
        return json.loads(said)

    # --- what is made

    def install(self, directory: Path) -> None:
        """Apply the overlay, and return when all nodes are ready. ``directory`` gets a copy's."""
        name, _, tag = self.image.rpartition(":")
        overlay = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": self.namespace,
            "resources": [os.path.relpath(DEV, directory)],
            "images": [{"name": "penstock", "newName": name, "newTag": tag}],
        }
        (directory / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
        made = list(yaml.safe_load_all(self.kubectl("kustomize", str(directory))))
        self.apply(made)
        self.wait_rolled()

    def apply(self, objects: Sequence[Object]) -> None:
        """Make them, or have them be so."""
        validate = []
        if self._is_old:
            # The lab's Kubernetes: what is left out is not known there yet.
            validate = ["--validate=false"]
            for one in objects:
                if one["kind"] == "PodDisruptionBudget":
                    one["apiVersion"] = "policy/v1beta1"
        self.kubectl("apply", "--filename=-", *validate, given=yaml.safe_dump_all(objects))

    def remove(self) -> None:
        """The namespace and all in it."""
        self.kubectl(
            "delete", "namespace", self.namespace, "--ignore-not-found", timeout_s=ROLLED_S
        )

    # --- pods

    def wait_rolled(self) -> None:
        """Until every pod is that of the newest revision, and ready."""
        self.within(
            "rollout",
            "status",
            "statefulset/penstock",
            f"--timeout={ROLLED_S:.0f}s",
            timeout_s=ROLLED_S + 10,
        )

    def pod(self, name: str) -> Object:
        """What the API knows of it; nothing where there is none."""
        said = self.within("get", "pod", name, "--ignore-not-found", "--output=json")
        return dict(json.loads(said)) if said else {}

    def is_ready(self, name: str, other_than: str = "") -> bool:
        """Whether a pod of that name is, which has not this uid."""
        pod = self.pod(name)
        if not pod or pod["metadata"]["uid"] == other_than:
            return False
        conditions = pod["status"].get("conditions", [])
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    def is_in_sync(self) -> bool:
        """Whether all replicas of the load's topic are."""
        (topic,) = self.penstock("topics", "describe", TOPIC)
        return all(len(one["isr"]) == len(one["replicas"]) for one in topic["partitions"])

    def replace(self, name: str, *options: str) -> None:
        """Delete a pod, and return when another one is ready and all replicas are in sync."""
        uid = self.pod(name)["metadata"]["uid"]
        self.within("delete", "pod", name, *options, timeout_s=ROLLED_S)
        self.wait_replaced(name, uid)

    def wait_replaced(self, name: str, uid: str) -> None:
        """Until a pod of that name with another uid is ready, and all replicas are in sync."""
        wait_until(lambda: self.is_ready(name, uid), f"{name} is ready again", ROLLED_S)
        wait_until(self.is_in_sync, "all replicas are in sync", ROLLED_S)

    def evict(self, name: str) -> str:
        """As `kubectl drain` does: the pod's uid. AssertionError where the budget refuses it."""
        uid = str(self.pod(name)["metadata"]["uid"])
        version = "policy/v1beta1" if self._is_old else "policy/v1"
        about = {"name": name, "namespace": self.namespace}
        self.kubectl(
            "create",
            f"--raw=/api/v1/namespaces/{self.namespace}/pods/{name}/eviction",
            "--filename=-",
            given=json.dumps({"apiVersion": version, "kind": "Eviction", "metadata": about}),
        )
        return uid


class Load:
    """A client in a pod of its own, which writes until ``finish``."""

    def __init__(self, installed: Installed) -> None:
        self._installed = installed
        installed.apply(self._objects())
        self.wait_progress()

    def _objects(self) -> list[Object]:
        about = {"name": "load", "namespace": self._installed.namespace}
        bootstrap = f"penstock.{self._installed.namespace}.svc:9092"
        restricted = {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        pod = {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "containers": [
                {
                    "name": "load",
                    "image": self._installed.image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["python", "/load/load.py", bootstrap, TOPIC, str(PARTITIONS)],
                    "securityContext": restricted,
                    "volumeMounts": [{"name": "load", "mountPath": "/load"}],
                }
            ],
            "volumes": [{"name": "load", "configMap": {"name": "load"}}],
        }
        return [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": about,
                "data": {"load.py": LOAD.read_text()},
            },
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {**about, "labels": {"penstock-client": "true"}},
                "spec": pod,
            },
        ]

    def lines(self) -> list[dict[str, Any]]:
        """What it has said so far."""
        said = self._installed.within("logs", "load", "--tail=-1")
        return [json.loads(line) for line in said.splitlines() if line.startswith("{")]

    def wait_progress(self, records: int = 500) -> None:
        """Until so many more are acknowledged."""
        wanted = self._acknowledged() + records
        wait_until(lambda: self._acknowledged() >= wanted, "writes go on", ROLLED_S)

    def _acknowledged(self) -> int:
        if self._installed.pod("load")["status"]["phase"] == "Pending":
            return 0
        lines = self.lines()
        return int(lines[-1]["acknowledged"]) if lines else 0

    def pause_ms(self, step: Callable[[], None]) -> int:
        """The longest time that a partition waited while this was done, and just after it."""
        self.wait_progress()
        before = len(self.lines())
        step()
        self.wait_progress()
        return max(int(line["pause_ms"]) for line in self.lines()[before:])

    def finish(self) -> dict[str, Any]:
        """Its last line: what is lost and doubled."""
        self._installed.within("exec", "load", "--", "touch", "/tmp/stop")

        def ended() -> bool:
            return self._installed.pod("load")["status"]["phase"] in ("Succeeded", "Failed")

        wait_until(ended, "the load has read all", ROLLED_S)
        return self.lines()[-1]

    def remove(self) -> None:
        """The pod and its program, should it still write."""
        self._installed.within(
            "delete", "pod/load", "configmap/load", "--grace-period=0", "--force"
        )
