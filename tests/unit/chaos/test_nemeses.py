"""Nemeses of links, disks, limits and members, on a cluster of paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from penstock.chaos.cluster import CLIENTS, OFFERED, Link
from penstock.chaos.errors import FaultError, NotHereError, PlanError
from penstock.chaos.nemeses import Fault
from penstock.chaos.nemeses import asking as asking_module
from penstock.chaos.nemeses.asking import until, wait_in_sync
from penstock.chaos.nemeses.registry import NEMESES, USUAL, find_nemesis, those_of
from penstock.client import UnknownServerError
from tests.unit.chaos.breakable import BreakableCluster, FakeAdmin, Stage

LINKS = (
    *("isolate", "halves", "bridge", "majorities-ring", "one-way", "client-only"),
    *("slow", "rate-limited", "late-acks", "late-isr-changes", "late-heartbeats"),
)
DISKS = ("slow-disk", "full-disk", "failing-disk", "failing-sync", "lost-unsynced", "blackout")
CLOCKS = ("clock-jump", "clock-strobe")
LIMITS = ("few-descriptors", "little-memory")
OF_ONE_ROLE = (*LINKS, *DISKS, *CLOCKS, *LIMITS, "voter")


@pytest.fixture
def cluster(tmp_path: Path) -> BreakableCluster:
    return BreakableCluster(tmp_path)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking_module, "PATIENCE_S", 0.0)
    monkeypatch.setattr(until, "__defaults__", (0.0, 0.0))


def planned(name: str, target: str = "random", nodes: int = 3) -> Fault:
    """A fault of the nemesis, with what takes time taking none."""
    fault = find_nemesis(name).plan(Random(7), nodes)
    parameters = {
        **fault.parameters,
        **({"runs_ms": 0} if "runs_ms" in fault.parameters else {}),
        **({"pauses_ms": [0, 0, 0]} if "pauses_ms" in fault.parameters else {}),
    }
    return Fault(fault.nemesis, fault.kind, target, parameters)


def cut_around(name: str, tmp_path: Path, nodes: int, **parameters: object) -> set[Link]:
    made = BreakableCluster(tmp_path, nodes)
    find_nemesis(name).invoke(Fault(name, name, "random", parameters), Stage(made))
    assert all(fault.cut for fault in made.links.values())
    return set(made.links)


def heard_by(cut: set[Link], node: int, nodes: int) -> set[int]:
    return {other for other in range(1, nodes + 1) if Link(other, node) not in cut} - {node}


@pytest.mark.parametrize("name", [*LINKS, *DISKS, *LIMITS, "swizzle-clog"])
def test_what_is_broken_is_healed_and_twice_is_as_once(
    name: str, cluster: BreakableCluster
) -> None:
    nemesis, scene = find_nemesis(name), Stage(cluster)
    fault = planned(name)
    held = nemesis.invoke(fault, scene)
    assert held["struck"]
    assert not cluster.is_whole
    for _ in range(2):
        nemesis.heal(fault, scene, held)
        assert cluster.is_whole


@pytest.mark.parametrize("name", OF_ONE_ROLE)
def test_where_nobody_plays_the_role_nothing_is_done(name: str, cluster: BreakableCluster) -> None:
    with pytest.raises(FaultError, match="nobody"):
        find_nemesis(name).invoke(planned(name, "nobody here"), Stage(cluster))
    assert cluster.done == []


@pytest.mark.parametrize(
    ("name", "failing"),
    [
        *((name, "disk 3") for name in DISKS),
        ("blackout", "pause 3"),
        ("lost-unsynced", "kill 2"),
        *((name, "clock 3") for name in CLOCKS),
        ("few-descriptors", "limits 3"),
        ("late-isr-changes", "kill 2"),
        ("swizzle-clog", "links 6"),
    ],
)
def test_what_fails_half_way_leaves_nothing_broken(
    name: str, failing: str, cluster: BreakableCluster
) -> None:
    cluster.failing = {failing}
    if failing == "limits 3":
        cluster.failing = set()
        cluster.up.discard(3)  # It has no process that could be limited.
    target = "all" if failing.endswith("3") else "random"
    with pytest.raises(FaultError):
        find_nemesis(name).invoke(planned(name, target), Stage(cluster))
    cluster.up.add(3)
    assert cluster.is_whole


@pytest.mark.parametrize(
    "name",
    [
        *("kill", "term", "pause", "storm", "isolate", "one-way", "client-only", "slow"),
        *("slow-disk", "full-disk", "lost-unsynced", "clock-jump", "few-descriptors"),
    ],
)
def test_coordinators_leaders_and_controllers_are_struck_by_their_roles(name: str) -> None:
    drawn = {find_nemesis(name).plan(Random(seed), 3).target for seed in range(100)}
    assert drawn >= {"a leader", "a coordinator or a leader", "the active controller", "random"}
    if name in {"kill", "pause", "slow-disk", "clock-jump"}:
        assert drawn >= {"all"}


# --- clocks


def test_clocks_are_wrong_by_less_than_any_topic_of_a_run_keeps(cluster: BreakableCluster) -> None:
    jump = find_nemesis("clock-jump")
    drawn = [jump.plan(Random(seed), 3) for seed in range(60)]
    offsets = {fault.parameters["offset_ms"] for fault in drawn}
    assert min(offsets) < 0 < max(offsets)
    assert all(200 <= abs(offset) < 3_600_000 for offset in offsets)
    fault = Fault("clock-jump", "clock-jump", "all", {"offset_ms": -30_000, "strobe_ms": 0})
    held = jump.invoke(fault, Stage(cluster))
    assert cluster.clocks == dict.fromkeys((1, 2, 3), (-30_000, 0))
    jump.heal(fault, Stage(cluster), held)
    assert cluster.clocks == {}


def test_a_strobe_says_how_fast(cluster: BreakableCluster) -> None:
    find_nemesis("clock-strobe").invoke(planned("clock-strobe", "all"), Stage(cluster))
    assert all(offset and 0 < strobe <= 200 for offset, strobe in cluster.clocks.values())


# --- partitions


def test_an_isolated_node_hears_nobody_and_nobody_hears_it(tmp_path: Path) -> None:
    cut = cut_around("isolate", tmp_path, 3)
    assert cut == {Link(a, b) for a, b in ((2, 1), (1, 2), (2, 3), (3, 2))} | {
        Link(2, CLIENTS),
        Link(CLIENTS, 2),
    }


@pytest.mark.parametrize("nodes", [2, 3, 4, 5])
def test_halves_do_not_hear_each_other(nodes: int, tmp_path: Path) -> None:
    cut = cut_around("halves", tmp_path, nodes)
    half = heard_by(cut, 2, nodes) | {2}
    rest = set(range(1, nodes + 1)) - half
    assert len(half) == nodes // 2
    assert cut == {Link(a, b) for a in half for b in rest} | {
        Link(b, a) for a in half for b in rest
    }


@pytest.mark.parametrize("nodes", [3, 4, 5, 7])
def test_a_bridge_alone_hears_everybody(nodes: int, tmp_path: Path) -> None:
    cut = cut_around("bridge", tmp_path, nodes)
    hearing = {node for node in range(1, nodes + 1) if len(heard_by(cut, node, nodes)) == nodes - 1}
    assert hearing == {2}


@pytest.mark.parametrize("nodes", [3, 5, 7])
def test_in_a_ring_each_hears_a_majority_and_no_two_the_same(nodes: int, tmp_path: Path) -> None:
    cut = cut_around("majorities-ring", tmp_path, nodes)
    heard = [frozenset(heard_by(cut, node, nodes) | {node}) for node in range(1, nodes + 1)]
    assert {len(one) for one in heard} == {nodes // 2 + 1}
    assert len(set(heard)) == nodes


@pytest.mark.parametrize("deaf", [True, False])
def test_one_way_is_one_way(deaf: bool, tmp_path: Path) -> None:
    cut = cut_around("one-way", tmp_path, 3, deaf=deaf)
    assert cut == ({Link(1, 2), Link(3, 2)} if deaf else {Link(2, 1), Link(2, 3)})


def test_clients_alone_are_cut_off(tmp_path: Path) -> None:
    assert cut_around("client-only", tmp_path, 3) == {Link(2, CLIENTS), Link(CLIENTS, 2)}


def test_a_swizzle_adds_node_by_node_and_takes_them_away_in_its_own_order(
    cluster: BreakableCluster,
) -> None:
    nemesis, scene = find_nemesis("swizzle-clog"), Stage(cluster)
    fault = planned("swizzle-clog")
    held = nemesis.invoke(fault, scene)
    assert cluster.done == ["links 4", "links 6", "links 6"]
    assert sorted(held["order"]) == sorted(held["back"]) == [1, 2, 3]
    nemesis.heal(fault, scene, held)
    assert cluster.done[3:] == ["links 6", "links 4", "links 0"]


@pytest.mark.parametrize("name", ["halves", "bridge", "swizzle-clog", "late-acks", "voter"])
def test_one_node_alone_cannot_be_parted(name: str, tmp_path: Path) -> None:
    alone = BreakableCluster(tmp_path, 1)
    with pytest.raises(FaultError, match="more --nodes"):
        find_nemesis(name).invoke(planned(name, "all", 1), Stage(alone))
    assert alone.done == []


# --- other links


def test_messages_are_held_by_their_names(cluster: BreakableCluster) -> None:
    fault = planned("late-heartbeats")
    find_nemesis("late-heartbeats").invoke(fault, Stage(cluster))
    assert set(cluster.links) == {Link(2, 1), Link(2, 3)}
    for one in cluster.links.values():
        assert (one.cut, one.hold) == (False, ("Controller/Heartbeat",))
        assert one.hold_ms == fault.parameters["hold_ms"] > 0


def test_a_node_is_restarted_so_that_there_are_changes_to_hold(cluster: BreakableCluster) -> None:
    find_nemesis("late-isr-changes").invoke(planned("late-isr-changes"), Stage(cluster))
    assert cluster.done == ["links 6", "kill 2", "start 2"]


def test_two_that_break_links_are_not_joined() -> None:
    with pytest.raises(PlanError, match="isolate and slow break links"):
        find_nemesis("isolate+slow")
    assert find_nemesis("isolate+kill+slow-disk").name == "isolate+kill+slow-disk"


# --- families


def test_a_family_draws_all_of_its_members_and_breaks_as_they_do(cluster: BreakableCluster) -> None:
    family = find_nemesis("disk")
    assert {family.plan(Random(seed), 3).kind for seed in range(200)} >= {
        *("slow-disk", "full-disk", "failing-disk", "failing-sync", "flipped-bit"),
        *("truncated-file", "stale-directory", "swapped-directories", "wiped-disk"),
    }
    fault = Fault("disk", "full-disk", "random", {"errno": "ENOSPC"})
    held = family.invoke(fault, Stage(cluster))
    assert cluster.disks[2].errno == "ENOSPC"
    family.heal(fault, Stage(cluster), held)
    assert cluster.is_whole


@pytest.mark.parametrize("backend", OFFERED)
@pytest.mark.parametrize("name", ["partition", "netem", "disk", "membership"])
def test_a_family_draws_what_the_backend_has_and_all_of_it(name: str, backend: str) -> None:
    if (name, backend) in (("netem", "kubernetes"), ("disk", "kubernetes")):
        with pytest.raises(NotHereError, match=f"{backend} has none of what the nemesis {name}"):
            find_nemesis(name, backend)
        return
    family = find_nemesis(name, backend)
    drawn = [family.plan(Random(seed), 3) for seed in range(200)]
    assert drawn == [find_nemesis(name, backend).plan(Random(seed), 3) for seed in range(200)]
    members = {one.kind: NEMESES[one.kind] for one in drawn}
    assert set(members) == {
        kind
        for kind in NEMESES[name].summary.split(": ")[1].split(", ")
        if NEMESES[kind].needs <= OFFERED[backend]
    }
    assert [those_of(one) for one in drawn] == [[members[one.kind]] for one in drawn]


def test_a_bad_network_is_of_links_here_and_of_packets_too_in_containers() -> None:
    kinds = {
        backend: {find_nemesis("netem", backend).plan(Random(seed), 3).kind for seed in range(200)}
        for backend in ("local", "docker", "namespaces")
    }
    assert kinds["namespaces"] == kinds["docker"]
    assert kinds["local"] & kinds["docker"] == {"slow", "rate-limited"}
    assert kinds["docker"] >= {"lossy", "duplicated", "reordered"}
    assert kinds["local"] >= {"late-acks", "late-isr-changes", "late-heartbeats"}


def test_a_fault_that_its_family_has_not_is_refused() -> None:
    with pytest.raises(PlanError, match="disk has no 'gone'; next: take of slow-disk, "):
        those_of(Fault("disk", "gone", "random"))


def test_of_several_at_a_time_each_is_carried_out_by_its_own() -> None:
    fault = find_nemesis("power+pause").plan(Random(3), 3)
    assert [one.name for one in those_of(fault)] in (
        ["lost-unsynced", "pause"],
        ["blackout", "pause"],
    )


def test_a_family_stands_beside_another_nemesis(cluster: BreakableCluster) -> None:
    both = find_nemesis("limits+pause")
    fault = both.plan(Random(3), 3)
    held = both.invoke(fault, Stage(cluster))
    assert cluster.limits
    assert cluster.paused
    both.heal(fault, Stage(cluster), held)
    assert cluster.is_whole


def test_every_name_is_there_once() -> None:
    families = {"partition", "netem", "disk", "power", "membership", "limits"}
    assert families <= set(USUAL) < set(NEMESES)
    assert all(NEMESES[name].name == name for name in NEMESES)
    assert all(len(one.summary) > 10 for one in NEMESES.values())


# --- disks and limits


def test_all_stand_still_before_the_first_loses_power(cluster: BreakableCluster) -> None:
    find_nemesis("blackout").invoke(planned("blackout", "all"), Stage(cluster))
    assert cluster.done == [
        *(f"disk {node}" for node in (1, 2, 3)),
        *(f"pause {node}" for node in (1, 2, 3)),
        *(f"kill {node}" for node in (1, 2, 3)),
    ]
    assert not any(fault.keep_unsynced for fault in cluster.disks.values())


@pytest.mark.parametrize("name", ["failing-disk", "failing-sync", "little-memory"])
def test_what_may_have_ended_is_started_anew(name: str, cluster: BreakableCluster) -> None:
    nemesis, scene = find_nemesis(name), Stage(cluster)
    fault = planned(name)
    held = nemesis.invoke(fault, scene)
    assert held["may_end"] in ("disk", "memory")
    cluster.up.discard(2)  # By itself.
    nemesis.heal(fault, scene, held)
    assert cluster.done[-1] == "start 2"
    assert "kill 2" not in cluster.done


# --- membership


def test_a_voter_is_removed_and_comes_back(cluster: BreakableCluster) -> None:
    admin = FakeAdmin()
    nemesis, scene = find_nemesis("voter"), Stage(cluster, admin)
    fault = planned("voter")
    held = nemesis.invoke(fault, scene)
    assert set(admin.voters) == {1, 3}
    for _ in range(2):
        nemesis.heal(fault, scene, held)
        assert admin.voters == {1: "h:1", 2: "h:2", 3: "h:3"}


@pytest.mark.parametrize(
    ("how", "replicas", "wanted"),
    [
        ("fewer", [1, 2, 3], lambda now: len(now) == 2),
        ("moved", [1, 2], lambda now: len(now) == 2 and 3 in now),
        ("reordered", [1, 2, 3], lambda now: sorted(now) == [1, 2, 3]),
    ],
)
def test_replicas_are_others_and_then_those_from_before(
    how: str, replicas: Sequence[int], wanted: object, cluster: BreakableCluster
) -> None:
    admin = FakeAdmin(replicas={0: list(replicas)})
    nemesis, scene = find_nemesis("reassign"), Stage(cluster, admin)
    fault = Fault("reassign", "reassign", "some partitions", {"how": how})
    held = nemesis.invoke(fault, scene)
    assert admin.replicas[0] != list(replicas)
    assert callable(wanted)
    assert wanted(admin.replicas[0])
    for _ in range(2):
        nemesis.heal(fault, scene, held)
        assert admin.replicas == {0: list(replicas)}


def test_a_reassignment_that_is_refused_in_part_is_taken_back(cluster: BreakableCluster) -> None:
    admin = FakeAdmin(replicas={0: [1, 2, 3]}, refused=UnknownServerError("half of it"))
    fault = Fault("reassign", "reassign", "some partitions", {"how": "fewer"})
    with pytest.raises(FaultError, match="half of it"):
        find_nemesis("reassign").invoke(fault, Stage(cluster, admin))
    assert admin.replicas == {0: [1, 2, 3]}


def test_one_replica_on_one_node_cannot_be_another(cluster: BreakableCluster) -> None:
    admin = FakeAdmin(replicas={0: [1]})
    fault = Fault("reassign", "reassign", "some partitions", {"how": "fewer"})
    with pytest.raises(FaultError, match="no partition can have replicas that are fewer"):
        find_nemesis("reassign").invoke(fault, Stage(cluster, admin))


# --- waiting


def test_what_takes_records_waits_until_all_are_in_sync(cluster: BreakableCluster) -> None:
    wait_in_sync(Stage(cluster))
    behind = FakeAdmin(out_of_sync={1: [3]})
    with pytest.raises(FaultError, match="t-1; next: plan faults further apart"):
        wait_in_sync(Stage(cluster, behind))


def test_who_is_asked_and_does_not_answer_is_asked_again() -> None:
    answers = iter([UnknownServerError("not now"), False, True])

    def is_so() -> bool:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    until(is_so, "it is so", 60.0, 0.0)
    with pytest.raises(FaultError, match="it is so not within 0 s"):
        until(lambda: False, "it is so", 0.0, 0.0)
