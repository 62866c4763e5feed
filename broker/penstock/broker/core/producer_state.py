"""What a partition remembers of idempotent producers, so that a retry is not appended twice.

Pure. Per producer id: its newest epoch and the last five batches of it, as in KIP-98 (five is
what a producer may have in flight). Rules, for a batch of producer id P, epoch E, sequence S:

======================================  =====================================================
what is known                           answer
======================================  =====================================================
E is older than P's epoch               InvalidProducerEpochError
the same S and length, among the five   Duplicate, with the offsets it got the first time
S follows P's last batch                Append
all of it lies before what is expected  DuplicateSequenceError when every sequence from there
                                        on is known to be in the log, else OutOfOrder...
anything else of epoch E                OutOfOrderSequenceError (a gap, or a partial overlap)
E is newer, or has only markers so far  S must be 0, else OutOfOrderSequenceError
P is unknown                            S must be 0, unless P's state may have been forgotten
======================================  =====================================================

Kafka (2.5 and later, KIP-360) lets an unknown producer begin anywhere, which lets the second of
two batches in flight in when the first failed. Here that is allowed only where the state may have
been lost: ``forgotten_up_to`` is the largest producer id whose state was dropped by expiry, or
ANY_PRODUCER where the log's older part was never seen (retention; a replica that began in the
middle and was handed nothing over). An id above it has never written here, so its first sequence
must be 0.

A producer is forgotten when it has written nothing for ``producer_expiration_ms`` (a day), by a
clock that advances steadily while the process runs: setting the wall clock, or a machine that wakes
up, makes nobody older, or the next retry would be written twice. Only over a restart does the wall
clock say how long it was, and it may be wrong then. So whoever is found on the disk is remembered
for RESTART_GRACE_MS more whatever it says, which is far longer than a client tries, and at most
for a day.

After sequence 2^31 - 1 comes 0.

Where the state is read from the log, a batch may be damaged: then nobody knows who wrote it, and it
is kept as a ``DoubtedBatch``. Its checksum still tells when it is sent again. What its header says
of the batch that comes next is believed only where everything else would refuse that one: if it is
wrong, a producer may overtake itself, but nothing is there twice, nor taken for what is there. A
state with doubts is in no snapshot.

The open transactions are kept beside the producers, and in their snapshots: they say where a
transaction began that a mark ends. A producer is not forgotten while it has one.

Batches that an append would add are checked on a ProducerStage (core/producer_stage.py).
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from crc32c import crc32c

from penstock.broker.core.producer_entry import (
    BATCHES_KEPT,
    CONTIGUOUS_MAX,
    SEQUENCE_MASK,
    ProducerEntry,
    decode_entries,
    encode_entry,
    recorded,
)
from penstock.broker.core.transactions import (
    EndedTransaction,
    OpenTransaction,
    OpenTransactions,
    TransactionsUndo,
)
from penstock.wire.errors import (
    CorruptRecordError,
    DuplicateSequenceError,
    InvalidProducerEpochError,
    OutOfOrderSequenceError,
)
from penstock.wire.markers import MarkerType
from penstock.wire.records import BatchHeader

ANY_PRODUCER: Final = 2**63 - 1
NEVER_FORGOT: Final = -1
RESTART_GRACE_MS: Final = 3_600_000
"""So long nobody is forgotten who was found on the disk at a start."""

_HANDED_MAX: Final = 5000
"""So many producers make a snapshot of 0.8 MB at most."""

_MAGIC: Final = b"PSPS"
_VERSION: Final = 1
# With open transactions behind the entries. Version 1 is written where there never was one, so that
# earlier versions find what they know.
_VERSION_WITH_TRANSACTIONS: Final = 2
# With the marks of producers as well. It is written where there is one, or a transaction.
_VERSION_WITH_MARKS: Final = 3
# Magic, version, CRC of what follows, end offset, leader epoch, forgotten up to, entries.
_HEAD: Final = struct.Struct(">4sHIqiqI")
_CRC_FROM: Final = 10


class DoubtedBatch(NamedTuple):
    """A batch of the log whose checksum does not hold, by its header as it can be read.

    ``crc`` is the checksum that it has now: where it is what the header says of it that is damaged,
    this is the one that was sent.
    """

    header: BatchHeader
    crc: int

    def is_sent_again_as(self, header: BatchHeader) -> bool:
        """Whether the batch is this one, going by its checksum."""
        is_as_long = header.last_offset_delta == self.header.last_offset_delta
        return is_as_long and header.crc in (self.header.crc, self.crc)

    def may_be_before(self, header: BatchHeader) -> bool:
        """Whether the batch comes right after this one, going by what is damaged."""
        expected = (self.header.last_sequence + 1) & SEQUENCE_MASK
        return self._may_be_of(header) and header.base_sequence == expected

    def may_be(self, header: BatchHeader) -> bool:
        """Whether the batch is this one for all that can be told: the broker stamped this one, and
        changed its checksum by that.
        """
        said, sent = self.header, header
        return (
            said.is_log_append_time
            and self._may_be_of(header)
            and (said.base_sequence, said.last_offset_delta)
            == (sent.base_sequence, sent.last_offset_delta)
        )

    def _may_be_of(self, header: BatchHeader) -> bool:
        said = self.header
        return (said.producer_id, said.producer_epoch) == (
            header.producer_id,
            header.producer_epoch,
        )


class StateUndo(NamedTuple):
    """What an append changes in a state, as it was before; None for what was not there."""

    entries: tuple[tuple[int, ProducerEntry | None], ...]
    transactions: TransactionsUndo | None  # None where they stay as they are.


@dataclass(frozen=True, slots=True)
class Append:
    """The batch is new and in order."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The batch is in the log already, at these offsets."""

    base_offset: int
    last_offset: int


