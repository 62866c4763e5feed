"""Voter sets as values, and as a log and a snapshot keep them."""

from __future__ import annotations

import pytest

from penstock.raft_meta.journal import COMMAND, NO_OP, VOTERS, LmdbJournal, RaftSafetyError
from penstock.raft_meta.snapshots import Snapshot, SnapshotStore
from penstock.raft_meta.voters import ANY_DIRECTORY, MAX_VOTERS, Member, VoterSet
from penstock.v1 import raft_pb2
from penstock.wire.errors import DataDirectoryError
from tests.unit.raft_meta.founded import directory_of, voter_set

THREE = voter_set([1, 2, 3])
FOUR = voter_set([1, 2, 3, 4])


def test_a_set_survives_being_stored_and_sent():
    assert VoterSet.decode(FOUR.encode()) == FOUR
    assert VoterSet.from_proto(FOUR.to_proto()) == FOUR
    assert [member.node_id for member in VoterSet((FOUR.get(3), FOUR.get(1)))] == [1, 3]


@pytest.mark.parametrize("count", range(1, 8))
def test_majorities_of_sets_that_may_follow_each_other_meet(count):
    smaller, larger = voter_set(range(count)), voter_set(range(count + 1))
    assert larger.may_follow(smaller)
    assert smaller.may_follow(larger)
    assert smaller.majority + larger.majority > len(larger)


@pytest.mark.parametrize(
    ("after", "may"),
    [
        (THREE, True),
        (FOUR, True),
        (voter_set([1, 2]), True),
        (voter_set([1, 2, 3, 4, 5]), False),
        (voter_set([1]), False),
        (voter_set([1, 2, 4]), False),  # One removed and one added.
        (THREE.with_member(Member(2, "elsewhere", 9, directory_of(2))), True),
        (THREE.with_member(Member(2, "host-2", 1, directory_of(22))), False),  # Another disk.
    ],
)
def test_only_one_voter_changes_at_a_time(after, may):
    assert after.may_follow(THREE) is may


def test_directories_that_were_not_known_may_be_filled_in_and_not_taken_back():
    unknown = VoterSet.of([1, 2, 3])
    assert THREE.may_follow(unknown)
    assert not unknown.may_follow(THREE)


def test_a_voter_counts_with_its_own_directory_alone():
    assert THREE.includes(2, directory_of(2))
    assert not THREE.includes(2, directory_of(3))
    assert not THREE.includes(2, ANY_DIRECTORY)
    assert not THREE.includes(4, directory_of(4))
    assert VoterSet.of([2]).includes(2, directory_of(9))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff\xff",
        raft_pb2.VoterSet(voters=[{"node_id": -1}]).SerializeToString(),
        raft_pb2.VoterSet(voters=[{"node_id": 1}, {"node_id": 1}]).SerializeToString(),
        raft_pb2.VoterSet(voters=[{"node_id": 1, "directory_id": b"short"}]).SerializeToString(),
        raft_pb2.VoterSet(
            voters=[{"node_id": n} for n in range(MAX_VOTERS + 1)]
        ).SerializeToString(),
    ],
)
def test_what_is_no_set_is_refused(raw):
    with pytest.raises(ValueError, match="no voter"):
        VoterSet.decode(raw)


# In the journal.


def open_journal(path, **named) -> LmdbJournal:
    named.setdefault("new_directory_id", lambda: directory_of(1))
    return LmdbJournal(path / "journal", cluster_id="c", node_id=1, **named)


@pytest.fixture
def journal(tmp_path):
    """A log up to 5, with THREE at 2 and FOUR at 4."""
    journal = open_journal(tmp_path)
    journal.add(NO_OP, 1, 0)
    journal.add(VOTERS + THREE.encode(), 2, 1)
    journal.add(COMMAND + b"a", 3, 1)
    journal.add(VOTERS + FOUR.encode(), 4, 1)
    journal.add(COMMAND + b"b", 5, 1)
    journal.sync()
    yield journal
    journal.abandon()


def reopened(journal, tmp_path) -> LmdbJournal:
    journal.abandon()
    return open_journal(tmp_path)


def test_a_set_is_in_force_from_the_moment_it_is_in_the_log(journal):
    assert (journal.voters, journal.voters_index) == (FOUR, 4)
    assert [journal.voters_at(index) for index in range(1, 6)] == [None, THREE, THREE, FOUR, FOUR]


def test_it_is_so_after_a_restart(journal, tmp_path):
    after = reopened(journal, tmp_path)
    assert (after.voters, after.voters_index) == (FOUR, 4)
    after.abandon()


