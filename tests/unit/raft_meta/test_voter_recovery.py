"""What a voter finds on its disk, wherever between two files the crash lay."""

from __future__ import annotations

import pytest

from penstock.raft_meta.snapshots import Snapshot, SnapshotStore
from penstock.raft_meta.voter import Committed, Installed
from penstock.wire.errors import DataDirectoryError
from tests.unit.raft_meta.lone_voter import Lone, append, entry
from tests.unit.raft_meta.raft_fuzz import Network

NEVER_EMPTY = ". Do not start this controller with an empty directory"


@pytest.fixture
def lone(tmp_path):
    lone = Lone(tmp_path)
    entries = [entry(index, 1) for index in range(2, 11)]
    lone.tell(2, append(1, (1, 0), *entries, commit=8))
    lone.events.clear()
    yield lone
    lone.journal.abandon()


def test_a_restart_delivers_what_is_committed_again_and_in_order(lone):
    lone.journal.close()
    lone.open()
    lone.step()
    assert [event.index for event in lone.of(Committed)] == list(range(2, 9))
    assert lone.log[-1] == (10, 1)


def test_a_restart_after_compaction_begins_with_the_snapshot(lone):
    lone.voter.compact(8, b"state")
    lone.step()
    lone.crash()
    lone.step()
    expected = Snapshot(8, 1, b"state", lone.journal.voters)
    assert [event.snapshot for event in lone.of(Installed)] == [expected]
    assert lone.of(Committed) == []
    assert lone.log == [(6, 1), (7, 1), (8, 1), (9, 1), (10, 1)]  # Two are kept, and the rest.


def test_a_crash_between_snapshot_and_compaction_loses_nothing(lone):
    SnapshotStore(lone.directory).save(Snapshot(8, 1, b"state"))
    lone.crash()
    lone.step()
    assert lone.log[0] == (1, 0)
    assert lone.log[-1] == (10, 1)
    assert lone.status.commit_index >= 8
    assert [event.snapshot.index for event in lone.of(Installed)] == [8]


@pytest.mark.parametrize("last", [(20, 3), (9, 3)])
def test_a_crash_between_snapshot_and_journal_of_an_install(
    lone: Lone, last: tuple[int, int]
) -> None:
    """The journal ends before the snapshot, or went another way beyond what was committed."""
    SnapshotStore(lone.directory).save(Snapshot(last[0], last[1], b"newer"))
    lone.crash()
    lone.step()
    assert lone.log == [last]
    assert lone.status.commit_index == last[0]
    assert [event.snapshot.data for event in lone.of(Installed)] == [b"newer"]


def test_a_journal_without_its_snapshot_is_refused(lone):
    lone.voter.compact(8, b"state")
    lone.step()
    (lone.directory / "snapshot").unlink()
    with pytest.raises(DataDirectoryError, match=f"what came before is gone{NEVER_EMPTY}"):
        lone.crash()
    lone.journal.abandon()


def test_an_older_snapshot_than_the_journal_begins_with_is_refused(lone):
    lone.voter.compact(8, b"state")
    lone.step()
    SnapshotStore(lone.directory).save(Snapshot(3, 1, b"old"))
    with pytest.raises(DataDirectoryError, match=f"the snapshot ends at 3{NEVER_EMPTY}"):
        lone.crash()
    lone.journal.abandon()


@pytest.mark.parametrize("position", [0, 8, 30, 44])
def test_a_damaged_snapshot_is_refused_and_named(tmp_path, position):
    store = SnapshotStore(tmp_path)
    store.save(Snapshot(8, 1, b"some state"))
    raw = bytearray((tmp_path / "snapshot").read_bytes())
    raw[position] ^= 4
    (tmp_path / "snapshot").write_bytes(raw)
    with pytest.raises(DataDirectoryError, match=f"damaged: .*{NEVER_EMPTY}"):
        store.load()


@pytest.mark.parametrize("size", [0, 10, 45])
def test_a_torn_snapshot_is_refused(tmp_path, size):
    store = SnapshotStore(tmp_path)
    store.save(Snapshot(8, 1, b"some state"))
    path = tmp_path / "snapshot"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataDirectoryError, match=f"damaged: .*{NEVER_EMPTY}"):
        store.load()


def test_a_snapshot_left_half_written_is_not_looked_at(tmp_path):
    store = SnapshotStore(tmp_path)
    store.save(Snapshot(8, 1, b"state"))
    (tmp_path / "snapshot.tmp").write_bytes(b"half of the next")
    assert store.load() == Snapshot(8, 1, b"state")
    store.save(Snapshot(9, 1, b"next"))
    assert store.load() == Snapshot(9, 1, b"next")


def test_every_crash_around_a_leaders_sync_keeps_what_was_acknowledged(tmp_path):
    for number, when in enumerate(("crash_before_sync", "crash_after_sync")):
        net = Network(tmp_path / str(number), 3, seed=11)
        leader = net.wait_leader()
        acknowledged = net.propose()
        net.run(0.1)
        assert acknowledged in net.acknowledged
        setattr(leader, when, True)
        net.propose(leader)
        net.run(0.05)
        assert leader.voter is None
        net.settle()
        assert acknowledged in leader.state
        net.close()


def test_all_voters_crash_at_once_and_come_back_with_everything(tmp_path):
    net = Network(tmp_path, 3, seed=5, compact_every=30)
    net.wait_leader()
    for _ in range(100):
        net.propose()
        net.run(0.01)
    before = set(net.acknowledged)
    assert len(before) > 90
    for host in net.hosts.values():
        net.crash(host, down_s=1.0)
    net.run(1.5)
    net.settle()
    assert all(before <= set(host.state) for host in net.hosts.values())
    net.close()


def test_a_voter_that_lost_its_disk_is_none_until_it_is_added_again(tmp_path):
    net = Network(tmp_path, 3, seed=6, compact_every=30)
    leader = net.wait_leader()
    for _ in range(100):
        net.propose()
        net.run(0.01)
    victim = next(host for host in net.hosts.values() if host is not leader)
    net.wipe(victim)
    net.run(3)
    assert not victim.is_member
    assert net.changes.get(net.add(victim.node_id, leader)) is not None
    net.run(1)
    assert set(net.changes.values()) == {"duplicate"}  # Its old disk is the voter, still.
    net.insist(lambda: net.remove(victim.node_id))
    net.insist(lambda: net.add(victim.node_id))
    net.settle()
    assert victim.is_member
    assert net.installs > 0
    net.close()
