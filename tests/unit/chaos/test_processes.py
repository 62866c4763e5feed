"""Nemeses of processes, and the thread that carries out a schedule, on a cluster of paper."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.chaos.cluster import Capability
from penstock.chaos.errors import FaultError, PlanError
from penstock.chaos.fault_thread import FaultThread, read_faults
from penstock.chaos.nemeses import Fault, Nemesis, Scene, ScheduledFault
from penstock.chaos.nemeses.registry import NEMESES, find_nemeses, find_nemesis, require
from tests.support import wait_until
from tests.unit.chaos.breakable import Stage
from tests.unit.chaos.fake_cluster import FakeCluster


class NoPicture:
    """For roles that need none."""

    def controller(self) -> int:
        raise AssertionError

    def leaders(self, *, internal: bool) -> dict[tuple[str, int], int]:
        raise AssertionError

    def replicas(self, topic: str, partition: int) -> Sequence[int]:
        raise AssertionError

    def group_coordinator(self, group: str) -> int:
        raise AssertionError

    def transaction_coordinator(self, transactional_id: str) -> int:
        raise AssertionError


def broken_and_healed(name: str, fault: Fault) -> tuple[list[str], list[str], Mapping[str, Any]]:
    cluster = FakeCluster()
    scene = Stage(cluster)
    nemesis = find_nemesis(name)
    held = nemesis.invoke(fault, scene)
    broken = list(cluster.done)
    nemesis.heal(fault, scene, held)
    return broken, cluster.done[len(broken) :], held


@pytest.mark.parametrize(
    ("name", "parameters", "broken", "healed"),
    [
        ("kill", {}, ["kill 2"], ["start 2"]),
        ("term", {}, ["terminate 2"], ["start 2"]),
        ("pause", {}, ["pause 2"], ["resume 2"]),
        (
            "storm",
            {"lives_ms": [1, 1]},
            ["kill 2", "start 2", "kill 2", "start 2", "kill 2"],
            ["start 2"],
        ),
        ("rolling", {"order": 0.5}, ["terminate 2", "start 2", "wait_ready"], []),
        ("quiet", {}, [], []),
    ],
)
def test_what_is_broken_is_healed(
    name: str, parameters: Mapping[str, Any], broken: list[str], healed: list[str]
) -> None:
    assert broken_and_healed(name, Fault(name, name, "a leader", parameters))[:2] == (
        broken,
        healed,
    )


@pytest.mark.parametrize("nemesis", NEMESES.values(), ids=lambda one: one.name)
@pytest.mark.parametrize("nodes", [1, 3, 5])
def test_faults_are_planned_of_the_seed_alone(nemesis: Nemesis, nodes: int) -> None:
    planned = [nemesis.plan(Random(seed), nodes) for seed in range(20)]
    assert planned == [nemesis.plan(Random(seed), nodes) for seed in range(20)]
    assert {one.nemesis for one in planned} == {nemesis.name}


def test_several_at_a_time_are_broken_together_and_healed_backwards() -> None:
    fault = find_nemesis("kill+pause").plan(Random(3), 3)
    broken, healed, held = broken_and_healed("kill+pause", fault)
    assert broken[0].startswith("kill")
    assert broken[-1].startswith("pause")
    assert healed[0].startswith("resume")
    assert healed[-1].startswith("start")
    assert set(held["struck"]) >= {2}


def test_where_one_of_several_cannot_be_nothing_stays_broken() -> None:
    cluster = FakeCluster()
    parts = [
        {"nemesis": "kill", "kind": "kill", "target": "a leader", "parameters": {}},
        {"nemesis": "pause", "kind": "pause", "target": "nobody here", "parameters": {}},
    ]
    fault = Fault("kill+pause", "kill+pause", "", {"faults": parts})
    with pytest.raises(FaultError):
        find_nemesis("kill+pause").invoke(fault, Stage(cluster))
    assert cluster.done == ["kill 2", "start 2"]


def test_where_one_of_several_nodes_cannot_be_struck_none_stays_so() -> None:
    class Stubborn(FakeCluster):
        def kill(self, node: int) -> None:
            if node == 3:
                raise FaultError("node 3 does not go")
            super().kill(node)

    cluster = Stubborn()
    with pytest.raises(FaultError, match="node 3 does not go"):
        find_nemesis("kill").invoke(Fault("kill", "kill", "all"), Stage(cluster))
    assert cluster.up == {1, 2, 3}


@pytest.mark.parametrize("text", ["flood", "kill,flood", "kill+flood", "kill+kill"])
def test_unknown_names_are_refused(text: str) -> None:
    with pytest.raises(PlanError):
        find_nemeses(text)


def test_what_the_backend_has_not_is_refused_before_anything_starts() -> None:
    with pytest.raises(PlanError, match="kill needs processes, which the backend paper has not"):
        require(find_nemeses("quiet,kill"), frozenset({Capability.LINKS}), "paper")
    require(find_nemeses("quiet"), frozenset(), "paper")


# --- the thread


def carry_out(
    path: Path, cluster: FakeCluster, faults: Sequence[ScheduledFault], **nemeses: Nemesis
) -> FaultThread:
    thread = FaultThread(
        faults,
        {**NEMESES, **nemeses},
        cluster,
        NoPicture(),
        seed=1,
        epoch_ns=time.monotonic_ns(),
        path=path / "faults.jsonl",
    )
    thread.start()
    return thread


def fault(kind: str, target: str) -> Fault:
    return Fault(kind, kind, target)


def test_each_fault_is_injected_held_healed_and_written_down(tmp_path: Path) -> None:
    cluster = FakeCluster()
    planned = [
        ScheduledFault(20, 1, fault("pause", "node 1")),
        ScheduledFault(0, 1, fault("kill", "node 3")),
    ]
    thread = carry_out(tmp_path, cluster, planned)
    wait_until(lambda: thread.ended, "all faults are over")
    assert cluster.done == ["kill 3", "start 3", "pause 1", "resume 1"]
    written = read_faults(tmp_path / "faults.jsonl")
    assert written == thread.records
    for one in written:
        assert one.began_t <= one.held_t < one.healed_t
    evidence = written[0].evidence()
    assert evidence is not None
    assert (evidence.kind, list(evidence.struck)) == ("kill", [3])


def test_a_stop_heals_what_holds_and_begins_nothing_more(tmp_path: Path) -> None:
    cluster = FakeCluster()
    hour = 3_600_000
    planned = [
        ScheduledFault(0, hour, fault("kill", "node 3")),
        ScheduledFault(hour, 1, fault("kill", "node 1")),
    ]
    thread = carry_out(tmp_path, cluster, planned)
    wait_until(lambda: cluster.done == ["kill 3"], "the first one holds")
    assert thread.stop(10)
    assert cluster.done == ["kill 3", "start 3"]


def test_what_cannot_be_injected_or_healed_is_written_down_and_the_rest_goes_on(
    tmp_path: Path,
) -> None:
    class Stubborn:
        name = "stubborn"
        summary = ""
        needs: frozenset[Capability] = frozenset()

        def plan(self, random: Random, nodes: int) -> Fault:
            return fault("stubborn", "node 1")

        def invoke(self, fault: Fault, scene: Scene) -> Mapping[str, Any]:
            return {"struck": [1]}

        def heal(self, fault: Fault, scene: Scene, held: Mapping[str, Any]) -> None:
            raise OSError("it does not let go")

    cluster = FakeCluster()
    planned = [
        ScheduledFault(0, 1, fault("kill", "node 9")),
        ScheduledFault(1, 1, fault("stubborn", "node 1")),
        ScheduledFault(2, 1, fault("pause", "node 1")),
    ]
    thread = carry_out(tmp_path, cluster, planned, stubborn=Stubborn())
    wait_until(lambda: thread.ended, "all faults are over")
    nobody, stubborn, paused = thread.records
    assert (nobody.held, "nobody is 'node 9'" in nobody.error) == (None, True)
    assert nobody.evidence() is None
    assert "it does not let go" in stubborn.error
    assert paused.error == ""
    assert cluster.done == ["pause 1", "resume 1"]
