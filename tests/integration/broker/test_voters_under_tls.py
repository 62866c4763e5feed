"""The voters change under TLS with certificates on both sides."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from penstock.broker.datadir import format_directory
from penstock.cli.certificates import Authority, issue_node, write_files
from penstock.client import AdminClient
from penstock.raft_meta.exposure import TlsFiles
from penstock.wire.errors import LastVoterError, VoterChangeInProgressError, VoterNotCaughtUpError
from tests.integration.broker.test_voters import penstock_command, run_penstock, voters
from tests.integration.cluster import (
    LOCAL_HOSTS,
    Cluster,
    NodeProcess,
    running_cluster,
)
from tests.integration.ports import free_ports
from tests.integration.raw import create_topic, produce, read_all
from tests.support import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


class Operator:
    """Somebody with a client's certificate."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        assert cluster.authority is not None
        self._cluster = cluster
        issued = cluster.authority.issue("operator", ["operator"])
        self._files = write_files(directory / "operator", "operator", cluster.authority, issued)

    def command(self, *arguments: str) -> list[str]:
        return [
            "--tls-ca", str(self._files.ca),
            "--tls-cert", str(self._files.certificate),
            "--tls-key", str(self._files.key),
            "--bootstrap", self._cluster.bootstrap,
            "quorum", *arguments,
        ]  # fmt: skip

    def quorum(self, *arguments: str) -> dict:
        """What ``penstock quorum ... --output json`` prints."""
        return run_penstock(self._cluster, *self.command(*arguments, "--output", "json"))

    def client(self, **timeouts: int) -> AdminClient:
        return AdminClient(
            self._cluster.bootstrap,
            tls_ca=str(self._files.ca),
            tls_certificate=str(self._files.certificate),
            tls_key=str(self._files.key),
            **timeouts,
        )


def start_node(
    cluster: Cluster, directory: Path, node_id: int, signed_by: Authority, roles: str
) -> NodeProcess:
    """A new node with a certificate of some authority; it trusts that one and the cluster's."""
    assert cluster.authority is not None
    broker, controller = free_ports(2)
    node = NodeProcess(directory / f"node-{node_id}", node_id, broker)
    format_directory(node.directory, cluster.cluster_id, node_id)
    issued = issue_node(signed_by, node_id, cluster.cluster_id, LOCAL_HOSTS)
    files: TlsFiles = write_files(node.directory / "tls", "node", cluster.authority, issued)
    files.ca.write_bytes(signed_by.pem + cluster.authority.pem)
    listed = ",".join(f"{n}@{address}" for n, address in cluster.controller_addresses.items())
    node.config.write_text(
        f'node.id = {node_id}\ndata.dir = "{node.directory}"\nnode.roles = "{roles}"\n'
        f'broker.listen = "{node.address}"\ncontroller.listen = "127.0.0.1:{controller}"\n'
        f'controller.quorum.voters = "{listed}"\noffsets.topic.replication.factor = 1\n'
        f'tls.ca = "{files.ca}"\ntls.certificate = "{files.certificate}"\ntls.key = "{files.key}"\n'
    )
    cluster.nodes[node_id] = node
    node.start()
    cluster.controller_addresses[node_id] = f"127.0.0.1:{controller}"
    return node


def add_voter(cluster: Cluster, operator: Operator, node_id: int) -> set[int]:
    return voters(operator.quorum("add", f"{node_id}@{cluster.controller_addresses[node_id]}"))


def is_held_up(admin: AdminClient) -> bool:
    """Whether a change is under way: one that can not be is refused for a reason of its own."""
    try:
        admin.remove_voter(1)
    except VoterChangeInProgressError:
        return True
    except LastVoterError:
        return False
    raise AssertionError("the only voter was removed")


def test_a_cluster_grows_and_outlives_its_active_controller(tmp_path: Path) -> None:
    authority = Authority()
    with running_cluster(tmp_path, 1, authority=authority) as cluster:
        operator = Operator(cluster, tmp_path)
        create_topic(cluster, "kept", replication_factor=1)
        for node_id in (2, 3):
            start_node(cluster, tmp_path, node_id, authority, "controller,broker")
            assert add_voter(cluster, operator, node_id) == set(range(1, node_id + 1))
        cluster.wait_ready()
        create_topic(cluster, "spread", replication_factor=3)
        produce(cluster, "spread", [b"a"])
        assert operator.quorum("status")["leader_id"] == 1
        cluster.nodes.pop(1).kill()
        create_topic(cluster, "later", replication_factor=2)
        produce(cluster, "later", [b"b"])
        assert [r.value for r in read_all(cluster, "spread", at_least=1)] == [b"a"]
        assert operator.quorum("status")["leader_id"] in {2, 3}


def test_a_newcomer_of_another_authority_is_not_added_and_holds_nobody_up(tmp_path: Path) -> None:
    authority = Authority()
    with running_cluster(tmp_path, 1, authority=authority) as cluster:
        operator = Operator(cluster, tmp_path)
        stranger = start_node(cluster, tmp_path, 9, Authority("another"), "controller")
        del cluster.nodes[9]  # It will never be ready.
        try:
            address = cluster.controller_addresses.pop(9)
            with (
                operator.client(request_timeout_ms=7_500, default_api_timeout_ms=7_500) as admin,
                pytest.raises(VoterNotCaughtUpError, match="controller 9 did not answer") as told,
            ):
                admin.add_voter(9, address)
            assert "certificate" in told.value.message
            assert "controller listens" in stranger.log.read_text()
            log = cluster.nodes[1].log
            wait_until(
                lambda: "CERTIFICATE_VERIFY_FAILED" in log.read_text(),
                "the log says why it is not reached",
            )

            # An operator who is tired of waiting.
            waiting = subprocess.Popen(
                penstock_command(*operator.command("add", f"9@{address}")),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            with operator.client(request_timeout_ms=500, default_api_timeout_ms=500) as admin:
                wait_until(lambda: is_held_up(admin), "the stranger is waited for")
                waiting.kill()
                waiting.wait()
                # Long before the time is over that the command would have waited.
                wait_until(lambda: not is_held_up(admin), "others have their turn", 10)
            start_node(cluster, tmp_path, 2, authority, "controller")
            assert add_voter(cluster, operator, 2) == {1, 2}
        finally:
            stranger.kill()
