"""`penstock decommission`: how far it is, in a line, and what it does while the cluster changes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from penstock.cli import decommission as decommissioning
from penstock.cli.app import app
from penstock.cli.decommission import progress
from penstock.cli.partitions import Plan
from penstock.client.descriptions import (
    BrokerDescription,
    ClusterDescription,
    PartitionDescription,
    PartitionReassignment,
    QuorumDescription,
    QuorumVoter,
    ReplicaProgress,
    TopicDescription,
)
from penstock.wire.ids import TopicPartition


def at(number: int) -> TopicPartition:
    return TopicPartition("orders", number)


def held(number: int, leader: int = 1) -> dict[TopicPartition, PartitionDescription]:
    return {at(number): PartitionDescription(number, leader, 1, (4, 1), (4, 1), (), 1)}


def move(number: int, *lags: int) -> PartitionReassignment:
    replicas = tuple(ReplicaProgress(5 + n, False, 7, lag) for n, lag in enumerate(lags))
    adding = tuple(replica.node_id for replica in replicas)
    return PartitionReassignment(at(number), (5, 1), adding, (4,), 1, replicas)


def test_what_is_still_to_be_copied_is_counted_of_this_nodes_moves() -> None:
    left = held(0) | held(1)
    moves = [move(0, 1_200), move(1, -1), move(2, 99)]
    assert progress(4, 5, left, moves) == (
        "moved 3 of 5 replicas of node 4; 1,200 records are still to be copied"
    )
    assert progress(4, 1, {}, []) == "moved 1 of 1 replica of node 4"


def test_what_cannot_move_is_named() -> None:
    left = {where: one for n in range(5) for where, one in held(n, leader=-1).items()}
    line = progress(4, 5, left, [])
    assert "orders-0, orders-1, orders-2 and 2 more can't move while nobody leads" in line


class FakeAdmin:
    """A cluster in which each look ends one move: ``on_look`` says what else happens then."""

    def __init__(self, replicas: list[tuple[int, ...]], *, live: bool = True) -> None:
        self.replicas = dict(enumerate(replicas))
        self.nodes = {1, 2, 3, 4, 5}
        self.voters = {1, 2, 4}
        self.down = set() if live else {4}
        self.moving: dict[int, tuple[int, ...]] = {}
        self.done: list[str] = []
        self.on_look: dict[int, Callable[[], None]] = {}
        self._looks = 0

    def describe_cluster(self) -> ClusterDescription:
        brokers = tuple(
            BrokerDescription(node, f"host-{node}", 9092, "", node in self.down, False, 1)
            for node in sorted(self.nodes)
        )
        return ClusterDescription("c", 1, 1, 1, brokers, 1)

    def describe_quorum(self) -> QuorumDescription:
        voters = tuple(QuorumVoter(node, "host", 10092, 1) for node in sorted(self.voters))
        return QuorumDescription(1, 1, 1, 1, voters, 1)

    def list_topics(self, *, include_internal: bool) -> list[TopicDescription]:
        assert include_internal
        return self.describe_topics(["orders"])

    def describe_topics(self, names: Sequence[str]) -> list[TopicDescription]:
        partitions = tuple(
            PartitionDescription(n, nodes[0], 1, nodes, nodes, (), 1)
            for n, nodes in self.replicas.items()
        )
        return [TopicDescription(name, "id", False, {}, partitions) for name in names]

    def alter_partition_reassignments(self, plan: Plan) -> None:
        self.moving |= {where.partition: tuple(nodes) for where, nodes in plan.items()}

    def list_partition_reassignments(self) -> list[PartitionReassignment]:
        return [
            PartitionReassignment(at(n), nodes, (), (4,), 1, ()) for n, nodes in self.moving.items()
        ]

    def next(self, _seconds: float) -> None:
        """What happens while the command sleeps."""
        self._looks += 1
        if self.moving:
            number, nodes = self.moving.popitem()
            self.replicas[number] = nodes
        self.on_look.get(self._looks, lambda: None)()

    def remove_voter(self, node: int) -> QuorumDescription:
        self.voters.remove(node)
        self.done.append(f"no voter {node}")
        return self.describe_quorum()

    def unregister_broker(self, node: int) -> None:
        assert node in self.down
        self.nodes.remove(node)
        self.done.append(f"unregistered {node}")


def run(monkeypatch: pytest.MonkeyPatch, admin: FakeAdmin, *arguments: str) -> tuple[int, str, str]:
    @contextmanager
    def client(_settings: object) -> Iterator[FakeAdmin]:
        yield admin

    monkeypatch.setattr(decommissioning, "admin_client", client)
    monkeypatch.setattr(decommissioning.time, "sleep", admin.next)
    done = CliRunner().invoke(app, ["decommission", *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_partitions_that_are_made_meanwhile_move_too(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = FakeAdmin([(4, 1), (1, 4)])
    admin.on_look = {1: lambda: admin.replicas.update({2: (2, 4)})}
    status, said, _ = run(monkeypatch, admin, "4", "--execute")
    assert status == 0
    assert not any(4 in nodes for nodes in admin.replicas.values())
    assert "moved 3 replicas of node 4" in said
    assert admin.done == ["no voter 4"]
    assert "next: stop node 4, then `penstock cluster unregister 4`" in said


def test_a_node_that_is_stopped_meanwhile_is_unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = FakeAdmin([(4, 1)])
    admin.on_look = {1: lambda: admin.down.add(4)}
    status, said, _ = run(monkeypatch, admin, "4", "--execute")
    assert (status, admin.done) == (0, ["no voter 4", "unregistered 4"])
    assert "next: " not in said


def test_a_node_that_came_back_meanwhile_is_to_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = FakeAdmin([(4, 1)], live=False)
    admin.on_look = {1: admin.down.clear}
    status, said, _ = run(monkeypatch, admin, "4", "--execute")
    assert (status, admin.done) == (0, ["no voter 4"])
    assert "next: stop node 4, then `penstock cluster unregister 4`" in said


def test_interrupted_it_votes_still_and_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = FakeAdmin([(4, 1), (4, 2)])
    admin.on_look = {1: lambda: os.kill(os.getpid(), signal.SIGINT)}
    status, _, told = run(monkeypatch, admin, "4", "--execute")
    assert (status, admin.done) == (130, [])
    assert "`penstock decommission 4 --execute` goes on" in told


def test_the_only_controller_is_not_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = FakeAdmin([(4, 1)])
    admin.voters = {4}
    status, _, told = run(monkeypatch, admin, "4", "--execute")
    assert (status, admin.done, admin.moving) == (1, [], {})
    assert "node 4 is the only controller" in told
