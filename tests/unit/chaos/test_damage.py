"""Nemeses of files, on directories of paper nodes."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from penstock.chaos.errors import FaultError
from penstock.chaos.nemeses import Fault, damage
from penstock.chaos.nemeses import asking as asking_module
from penstock.chaos.nemeses.damage import pieces
from penstock.chaos.nemeses.registry import find_nemesis
from penstock.client import TopicPartition
from penstock.wire.records import Record, encode_batch
from tests.unit.chaos.breakable import BreakableCluster, FakeAdmin, Stage

PARTITION = TopicPartition("t", 1)
"""Of which FakeAdmin says that node 2 is its preferred leader."""


@pytest.fixture
def cluster(tmp_path: Path) -> BreakableCluster:
    return BreakableCluster(tmp_path)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking_module, "PATIENCE_S", 0.0)
    monkeypatch.setattr(asking_module.until, "__defaults__", (0.0, 0.0))
    monkeypatch.setattr(damage, "_REFUSED_S", 0.0)
    monkeypatch.setattr(damage, "_ALONE_S", 0.0)


def segment(cluster: BreakableCluster, batches: int = 4) -> Path:
    """Node 2 has so many batches of two records of the partition."""
    path = cluster.data_directory(2) / "logs" / "t-1" / f"{0:020}.log"
    path.parent.mkdir(parents=True)
    path.write_bytes(
        b"".join(
            encode_batch([Record(at + n, 1, None, b"value", ()) for n in range(2)], base_offset=at)
            for at in range(0, 2 * batches, 2)
        )
    )
    return path


def fault(name: str, target: str = "random", **parameters: object) -> Fault:
    return Fault(name, name, target, parameters)


def test_batches_are_on_one_side_of_the_high_watermark(cluster: BreakableCluster) -> None:
    path = segment(cluster)
    size = path.stat().st_size // 4
    directory = cluster.data_directory(2)
    below = pieces(directory, {PARTITION: 4}, "below")
    assert [(one.offset, one.start_byte, one.end_byte) for one in below] == [
        (0, 0, size),
        (2, size, 2 * size),
    ]
    assert [one.offset for one in pieces(directory, {PARTITION: 4}, "above")] == [4, 6]
    assert [one.offset for one in pieces(directory, {PARTITION: 5}, "above")] == [6]
    assert pieces(directory, {TopicPartition("t", 0): 4}, "below") == []


@pytest.mark.parametrize("where", ["below", "above"])
@pytest.mark.parametrize("stop", ["kill", "terminate"])
def test_one_bit_is_another(where: str, stop: str, cluster: BreakableCluster) -> None:
    path = segment(cluster)
    whole = path.read_bytes()
    admin = FakeAdmin(ends={1: 4})
    held = find_nemesis("flipped-bit").invoke(
        fault("flipped-bit", where=where, stop=stop), Stage(cluster, admin)
    )
    paused = ["pause 1", "pause 3"] if where == "above" else []
    assert cluster.done == [*paused, f"{stop} 2"]
    assert not cluster.paused
    now = path.read_bytes()
    [at] = [n for n, (one, other) in enumerate(zip(whole, now, strict=True)) if one != other]
    assert (whole[at] ^ now[at]).bit_count() == 1
    assert held["byte"] == at
    assert (at < len(whole) // 2) == (where == "below")
    assert (held["topic"], held["partition"]) == ("t", 1)


def test_damage_is_not_healed_by_who_has_read_from_another(
    cluster: BreakableCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = segment(cluster)
    whole = path.read_bytes()
    scene, nemesis = Stage(cluster, FakeAdmin(ends={1: 4})), find_nemesis("flipped-bit")
    one = fault("flipped-bit", where="below", stop="kill")
    held = nemesis.invoke(one, scene)
    monkeypatch.setattr(damage, "_READ_S", 0.25)
    # Whoever was asked took node 2 for the leader still, and the reader another one.
    monkeypatch.setattr(damage, "_is_read", lambda *_: True)
    with pytest.raises(
        FaultError, match=r"t-1 is read from \d where it is damaged, and mended: not"
    ):
        nemesis.heal(one, scene, held)
    assert 2 in cluster.up
    path.write_bytes(whole)
    nemesis.heal(one, scene, held)
    path.unlink()  # By retention, say.
    nemesis.heal(one, scene, held)


@pytest.mark.parametrize("where", ["below", "above"])
def test_a_file_is_cut(where: str, cluster: BreakableCluster) -> None:
    path = segment(cluster)
    size = path.stat().st_size
    held = find_nemesis("truncated-file").invoke(
        fault("truncated-file", where=where, stop="kill"), Stage(cluster, FakeAdmin(ends={1: 4}))
    )
    assert path.stat().st_size == held["byte"] == size - held["lost_bytes"]
    assert (held["byte"] < size // 2) == (where == "below")


@pytest.mark.parametrize("name", ["flipped-bit", "truncated-file"])
def test_where_there_is_nothing_to_damage_the_node_goes_on(
    name: str, cluster: BreakableCluster
) -> None:
    segment(cluster)
    with pytest.raises(FaultError, match="nothing above a high watermark"):
        find_nemesis(name).invoke(
            fault(name, where="above", stop="kill"), Stage(cluster, FakeAdmin(ends={1: 8}))
        )
    assert cluster.is_whole


@pytest.mark.parametrize("name", ["flipped-bit", "truncated-file", "stale-directory", "wiped-disk"])
def test_nothing_is_taken_while_a_replica_is_out_of_sync(
    name: str, cluster: BreakableCluster
) -> None:
    behind = FakeAdmin(out_of_sync={0: [3]})
    with pytest.raises(FaultError, match="plan faults further apart"):
        find_nemesis(name).invoke(fault(name), Stage(cluster, behind))
    assert cluster.done == []


@pytest.mark.parametrize(
    "name",
    [
        *("flipped-bit", "truncated-file", "stale-directory"),
        *("swapped-directories", "wiped-disk"),
    ],
)
def test_where_nobody_plays_the_role_nothing_is_done(name: str, cluster: BreakableCluster) -> None:
    with pytest.raises(FaultError, match="nobody"):
        find_nemesis(name).invoke(fault(name, "nobody here"), Stage(cluster))
    assert cluster.done == []


def test_records_are_those_from_a_life_ago_and_nothing_else_is(cluster: BreakableCluster) -> None:
    logs = cluster.data_directory(2) / "logs"
    (logs / "record").write_text("old")

    class Writing(BreakableCluster):
        def wait_ready(self, timeout_s: float) -> None:
            (logs / "record").write_text("new")
            (logs.parent / "raft").write_text("new")

    cluster.__class__ = Writing
    nemesis, scene = find_nemesis("stale-directory"), Stage(cluster)
    one = fault("stale-directory", age_ms=0)
    held = nemesis.invoke(one, scene)
    assert (logs / "record").read_text() == "old"
    assert (logs.parent / "raft").read_text() == "new"
    assert cluster.done == ["terminate 2", "start 2", "kill 2"]
    assert not [path for path in cluster.root.iterdir() if path.name.startswith(".")]
    for _ in range(2):
        nemesis.heal(one, scene, held)
        assert cluster.is_whole


def test_two_nodes_have_each_others_directory_and_then_their_own(
    cluster: BreakableCluster,
) -> None:
    nemesis, scene = find_nemesis("swapped-directories"), Stage(cluster)
    one = fault("swapped-directories")
    held = nemesis.invoke(one, scene)
    assert (held["struck"], held["refused"], held["may_end"]) == ([2, 3], [2, 3], "directory")
    assert (cluster.data_directory(2) / "whose").read_text() == "3"
    for _ in range(2):
        nemesis.heal(one, scene, held)
        assert (cluster.data_directory(2) / "whose").read_text() == "2"
        assert cluster.is_whole


def test_a_node_that_takes_anothers_directory_has_not_refused(cluster: BreakableCluster) -> None:
    for node in (2, 3):
        (cluster.data_directory(node) / "whose").unlink()

    class Trusting(BreakableCluster):
        def start_node(self, node: int) -> None:
            self.up.add(node)

    cluster.__class__ = Trusting
    held = find_nemesis("swapped-directories").invoke(fault("swapped-directories"), Stage(cluster))
    assert held["refused"] == []


def test_a_node_without_anything_refuses_and_is_replaced(cluster: BreakableCluster) -> None:
    admin = FakeAdmin()
    nemesis, scene = find_nemesis("wiped-disk"), Stage(cluster, admin)
    one = fault("wiped-disk")
    held = nemesis.invoke(one, scene)
    assert (held["struck"], held["refused"]) == ([2], [2])
    assert list(cluster.data_directory(2).iterdir()) == []
    nemesis.heal(one, scene, held)
    assert cluster.done == ["kill 2", "start 2", "format 2", "start 2"]
    assert (admin.voters, cluster.is_whole) == ({1: "h:1", 2: "h:2", 3: "h:3"}, True)
    (cluster.data_directory(2) / "raft").mkdir()  # It has voted.
    before = list(cluster.done)
    nemesis.heal(one, scene, held)
    assert cluster.done == before


@pytest.mark.parametrize("name", ["swapped-directories", "wiped-disk"])
def test_what_fails_half_way_is_mended(name: str, cluster: BreakableCluster) -> None:
    class Failing(BreakableCluster):
        is_broken = True

        def start_node(self, node: int) -> None:
            if self.is_broken:
                self.is_broken = False
                raise FaultError("it does not start")
            super().start_node(node)

    cluster.__class__ = Failing
    with pytest.raises(FaultError, match="it does not start"):
        find_nemesis(name).invoke(fault(name), Stage(cluster))
    assert cluster.is_whole
    assert (cluster.data_directory(2) / "whose").read_text() == "2"


@pytest.mark.parametrize("name", ["flipped-bit", "truncated-file"])
def test_above_the_high_watermark_a_node_is_killed(name: str) -> None:
    """Whoever stops in order hands over, and has nothing there then."""
    planned = [find_nemesis(name).plan(Random(seed), 3).parameters for seed in range(50)]
    assert {(one["where"], one["stop"]) for one in planned} == {
        ("below", "kill"),
        ("below", "terminate"),
        ("above", "kill"),
    }
