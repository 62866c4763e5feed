"""docs/operating/controllers.md, step by step, with real nodes and the penstock command."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.broker.datadir import format_directory
from tests.integration.cluster import Cluster, NodeProcess, running_cluster
from tests.integration.ports import free_ports
from tests.integration.raw import create_topic, produce, read_all
from tests.support import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


def penstock_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "penstock.cli", *arguments]


def penstock(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        penstock_command(*arguments),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def quorum(cluster: Cluster, *arguments: str) -> dict:
    """What ``penstock quorum ... --output json`` prints."""
    asked = ("quorum", *arguments, "--bootstrap", cluster.bootstrap, "--output", "json")
    if arguments != ("status",):
        return run_penstock(cluster, *asked)
    done = penstock(*asked)
    assert done.stdout, f"{done.stderr}\n{cluster.log_tails()}"
    found: dict = json.loads(done.stdout)
    assert done.returncode == (0 if found["confirmed"] else 1)
    return found


def run_penstock(cluster: Cluster, *arguments: str) -> dict:
    """What a command prints, which must succeed."""
    done = penstock(*arguments)
    assert done.returncode == 0, f"{arguments}: {done.stderr}\n{cluster.log_tails()}"
    return json.loads(done.stdout)


def voters(description: dict) -> set[int]:
    return {voter["node_id"] for voter in description["voters"]}


def add_node(cluster: Cluster, directory: Path, node_id: int, roles: str) -> NodeProcess:
    """A new node, formatted and started: its settings name the controllers that there are."""
    broker, controller = free_ports(2)
    node = NodeProcess(directory / f"node-{node_id}", node_id, broker)
    format_directory(node.directory, cluster.cluster_id, node_id)
    listed = ",".join(f"{n}@{address}" for n, address in cluster.controller_addresses.items())
    node.config.write_text(
        f'node.id = {node_id}\ndata.dir = "{node.directory}"\nnode.roles = "{roles}"\n'
        f'broker.listen = "{node.address}"\ncontroller.listen = "127.0.0.1:{controller}"\n'
        f'controller.quorum.voters = "{listed}"\noffsets.topic.replication.factor = 1\n'
        "offsets.topic.num.partitions = 4\n"
    )
    cluster.controller_addresses[node_id] = f"127.0.0.1:{controller}"
    if "broker" in roles:
        cluster.nodes[node_id] = node
    node.start()
    return node


def add_voter(cluster: Cluster, node_id: int) -> dict:
    return quorum(cluster, "add", f"{node_id}@{cluster.controller_addresses[node_id]}")


@pytest.mark.parametrize("roles", ["controller,broker", "controller"])
def test_growing_from_one_to_three_to_five(tmp_path: Path, roles: str) -> None:
    with running_cluster(tmp_path, 1) as cluster:
        create_topic(cluster, "kept", replication_factor=1)
        started = []
        try:
            for node_id in range(2, 6):
                started.append(add_node(cluster, tmp_path, node_id, roles))
                assert voters(add_voter(cluster, node_id)) == set(range(1, node_id + 1))
            cluster.wait_ready()
            # The first one is not needed any more: any two of five may go.
            if roles == "controller,broker":
                cluster.nodes[1].kill()
                del cluster.nodes[1]
                wait_until(
                    lambda: quorum(cluster, "status")["leader_id"] in {2, 3, 4, 5},
                    "another one leads",
                )
                create_topic(cluster, "later", replication_factor=1)
        finally:
            for node in started:
                if node.alive:
                    node.stop()


def test_a_dead_controller_is_replaced_for_good(tmp_path: Path) -> None:
    with running_cluster(tmp_path, 3) as cluster:
        create_topic(cluster, "kept", replication_factor=2)
        produce(cluster, "kept", [b"a", b"b"])
        old = cluster.nodes.pop(3)
        old.kill()
        assert voters(quorum(cluster, "remove", "3")) == {1, 2}
        shutil.rmtree(old.directory)
        del cluster.controller_addresses[3]
        add_node(cluster, tmp_path, 3, "controller,broker")
        assert voters(add_voter(cluster, 3)) == {1, 2, 3}
        cluster.wait_ready()
        cluster.nodes[1].kill()
        del cluster.nodes[1]
        create_topic(cluster, "later", replication_factor=1)
        assert [r.value for r in read_all(cluster, "kept", at_least=2)] == [b"a", b"b"]


def test_a_voter_is_not_sought_where_it_is_not(tmp_path: Path) -> None:
    with running_cluster(tmp_path, 3) as cluster:
        for node_id, address in cluster.controller_addresses.items():
            wrong = f"{node_id}@127.0.0.1:1"
            refused = penstock("quorum", "add", wrong, "--bootstrap", cluster.bootstrap)
            assert refused.returncode == 1
            assert f"heard at {address}, and not at 127.0.0.1:1" in refused.stderr
        assert voters(quorum(cluster, "status")) == {1, 2, 3}


def test_what_is_known_of_voters_that_are_down_is_shown(tmp_path: Path) -> None:
    with running_cluster(tmp_path, 3) as cluster:
        before = quorum(cluster, "status")
        assert (before["confirmed"], before["role"]) == (True, "leader")
        first, second = sorted({1, 2, 3} - {before["leader_id"]})
        cluster.nodes[first].kill()

        def unreachable() -> dict | None:
            found = quorum(cluster, "status")
            return next((v for v in found["voters"] if v["is_unreachable"]), None)

        wait_until(lambda: unreachable() is not None, "the dead voter is missed")
        gone = unreachable()
        assert gone is not None
        assert gone["node_id"] == first
        assert gone["silent_ms"] > 0
        # The leader goes on leading, as far as it knows; no majority says so any more.
        cluster.nodes[second].kill()
        cut_off = quorum(cluster, "status")
        assert not cut_off["confirmed"]
        told = penstock("quorum", "status", "--bootstrap", cluster.bootstrap)
        assert "Confirmed: no" in told.stdout
        assert "nothing can be changed" in told.stderr


def test_the_active_controller_is_removed_and_an_empty_disk_does_not_vote(tmp_path: Path) -> None:
    with running_cluster(tmp_path, 3) as cluster:
        leader = quorum(cluster, "status")["leader_id"]
        after = quorum(cluster, "remove", str(leader))
        assert leader not in voters(after)
        assert after["leader_id"] not in (leader, -1)
        again = penstock("quorum", "remove", str(leader), "--bootstrap", cluster.bootstrap)
        assert again.returncode == 1
        assert "is no voter" in again.stderr
        assert "next:" in again.stderr
        assert voters(add_voter(cluster, leader)) == {1, 2, 3}

        # Another one loses its raft directory.
        victim = cluster.nodes[leader]
        victim.stop()
        shutil.rmtree(victim.directory / "raft")
        meta = json.loads((victim.directory / "meta.json").read_text())
        meta["contains"].remove("raft")
        (victim.directory / "meta.json").write_text(json.dumps(meta))
        victim.start()

        def wiped() -> bool:
            found = quorum(cluster, "status")["voters"]
            return any(v["is_wiped"] and v["node_id"] == leader for v in found)

        wait_until(wiped, "the empty directory is seen")
        refused = penstock(
            "quorum", "add", f"{leader}@{cluster.controller_addresses[leader]}",
            "--bootstrap", cluster.bootstrap,
        )  # fmt: skip
        assert refused.returncode == 1
        assert f"penstock quorum remove {leader}" in refused.stderr
        quorum(cluster, "remove", str(leader))
        assert voters(add_voter(cluster, leader)) == {1, 2, 3}
        cluster.wait_ready()


def test_one_survivor_of_three_goes_on(tmp_path: Path) -> None:
    with running_cluster(tmp_path, 3) as cluster:
        create_topic(cluster, "kept", replication_factor=3)
        produce(cluster, "kept", [b"a"])
        for node in cluster.nodes.values():
            node.stop()
        for lost in (2, 3):
            shutil.rmtree(cluster.nodes.pop(lost).directory)
        survivor = cluster.nodes[1]
        arguments = ["quorum", "recover", "--config", str(survivor.config)]
        shown = penstock(*arguments)
        assert shown.returncode == 0, shown.stderr
        assert "Nothing was changed" in shown.stdout
        done = penstock(*arguments, "--accept-loss", "--output", "json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["voters_before"] == [1, 2, 3]
        cluster.start()
        assert voters(quorum(cluster, "status")) == {1}


def test_a_cluster_that_nobody_founded_is_called_that(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 2, may_found=False)
    for node in cluster.nodes.values():
        node.start()
    try:
        cause = "the cluster is not founded yet, as far as controllers 1, 2 know: controller 1"

        def told() -> bool:
            status = penstock("quorum", "status", "--bootstrap", cluster.bootstrap)
            return status.returncode == 1 and cause in status.stderr

        wait_until(told, "both controllers are asked")
        made = penstock("topics", "create", "t", "--bootstrap", cluster.bootstrap)
        assert made.returncode == 1
        assert cause in made.stderr
        assert "next: stop node 1, say `penstock format --data-dir DIR" in made.stderr
        listed = penstock("topics", "list", "--bootstrap", cluster.bootstrap)
        assert listed.returncode == 1
        assert cause in listed.stderr
    finally:
        cluster.close()
