"""What a log holds, on a disk or in the page cache, and the operations that change it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from penstock.broker.core.producer_state import ProducerState
from penstock.wire.errors import PenstockError
from penstock.wire.markers import mark_of
from penstock.wire.records import BatchHeader, verify_batch


class Batch(NamedTuple):
    """One batch as it stands in a log."""

    header: BatchHeader
    data: bytes


class Cut(NamedTuple):
    """Everything at and after the offset is gone."""

    offset: int


class Restart(NamedTuple):
    """Everything is gone, and the log begins at the offset, with what producers wrote below."""

    offset: int
    producers: bytes


class StartWithin(NamedTuple):
    """The empty log begins at the offset, which is that of a batch that holds its start."""

    offset: int


class Start(NamedTuple):
    """The log begins at the offset."""

    offset: int


Operation = Batch | Cut | Restart | StartWithin | Start


def is_sound(batch: Batch) -> bool:
    """Whether a batch is on the disk as it was written. Tests of the checkers put a bug here."""
    try:
        verify_batch(batch.data)
    except PenstockError:
        return False
    return True


@dataclass(slots=True)
class Contents:
    """What a log holds, on a disk or in the page cache.

    What lies above ``synced`` is looked at by who opens the log. ``flipped`` are the base offsets
    of batches of which the disk has changed a bit since. ``history`` is the leader epoch in which
    the log was last known to be a prefix of its leader's, or -1: a power loss may have brought back
    what had been cut. ``before`` is what the producers wrote before the batches.
    """

    start: int = 0
    end: int = 0
    batches: list[Batch] = field(default_factory=list)
    synced: int = 0
    flipped: set[int] = field(default_factory=set)
    history: int = -1
    before: ProducerState = field(default_factory=ProducerState)

    def recover(self) -> None:
        """Cut what lies above ``synced`` before the first batch that is not sound."""
        for place in range(self.index_of(self.synced), len(self.batches)):
            if not is_sound(self.batches[place]):
                self.end = self.batches[place].header.base_offset
                del self.batches[place:]
                break
        self.synced = self.end

    def copy(self) -> Contents:
        """The same, to be changed apart."""
        return Contents(
            self.start,
            self.end,
            list(self.batches),
            self.synced,
            set(self.flipped),
            before=self.before.copy(),
        )

    def producers(self, now_ms: int = 0) -> ProducerState:
        """What is known of producers at the end: when each wrote last is not, so they have now."""
        state = self.before.copy()
        for header, data in self.batches:
            state.record(header, header.base_offset, now_ms, mark_of(header, data))
        state.bound_ages(now_ms, now_ms)
        return state

    def apply(self, operation: Operation) -> None:
        """Carry out one operation."""
        match operation:
            case Batch(header, _):
                self.batches.append(operation)
                self.end = header.next_offset
            case Cut(offset):
                while self.batches and self.batches[-1].header.next_offset > offset:
                    self.end = self.batches.pop().header.base_offset
                self.end = min(self.end, max(offset, self.start))
                self.start = min(self.start, self.end)  # Batches are not split.
                self.synced = min(self.synced, self.end)
                self.flipped = {base for base in self.flipped if base < self.end}
            case Restart(offset, producers):
                self.start = self.end = self.synced = offset
                self.batches.clear()
                self.flipped.clear()
                self.before = ProducerState.begun_at(offset, producers, 0)
            case StartWithin(offset):
                self.start = self.end = self.synced = offset
            case Start(offset):
                self.start = offset
                keep = self.index_of(offset)
                self.flipped.difference_update(b.header.base_offset for b in self.batches[:keep])
                for header, data in self.batches[:keep]:
                    self.before.record(header, header.base_offset, 0, mark_of(header, data))
                del self.batches[:keep]

    def index_of(self, offset: int) -> int:
        """The place of the batch that holds ``offset``, or of the first after it."""
        place = bisect_right(self.batches, offset, key=lambda batch: batch.header.base_offset) - 1
        if place >= 0 and self.batches[place].header.next_offset > offset:
            return place
        return place + 1


def battered(batch: Batch, rng: Random) -> Batch:
    """A batch as the disk may have it that never was told to keep it."""
    header, data = batch
    at = rng.randrange(len(data))
    match rng.choice(("torn", "zeroes", "garbage", "whole")):
        case "torn":
            return Batch(header, data[:at])
        case "zeroes":
            return Batch(header, data[:at] + bytes(len(data) - at))
        case "garbage":
            return Batch(header, data[:at] + rng.randbytes(len(data) - at))
        case _:
            return batch
