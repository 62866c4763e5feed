"""Clusters under TLS: they work, they renew, and nobody speaks for another."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import grpc
import pytest

from penstock.cli.certificates import Authority, issue_node, write_files
from penstock.raft_meta.authentication import node_name
from penstock.v1 import (
    cluster_pb2,
    controller_pb2,
    controller_pb2_grpc,
    coordination_pb2,
    coordination_pb2_grpc,
    raft_pb2,
    raft_pb2_grpc,
    replication_pb2,
    replication_pb2_grpc,
)
from penstock.wire.transport import CHANNEL_OPTIONS
from tests.integration import raw
from tests.integration.cluster import LOCAL_HOSTS, Cluster, NodeProcess, running_cluster
from tests.integration.transacting import Producer, committed, given
from tests.support import wait_until

pytestmark = pytest.mark.integration


def node_credentials(authority: Authority, node_id: int, cluster_id: str):
    issued = issue_node(authority, node_id, cluster_id)
    return grpc.ssl_channel_credentials(authority.pem, issued.key, issued.certificate)


def as_node(cluster: Cluster, address: str, server: int, node_id: int) -> grpc.Channel:
    """A channel as node ``node_id`` opens it to node ``server``."""
    assert cluster.authority is not None
    expected = ("grpc.ssl_target_name_override", node_name(server, cluster.cluster_id))
    return grpc.secure_channel(
        address,
        node_credentials(cluster.authority, node_id, cluster.cluster_id),
        options=[*CHANNEL_OPTIONS, expected],
    )


def renew(cluster: Cluster, node: NodeProcess) -> bytes:
    """Write a new certificate over a node's files."""
    assert cluster.authority is not None
    issued = issue_node(cluster.authority, node.node_id, cluster.cluster_id, LOCAL_HOSTS)
    write_files(node.directory / "tls", "node", cluster.authority, issued)
    return issued.certificate


def works(cluster: Cluster, topic: str) -> None:
    """Records are committed by all three replicas, and read back."""
    raw.create_topic(cluster, topic, configs={"min.insync.replicas": "3"})
    raw.produce(cluster, topic, [b"a", b"b"])
    assert [record.value for record in raw.read_all(cluster, topic, at_least=2)] == [b"a", b"b"]
    transacts(cluster, f"{topic}-whole")


def transacts(cluster: Cluster, topic: str) -> None:
    """Brokers ask each other about a transaction, and write its marks."""
    raw.create_topic(cluster, topic, partitions=3)
    producer = Producer(cluster, f"{topic}-writer")
    given(producer.init())
    for commit in (True, False):
        for partition in range(3):
            assert producer.send(topic, [b"%d" % commit], partition) is None
        given(producer.end(commit=commit))
    for partition in range(3):
        assert committed(cluster, topic, partition) == [b"1"]


@pytest.mark.parametrize("client_auth", ["required", "none"])
def test_a_cluster_under_tls_commits_and_renews(tmp_path: Path, client_auth: str) -> None:
    settings = {"tls.client.auth": client_auth}
    with running_cluster(tmp_path, settings=settings, authority=Authority()) as cluster:
        works(cluster, "before")
        for node in cluster.nodes.values():
            renew(cluster, node)
        # A node that comes back is met with the new certificates, by all, on every port.
        node = cluster.nodes[2]
        node.kill()
        node.start()
        cluster.wait_ready()
        works(cluster, "after")
        for other in cluster.nodes.values():
            log = other.log.read_text()
            assert "Traceback" not in log
            if other is not node:
                assert "TLS files were read anew" in log


def test_whoever_trusts_the_next_authority_too_can_follow_to_it(tmp_path: Path) -> None:
    """The authority is replaced under a running cluster, as docs/operating/security.md says."""
    old, new = Authority("old"), Authority("new")
    with running_cluster(tmp_path, authority=old) as cluster:
        for node in cluster.nodes.values():
            (node.directory / "tls" / "ca.pem").write_bytes(old.pem + new.pem)
        for node in cluster.nodes.values():
            issued = issue_node(new, node.node_id, cluster.cluster_id, LOCAL_HOSTS)
            write_files(node.directory / "tls", "node", new, issued)
            (node.directory / "tls" / "ca.pem").write_bytes(old.pem + new.pem)
            node.stop()
            node.start()
        client = old.issue("client", ["client"])
        cluster.credentials = grpc.ssl_channel_credentials(
            old.pem + new.pem, client.key, client.certificate
        )
        cluster.wait_ready()
        works(cluster, "moved")


