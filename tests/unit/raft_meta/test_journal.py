"""The journal: what sync promised is there after a crash, and what Raft forbids is refused."""

from __future__ import annotations

import random

import lmdb
import pytest

from penstock.raft_meta.journal import COMMAND, NO_OP, LmdbJournal, RaftSafetyError
from penstock.raft_meta.voters import VoterSet
from penstock.wire.errors import DataDirectoryError


def open_journal(path, *, cluster_id="c", node_id=1, **named) -> LmdbJournal:
    return LmdbJournal(path, cluster_id=cluster_id, node_id=node_id, **named)


@pytest.fixture
def journal(tmp_path):
    journal = open_journal(tmp_path / "j")
    journal.add(NO_OP, 1, 0)
    yield journal
    journal.abandon()


def fill(journal, count, term=1) -> None:
    for index in range(journal.last_index + 1, journal.last_index + 1 + count):
        journal.add(COMMAND + b"%d" % index, index, term)


def contents(journal):
    return (
        journal[:],
        journal.getCurrentTerm(),
        journal.getVotedForNodeId(),
    )


def reopen(journal, tmp_path, **named) -> LmdbJournal:
    journal.abandon()
    return open_journal(tmp_path / "j", **named)


def test_what_was_synced_survives_a_crash_and_the_rest_does_not(journal, tmp_path):
    fill(journal, 3)
    journal.setCurrentTerm(4, "2")
    journal.sync()
    synced = contents(journal)
    fill(journal, 2)
    journal.setCurrentTerm(5, None)
    after = reopen(journal, tmp_path)
    assert contents(after) == synced
    assert (after.getCurrentTerm(), after.getVotedForNodeId()) == (4, "2")
    after.abandon()


def test_a_planned_stop_keeps_the_commit_index_too(journal, tmp_path):
    fill(journal, 3)
    journal.sync()
    journal.setRaftCommitIndex(3)
    journal.close()
    after = open_journal(tmp_path / "j")
    assert after.commit_index == 3
    after.abandon()


def test_the_commit_index_is_never_ahead_of_the_disk(journal, tmp_path):
    fill(journal, 5)
    assert journal.dirty
    journal.setRaftCommitIndex(4)  # Of entries that no sync has written yet.
    after = reopen(journal, tmp_path)
    assert after.last_index == 6
    assert after.commit_index <= after.last_index
    after.abandon()


def test_a_sync_with_nothing_new_opens_no_transaction(journal):
    journal.sync()
    journal.setRaftCommitIndex(1)
    journal._write = lambda: pytest.fail("wrote")
    journal.sync()


def test_truncation_and_other_entries_in_their_place_are_durable(journal, tmp_path):
    fill(journal, 5, term=1)
    journal.sync()
    journal.deleteEntriesFrom(3)
    fill(journal, 1, term=2)
    journal.setCurrentTerm(2, None)
    journal.sync()
    after = reopen(journal, tmp_path)
    assert [(entry.log_index, entry.term) for entry in after[:]] == [(1, 0), (2, 1), (3, 1), (4, 2)]
    after.abandon()


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda j: j.add(COMMAND, 9, 1), "cannot follow"),
        (lambda j: j.add(COMMAND, 5, 0), "later term"),
        (lambda j: j.add(b"\x00pickled", 5, 1), "never replicated"),
        (lambda j: j.add(b"\x02pickled", 5, 1), "never replicated"),
        (lambda j: j.deleteEntriesFrom(1), "committed already"),
        (lambda j: j.setCurrentTerm(2, None), "term 2 after term 3"),
        (lambda j: j.setCurrentTerm(3, "1"), "second vote"),
        (lambda j: j.setCurrentTerm(3, None), "second vote"),
        (lambda j: j.setRaftCommitIndex(5), "beyond the log"),
        (lambda j: j.setRaftCommitIndex(1), "after 2"),
        (lambda j: j.compact_to(4), "compaction"),
        (lambda j: j.reset_to_snapshot(2, 1), "is committed"),
        (lambda j: j.clear(), "clear"),
        (lambda j: j.deleteEntriesTo(1), "compact"),
        (lambda j: j.entries(4, 5), "are wanted"),
    ],
)
def test_what_raft_forbids_is_refused(journal, tmp_path, break_it, message):
    fill(journal, 3)
    journal.setCurrentTerm(3, "2")
    journal.setRaftCommitIndex(2)
    journal.sync()
    before = contents(journal)
    with pytest.raises(RaftSafetyError, match=message):
        break_it(journal)
    after = reopen(journal, tmp_path)
    assert contents(after) == before
    after.abandon()


