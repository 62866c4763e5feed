"""`penstock can-roll`, `drain`, `decommission`, `doctor` and `metrics` on clusters that run."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.client import AdminClient, Consumer, Producer
from tests.integration.cli.dev_cluster import COMMAND, DevCluster, Finished
from tests.integration.cluster import Cluster, environment_without_penstock, running_cluster
from tests.support import wait_until

pytestmark = pytest.mark.integration

NOTHING_DONE_S = 20.0


class Operator:
    """Runs commands against a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def run(self, *arguments: str) -> Finished:
        done = CliRunner().invoke(
            app, arguments, env={"PENSTOCK_BOOTSTRAP": self.cluster.bootstrap}
        )
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Finished(done.exit_code, done.stdout, done.stderr)

    def ok(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.status == 0, f"{done}\n{self.cluster.log_tails()}"
        return done.stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--output", "json").stdout)

    def findings(self) -> list[str]:
        """What the doctor finds, but for what this machine is to blame for: its disk and clock."""
        return [
            f"{one['severity']}: {one['about']}: {one['what']}"
            for one in self.json("doctor")["findings"]
            if "its directory" not in one["what"] and one["about"] != "clocks"
        ]

    def state(self, node: int) -> str:
        (found,) = [
            line
            for line in self.ok("cluster", "describe").splitlines()
            if line.split()[:1] == [str(node)] and self.cluster.nodes[node].address in line
        ]
        return " ".join(found.split())

    def leaders(self, topic: str) -> list[int]:
        (described,) = self.json("topics", "describe", topic)
        return [partition["leader"] for partition in described["partitions"]]


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Operator]:
    with running_cluster(tmp_path) as cluster:
        yield Operator(cluster)


def test_a_node_is_drained_stopped_and_started(three: Operator) -> None:
    three.ok("topics", "create", "orders", "--partitions", "6", "--replication-factor", "3")
    assert three.findings() == []
    assert three.json("can-roll", "2") == {"node_id": 2, "can_roll": True, "reasons": []}
    assert "can be stopped" in three.ok("can-roll", "2")

    with Producer(three.cluster.bootstrap, acks="all", max_block_ms=15_000) as producer:
        sent = [producer.send("orders", b"%d" % n, partition=n % 6) for n in range(600)]
        assert "drained broker 2" in three.ok("drain", "2")
        sent += [producer.send("orders", b"%d" % n, partition=n % 6) for n in range(600, 1200)]
        for future in sent:
            future.result(30)
    assert set(three.leaders("orders")) == {1, 3}
    assert "drained 0" in three.state(2)
    three.ok("drain", "2")  # The same again changes nothing.

    assert three.ok("can-roll", "2"), "it may still be stopped itself"
    no = three.run("can-roll", "1")
    assert no.status == 1
    assert "without node 1 fewer replicas of orders-0" in no.stdout
    assert "broker 2 is drained" in no.stdout

    began_s = time.monotonic()
    assert three.run("can-roll", "1", "--wait", "1").status == 1
    assert time.monotonic() - began_s >= 1

    assert three.cluster.nodes[2].stop() == 0
    three.cluster.nodes[2].start()
    three.cluster.wait_ready()
    assert "live" in three.state(2), "a new process is not drained"
    assert three.ok("can-roll", "1", "--wait", "30")

    three.ok("drain", "2")
    undone = three.run("drain", "2", "--undo", "--output", "json")
    assert json.loads(undone.stdout) == {"node_id": 2, "drained": False}
    three.ok("partitions", "elect")
    assert sorted(three.leaders("orders")) == [1, 1, 2, 2, 3, 3]
    with Consumer(three.cluster.bootstrap, topics=["orders"], auto_offset_reset="earliest") as read:
        got: set[bytes] = set()
        wait_until(lambda: len(take(read, got)) == 1200, "all is read", 30)


def take(consumer: Consumer, got: set[bytes]) -> set[bytes]:
    got.update(record.value or b"" for record in consumer.poll(500))
    return got