_APPEND: Final = Append()


class ProducerState:
    """The producers of one partition. ``check`` asks, ``record`` notes what was appended."""

    __slots__ = ("_entries", "doubted", "forgotten_up_to", "transactions")

    def __init__(
        self, entries: dict[int, ProducerEntry] | None = None, forgotten_up_to: int = NEVER_FORGOT
    ) -> None:
        self._entries = entries if entries is not None else {}
        self.forgotten_up_to = forgotten_up_to
        self.transactions = OpenTransactions()
        self.doubted: tuple[DoubtedBatch, ...] = ()  # In the log, by their offsets.

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProducerState):
            return NotImplemented
        return (self._entries, self.forgotten_up_to, self.transactions, self.doubted) == (
            other._entries,
            other.forgotten_up_to,
            other.transactions,
            other.doubted,
        )

    __hash__ = None  # type: ignore[assignment]  # Mutable.

    def entry(self, producer_id: int) -> ProducerEntry | None:
        """What is known of a producer."""
        return self._entries.get(producer_id)

    def check(self, header: BatchHeader) -> Append | Duplicate:
        """Whether the batch is to be appended; see the table above for what is raised.

        A batch without a producer id is always to be appended.
        """
        return self.check_after(header, self._entries.get(header.producer_id))

    def expects(self, header: BatchHeader) -> bool:
        """Whether the batch is the very one that its producer was to send next, or has none.

        No bit of what a header says of its producer can have flipped then. Others may be in order
        as well: only their checksum tells.
        """
        if header.is_control or header.is_transactional:
            return False
        if header.producer_id < 0:  # A flipped sign leaves none of the three as it is without one.
            return header.producer_id == header.producer_epoch == header.base_sequence == -1
        entry = self._entries.get(header.producer_id)
        if entry is None or not entry.batches:
            return False
        return (header.producer_epoch, header.base_sequence) == (
            entry.producer_epoch,
            entry.batches[-1].next_sequence,
        )

    def check_after(self, header: BatchHeader, entry: ProducerEntry | None) -> Append | Duplicate:
        """``check``, when ``entry`` is what is known of the producer."""
        if header.producer_id < 0:
            return _APPEND
        if not self.doubted:
            return self._check_known(header, entry)
        for doubted in self.doubted:
            if doubted.is_sent_again_as(header):
                return Duplicate(doubted.header.base_offset, doubted.header.last_offset)
        known_up_to = entry.batches[-1].base_offset if entry is not None and entry.batches else -1
        unknown = [one for one in self.doubted if one.header.base_offset > known_up_to]
        for doubted in unknown:
            if doubted.may_be(header):
                raise CorruptRecordError(
                    f"the batch of producer {header.producer_id} may be the one at offset "
                    f"{doubted.header.base_offset}, which is damaged, so it can't be told whether "
                    "it is in the log; try again once that is mended or deleted"
                )
        try:
            return self._check_known(header, entry)
        except OutOfOrderSequenceError:
            if any(doubted.may_be_before(header) for doubted in unknown):
                return _APPEND
            raise

    def _check_known(self, header: BatchHeader, entry: ProducerEntry | None) -> Append | Duplicate:
        sequence = header.base_sequence
        if entry is not None and header.producer_epoch < entry.producer_epoch:
            raise InvalidProducerEpochError(
                f"producer {header.producer_id} has epoch {entry.producer_epoch} by now, so epoch "
                f"{header.producer_epoch} may write no more; ask InitProducerId for a new one"
            )
        if sequence < 0:  # A coordinator's own batch, which it sends once.
            return _APPEND
        if entry is None:
            if sequence != 0 and header.producer_id > self.forgotten_up_to:
                raise OutOfOrderSequenceError(
                    f"producer {header.producer_id} begins with sequence {sequence}, but has "
                    "written nothing here; its first batch must have sequence 0: send the earlier "
                    "batches first, or get a new producer epoch"
                )
            return _APPEND
        if header.producer_epoch > entry.producer_epoch or not entry.batches:
            if sequence != 0:
                raise OutOfOrderSequenceError(
                    f"producer {header.producer_id} begins epoch {header.producer_epoch} with "
                    f"sequence {sequence}; a new epoch must begin with sequence 0"
                )
            return _APPEND
        for batch in entry.batches:
            if (
                batch.base_sequence == sequence
                and batch.last_offset_delta == header.last_offset_delta
            ):
                return Duplicate(batch.base_offset, batch.last_offset)
        self._check_order(header, entry)
        return _APPEND

    @staticmethod
    def _check_order(header: BatchHeader, entry: ProducerEntry) -> None:
        expected = entry.batches[-1].next_sequence
        if header.base_sequence == expected:
            return
        behind = (expected - header.base_sequence) & SEQUENCE_MASK
        what = (
            f"producer {header.producer_id} (epoch {header.producer_epoch}) sent sequences "
            f"{header.base_sequence} to {header.last_sequence}, but {expected} comes next"
        )
        if header.last_offset_delta < behind <= entry.contiguous:
            raise DuplicateSequenceError(
                f"{what}: the batch is in the log already, but is older than the last "
                f"{BATCHES_KEPT}, whose offsets are kept"
            )
        raise OutOfOrderSequenceError(
            f"{what}; send what is missing first, or get a new producer epoch"
        )

    def record(
        self,
        header: BatchHeader,
        base_offset: int,
        now_ms: int,
        mark: MarkerType | None = None,
    ) -> EndedTransaction | None:
        """Note that the batch is in the log at ``base_offset``, whatever ``check`` would say.

        Followers and recovery call it with what the leader let in. A control batch fences older
        epochs and ends what the producer had in flight: the transaction that it ends is returned.
        ``mark`` is what it says (markers.mark_of).
        """
        entry = recorded(header, self._entries.get(header.producer_id), base_offset, now_ms, mark)
        if entry is not None:
            self._entries[header.producer_id] = entry
        return self.transactions.note(header, base_offset)

    def update(self, entries: Mapping[int, ProducerEntry]) -> None:
        """Know these producers, by their ids, as a stage found them."""
        self._entries.update(entries)

    def doubt(self, header: BatchHeader, crc: int) -> None:
        """Note that the batch is in the log, damaged: ``crc`` is the checksum of what is there."""
        self.doubted += (DoubtedBatch(header, crc),)

    def doubts_from(self, offset: int) -> bool:
        """Whether a batch at or after ``offset`` was doubted."""
        return any(doubted.header.last_offset >= offset for doubted in self.doubted)

    def last_batches(self, below: int) -> dict[int, int]:
        """The base offset of each producer's last batch below an offset, by producer id.

        -1 where all that are kept of a producer come later: which one was before is not known then.
        Those are left out who wrote none in their newest epoch: nothing goes on from a batch.
        """
        return {
            producer_id: max(
                (batch.base_offset for batch in entry.batches if batch.base_offset < below),
                default=-1,
            )
            for producer_id, entry in self._entries.items()
            if entry.batches
        }

    def epochs(self) -> dict[int, int]:
        """The newest epoch of each producer, by producer id."""
        return {producer_id: entry.producer_epoch for producer_id, entry in self._entries.items()}

    def touches(self, offset: int) -> bool:
        """Whether any producer has a batch at or after ``offset``, as far as is remembered."""
        return (
            self.transactions.last_offset >= offset
            or self.doubts_from(offset)
            or any(
                entry.batches and entry.batches[-1].last_offset >= offset
                for entry in self._entries.values()
            )
        )

    def expire(self, now_ms: int, expiration_ms: int) -> int:
        """Forget the producers that wrote nothing for ``expiration_ms``; how many there were."""
        gone = [
            producer_id
            for producer_id, entry in self._entries.items()
            if now_ms - entry.last_seen_ms >= expiration_ms and producer_id not in self.transactions
        ]
        for producer_id in gone:
            del self._entries[producer_id]
            self.forgotten_up_to = max(self.forgotten_up_to, producer_id)
        return len(gone)

    def bound_ages(self, oldest_ms: int, newest_ms: int) -> None:
        """Take nobody as last seen before ``oldest_ms`` or after ``newest_ms``."""
        for producer_id, entry in self._entries.items():
            seen_ms = min(max(entry.last_seen_ms, oldest_ms), newest_ms)
            if seen_ms != entry.last_seen_ms:
                self._entries[producer_id] = replace(entry, last_seen_ms=seen_ms)

    def below(self, offset: int) -> ProducerState:
        """What of it is of batches that end below ``offset``: enough to go on from there.

        Whoever has written more is known as far as those of the last batches go that end before. Of
        whom none does nothing is known: what it goes on with is refused, as out of order, until
        what comes after is copied. Letting it go on anywhere would let it overtake itself, and
        those that never wrote as well.

        Whoever has no batches has a mark, of which nobody knows where it is. Where one that ended a
        transaction may be cut off, and lies there, all of these are left out: a replica would take
        it for there, and, were it to lead before it is, refuse for ever to write it.
        """
        entries = {}
        marks_may_come = self.transactions.may_lose_mark_from(offset)
        for producer_id, entry in self._entries.items():
            if marks_may_come and not entry.batches:
                continue
            if (earlier := entry.below(offset)) is not None:
                entries[producer_id] = earlier
        return ProducerState(entries, self.forgotten_up_to)

    def handed_over(self, offset: int) -> bytes:
        """A snapshot of what is of batches below ``offset``.

        Empty where that is nothing, or more than fits into a message. Who is handed nothing may
        know more, and keeps it.
        """
        below = self.below(offset) if offset and len(self) <= _HANDED_MAX else None
        if below is None or (not len(below) and below.forgotten_up_to == ANY_PRODUCER):
            return b""
        return below.encode(offset, -1)

    def take_back(self, undos: Sequence[StateUndo]) -> None:
        """Be as before the last changes that were not taken back yet, the newest first.

        What they changed may have been cut off in part: who is not known any more stays so.
        """
        for undo in undos:
            for producer_id, entry in undo.entries:
                if entry is None:
                    self._entries.pop(producer_id, None)
                else:
                    self._entries[producer_id] = entry
        self.transactions.take_back(
            [undo.transactions for undo in undos if undo.transactions is not None]
        )

    def open_transactions(self) -> list[OpenTransaction]:
        """The transactions that are open, the oldest first."""
        found = []
        for producer_id, first_offset in self.transactions.first_offsets().items():
            entry = self._entries.get(producer_id)
            epoch = -1 if entry is None else entry.producer_epoch
            found.append(OpenTransaction(producer_id, epoch, first_offset))
        return found

    def entries(self) -> Iterable[tuple[int, ProducerEntry]]:
        """Every producer id with what is known of it, in no particular order."""
        return self._entries.items()

    def has_open_transaction(self, producer_id: int, producer_epoch: int) -> bool:
        """Whether the producer's transaction of that epoch is open."""
        entry = self._entries.get(producer_id)
        is_known = entry is not None and entry.producer_epoch == producer_epoch
        return is_known and producer_id in self.transactions

    def copy(self) -> ProducerState:
        """A state that changes on its own."""
        other = ProducerState(dict(self._entries), self.forgotten_up_to)
        other.transactions = self.transactions.copy()
        other.doubted = self.doubted
        return other

    def encode(self, end_offset: int, leader_epoch: int) -> bytes:
        """A snapshot: the state when the log ended at ``end_offset``, with a checksum.

        ``leader_epoch`` is the one that wrote the offset before (-1 for none). Both together say
        which log the snapshot is of: logs that have the same epoch at an offset are the same up
        to there.
        """
        transactions = self.transactions.encode()
        has_marks = any(entry.mark is not None for entry in self._entries.values())
        version = _VERSION_WITH_MARKS if transactions or has_marks else _VERSION
        parts = [
            _HEAD.pack(
                _MAGIC, version, 0, end_offset, leader_epoch, self.forgotten_up_to, len(self)
            )
        ]
        parts += [encode_entry(*item) for item in self._entries.items()]
        parts.append(transactions)
        data = bytearray(b"".join(parts))
        struct.pack_into(">I", data, 6, crc32c(memoryview(data)[_CRC_FROM:]))
        return bytes(data)

    @classmethod
    def decode(cls, data: bytes) -> tuple[ProducerState, int, int]:
        """A snapshot's state, end offset and leader epoch. Raises CorruptRecordError for damage."""
        try:
            magic, version, crc, end_offset, epoch, forgotten, count = _HEAD.unpack_from(data)
            known = _VERSION <= version <= _VERSION_WITH_MARKS
            if magic != _MAGIC or not known or crc != crc32c(data[_CRC_FROM:]):
                raise CorruptRecordError("a producer snapshot has a bad magic, version or checksum")
            entries, position = decode_entries(data, _HEAD.size, count)
        except struct.error as error:
            raise CorruptRecordError(f"a producer snapshot is cut short: {error}") from None
        state = cls(entries, forgotten)
        if version >= _VERSION_WITH_TRANSACTIONS:
            state.transactions = OpenTransactions.decode(data[position:])
        return state, end_offset, epoch

    @classmethod
    def begun_at(cls, offset: int, handed: bytes, now_ms: int) -> ProducerState:
        """The state of a log that begins anew: as the leader handed it over, if it did."""
        if not offset:
            return cls()
        with contextlib.suppress(CorruptRecordError):
            state, end_offset, _ = cls.decode(handed)
            if end_offset == offset:
                state.bound_ages(now_ms, now_ms)  # The leader's clock is another one.
                return state
        # What wrote below is not known here, so nobody's first sequence can be judged.
        return cls(forgotten_up_to=ANY_PRODUCER)

    def validate(self) -> None:
        """Raise AssertionError where a rule is broken. For tests."""
        for producer_id, entry in self._entries.items():
            assert producer_id >= 0, producer_id
            assert len(entry.batches) <= BATCHES_KEPT, entry
            assert 0 <= entry.contiguous <= CONTIGUOUS_MAX, entry
            for older, newer in zip(entry.batches, entry.batches[1:], strict=False):
                assert older.last_offset < newer.base_offset, entry