def test_compaction_keeps_the_entry_that_the_next_follows(journal, tmp_path):
    fill(journal, 9)
    journal.setRaftCommitIndex(8)
    journal.compact_to(6)
    journal.sync()
    after = reopen(journal, tmp_path)
    assert (after.first_index, after.last_index, after.commit_index) == (6, 10, 8)
    assert (after.term_at(5), after.term_at(6)) == (None, 1)
    after.abandon()


@pytest.mark.parametrize("index", [4, 7, 50])
def test_a_snapshot_replaces_the_log_and_keeps_the_vote(journal, tmp_path, index):
    fill(journal, 6)
    journal.setCurrentTerm(3, "2")
    journal.setRaftCommitIndex(2)
    journal.sync()
    journal.reset_to_snapshot(index, 2)
    after = reopen(journal, tmp_path)
    assert after[:] == [(NO_OP, index, 2)]
    assert after.commit_index == index
    assert (after.getCurrentTerm(), after.getVotedForNodeId()) == (3, "2")
    after.abandon()


@pytest.mark.parametrize("identity", [{"cluster_id": "other"}, {"node_id": 2}])
def test_another_nodes_journal_is_refused(journal, tmp_path, identity):
    journal.abandon()
    with pytest.raises(DataDirectoryError, match="belongs to"):
        open_journal(tmp_path / "j", **identity)


def damage(path, table, change) -> None:
    with lmdb.open(str(path), max_dbs=2) as environment:
        database = environment.open_db(table)
        with environment.begin(write=True) as transaction:
            change(transaction, database)


@pytest.mark.parametrize(
    ("table", "change", "message"),
    [
        (b"log", lambda t, d: t.put((3).to_bytes(8, "big"), b"x" * 20, db=d), "entry 3 fails"),
        (b"log", lambda t, d: t.put((3).to_bytes(8, "big"), b"x", db=d), "damaged"),
        (b"log", lambda t, d: t.delete((3).to_bytes(8, "big"), db=d), "entry 3 is missing"),
        (b"log", lambda t, d: t.delete((5).to_bytes(8, "big"), db=d), "ends at entry 4"),
        (b"meta", lambda t, d: t.put(b"hard-state", b"x" * 44, db=d), "hard state"),
        (b"meta", lambda t, d: t.delete(b"hard-state", db=d), "hard state is missing"),
    ],
)
def test_damage_is_never_read_over(journal, tmp_path, table, change, message):
    fill(journal, 4)
    journal.close()
    damage(tmp_path / "j", table, change)
    with pytest.raises(DataDirectoryError, match=message) as raised:
        open_journal(tmp_path / "j")
    assert str(tmp_path) in raised.value.message


def test_a_flipped_bit_of_any_entry_is_found(journal, tmp_path):
    fill(journal, 1)
    journal.close()

    def flip(transaction, database):
        key = (2).to_bytes(8, "big")
        row = bytearray(transaction.get(key, db=database))
        row[-1] ^= 1
        transaction.put(key, bytes(row), db=database)

    damage(tmp_path / "j", b"log", flip)
    with pytest.raises(DataDirectoryError, match=r"checksum\. Do not start this"):
        open_journal(tmp_path / "j")


@pytest.mark.parametrize("kept_bytes", [100, 8192, 5 * 4096])
def test_a_file_that_would_end_the_process_is_refused(journal, tmp_path, kept_bytes):
    fill(journal, 400)
    journal.sync()
    journal.close()
    file = tmp_path / "j" / "data.mdb"
    data = file.read_bytes()
    file.write_bytes(data[:kept_bytes] + bytes(len(data) - kept_bytes))
    with pytest.raises(DataDirectoryError, match=r"is damaged: .*\. Do not start this"):
        open_journal(tmp_path / "j")


class Failing:
    """An environment whose n-th write operation fails, the commit counted as one."""

    def __init__(self, environment, allowed):
        self._environment = environment
        self.allowed = allowed

    def __getattr__(self, name):
        return getattr(self._environment, name)

    def begin(self, *arguments, **named):
        transaction = self._environment.begin(*arguments, **named)
        return FailingTransaction(self, transaction) if named.get("write") else transaction

    def spend(self):
        self.allowed -= 1
        if self.allowed < 0:
            raise lmdb.DiskError("injected")


class FailingTransaction:
    def __init__(self, owner, transaction):
        self._owner = owner
        self._transaction = transaction

    def __enter__(self):
        self._transaction.__enter__()
        return self

    def __exit__(self, kind, error, trace):
        if kind is None:
            try:
                self._owner.spend()
            except lmdb.DiskError:
                self._transaction.abort()
                raise
        return self._transaction.__exit__(kind, error, trace)

    def put(self, *arguments, **named):
        self._owner.spend()
        return self._transaction.put(*arguments, **named)

    def delete(self, *arguments, **named):
        self._owner.spend()
        return self._transaction.delete(*arguments, **named)


