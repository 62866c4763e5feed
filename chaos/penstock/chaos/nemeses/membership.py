"""Members that come and go: voters of the quorum, and replicas of partitions."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, Final

from penstock.chaos.cluster import Capability
from penstock.chaos.errors import FaultError
from penstock.chaos.nemeses import Fault, Scene
from penstock.chaos.nemeses.asking import PATIENCE_S, until
from penstock.client import (
    AdminClient,
    PenstockError,
    TopicPartition,
    UnknownTopicOrPartitionError,
)
from penstock.wire.errors import UnknownVoterError

_NOTHING: Final[frozenset[Capability]] = frozenset()
_SHARE: Final = 3
"""At most one of so many partitions is moved at a time."""


def remove_voter(scene: Scene, node: int) -> None:
    """Have a controller be no voter; asked again until it is so. Raises FaultError."""

    def is_removed() -> bool:
        with scene.admin() as admin:
            with contextlib.suppress(UnknownVoterError):  # An answer before did not come.
                admin.remove_voter(node)
            return True

    until(is_removed, f"controller {node} is no voter:")


def add_voter(scene: Scene, node: int, address: str) -> None:
    """Have a controller that runs be a voter; asked again until it is. Raises FaultError."""

    def is_added() -> bool:
        with scene.admin() as admin:
            if node not in {voter.node_id for voter in admin.describe_quorum().voters}:
                admin.add_voter(node, address)
            return True

    until(is_added, f"controller {node} is a voter:")


def address_of(admin: AdminClient, node: int) -> str:
    """Where a voter is reached. Raises FaultError where it is none."""
    for voter in admin.describe_quorum().voters:
        if voter.node_id == node:
            return f"{voter.host}:{voter.port}"
    raise FaultError(f"node {node} is no voter now; next: give the cluster longer between faults")


class Voter:
    """Takes a controller out of the voters, while it runs, and has it be one again."""

    name = "voter"
    summary = "remove a voter of the quorum, by role, and add it again"
    needs = _NOTHING

    def plan(self, random: Random, nodes: int) -> Fault:
        """Whom."""
        target = random.choice(("the active controller", "not the active controller", "random"))
        return Fault(self.name, self.name, target if nodes > 1 else "all")

    def invoke(self, fault: Fault, scene: Scene) -> Mapping[str, Any]:
        """Returns when it is none."""
        [node, *others] = scene.resolve(fault.target)
        if others or len(scene.cluster.nodes) == 1:
            raise FaultError(f"{self.name} takes one voter of several; next: more --nodes")
        try:
            with scene.admin() as admin:
                address = address_of(admin, node)
        except PenstockError as error:
            raise FaultError(f"nobody says who votes ({error}); next: see the controllers") from (
                error
            )
        held = {"struck": [node], "address": address}
        try:
            remove_voter(scene, node)
        except FaultError:
            self.heal(fault, scene, held)  # It may have been removed all the same.
            raise
        return held

    def heal(self, fault: Fault, scene: Scene, held: Mapping[str, Any]) -> None:
        """Returns when it votes again."""
        for node in held["struck"]:
            add_voter(scene, node, held["address"])


class Reassign:
    """Moves partitions of clients' topics, or takes a replica away, and takes it back."""

    name = "reassign"
    summary = "give some partitions other replicas, or one less, and then those from before"
    needs = _NOTHING

    def plan(self, random: Random, nodes: int) -> Fault:
        """How: which partitions there are is found out later."""
        how = random.choice(("fewer", "moved", "reordered"))
        return Fault(self.name, self.name, "some partitions", {"how": how})

    def invoke(self, fault: Fault, scene: Scene) -> Mapping[str, Any]:
        """Returns when the controllers have taken it down; it goes on meanwhile."""
        nodes = scene.cluster.nodes
        try:
            with scene.admin() as admin:
                before = _replicas(admin)
                count = max(1, len(before) // _SHARE)
                chosen = scene.random.sample(sorted(before), min(count, len(before)))
                wanted = {
                    tp: _other_replicas(before[tp], nodes, fault.parameters["how"], scene.random)
                    for tp in chosen
                }
                wanted = {tp: to for tp, to in wanted.items() if list(to) != before[tp]}
                if not wanted:
                    raise FaultError(
                        f"no partition can have replicas that are {fault.parameters['how']}; next: "
                        "more --nodes"
                    )
                moves = [_move(tp, before[tp], to) for tp, to in wanted.items()]
                struck = sorted({node for to in wanted.values() for node in to})
                held = {"struck": struck, "moves": moves}
                try:
                    admin.alter_partition_reassignments(wanted)
                except PenstockError:
                    self.heal(fault, scene, held)  # Some of them may move.
                    raise
        except PenstockError as error:
            raise FaultError(f"nothing could be reassigned: {error}") from error
        return held

    def heal(self, fault: Fault, scene: Scene, held: Mapping[str, Any]) -> None:
        """Returns when all have the replicas from before, in sync or not yet."""
        wanted = {
            TopicPartition(one["topic"], one["partition"]): one["before"] for one in held["moves"]
        }

        def is_back() -> bool:
            with scene.admin() as admin:
                now = _replicas(admin)
                away = {tp: to for tp, to in wanted.items() if tp in now and now[tp] != to}
                moving = {one.partition for one in admin.list_partition_reassignments()}
                for tp, to in away.items():
                    if tp not in moving or tp not in asked:
                        asked.add(tp)
                        _ask(admin, tp, to)
                return not away and not moving & set(wanted)

        asked: set[TopicPartition] = set()
        until(is_back, "partitions have the replicas from before:", 2 * PATIENCE_S)


def _ask(admin: AdminClient, partition: TopicPartition, to: Sequence[int]) -> None:
    with contextlib.suppress(UnknownTopicOrPartitionError):  # It was deleted meanwhile.
        admin.alter_partition_reassignments({partition: to})


def _replicas(admin: AdminClient) -> dict[TopicPartition, list[int]]:
    """Of each partition of clients' topics."""
    return {
        TopicPartition(topic.name, one.partition): list(one.replicas)
        for topic in admin.list_topics()
        for one in topic.partitions
    }


def _other_replicas(
    before: Sequence[int], nodes: Sequence[int], how: str, random: Random
) -> list[int]:
    """What to have instead: as before where it cannot be so."""
    found = list(before)
    others = [node for node in nodes if node not in before]
    if how == "moved" and others:
        found[random.randrange(len(found))] = random.choice(others)
    elif how == "reordered" or len(found) == 1:
        random.shuffle(found)
    else:
        found.pop(random.randrange(len(found)))
    return found


def _move(partition: TopicPartition, before: Sequence[int], to: Sequence[int]) -> dict[str, Any]:
    return {
        "topic": partition.topic,
        "partition": partition.partition,
        "before": list(before),
        "wanted": list(to),
    }


MEMBERSHIP: Final = (Voter(), Reassign())
