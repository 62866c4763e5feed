"""What Kubernetes does with a StatefulSet of nodes, played with processes on loopback.

A pod has an ordinal, which is its node's id, and a disk, which both stay; an address, which is
another one each time that it starts; and the environment that deploy/kubernetes gives it. It is
started by `penstock adopt` and then the node, is ready when /readyz says so, and is stopped as a
kubelet does: preStop, SIGTERM, and after the grace period SIGKILL.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.broker.datadir import new_cluster_id
from tests.integration.cluster import environment_without_penstock
from tests.integration.ports import free_ports
from tests.support import wait_until

PRE_STOP = Path(__file__).resolve().parents[3] / "deploy/docker/prestop.py"
READY_S = 90.0
GRACE_S = 60.0
ADOPT_S = 60.0


class Pod:
    """One of them. ``software`` is put before all else that Python imports."""

    def __init__(self, directory: Path, ordinal: int, ports: Sequence[int]) -> None:
        self.ordinal = ordinal
        self.disk = directory / f"disk-{ordinal}"
        self.log = directory / f"pod-{ordinal}.log"
        self.host = ""
        self.name = ""
        """What it is called in the cluster's DNS, if that is played too."""
        self.broker_port, self.controller_port, self.metrics_port = ports
        self.software: Path | None = None
        self.pre_stop = PRE_STOP  # Of its software's image.
        self.process: subprocess.Popen[bytes] | None = None
        self.killed_by_grace = 0

    @property
    def address(self) -> str:
        """Where its broker is now, by its name if it has one."""
        return f"{self.name or self.host}:{self.broker_port}"

    @property
    def controller(self) -> str:
        """Where its controller is now, by its name if it has one."""
        return f"{self.name or self.host}:{self.controller_port}"

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None