def test_cutting_the_log_puts_the_set_before_in_force_again(journal, tmp_path):
    journal.deleteEntriesFrom(3)
    assert (journal.voters, journal.voters_index) == (THREE, 2)
    journal.sync()
    after = reopened(journal, tmp_path)
    assert after.voters == THREE
    after.deleteEntriesFrom(1)
    assert after.voters is None
    after.abandon()


def test_compaction_keeps_the_set_that_was_in_force(journal, tmp_path):
    journal.setCurrentTerm(1, None)
    journal.setRaftCommitIndex(5)
    journal.compact_to(3)
    journal.sync()
    after = reopened(journal, tmp_path)
    assert (after.voters, after.voters_at(3)) == (FOUR, THREE)
    after.compact_to(5)
    after.sync()
    again = reopened(after, tmp_path)
    assert (again.voters, again.voters_index) == (FOUR, 4)
    again.abandon()


def test_a_snapshot_brings_its_own_set(journal, tmp_path):
    journal.reset_to_snapshot(20, 3, THREE)
    after = reopened(journal, tmp_path)
    assert (after.voters, after.voters_index) == (THREE, 20)
    after.abandon()


def test_a_log_never_holds_two_sets_that_differ_by_more_than_one_voter(journal):
    for wrong in (voter_set([1, 2]), voter_set([1, 2, 3, 4, 5, 6])):
        with pytest.raises(RaftSafetyError, match="more than one voter"):
            journal.add(VOTERS + wrong.encode(), 6, 1)
    with pytest.raises(RaftSafetyError, match="no voter set"):
        journal.add(VOTERS + b"\xff", 6, 1)


def test_a_directory_keeps_its_id_and_a_new_one_has_another(tmp_path):
    first = LmdbJournal(tmp_path / "a", cluster_id="c", node_id=1)
    kept = first.directory_id
    first.abandon()
    again = LmdbJournal(tmp_path / "a", cluster_id="c", node_id=1)
    assert again.directory_id == kept
    assert len(kept) == 16
    other = LmdbJournal(tmp_path / "b", cluster_id="c", node_id=1)
    assert other.directory_id != kept
    for each in (again, other):
        each.abandon()


def test_a_pledge_and_a_founding_are_for_good(tmp_path):
    journal = open_journal(tmp_path)
    assert journal.is_fresh
    journal.give_pledge(directory_of(7))
    journal.sync()
    after = reopened(journal, tmp_path)
    assert after.pledge == directory_of(7)
    with pytest.raises(RaftSafetyError, match="second pledge"):
        after.give_pledge(directory_of(8))
    after.found(THREE)
    assert not after.is_fresh
    again = reopened(after, tmp_path)
    assert (again.voters, again.voters_index) == (THREE, 0)
    with pytest.raises(RaftSafetyError, match="second founding"):
        again.found(FOUR)
    with pytest.raises(RaftSafetyError, match="pledge"):
        again.give_pledge(directory_of(7))
    again.abandon()


def test_a_damaged_set_is_refused(journal, tmp_path):
    journal.setCurrentTerm(1, None)
    journal.setRaftCommitIndex(5)
    journal.compact_to(3)
    journal.sync()
    with journal._environment.begin(write=True) as transaction:
        row = bytearray(transaction.get(b"voters", db=journal._meta))
        row[-1] ^= 1
        transaction.put(b"voters", bytes(row), db=journal._meta)
    journal.abandon()
    with pytest.raises(DataDirectoryError, match="voter set fails its checksum"):
        open_journal(tmp_path)


def test_a_snapshot_file_holds_the_set_and_one_of_before_has_none(tmp_path):
    store = SnapshotStore(tmp_path)
    store.save(Snapshot(8, 1, b"state", FOUR))
    assert store.load() == Snapshot(8, 1, b"state", FOUR)
    raw = bytearray((tmp_path / "snapshot").read_bytes())
    raw[50] ^= 1  # Within the voter set.
    (tmp_path / "snapshot").write_bytes(raw)
    with pytest.raises(DataDirectoryError, match="fails its checksum"):
        store.load()


def test_a_snapshot_of_the_first_version_is_read(tmp_path):
    import crc32c

    from penstock.raft_meta.snapshots import _HEADER, _TRAILER

    data = b"old state"
    header = _HEADER.pack(b"PSNP", 1, 8, 1, len(data), crc32c.crc32c(data))
    (tmp_path / "snapshot").write_bytes(header + _TRAILER.pack(crc32c.crc32c(header)) + data)
    assert SnapshotStore(tmp_path).load() == Snapshot(8, 1, data)