def test_a_drain_that_cannot_end_ends_in_time(three: Operator) -> None:
    three.ok("topics", "create", "single", "--partitions", "3", "--replication-factor", "1")
    began_s = time.monotonic()
    late = three.run("drain", "1", "--timeout", "2")
    assert time.monotonic() - began_s < 2 + NOTHING_DONE_S / 2
    assert late.status == 1
    assert "leads 1 partition still, for which no other replica is in sync" in late.stderr
    assert "error: broker 1 is drained, and within 2 s nobody else came in sync" in late.stderr
    assert "(single-" in late.stderr
    assert "next: wait until others are in sync" in late.stderr
    assert any("the only replica of single" in why for why in reasons(three, 1))
    unknown = three.run("drain", "9")
    assert (unknown.status, "broker 9 is not registered" in unknown.stderr) == (1, True)
    assert three.run("can-roll", "9").status == 1

    nobody = three.run("drain", "1", "--timeout", "1", "-b", "127.0.0.1:1")
    assert (nobody.status, "Traceback" in nobody.stderr) == (1, False)

    # Most controllers hang: there is nobody to take it down, and it ends in time all the same.
    three.ok("drain", "1", "--undo")
    for node in (2, 3):
        three.cluster.nodes[node].signal(signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        hung = three.run("drain", "1", "--timeout", "3", "-b", three.cluster.nodes[1].address)
        assert hung.status == 1
        assert time.monotonic() - began_s < 3 + NOTHING_DONE_S / 2
        assert "error: " in hung.stderr
    finally:
        for node in (2, 3):
            three.cluster.nodes[node].signal(signal.SIGCONT)


def reasons(operator: Operator, node: int) -> list[str]:
    told: list[str] = operator.json("can-roll", str(node))["reasons"]
    return told


def test_the_doctor_says_what_a_dead_node_means(three: Operator) -> None:
    three.ok("topics", "create", "orders", "--partitions", "2", "--replication-factor", "3")
    three.ok("topics", "create", "strict", "--config", "min.insync.replicas=3")
    three.ok("topics", "create", "lost", "--replication-factor", "1", "--partitions", "3")
    assert three.findings() == []
    three.cluster.nodes[3].kill()
    wait_until(lambda: "fenced" in three.state(3), "it is fenced", 30)
    wait_until(lambda: "controller 3" in " ".join(three.findings()), "its voter is missed", 30)
    found = "\n".join(three.findings())
    assert "critical: broker 3: it is fenced" in found
    assert "does not answer: " in found
    assert "critical: controller 3: it does not answer the leader" in found
    assert "orders-0, orders-1" in found
    assert "broker 3 is down or stopping" in found
    assert "strict-0 has fewer replicas in sync than min.insync.replicas" in found
    assert "offline: nobody leads" in found
    shown = three.run("doctor")
    assert shown.status == 1
    assert shown.stdout.count("\n  next: ") >= 5
    three.cluster.nodes[3].start()
    three.cluster.wait_ready()
    wait_until(lambda: three.findings() == [], "all is well again", 30)


def test_a_wrong_advertised_address_is_named(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    with cluster.nodes[2].config.open("a") as config:
        config.write('broker.advertised = "no-such-host.invalid:9092"\n')
    try:
        cluster.start()
        operator = Operator(cluster)
        found = "\n".join(operator.findings())
        assert (
            "broker 2: its advertised address no-such-host.invalid:9092 does not resolve" in found
        )
        refused = operator.run("metrics", "2")
        assert refused.status == 1
        assert "no-such-host.invalid" in refused.stderr
    finally:
        cluster.close()


def test_a_node_is_taken_out_of_the_cluster(tmp_path: Path) -> None:
    with running_cluster(tmp_path, 4) as cluster:
        operator = Operator(cluster)
        with AdminClient(cluster.bootstrap) as admin:
            placed = [[4, 1], [1, 4], [2, 4], [4, 2], [1, 2]]
            admin.create_topic("orders", replica_assignments=placed)
        with Producer(cluster.bootstrap, acks="all") as producer:
            for n in range(400):
                producer.send("orders", b"%d" % n, partition=n % 5)
        plan = operator.run("decommission", "4")
        assert plan.status == 0
        assert "1. move 4 replicas of node 4 to other brokers" in plan.stdout
        assert "make controller 4 no voter" in plan.stdout
        assert "nothing was changed; add --execute" in plan.stdout
        assert any(4 in replicas for replicas in replicas_of(operator))

        # Who is to take the replicas is down, so that it is interrupted halfway; then it goes on.
        cluster.nodes[3].kill()
        first = subprocess.Popen(
            [*COMMAND, "decommission", "4", "--to", "3", "--execute"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,  # So that what is not read here is left for communicate().
            env=environment_without_penstock() | {"PENSTOCK_BOOTSTRAP": cluster.bootstrap},
        )
        assert first.stderr is not None
        begun = first.stderr.readline()
        first.send_signal(signal.SIGINT)
        _, told = first.communicate(timeout=30)
        assert first.returncode == 130, begun + told
        assert b"moved 0 of 4 replicas of node 4" in begun
        assert b"stopped waiting: moves that have begun go on" in told
        assert b"Traceback" not in told
        again = operator.run("decommission", "4")
        assert "move 4 replicas of node 4 to other brokers (4 on the way already)" in again.stdout
        cluster.nodes[3].start()
        cluster.wait_ready()
        done = operator.run("decommission", "4", "--execute")
        assert done.status == 0, done
        assert "controller 4 votes no more" in done.stdout
        assert "next: stop node 4, then `penstock cluster unregister 4`" in done.stdout
        assert not any(4 in replicas for replicas in replicas_of(operator))
        voters = [voter["node_id"] for voter in operator.json("quorum", "status")["voters"]]
        assert voters == [1, 2, 3]

        assert cluster.nodes[4].stop() == 0
        with AdminClient(cluster.bootstrap) as admin:
            wait_until(
                lambda: any(b.fenced for b in admin.describe_cluster().brokers), "it is gone", 30
            )
        last = operator.json("decommission", "4", "--execute")
        assert (last["executed"], last["steps"], last["remaining_replicas"]) == (True, [], 0)
        with AdminClient(cluster.bootstrap) as admin:
            assert [broker.node_id for broker in admin.describe_cluster().brokers] == [1, 2, 3]
        assert "broker 4 is not registered" in operator.run("decommission", "4").stderr
        with Consumer(
            cluster.bootstrap, topics=["orders"], auto_offset_reset="earliest"
        ) as consumer:
            got: set[bytes] = set()
            wait_until(lambda: len(take(consumer, got)) == 400, "nothing is lost", 30)


def replicas_of(operator: Operator) -> list[list[int]]:
    (topic,) = operator.json("topics", "describe", "orders")
    return [partition["replicas"] for partition in topic["partitions"]]


def test_replicas_that_have_nowhere_to_go_are_said_before_anything_moves(three: Operator) -> None:
    three.ok("topics", "create", "orders", "--replication-factor", "3")
    refused = three.run("decommission", "3", "--execute")
    assert refused.status == 1
    assert "orders-0 has replicas on every broker that could take one" in refused.stderr
    assert three.run("decommission", "3", "--to", "3").status == 2
    voters = [voter["node_id"] for voter in three.json("quorum", "status")["voters"]]
    assert voters == [1, 2, 3], "it votes still"


def test_metrics_and_the_doctor_work_under_tls_without_an_http_port(tmp_path: Path) -> None:
    dev = DevCluster(tmp_path / "data", 27_300)
    try:
        dev.start("--tls")
        options = dev.messages.partition("clients need: ")[2].splitlines()[0].split()
        dev.ok("topics", "create", "orders", *options)
        dev.ok("produce", "orders", *options, stdin=b"one\ntwo\n")
        told = [
            sample
            for node in ("1", "2", "3")
            for sample in json.loads(
                dev.ok("metrics", node, "--match", "produced_records", "--output", "json", *options)
            )
        ]
        carried = {"orders": 0.0, "": 0.0}
        for sample in told:
            topic = sample["labels"].get("topic", "")
            by = "topic_" if topic else ""
            assert sample["name"] == f"penstock_{by}produced_records_total"
            carried[topic] += sample["value"]
        assert carried == {"orders": 2, "": 2}, "in all, and by topic"
        table = dev.ok("metrics", "--match", "directory=", *options)
        assert "penstock_log_directory_free_bytes" in table
        assert "# HELP" in dev.ok("metrics", "1", "--raw", *options)
        assert "--match" in dev.refused("metrics", "--match", "(", *options, status=2)
        asked = dev.run("doctor", "--output", "json", *options)
        nodes = json.loads(asked.stdout)["nodes"]
        assert [entry["node"]["node_id"] for entry in nodes] == [1, 2, 3]
    finally:
        dev.close()


def test_controllers_tell_up_to_where_brokers_are_told(three: Operator) -> None:
    with AdminClient(three.cluster.bootstrap) as admin:
        before = admin.describe_quorum()
        assert before.confirmed
        admin.create_topic("t", 1, 3)
        # The leader dies, and the next one says what was decided before it.
        decided = admin.describe_quorum().metadata_index
        assert decided > before.metadata_index > 0
        three.cluster.nodes[before.leader_id].kill()
        answers = []

        def is_led() -> bool:
            answers.append(admin.describe_quorum())
            return answers[-1].confirmed

        wait_until(is_led, "another one leads", 60)
        after = answers[-1]
        assert after.metadata_index >= decided
        # No broker waits for what it will never be told of.
        cluster = admin.describe_cluster(since_index=after.metadata_index)
        assert cluster.metadata_index >= after.metadata_index
        assert [topic.name for topic in admin.list_topics(since_index=decided)] == ["t"]
