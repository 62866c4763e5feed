"""The durable half of Raft: term, vote, log, voter set and commit index, one transaction a sync.

The directory's id is kept with them: who loses one loses all, and is another voter from then on
(penstock.raft_meta.voters).

Nothing here knows the engine; it has the methods that pysyncobj calls on a journal (add,
deleteEntriesFrom, setCurrentTerm ...) because it takes that journal's place.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, Final, NamedTuple, overload

import crc32c
import lmdb

from penstock.raft_meta.damage import damaged
from penstock.raft_meta.lmdb_pages import DamagedPagesError, check_pages
from penstock.raft_meta.metering import SyncObserver, nobody_observes
from penstock.raft_meta.room import AwaitRoom, give_up, is_full
from penstock.raft_meta.voters import DIRECTORY_ID_BYTES, VoterHistory, VoterSet
from penstock.wire.errors import DataDirectoryError

NO_OP: Final = b"\x01"
"""The command of a leader's first entry in its term, as the engine writes it."""
COMMAND: Final = b"\x42"
"""What every command of the state machine begins with, as the engine sees it."""
VOTERS: Final = b"\x43"
"""What an entry that holds a voter set begins with; for the engine it is a command too."""
FIRST_INDEX: Final = 1
"""Every log begins with an entry of this index and term 0, which means nothing (S:168)."""

_FORMAT_VERSION: Final = 1
_ENTRY_HEADER: Final = struct.Struct(">IQ")  # CRC32C of index, term and command; term.
_INDEX: Final = struct.Struct(">Q")
_CRC_PREFIX: Final = struct.Struct(">QQ")
_HARD_STATE: Final = struct.Struct(">IQqQQQ")  # CRC, term, vote, commit, first and last index.
_BASE_VOTERS: Final = struct.Struct(">IQ")  # CRC of the rest; the index of the set that follows.
_INITIAL_MAP_BYTES: Final = 64 * 1024 * 1024
_ENTRY_BYTES: Final = 200
"""About what an entry takes in memory besides its command."""

TERMS_GIVEN_UP: Final = 1_000_000
"""So many terms a lost majority may have had that the log of a survivor knows nothing of."""

_NOBODY: Final = -1


class RaftSafetyError(Exception):
    """Something happened that Raft rules out: the process must end rather than go on."""


class JournalEntry(NamedTuple):
    """One entry as the engine knows it; ``command`` begins with NO_OP, COMMAND or VOTERS."""

    command: bytes
    log_index: int
    term: int


def _open_checked(path: str, **named: Any) -> lmdb.Environment:
    check_pages(Path(path))
    return lmdb.open(path, **named)