def raft_hello(cluster: Cluster, node_id: int, receiver: int, cluster_id: str = ""):
    hello = raft_pb2.RaftHello(
        cluster_id=cluster_id or cluster.cluster_id, node_id=node_id, receiver_node_id=receiver
    )
    return raft_pb2.RaftExchangeRequest(hello=hello)


def status_of(call) -> tuple[grpc.StatusCode, str]:
    """How a call ends that must not succeed."""
    try:
        answer = call()
        answers = list(answer) if hasattr(answer, "__next__") else [answer]
    except grpc.RpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError(f"it was answered: {answers}")


def test_nobody_speaks_for_another_node(tmp_path: Path) -> None:
    with running_cluster(tmp_path, authority=Authority()) as cluster:
        picture = cluster.describe(1)
        assert picture is not None
        active = picture.controller_id  # The others refuse heartbeats before they read one.
        own, other = sorted({1, 2, 3} - {active})
        with as_node(cluster, cluster.controller_addresses[active], active, own) as channel:
            raft = raft_pb2_grpc.RaftStub(channel)
            controller = controller_pb2_grpc.ControllerStub(channel)
            registration = cluster_pb2.RegisterBrokerCommand(
                node_id=other, cluster_id=cluster.cluster_id, incarnation_id=b"x" * 16
            )
            forgeries = {
                "raft": lambda: raft.Exchange(
                    iter([raft_hello(cluster, other, active)]), timeout=10
                ),
                "register": lambda: controller.RegisterBroker(
                    controller_pb2.RegisterBrokerRequest(registration=registration), timeout=10
                ),
                "heartbeat": lambda: controller.Heartbeat(
                    iter([controller_pb2.BrokerHeartbeatRequest(node_id=other, broker_epoch=1)]),
                    timeout=10,
                ),
                "alter": lambda: controller.AlterPartition(
                    controller_pb2.AlterPartitionRequest(
                        change=cluster_pb2.AlterPartitionCommand(node_id=other)
                    ),
                    timeout=10,
                ),
                "producer ids": lambda: controller.AllocateProducerIds(
                    controller_pb2.AllocateProducerIdsRequest(
                        allocation=cluster_pb2.AllocateProducerIdsCommand(node_id=other)
                    ),
                    timeout=10,
                ),
                "watch": lambda: controller.WatchMetadata(
                    controller_pb2.WatchMetadataRequest(
                        cluster_id=cluster.cluster_id, node_id=other
                    ),
                    timeout=10,
                ),
            }
            for name, forgery in forgeries.items():
                code, said = status_of(forgery)
                assert code is grpc.StatusCode.PERMISSION_DENIED, (name, code, said)
                assert f"node {own}, as its certificate says, may not speak as node {other}" in said
            # Of another cluster by its words, and a receiver that is not meant.
            for hello in (
                raft_hello(cluster, own, active, "other"),
                raft_hello(cluster, own, other),
            ):
                code, said = status_of(lambda hello=hello: raft.Exchange(iter([hello]), timeout=10))
                assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert controller.DescribeQuorum(controller_pb2.DescribeQuorumRequest(), timeout=10)
        with as_node(cluster, cluster.nodes[active].address, active, own) as channel:
            replication = replication_pb2_grpc.ReplicationStub(channel)
            hello = replication_pb2.ReplicationFetchRequest(
                hello={"cluster_id": cluster.cluster_id, "node_id": other, "broker_epoch": 2**40}
            )
            code, said = status_of(lambda: replication.Fetch(iter([hello]), timeout=10))
            assert code is grpc.StatusCode.PERMISSION_DENIED, said
        refused = cluster.nodes[active].log.read_text()
        assert refused.count("a node was refused") == 5  # Once for each method that was asked.
        works(cluster, "unmoved")


