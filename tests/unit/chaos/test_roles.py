"""Roles: who is struck, by what the cluster says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from penstock.chaos.errors import FaultError
from penstock.chaos.roles import resolve
from penstock.client import RequestTimedOutError

NODES = (1, 2, 3, 4, 5)


class Told:
    """A picture as a test has it."""

    def __init__(self, *, controller: int = 2) -> None:
        self._controller = controller

    def controller(self) -> int:
        return self._controller

    def leaders(self, *, internal: bool) -> dict[tuple[str, int], int]:
        if internal:
            return {("__consumer_offsets", 0): 4, ("__other", 0): 1}
        return {("orders", 0): 3, ("orders", 1): -1}

    def replicas(self, topic: str, partition: int) -> Sequence[int]:
        return [3, 1, 5] if (topic, partition) == ("orders-eu", 7) else []

    def group_coordinator(self, group: str) -> int:
        return 4 if group == "billing of march" else -1

    def transaction_coordinator(self, transactional_id: str) -> int:
        return 5 if transactional_id == "till-1" else -1


def who(role: str, down: Sequence[int] = (), seed: int = 1, **told: int) -> list[int]:
    return resolve(role, NODES, down, Told(**told), Random(seed))


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        ("node 3", [3]),
        ("all", [1, 2, 3, 4, 5]),
        ("the active controller", [2]),
        ("a leader", [3]),
        ("leader of orders-eu-7", [3]),
        ("a coordinator", [4]),
        ("a coordinator or a leader", [4]),
        ("coordinator of group billing of march", [4]),
        ("coordinator of transactional id till-1", [5]),
    ],
)
def test_a_role_is_who_plays_it(role: str, expected: list[int]) -> None:
    assert who(role) == expected


def test_where_nothing_is_coordinated_a_leader_is_meant() -> None:
    class WithoutGroups(Told):
        def leaders(self, *, internal: bool) -> dict[tuple[str, int], int]:
            return {("__other", 0): 1} if internal else super().leaders(internal=False)

    picture = WithoutGroups()
    assert resolve("a coordinator or a leader", NODES, (), picture, Random(1)) == [3]
    with pytest.raises(FaultError, match="nobody is 'a coordinator' now"):
        resolve("a coordinator", NODES, (), picture, Random(1))


@pytest.mark.parametrize(("role", "count"), [("random", 1), ("a minority", 2), ("a majority", 3)])
def test_a_share_is_drawn_by_the_seed(role: str, count: int) -> None:
    drawn = [who(role, seed=seed) for seed in range(30)]
    assert {len(nodes) for nodes in drawn} == {count}
    assert len({tuple(nodes) for nodes in drawn}) > 3
    assert drawn == [who(role, seed=seed) for seed in range(30)]


def test_others_than_the_leader_and_the_controller_are_meant() -> None:
    assert {who("follower of orders-eu-7", seed=seed)[0] for seed in range(30)} == {1, 5}
    assert 2 not in {who("not the active controller", seed=seed)[0] for seed in range(30)}


def test_who_is_held_down_is_not_struck_again() -> None:
    drawn = {node for seed in range(30) for node in who("a minority", down=(1, 2), seed=seed)}
    assert drawn == {3, 4, 5}
    assert who("all", down=(1, 2)) == [1, 2, 3, 4, 5]
    assert who("node 1", down=(1, 2)) == [1]


@pytest.mark.parametrize(
    ("role", "down"),
    [
        ("node 9", ()),
        ("a leader", (3,)),
        ("the active controller", (2,)),
        ("leader of orders-eu-8", ()),
        ("coordinator of group nobody", ()),
        ("coordinator of transactional id nobody", ()),
        ("random", NODES),
    ],
)
def test_a_role_that_nobody_plays_is_a_fault_that_cannot_be(role: str, down: Sequence[int]) -> None:
    with pytest.raises(FaultError, match="nobody is"):
        who(role, down)


def test_no_active_controller_is_nobody() -> None:
    with pytest.raises(FaultError, match="nobody is 'the active controller'"):
        who("the active controller", controller=-1)


def test_what_is_no_role_is_said_so() -> None:
    with pytest.raises(FaultError, match="'the boss' is no role"):
        who("the boss")


def test_a_cluster_that_does_not_answer_is_a_fault_that_cannot_be() -> None:
    class Silent(Told):
        def controller(self) -> int:
            raise RequestTimedOutError("nobody answers")

    with pytest.raises(FaultError, match="could not be found out"):
        resolve("the active controller", NODES, (), Silent(), Random(1))
