"""A real cluster for tests: node processes on loopback, started, killed and restarted by name.

Everything waits on a condition with a deadline; nothing sleeps for a fixed time and hopes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.broker.datadir import format_directory, new_cluster_id
from penstock.cli.certificates import Authority, issue_node, write_files
from penstock.v1 import metadata_pb2, metadata_pb2_grpc
from penstock.wire.transport import CHANNEL_OPTIONS
from tests.integration.ports import free_ports
from tests.support import wait_until

READY_TIMEOUT_S = 60.0
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


class NodeProcess:
    """One node of a test cluster."""

    def __init__(self, directory: Path, node_id: int, broker_port: int) -> None:
        self.directory = directory
        self.node_id = node_id
        self.address = f"127.0.0.1:{broker_port}"
        self.config = directory / "node.toml"
        self.log = directory / "node.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.module = "penstock.broker"
        self._stopped: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert self.process is None or self.process.poll() is not None
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module, "--config", str(self.config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        if number in (signal.SIGSTOP, signal.SIGCONT):
            self._stopped = self.process if number == signal.SIGSTOP else None

    def stop(self, timeout_s: float = READY_TIMEOUT_S) -> int:
        """SIGTERM, and wait for the end; the exit status."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(timeout_s)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def answers(self) -> bool:
        """Whether it is alive and does not stand still by a signal of ours."""
        return self.alive and self._stopped is not self.process

    def partition_directory(self, topic: str, partition: int) -> Path:
        return self.directory / "logs" / f"{topic}-{partition}"


class Cluster:
    """Nodes 1..count, each controller and broker at once."""

    def __init__(
        self,
        directory: Path,
        count: int = 3,
        settings: Mapping[str, object] | None = None,
        authority: Authority | None = None,
        *,
        may_found: bool = True,
    ) -> None:
        self.cluster_id = new_cluster_id()
        self.authority = authority
        self.credentials = client_credentials(authority) if authority is not None else None
        ports = free_ports(2 * count)
        brokers, controllers = ports[:count], ports[count:]
        voters = ",".join(f"{i + 1}@127.0.0.1:{port}" for i, port in enumerate(controllers))
        self.nodes: dict[int, NodeProcess] = {}
        self.controller_addresses = {
            index + 1: f"127.0.0.1:{port}" for index, port in enumerate(controllers)
        }
        for index in range(count):
            node_id = index + 1
            node = NodeProcess(directory / f"node-{node_id}", node_id, brokers[index])
            founds = may_found and node_id == 1
            format_directory(node.directory, self.cluster_id, node_id, may_found=founds)
            values: dict[str, object] = {
                "node.id": node_id,
                "data.dir": str(node.directory),
                "broker.listen": node.address,
                "controller.listen": f"127.0.0.1:{controllers[index]}",
                "controller.quorum.voters": voters,
                "offsets.topic.replication.factor": min(3, count),
                "offsets.topic.num.partitions": 4,
                "transaction.state.topic.replication.factor": min(3, count),
                "transaction.state.topic.num.partitions": 4,
                **self._tls_settings(node),
                **(settings or {}),
            }
            node.config.write_text("".join(f"{key} = {_toml(v)}\n" for key, v in values.items()))
            self.nodes[node_id] = node

    def _tls_settings(self, node: NodeProcess) -> dict[str, object]:
        if self.authority is None:
            return {}
        issued = issue_node(self.authority, node.node_id, self.cluster_id, LOCAL_HOSTS)
        files = write_files(node.directory / "tls", "node", self.authority, issued)
        return {
            "tls.ca": str(files.ca),
            "tls.certificate": str(files.certificate),
            "tls.key": str(files.key),
        }

    def channel(self, node_id: int) -> grpc.Channel:
        """A client's channel to a broker."""
        return open_channel(self.nodes[node_id].address, self.credentials)

    @property
    def bootstrap(self) -> str:
        return ",".join(node.address for node in self.nodes.values())

    def start(self) -> None:
        for node in self.nodes.values():
            if not node.alive:
                node.start()
        self.wait_ready()

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until every running node sees every running broker unfenced."""
        running = {node.node_id for node in self.nodes.values() if node.alive}
        try:
            wait_until(lambda: self._agreed(running), "every broker is unfenced", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log_tails()}") from None

    def _agreed(self, running: set[int]) -> bool:
        for node in self.nodes.values():
            if node.node_id not in running:
                continue
            if not node.alive:
                raise AssertionError(f"node {node.node_id} ended\n{self.log_tails()}")
            picture = self.describe(node.node_id)
            if picture is None or picture.controller_id < 0:
                return False
            if not self.serves(node.node_id):
                return False
            unfenced = {broker.node_id for broker in picture.brokers if not broker.fenced}
            if not running <= unfenced:
                return False
        return True

    def serves(self, node_id: int) -> bool:
        """Whether a broker says of itself that it serves clients."""
        with self.channel(node_id) as channel:
            try:
                request = health_pb2.HealthCheckRequest()
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=2)
            except grpc.RpcError:
                return False
            return answer.status == health_pb2.HealthCheckResponse.SERVING

    def describe(self, node_id: int) -> metadata_pb2.DescribeClusterResponse | None:
        """The cluster as one broker sees it, or None when it does not answer."""
        with self.channel(node_id) as channel:
            stub = metadata_pb2_grpc.MetadataStub(channel)
            try:
                return stub.DescribeCluster(metadata_pb2.DescribeClusterRequest(), timeout=2)
            except grpc.RpcError:
                return None

    def topic(self, name: str, node_id: int | None = None) -> metadata_pb2.TopicDescription:
        """A topic as one running broker sees it."""
        asked = node_id or next(node.node_id for node in self.nodes.values() if node.answers)
        with self.channel(asked) as channel:
            stub = metadata_pb2_grpc.MetadataStub(channel)
            request = metadata_pb2.DescribeTopicsRequest(topics=[name])
            return stub.DescribeTopics(request, timeout=5).topics[0]

    def log_tails(self) -> str:
        """The last lines of every node's output, for a failure's message."""
        parts = []
        for node in self.nodes.values():
            lines = node.log.read_text(errors="replace").splitlines() if node.log.exists() else []
            parts.append("\n".join([f"--- node {node.node_id}", *lines[-25:]]))
        return "\n".join(parts)

    def close(self) -> None:
        for node in self.nodes.values():
            if node.alive:
                node.signal(signal.SIGTERM)
        for node in self.nodes.values():
            if node.process is None:
                continue
            try:
                node.process.wait(20)
            except subprocess.TimeoutExpired:
                node.kill()


def open_channel(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    if credentials is None:
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)


def client_credentials(authority: Authority) -> grpc.ChannelCredentials:
    """What a client shows that is no node."""
    client = authority.issue("client", ["client"])
    return grpc.ssl_channel_credentials(authority.pem, client.key, client.certificate)


@contextlib.contextmanager
def running_cluster(
    directory: Path,
    count: int = 3,
    settings: Mapping[str, object] | None = None,
    authority: Authority | None = None,
) -> Iterator[Cluster]:
    """A started cluster that is stopped at the end, whatever happens; with TLS if signed for."""
    cluster = Cluster(directory, count, settings, authority)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, int) else f'"{value}"'


def environment_without_penstock() -> dict[str, str]:
    """This process' environment with no setting of ours in it, as a user has it."""
    return {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("PENSTOCK_") and key != "GRPC_VERBOSITY"
    }