class StatefulSet:
    """Three of them, each a controller and a broker. For one thread.

    With ``hosts``, which stands for the cluster's DNS, they know each other by names that stay. It
    is written anew each time, from what it held before, with the addresses of now.
    """

    def __init__(self, directory: Path, replicas: int = 3, hosts: Path | None = None) -> None:
        self.cluster_id = new_cluster_id()
        self.records = directory / "records"
        self.records.mkdir()
        ports = free_ports(3 * replicas)
        self.pods = [
            Pod(directory, ordinal, ports[3 * ordinal : 3 * ordinal + 3])
            for ordinal in range(replicas)
        ]
        self._hosts = hosts
        self._other_hosts = ""
        if hosts is not None:
            self._other_hosts = hosts.read_text()
            for pod in self.pods:
                pod.name = f"penstock-{pod.ordinal}.test"
        # No two pods, and no two lives of one, have an address in common.
        self._addresses = (f"127.0.0.{number}" for number in itertools.count(20))

    @property
    def bootstrap(self) -> str:
        return ",".join(pod.address for pod in self.pods)

    def environment(self, pod: Pod) -> dict[str, str]:
        """What the manifest makes of the pod's name, and of what the cluster's DNS says now."""
        voters = ",".join(f"{one.ordinal}@{one.controller}" for one in self.pods)
        settings = {
            "CLUSTER_ID": self.cluster_id,
            "NODE_ID": str(pod.ordinal),
            # Probes and preStop of a pod ask within it.
            "METRICS_LISTEN": f"127.0.0.1:{pod.metrics_port}",
            "BOOTSTRAP": pod.address,
            "DATA_DIR": str(pod.disk / "data"),
            "BROKER_LISTEN": f"{pod.host}:{pod.broker_port}",
            "BROKER_ADVERTISED": pod.address,
            "CONTROLLER_LISTEN": f"{pod.host}:{pod.controller_port}",
            "CONTROLLER_ADVERTISED": pod.controller,
            "CONTROLLER_QUORUM_VOTERS": voters,
            "OFFSETS_TOPIC_NUM_PARTITIONS": "4",
            "TRANSACTION_STATE_TOPIC_NUM_PARTITIONS": "4",
        }
        found = environment_without_penstock()
        found |= {f"PENSTOCK_{key}": text for key, text in settings.items()}
        if pod.software is not None:
            found["PYTHONPATH"] = str(pod.software)
        return found

    # --- what a kubelet does

    def schedule(self, pod: Pod) -> None:
        """Give it a place to run, and so an address."""
        pod.host = next(self._addresses)
        if self._hosts is not None:
            known = [f"{one.host} {one.name}\n" for one in self.pods if one.host]
            self._hosts.write_text("\n".join([self._other_hosts, "".join(known)]))

    def adopt(self, pod: Pod) -> subprocess.CompletedProcess[str]:
        """Its init container. Of this software, whatever the node's is."""
        environment = self.environment(pod)
        environment.pop("PYTHONPATH", None)
        return subprocess.run(
            [sys.executable, "-m", "penstock.cli", "adopt", "--records", str(self.records)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=ADOPT_S,
            check=False,
        )

    def run(self, pod: Pod) -> None:
        """Its container, after its init container."""
        assert not pod.is_alive
        pod.disk.mkdir(exist_ok=True)
        done = self.adopt(pod)
        assert done.returncode == 0, done.stderr
        with pod.log.open("ab") as output:
            pod.process = subprocess.Popen(
                [sys.executable, "-m", "penstock.broker"],
                env=self.environment(pod),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def pre_stop(self, pod: Pod) -> None:
        """What deploy/kubernetes has a pod do before SIGTERM, in half of its grace period."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            [sys.executable, str(pod.pre_stop), str(GRACE_S / 2)],
            env={**self.environment(pod), "PATH": path},
            capture_output=True,
            text=True,
            timeout=GRACE_S,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{self.tails()}"

    def delete(self, pod: Pod, pre_stop: Callable[[], None], grace_s: float = GRACE_S) -> None:
        """Stop it as politely as its grace period lets."""
        assert pod.process is not None
        pre_stop()
        pod.process.send_signal(signal.SIGTERM)
        try:
            status = pod.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill(pod)
            pod.killed_by_grace += 1
        else:
            assert status == 0, f"pod {pod.ordinal} ended with {status}\n{self.tails()}"

    def kill(self, pod: Pod) -> None:
        """Its host dies."""
        assert pod.process is not None
        pod.process.kill()
        pod.process.wait()

    # --- what the controller of StatefulSets does

    def start(self) -> None:
        """All at once: podManagementPolicy Parallel."""
        for pod in self.pods:
            self.schedule(pod)
        for pod in self.pods:
            self.run(pod)
        for pod in self.pods:
            self.wait_ready(pod)

    def replace(self, pod: Pod) -> None:
        """A pod in place of one that is gone: same name, same disk, another address."""
        self.schedule(pod)
        self.run(pod)
        self.wait_ready(pod)

    def roll(
        self,
        pre_stop: Callable[[Pod], None],
        prepare: Callable[[Pod], None] = lambda _: None,
    ) -> None:
        """Replace each, the last one first, the next when the one before is ready."""
        for pod in reversed(self.pods):
            self.delete(pod, lambda: pre_stop(pod))  # noqa: B023 - called within the turn.
            prepare(pod)
            self.replace(pod)

    def wait_ready(self, pod: Pod) -> None:
        """Until its readiness probe says yes."""

        def ready() -> bool:
            assert pod.is_alive, f"pod {pod.ordinal} ended\n{self.tails()}"
            return is_ready(pod)

        try:
            wait_until(ready, f"pod {pod.ordinal} is ready", READY_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.tails()}") from None

    def tails(self) -> str:
        """The last lines of what each wrote."""
        parts = []
        for pod in self.pods:
            lines = pod.log.read_text(errors="replace").splitlines() if pod.log.exists() else []
            parts.append("\n".join([f"--- pod {pod.ordinal}", *lines[-15:]]))
        return "\n".join(parts)

    def close(self) -> None:
        alive = [pod.process for pod in self.pods if pod.is_alive and pod.process is not None]
        for process in alive:
            process.terminate()
        for process in alive:
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def is_ready(pod: Pod) -> bool:
    """The readiness probe."""
    if pod.software is not None:
        return _serves(pod)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{pod.metrics_port}/readyz", timeout=2):
            return True
    except (OSError, urllib.error.HTTPError):
        return False


def _serves(pod: Pod) -> bool:
    """The same of former software, by gRPC's health service: registered, and not fenced."""
    with grpc.insecure_channel(pod.address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=2
            )
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def penstock(
    *arguments: str, bootstrap: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A command of this software beside the cluster."""
    return subprocess.run(
        [sys.executable, "-m", "penstock.cli", *arguments, "--bootstrap", bootstrap],
        env={**environment_without_penstock(), **(environment or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def lose(disk: Path) -> None:
    """Put an empty volume in its place."""
    shutil.rmtree(disk)
    (disk / "lost+found").mkdir(parents=True)