@pytest.mark.parametrize("client_auth", ["required", "none"])
def test_a_client_is_no_node(tmp_path: Path, client_auth: str) -> None:
    settings = {"tls.client.auth": client_auth}
    with running_cluster(tmp_path, 1, settings, Authority()) as cluster:
        assert cluster.authority is not None
        client = cluster.authority.issue("client", ["client", "node-1.other.penstock"])
        shown = grpc.ssl_channel_credentials(cluster.authority.pem, client.key, client.certificate)
        expected = ("grpc.ssl_target_name_override", "localhost")
        options = [*CHANNEL_OPTIONS, expected]
        address = cluster.controller_addresses[1]
        with grpc.secure_channel(address, shown, options=options) as channel:
            controller = controller_pb2_grpc.ControllerStub(channel)
            raft = raft_pb2_grpc.RaftStub(channel)
            for call in (
                lambda: controller.DescribeQuorum(
                    controller_pb2.DescribeQuorumRequest(), timeout=10
                ),
                lambda: controller.ExecuteAdmin(controller_pb2.ExecuteAdminRequest(), timeout=10),
                lambda: raft.Exchange(iter([raft_hello(cluster, 1, 1)]), timeout=10),
            ):
                code, said = status_of(call)
                assert code is grpc.StatusCode.UNAUTHENTICATED
                assert f"connect with one for node-N.{cluster.cluster_id}.penstock" in said
        without = grpc.ssl_channel_credentials(cluster.authority.pem)
        for credentials in (shown, without) if client_auth == "none" else (shown,):
            with grpc.secure_channel(
                cluster.nodes[1].address, credentials, options=CHANNEL_OPTIONS
            ) as channel:
                replication = replication_pb2_grpc.ReplicationStub(channel)
                hello = replication_pb2.ReplicationFetchRequest(
                    hello={"cluster_id": cluster.cluster_id, "node_id": 1, "broker_epoch": 2**40}
                )
                code, said = status_of(lambda: replication.Fetch(iter([hello]), timeout=10))  # noqa: B023 - called at once.
                assert code is grpc.StatusCode.UNAUTHENTICATED
                coordination = coordination_pb2_grpc.CoordinationStub(channel)
                add = coordination_pb2.AddPartitionsRequest(cluster_id=cluster.cluster_id)
                code, _ = status_of(partial(coordination.AddPartitions, add, timeout=10))
                assert code is grpc.StatusCode.UNAUTHENTICATED
                mark = coordination_pb2.WriteMarkersRequest(cluster_id=cluster.cluster_id)
                code, _ = status_of(partial(coordination.WriteMarkers, mark, timeout=10))
                assert code is grpc.StatusCode.UNAUTHENTICATED
                located = replication.Locate(replication_pb2.LocateRequest(), timeout=10).port
                assert bool(located) == (client_auth == "none")


@pytest.mark.parametrize("mistake", ["no TLS", "another authority"])
def test_a_node_that_does_not_belong_says_what_to_check(tmp_path: Path, mistake: str) -> None:
    with running_cluster(tmp_path, authority=Authority()) as cluster:
        odd = cluster.nodes[3]
        odd.stop()
        if mistake == "no TLS":
            lines = odd.config.read_text().splitlines(keepends=True)
            odd.config.write_text("".join(line for line in lines if not line.startswith("tls.")))
        else:
            stranger = Authority("stranger")
            issued = issue_node(stranger, 3, cluster.cluster_id, LOCAL_HOSTS)
            write_files(odd.directory / "tls", "node", stranger, issued)
        already = len(odd.log.read_text())
        odd.start()

        def told() -> str:
            return odd.log.read_text()[already:]

        for peer in (1, 2):
            wait_until(
                lambda peer=peer: any(
                    "no connection to another controller" in line and f"peer={peer} " in line
                    for line in told().splitlines()
                ),
                f"the odd one has told of {peer}",
                60,
            )
        assert "that tls.* is set on both or on neither" in told()
        assert odd.alive
        picture = cluster.describe(1)  # The others need it not, and let nothing of it in.
        assert picture is not None
        assert {broker.node_id for broker in picture.brokers if not broker.fenced} == {1, 2}
        raw.create_topic(cluster, "without", replication_factor=2)


def start_in_vain(node: NodeProcess, override: str) -> str:
    """What a node says that cannot start, in a line."""
    ended = subprocess.run(
        [sys.executable, "-m", "penstock.broker", "--config", node.config, "--set", override],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    return ended.stderr


def test_a_node_says_why_its_files_are_unusable(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 1, authority=Authority())
    stranger = Authority("stranger")
    files = write_files(tmp_path / "wrong", "node", stranger, issue_node(stranger, 1, "other"))
    cases = {
        f"tls.ca={files.ca}": "no authority in tls.ca",
        f"tls.key={files.key}": "is not the key of the certificate",
        f"tls.certificate={tmp_path}/none.pem": "cannot read",
        "tls.ca=": "tls.ca is not set",
    }
    for override, wanted in cases.items():
        assert wanted in start_in_vain(cluster.nodes[1], override)


def test_a_controller_port_is_not_opened_to_strangers_by_accident(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 1)
    ended = start_in_vain(cluster.nodes[1], "controller.listen=0.0.0.0:1")
    assert "controller.listen=0.0.0.0:1 can be reached from other machines" in ended
    assert "set tls.ca, tls.certificate and tls.key" in ended
    assert "set controller.insecure.allow = true" in ended
