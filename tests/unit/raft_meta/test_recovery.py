"""A majority's disks are lost for good: one survivor goes on, by an operator's word."""

from __future__ import annotations

import crc32c
import pytest

from penstock.raft_meta.directory_lock import locked
from penstock.raft_meta.journal import TERMS_GIVEN_UP, LmdbJournal
from penstock.raft_meta.quorum import Role
from penstock.raft_meta.recovery import become_the_only_voter, survey
from penstock.raft_meta.snapshots import Snapshot, SnapshotStore
from penstock.raft_meta.voters import VoterSet
from penstock.v1 import raft_pb2
from penstock.wire.errors import DataDirectoryError
from tests.unit.raft_meta.lone_voter import Lone, Message, append, entry
from tests.unit.raft_meta.raft_fuzz import Network

FOUR = VoterSet.of(range(1, 5))


class Killed(BaseException):
    """The process ends here."""


def test_a_survivor_goes_on_alone_with_all_it_has_and_others_are_added(tmp_path):
    net = Network(tmp_path, 3, seed=31)
    leader = net.wait_leader()
    for _ in range(60):
        net.propose()
        net.run(0.02)
    survivor = next(host for host in net.hosts.values() if host is not leader)
    acknowledged = set(net.acknowledged)
    net.crash(survivor, down_s=1e9)
    for host in net.hosts.values():
        if host is not survivor:
            net.wipe(host, down_s=1e9)
    before = survey(survivor.directory, cluster_id="fuzz", node_id=survivor.node_id)
    assert before.voters_before == (1, 2, 3)
    found = become_the_only_voter(
        survivor.directory, cluster_id="fuzz", node_id=survivor.node_id, addresses={}
    )
    assert found == before
    net.start(survivor)
    net.wait_leader()
    assert survivor.voter.status().role is Role.LEADER
    net.settle()
    assert acknowledged <= set(survivor.state)
    for host in net.hosts.values():
        if host is not survivor:
            net.insist(lambda node_id=host.node_id: net.add(node_id))
    net.settle()
    assert net.voters() == {1, 2, 3}
    net.close()


def test_a_survivor_goes_on_in_a_term_that_a_lost_majority_cannot_have_reached(tmp_path):
    net = Network(tmp_path, 3, seed=31)
    net.wait_leader()
    net.propose()
    net.run(0.5)
    host = net.hosts[2]
    net.crash(host, down_s=1e9)
    before = survey(host.directory, cluster_id="fuzz", node_id=2)
    become_the_only_voter(host.directory, cluster_id="fuzz", node_id=2, addresses={})
    after = survey(host.directory, cluster_id="fuzz", node_id=2)
    assert after.last_term >= before.last_term + TERMS_GIVEN_UP
    net.close()


def test_an_empty_or_missing_directory_recovers_nothing(tmp_path):
    with pytest.raises(DataDirectoryError, match="holds no metadata log"):
        become_the_only_voter(tmp_path, cluster_id="c", node_id=1, addresses={})
    net = Network(tmp_path, 3, seed=1)
    for host in net.hosts.values():
        host.journal.close()
    with pytest.raises(DataDirectoryError, match="empty metadata log"):
        become_the_only_voter(tmp_path / "node-2", cluster_id="fuzz", node_id=2, addresses={})
    with pytest.raises(DataDirectoryError, match="belongs to"):
        survey(tmp_path / "node-2", cluster_id="other", node_id=2)


def test_a_directory_in_use_is_left_alone(tmp_path):
    with locked(tmp_path), pytest.raises(DataDirectoryError, match="another process"):
        survey(tmp_path, cluster_id="c", node_id=1)


def killed_as_it_installed_a_snapshot(directory) -> None:
    """Its journal ends with 10 of term 1; the snapshot, with 20 of term 1, has another voter."""
    lone = Lone(directory)
    lone.tell(2, append(1, (1, 0), *[entry(index, 1) for index in range(2, 11)], commit=8))
    data = b"the state up to 20"
    chunk = raft_pb2.SnapshotChunk(
        last_index=20, last_term=1, total_bytes=len(data), data=data, voters=FOUR.to_proto(),
        crc32c=crc32c.crc32c(FOUR.encode(), crc32c.crc32c(data)), round=5,
    )  # fmt: skip

    def die(*_what: object) -> None:
        raise Killed

    lone.journal.reset_to_snapshot = die
    with pytest.raises(Killed):
        lone.tell(2, Message(term=1, snapshot_chunk=chunk))
    lone.journal.abandon()


def ends_with(directory) -> tuple[int, int]:
    journal = LmdbJournal(directory / "journal", cluster_id="lone", node_id=1)
    try:
        return journal.last_index, journal.last_term
    finally:
        journal.abandon()


def test_a_snapshot_that_the_journal_lacks_counts_for_a_survivor(tmp_path):
    killed_as_it_installed_a_snapshot(tmp_path)
    found = survey(tmp_path, cluster_id="lone", node_id=1)
    assert (found.last_index, found.last_term) == (20, 1)
    assert found.voters_before == (1, 2, 3, 4)
    assert ends_with(tmp_path) == (10, 1)  # Looking changed nothing.
    assert found == become_the_only_voter(tmp_path, cluster_id="lone", node_id=1, addresses={})
    assert ends_with(tmp_path) == (21, 1 + TERMS_GIVEN_UP)


def test_a_journal_that_goes_on_after_the_snapshot_is_what_counts(tmp_path):
    lone = Lone(tmp_path)
    lone.tell(2, append(1, (1, 0), *[entry(index, 1) for index in range(2, 11)], commit=8))
    lone.journal.abandon()
    SnapshotStore(tmp_path).save(Snapshot(8, 1, b"state", FOUR))
    found = survey(tmp_path, cluster_id="lone", node_id=1)
    assert (found.last_index, found.voters_before) == (10, (1, 2, 3))


def test_a_first_snapshot_in_a_directory_is_no_empty_log(tmp_path):
    LmdbJournal(tmp_path / "journal", cluster_id="lone", node_id=1).abandon()
    SnapshotStore(tmp_path).save(Snapshot(20, 3, b"state", FOUR))
    found = survey(tmp_path, cluster_id="lone", node_id=1)
    assert (found.last_index, found.last_term, found.voters_before) == (20, 3, (1, 2, 3, 4))
    become_the_only_voter(tmp_path, cluster_id="lone", node_id=1, addresses={})
    assert ends_with(tmp_path) == (21, 3 + TERMS_GIVEN_UP)