class LmdbJournal:
    """The log as a list in memory, with what changed since the last ``sync`` still to be written.

    Between two syncs nothing of a change may leave the process: the guard sees to that. All
    methods belong to one thread. Invariants, each raising RaftSafetyError: indices have no gap,
    terms never fall along the log, the current term never goes back and neither does a vote
    within it, nothing at or below the commit index is cut, and the commit index is never ahead of
    what is durable (raising it further syncs first), and voter sets that follow each other differ
    by one voter.

    Raises DataDirectoryError for a damaged journal or another node's.
    """

    def __init__(
        self,
        path: Path,
        *,
        cluster_id: str,
        node_id: int,
        open_environment: Callable[..., Any] = _open_checked,
        await_room: AwaitRoom = give_up,
        new_directory_id: Callable[[], bytes] = lambda: uuid.uuid4().bytes,
        may_found: bool = False,
        on_synced: SyncObserver = nobody_observes,
    ) -> None:
        self._path = path
        self._on_synced = on_synced
        self._await_room = await_room
        self._entries: list[JournalEntry] = []
        self._term = 0
        self._vote = _NOBODY
        self._commit = FIRST_INDEX
        self._dirty_from: int | None = None  # Lowest index whose row is not what it should be.
        self._durable_first = 0  # The rows in the database: durable_first .. durable_last.
        self._durable_last = -1
        self._hard_state_dirty = False
        self._voters = VoterHistory()
        self._base_dirty = False
        self._pledge = b""
        self.may_found = False
        """This directory alone may found a cluster; never again once it has."""
        self.directory_id = b""
        """Tells this directory from every other one; drawn when it is made."""
        self.knows_no_voters = False
        """The journal is in use, and of a version that kept no voter sets and no directory ids."""
        path.mkdir(parents=True, exist_ok=True)
        try:
            self._environment = open_environment(
                str(path), map_size=_INITIAL_MAP_BYTES, max_dbs=2, sync=True, metasync=True,
                max_readers=8,
            )  # fmt: skip
        except DamagedPagesError as error:
            raise self._damaged(str(error)) from error
        except (lmdb.Error, OSError) as error:
            raise DataDirectoryError(f"cannot open the Raft journal in {path}: {error}") from error
        try:
            self._log = self._environment.open_db(b"log")
            self._meta = self._environment.open_db(b"meta")
            self._open(f"{_FORMAT_VERSION} {cluster_id} {node_id}".encode(), new_directory_id)
            if may_found and self.is_fresh and not self.may_found:
                self._permit_founding()
        except (lmdb.Error, struct.error) as error:
            self.abandon()
            if is_full(error):
                raise DataDirectoryError(
                    f"no room for the Raft journal in {path}: {error}; free space on that disk, "
                    "then start this node again"
                ) from error
            raise self._damaged(str(error)) from error
        except BaseException:
            self.abandon()
            raise

    # Reading the disk.

    def _open(self, identity: bytes, new_directory_id: Callable[[], bytes]) -> None:
        with self._environment.begin() as transaction:
            found = transaction.get(b"identity", db=self._meta)
            if found is not None:
                self._check_identity(bytes(found), identity)
                self._load_hard_state(transaction)
                self._load_voters(transaction)
                self._load_entries(transaction)
        # The process before may have ended by a flush that failed: what was read here may be in
        # the page cache alone then, and must be written anew before anybody is told of it.
        self._hard_state_dirty = found is not None
        if self.directory_id:
            return
        self.directory_id = new_directory_id()
        if found is not None and not self.is_fresh:
            self.knows_no_voters = True  # Its id is written with the voter set that it gets.
            return
        with self._environment.begin(write=True) as transaction:
            transaction.put(b"directory", self.directory_id, db=self._meta)
            if found is None:
                transaction.put(b"identity", identity, db=self._meta)
                transaction.put(b"hard-state", self._pack_hard_state(0, -1), db=self._meta)

    def _permit_founding(self) -> None:
        """Keep the permission here: it is lost with this directory, and used up by the founding."""
        with self._environment.begin(write=True) as transaction:
            transaction.put(b"may-found", b"1", db=self._meta)
        self.may_found = True

    def _check_identity(self, found: bytes, expected: bytes) -> None:
        if found != expected:
            raise DataDirectoryError(
                f"the Raft journal in {self._path} belongs to (format, cluster, node) "
                f"{found.decode(errors='replace')!r}, not to {expected.decode()!r}; "
                "start the node that it belongs to, or use another metadata.dir"
            )

    def _load_hard_state(self, transaction: Any) -> None:
        row = transaction.get(b"hard-state", db=self._meta)
        if row is None or len(row) != _HARD_STATE.size:
            raise self._damaged("its hard state is missing")
        crc, term, vote, commit, first, end = _HARD_STATE.unpack(row)
        if crc != crc32c.crc32c(bytes(row)[4:]):
            raise self._damaged("its hard state fails its checksum")
        self._term, self._vote, self._commit = term, vote, commit
        self._durable_first, self._durable_last = first, end - 1

    def _load_voters(self, transaction: Any) -> None:
        self.directory_id = bytes(transaction.get(b"directory", db=self._meta) or b"")
        if self.directory_id and len(self.directory_id) != DIRECTORY_ID_BYTES:
            raise self._damaged("its directory id has a wrong length")
        self._pledge = bytes(transaction.get(b"pledge", db=self._meta) or b"")
        self.may_found = transaction.get(b"may-found", db=self._meta) is not None
        row = transaction.get(b"voters", db=self._meta)
        if row is None:
            return
        crc, index = _BASE_VOTERS.unpack_from(row)
        if crc != crc32c.crc32c(bytes(row)[4:]):
            raise self._damaged("its voter set fails its checksum")
        self._voters = VoterHistory(self._decode_voters(bytes(row)[_BASE_VOTERS.size :]), index)

    def _decode_voters(self, payload: bytes) -> VoterSet:
        try:
            return VoterSet.decode(payload)
        except ValueError as error:
            raise self._damaged(str(error)) from None

    def _load_entries(self, transaction: Any) -> None:
        expected = self._durable_first
        for key, row in transaction.cursor(db=self._log):
            (index,) = _INDEX.unpack(key)
            crc, term = _ENTRY_HEADER.unpack_from(row)
            command = bytes(row[_ENTRY_HEADER.size :])
            if index != expected:
                raise self._damaged(f"entry {expected} is missing")
            if crc != _crc(command, index, term):
                raise self._damaged(f"entry {index} fails its checksum")
            self._entries.append(JournalEntry(command, index, term))
            if command[:1] == VOTERS:
                self._voters.append(index, self._decode_voters(command[1:]))
            expected += 1
        if expected != self._durable_last + 1:
            raise self._damaged(f"it ends at entry {expected - 1}, not at {self._durable_last}")
        if (
            self._entries
            and not self._entries[0].log_index <= self._commit <= self._entries[-1].log_index
        ):
            raise self._damaged(f"its commit index {self._commit} is not in it")

    def _damaged(self, what: str) -> DataDirectoryError:
        return damaged(f"the Raft journal in {self._path} is damaged: {what}")

    # Reading.

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, item: int) -> JournalEntry: ...
    @overload
    def __getitem__(self, item: slice) -> list[JournalEntry]: ...
    def __getitem__(self, item: int | slice) -> JournalEntry | list[JournalEntry]:
        return self._entries[item]

    @property
    def first_index(self) -> int:
        """The first entry's index; 0 when the journal is new."""
        return self._entries[0].log_index if self._entries else 0

    @property
    def last_index(self) -> int:
        """The last entry's index; 0 when the journal is new."""
        return self._entries[-1].log_index if self._entries else 0

    @property
    def last_term(self) -> int:
        """The last entry's term."""
        return self._entries[-1].term if self._entries else 0

    @property
    def commit_index(self) -> int:
        """Everything up to here is decided."""
        return self._commit

    def term_at(self, index: int) -> int | None:
        """The term of an entry, or None when the journal does not hold it."""
        if not self._entries or not self.first_index <= index <= self.last_index:
            return None
        return self._entries[index - self._entries[0].log_index].term

    def first_within(self, size_bytes: int, end: int) -> int:
        """The least index from which the entries before ``end`` take so much memory at most."""
        base = self.first_index
        for offset in range(end - base - 1, -1, -1):
            size_bytes -= len(self._entries[offset].command) + _ENTRY_BYTES
            if size_bytes < 0:
                return base + offset + 1
        return base

    def entries(self, first: int, last: int) -> list[JournalEntry]:
        """The entries from ``first`` to ``last``, both included; they must be there."""
        base = self._entries[0].log_index
        if not base <= first or not last <= self.last_index:
            raise RaftSafetyError(
                f"entries {first}..{last} are wanted of {base}..{self.last_index}"
            )
        return self._entries[first - base : last - base + 1]

    def getCurrentTerm(self) -> int:  # noqa: N802 - the engine's name for it.
        """The current term."""
        return self._term

    def getVotedForNodeId(self) -> str | None:  # noqa: N802 - the engine's name for it.
        """The id of the node voted for in the current term."""
        return None if self._vote == _NOBODY else str(self._vote)

    def getRaftCommitIndex(self) -> int:  # noqa: N802 - the engine's name for it.
        """The commit index."""
        return self._commit

    # Voters.

    @property
    def voters(self) -> VoterSet | None:
        """The voter set in force: the newest in the log, committed or not. None: none is known."""
        return self._voters.newest

    @property
    def voters_index(self) -> int:
        """The index of the set in force; 0 while no log holds it."""
        return self._voters.newest_index

    def voters_at(self, index: int) -> VoterSet | None:
        """The voter set that was in force when the log ended with ``index``."""
        return self._voters.at(index)

    @property
    def is_fresh(self) -> bool:
        """Nothing was ever promised or stored here."""
        return (
            self.last_index <= FIRST_INDEX
            and (self._term, self._vote) == (0, _NOBODY)
            and self.voters is None
        )

    @property
    def pledge(self) -> bytes:
        """The founder's directory that a fresh one promised to follow; empty: none."""
        return self._pledge

    def give_pledge(self, founder_directory_id: bytes) -> None:
        """Promise to follow a founder; another one is refused from then on."""
        if not self.is_fresh or self._pledge not in (b"", founder_directory_id):
            raise RaftSafetyError("a second pledge, or one by a directory that is in use")
        self._base_dirty |= self._pledge != founder_directory_id
        self._pledge = founder_directory_id

    def found(self, voters: VoterSet, *, index: int = 0) -> None:
        """Begin with a voter set that no log holds yet, durably.

        ``index`` is that of the entry that is known to hold it, if there is one.
        """
        if self._voters.newest is not None:
            raise RaftSafetyError("a second founding")
        self._voters = VoterHistory(voters, index)
        self._base_dirty = True
        self.sync()

    def take_over(self, voters: VoterSet) -> None:
        """Put a set in force that need not follow the one before, durably, in a term of its own.

        For an operator who gives up a lost majority, and for nobody else: what that majority may
        have decided beyond this log is lost. The term is one that it cannot have reached, so that
        whoever heard from it later than this log did knows which of the two histories goes on.
        """
        self._term, self._vote = self._term + TERMS_GIVEN_UP, _NOBODY
        index = self.last_index + 1
        self._entries.append(JournalEntry(VOTERS + voters.encode(), index, self._term))
        self._voters.append(index, voters)
        self._mark(index)
        # With the set goes the id of this directory, which a journal of before has not written yet.
        self._hard_state_dirty = self._base_dirty = True
        self.sync()

    # Changing; on disk after the next sync.

    def add(self, command: bytes, idx: int, term: int) -> None:
        """Append one entry."""
        if self._entries and idx != self._entries[-1].log_index + 1:
            raise RaftSafetyError(f"entry {idx} cannot follow entry {self._entries[-1].log_index}")
        if self._entries and term < self._entries[-1].term:
            raise RaftSafetyError(f"entry {idx} of term {term} follows one of a later term")
        if command[:1] == VOTERS:
            self._add_voters(command[1:], idx)
        elif command != NO_OP and command[:1] != COMMAND:
            raise RaftSafetyError(f"entry {idx} is of a kind that is never replicated")
        self._entries.append(JournalEntry(command, idx, term))
        self._mark(idx)

    def _add_voters(self, payload: bytes, index: int) -> None:
        try:
            voters = VoterSet.decode(payload)
        except ValueError as error:
            raise RaftSafetyError(f"entry {index}: {error}") from None
        before = self._voters.newest
        if before is not None and not voters.may_follow(before):
            raise RaftSafetyError(f"entry {index} changes more than one voter of {before.members}")
        self._voters.append(index, voters)

    def deleteEntriesFrom(self, position: int) -> None:  # noqa: N802 - the engine's name for it.
        """Cut the list from ``position`` on."""
        if position >= len(self._entries):
            return
        index = self._entries[position].log_index
        if index <= self._commit:
            raise RaftSafetyError(
                f"entry {index} was to be cut, but {self._commit} is committed already"
            )
        del self._entries[position:]
        self._voters.cut_from(index)
        self._mark(index)

    def deleteEntriesTo(self, position: int) -> None:  # noqa: N802 - the engine's name for it.
        """Never called: compaction is ours (``compact_to``), not the engine's."""
        raise RaftSafetyError(f"the engine tried to compact up to position {position}")

    def clear(self) -> None:
        """Never called: a log is replaced by ``reset_to_snapshot`` alone."""
        raise RaftSafetyError("the engine tried to clear the log")

    def setCurrentTerm(self, term: int, voted_for: str | None) -> None:  # noqa: N802 - engine's.
        """Enter a term, or vote in the current one."""
        vote = _NOBODY if voted_for is None else int(voted_for)
        if term < self._term:
            raise RaftSafetyError(f"term {term} after term {self._term}")
        if term == self._term and self._vote not in (_NOBODY, vote):
            raise RaftSafetyError(f"a second vote in term {term}: {self._vote}, now {vote}")
        self._hard_state_dirty |= (term, vote) != (self._term, self._vote)
        self._term, self._vote = term, vote

    def setRaftCommitIndex(self, index: int) -> None:  # noqa: N802 - the engine's name for it.
        """Note what is decided. It is written with the next sync; losing it loses nothing."""
        if index < self._commit:
            raise RaftSafetyError(f"commit index {index} after {self._commit}")
        if index > self.last_index:
            raise RaftSafetyError(f"commit index {index} beyond the log's end {self.last_index}")
        if index == self._commit:
            return
        if self._dirty_from is not None and index >= self._dirty_from:
            self.sync()
        self._commit = index

    def compact_to(self, index: int) -> None:
        """Drop the entries before ``index``, which stays as the first. A snapshot covers them."""
        if not self.first_index <= index <= self._commit:
            raise RaftSafetyError(
                f"compaction to {index} of {self.first_index}, committed {self._commit}"
            )
        del self._entries[: index - self.first_index]
        self._hard_state_dirty = True
        self._base_dirty |= self._voters.compact_to(index)

    def reset_to_snapshot(self, index: int, term: int, voters: VoterSet | None = None) -> None:
        """Drop every entry: a snapshot that ends with this one takes their place, and sync.

        Term and vote stay, and the voter set where the snapshot is so old that it has none.
        Raises RaftSafetyError for a snapshot of what is committed here.
        """
        if self._entries and index <= self._commit:
            raise RaftSafetyError(f"a snapshot up to {index} when {self._commit} is committed")
        if term > self._term:
            self._term, self._vote = term, _NOBODY
        self._entries = [JournalEntry(NO_OP, index, term)]
        self._voters = VoterHistory(voters or self._voters.newest, index)
        self._base_dirty = True
        self._commit = index
        self._dirty_from = index
        self._hard_state_dirty = True
        self.sync()

    def _mark(self, index: int) -> None:
        if self._dirty_from is None or index < self._dirty_from:
            self._dirty_from = index

    # Writing.

    @property
    def dirty(self) -> bool:
        """There is something that must be on disk before any message leaves."""
        return self._dirty_from is not None or self._hard_state_dirty or self._base_dirty

    def sync(self) -> None:
        """Make everything so far durable, in one transaction; nothing to do costs nothing.

        Where there is no room it is tried again when ``await_room`` returns: a transaction that
        failed is as if it had never been, and the next one writes all of its pages anew, so that
        no failed flush passes for a success. Any exception leaves the disk as it was; the process
        must then end, for what is in memory is not what a restart will find.
        """
        if not self.dirty:
            return
        while True:
            begun_s = perf_counter()
            try:
                self._write()
                self._on_synced(perf_counter() - begun_s)
                break
            except lmdb.MapFullError:  # A map is only address space: it grows with the log.
                self._environment.set_mapsize(self._environment.info()["map_size"] * 2)
            except (lmdb.Error, OSError) as error:
                if not is_full(error):
                    raise
                self._await_room(error)
        self._dirty_from = None
        self._hard_state_dirty = self._base_dirty = False
        self._durable_first, self._durable_last = self._bounds()

    def _bounds(self) -> tuple[int, int]:
        """The first and last index; the last is before the first while there is no entry."""
        return (self.first_index, self.last_index) if self._entries else (0, -1)

    def _write(self) -> None:
        first, last = self._bounds()
        changed_from = last + 1 if self._dirty_from is None else self._dirty_from
        with self._environment.begin(write=True) as transaction:
            for index in range(self._durable_first, min(first, self._durable_last + 1)):
                transaction.delete(_INDEX.pack(index), db=self._log)
            for index in range(max(changed_from, last + 1, first), self._durable_last + 1):
                transaction.delete(_INDEX.pack(index), db=self._log)
            for entry in self._entries[max(changed_from - first, 0) :]:
                row = _ENTRY_HEADER.pack(_crc(*entry), entry.term) + entry.command
                transaction.put(_INDEX.pack(entry.log_index), row, db=self._log)
            transaction.put(b"hard-state", self._pack_hard_state(first, last), db=self._meta)
            if self._base_dirty:
                self._write_base(transaction)

    def _write_base(self, transaction: Any) -> None:
        transaction.put(b"directory", self.directory_id, db=self._meta)
        if self._pledge:
            transaction.put(b"pledge", self._pledge, db=self._meta)
        if self._voters.base is not None:
            row = _BASE_VOTERS.pack(0, self._voters.base_index)[4:] + self._voters.base.encode()
            crc = crc32c.crc32c(row).to_bytes(4, "big")
            transaction.put(b"voters", crc + row, db=self._meta)

    def _pack_hard_state(self, first: int, last: int) -> bytes:
        body = _HARD_STATE.pack(0, self._term, self._vote, self._commit, first, last + 1)[4:]
        return crc32c.crc32c(body).to_bytes(4, "big") + body

    def onOneSecondTimer(self) -> None:  # noqa: N802 - the engine's name for it.
        """Nothing: what must be durable is so already."""

    def _destroy(self) -> None:
        self.close()

    def close(self) -> None:
        """Write what is left, the commit index too, and let go of the files. Safe to call twice."""
        if self._environment is None:
            return
        self._hard_state_dirty = True
        self.sync()
        self.abandon()

    def abandon(self) -> None:
        """Let go of the files and write nothing, as a crash would. Safe to call twice."""
        if self._environment is not None:
            self._environment.close()
            self._environment = None


def _crc(command: bytes, index: int, term: int) -> int:
    return int(crc32c.crc32c(command, crc32c.crc32c(_CRC_PREFIX.pack(index, term))))
