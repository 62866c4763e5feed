from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from penstock.chaos.cluster import Capability, PacketFault
from penstock.chaos.errors import FaultError, PlanError
from penstock.chaos.nemeses import Fault
from penstock.chaos.nemeses.registry import find_nemesis
from tests.unit.chaos.fake_cluster import FakeCluster

NAMES = ("lossy", "duplicated", "reordered")


class Packets(FakeCluster):
    """A cluster whose packets can be broken, but for those of stubborn nodes."""

    capabilities = frozenset({Capability.PACKETS})

    def __init__(self, stubborn: Sequence[int] = ()) -> None:
        super().__init__()
        self.stubborn = stubborn
        self.faults: dict[int, PacketFault] = {}

    def set_packets(self, node: int, fault: PacketFault | None) -> None:
        if fault is None:
            self.faults.pop(node, None)
        elif node in self.stubborn:
            raise FaultError(f"node {node} has no packets")
        else:
            self.faults[node] = fault


class Everybody:
    """A scene in which all play every role."""

    random = Random(1)

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster

    def resolve(self, target: str) -> Sequence[int]:
        return self.cluster.nodes

    def down(self) -> Sequence[int]:
        return []


@pytest.mark.parametrize("name", NAMES)
def test_they_hold_until_they_are_healed(name: str) -> None:
    nemesis, cluster = find_nemesis(name), Packets()
    assert nemesis.needs == {Capability.PACKETS}
    fault = nemesis.plan(Random(3), 3)
    held = nemesis.invoke(fault, Everybody(cluster))
    assert held["struck"] == [1, 2, 3]
    assert set(cluster.faults) == {1, 2, 3}
    for _ in range(2):
        nemesis.heal(fault, Everybody(cluster), held)
        assert cluster.faults == {}


def test_each_breaks_what_its_name_says() -> None:
    for name, broken in zip(NAMES, ("loss", "duplicate", "reorder"), strict=True):
        for seed in range(50):
            drawn = PacketFault(**find_nemesis(name).plan(Random(seed), 3).parameters)
            percents = {"loss": drawn.loss, "duplicate": drawn.duplicate, "reorder": drawn.reorder}
            assert 0 < percents.pop(broken) <= 50
            assert set(percents.values()) == {0}
            # Without a delay there is nothing that others could overtake.
            assert (drawn.delay_ms > 0) == (name == "reordered")


def test_where_one_of_several_cannot_be_struck_none_stays_so() -> None:
    cluster = Packets(stubborn=[3])
    with pytest.raises(FaultError, match="node 3"):
        find_nemesis("lossy").invoke(
            Fault("lossy", "lossy", "all", {"loss": 5}), Everybody(cluster)
        )
    assert cluster.faults == {}


def test_a_cluster_of_one_is_struck_as_a_whole() -> None:
    assert {find_nemesis("lossy").plan(Random(seed), 1).target for seed in range(20)} == {"all"}


def test_two_of_them_cannot_be_at_the_same_time() -> None:
    with pytest.raises(PlanError, match=r"lossy and reordered break packets, "):
        find_nemesis("lossy+reordered")
    assert find_nemesis("lossy+kill").needs == {Capability.PACKETS, Capability.PROCESSES}