def test_a_sync_takes_effect_whole_or_not_at_all(tmp_path):
    """Each step of the transaction fails once; a restart finds the state before, or after."""
    outcomes = set()
    for allowed in range(12):
        path = tmp_path / f"j{allowed}"
        journal = open_journal(path)
        journal.add(NO_OP, 1, 0)
        fill(journal, 5)
        journal.sync()
        before = contents(journal)
        journal._environment = Failing(journal._environment, allowed)
        journal.deleteEntriesFrom(2)
        fill(journal, 2, term=7)
        journal.setCurrentTerm(7, "3")
        after = contents(journal)
        failed = False
        try:
            journal.sync()
        except lmdb.DiskError:
            failed = True
        journal._environment._environment.close()
        found = open_journal(path)
        assert contents(found) == (before if failed else after)
        outcomes.add(failed)
        found.abandon()
    assert outcomes == {True, False}


def test_random_histories_reopen_as_they_were_synced(tmp_path):
    rng = random.Random(7)
    fast = {"open_environment": lambda *a, **k: lmdb.open(*a, **{**k, "sync": False})}
    journal = open_journal(tmp_path / "j", **fast)
    journal.add(NO_OP, 1, 0)
    journal.sync()
    saved = contents(journal)
    for _ in range(400):
        match rng.randrange(7):
            case 0 | 1 | 2:
                fill(journal, rng.randint(1, 4), term=journal.getCurrentTerm())
            case 3:
                cut = rng.randint(journal.commit_index, journal.last_index) + 1
                journal.deleteEntriesFrom(cut - journal.first_index)
            case 4:
                journal.setCurrentTerm(journal.getCurrentTerm() + 1, rng.choice([None, "1"]))
            case 5:
                durable = min(journal._durable_last, journal.last_index)
                if journal._dirty_from is not None:
                    durable = min(durable, journal._dirty_from - 1)
                journal.setRaftCommitIndex(
                    max(journal.commit_index, rng.randint(journal.commit_index, durable))
                    if durable > journal.commit_index
                    else journal.commit_index
                )
            case 6:
                journal.compact_to(rng.randint(journal.first_index, journal.commit_index))
        if rng.random() < 0.4:
            journal.sync()
            saved = contents(journal)
        if rng.random() < 0.1:
            journal = reopen(journal, tmp_path, **fast)
            assert contents(journal) == saved
    journal.abandon()


def test_the_map_grows_with_the_log(tmp_path):
    small = {"open_environment": lambda *a, **k: lmdb.open(*a, **{**k, "map_size": 128 * 1024})}
    journal = open_journal(tmp_path / "j", **small)
    journal.add(NO_OP, 1, 0)
    for index in range(2, 10):
        journal.add(COMMAND + b"x" * 200_000, index, 1)
    journal.sync()
    after = reopen(journal, tmp_path)
    assert after.last_index == 9
    after.abandon()


def test_the_environment_is_opened_to_reach_the_disk_at_every_commit(tmp_path):
    """Votes and entries are answered after a commit: it must not stop in the page cache."""
    seen: dict[str, object] = {}

    def spy(*arguments: object, **options: object) -> object:
        seen.update(options)
        return lmdb.open(*arguments, **options)

    open_journal(tmp_path / "j", open_environment=spy)
    assert seen["sync"] is True
    assert seen["metasync"] is True
    assert not seen.get("map_async", False)
    assert not seen.get("writemap", False)


def forget_the_directory(journal) -> None:
    """As a version left it that kept neither voter sets nor directory ids."""
    with journal._environment.begin(write=True) as transaction:
        transaction.delete(b"directory", db=journal._meta)


def test_an_unused_journal_of_an_older_version_gets_a_directory_id_for_good(tmp_path):
    journal = open_journal(tmp_path / "j")
    forget_the_directory(journal)
    journal = reopen(journal, tmp_path)
    directory_id = journal.directory_id
    assert not journal.knows_no_voters
    journal = reopen(journal, tmp_path)
    assert journal.directory_id == directory_id
    journal.abandon()


def test_a_used_journal_of_an_older_version_gets_its_id_with_its_voters(journal, tmp_path):
    fill(journal, 3)
    journal.setCurrentTerm(1, None)
    journal.sync()
    forget_the_directory(journal)
    for _ in range(2):  # A crash before the voters are written leaves it what it was.
        journal = reopen(journal, tmp_path)
        assert journal.knows_no_voters
    journal.found(VoterSet.of([1, 2]))
    directory_id = journal.directory_id
    journal = reopen(journal, tmp_path)
    assert (journal.directory_id, journal.knows_no_voters) == (directory_id, False)
    journal.abandon()
