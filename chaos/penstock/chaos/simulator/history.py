"""What was ever shown as committed of a partition, for the checkers to hold everybody to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from penstock.chaos.simulator.contents import Batch
from penstock.wire.records import decode_batch, parse_header


class Violation(AssertionError):  # noqa: N818 - it is what it is called everywhere.
    """A promise was broken."""


_noting: Final[list[list[Violation]]] = []


def check(holds: bool, what: str) -> None:
    """Raise Violation unless it holds; within ``noting`` note it instead."""
    if holds:
        return
    violation = Violation(what)
    if not _noting:
        raise violation
    _noting[-1].append(violation)


@contextmanager
def noting() -> Iterator[list[Violation]]:
    """Within, a broken promise does not end the run: what else comes of it is to be seen.

    Gives what was broken, the first first. For one run at a time in a process.
    """
    _noting.append([])
    try:
        yield _noting[-1]
    finally:
        _noting.pop()


@dataclass(slots=True)
class CommittedLog:
    """What was ever shown as committed of one partition, in leader epochs from ``first_epoch`` on.

    There is another one after an election that was allowed to lose records: it begins with what the
    new leader had of this one, and those of earlier epochs go on by this one.
    """

    first_epoch: int = -1
    forked_at: int = 0
    end: int = 0
    deleted: int = 0  # Records below may be gone: somebody deleted them.
    hands_over: bool = True  # What is known of their producers is not.
    bases: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # Of the batches; the next offsets.
    batches: list[bytes] = field(default_factory=list)
    values: dict[bytes, int] = field(default_factory=dict)  # Record values and their offsets.
    newest: dict[tuple[bytes, int, int], tuple[int, int]] = field(default_factory=dict)
    """Of each producer, under each of its ids and epochs, the last record's number and offset.

    Who takes another id has given up what may still be on its way under the one before.
    """

    def batch_at(self, offset: int) -> bytes | None:
        """The batch that begins at ``offset``."""
        place = bisect_right(self.bases, offset) - 1
        return self.batches[place] if place >= 0 and self.bases[place] == offset else None

    @property
    def forgotten(self) -> int:
        """What is known of the producers of records below may be gone.

        Where that is not handed over, who deletes records deletes it as well, on replicas that
        begin anew after them: a retry that comes so late is taken for a new batch (as in Kafka).
        """
        return 0 if self.hands_over else self.deleted

    def delete_below(self, offset: int) -> None:
        """Records below the offset may be gone from now on."""
        self.deleted = max(self.deleted, offset)

    def extend(self, batch: Batch, who: str) -> None:
        """The next committed batch.

        After an election with loss it may be that of an older leader that had deleted what would
        come next, which the one in between had never had.
        """
        base = batch.header.base_offset
        check(self.end == base or self.end < base <= self.deleted, f"{who}: a gap at {self.end}")
        self._add(batch.header.base_offset, batch.header.next_offset, batch.data, who)

    def _add(self, base_offset: int, next_offset: int, data: bytes, who: str) -> None:
        self.bases.append(base_offset)
        self.ends.append(next_offset)
        self.batches.append(data)
        self.end = next_offset
        header = parse_header(data)
        if header.is_control:
            return  # The marks of one coordinator are all the same.
        identity = header.producer_id, header.producer_epoch
        for record in decode_batch(data):
            if record.key is not None and header.base_sequence < 0:
                continue  # A coordinator's: it may say the same again.
            value = bytes(record.value or b"")
            earlier = self.values.get(value, record.offset)
            self.values[value] = record.offset
            check(
                earlier == record.offset or earlier < self.forgotten,
                f"{who}: {value!r} is committed twice, at {earlier} and {record.offset}",
            )
            self._check_order(value, record.offset, identity, who)

    def _check_order(self, value: bytes, offset: int, identity: tuple[int, int], who: str) -> None:
        producer, _, number = value.rpartition(b"-")
        if not producer:
            return
        last, last_offset = self.newest.get((producer, *identity), (-1, -1))
        check(
            int(number) > last or last_offset < self.forgotten,
            f"{who}: {value!r} is committed at {offset}, but number {last} of the same producer "
            f"before it, at {last_offset}",
        )
        self.newest[producer, *identity] = (int(number), offset)

    def fork(self, offset: int, leader_epoch: int) -> CommittedLog:
        """What is left when a leader goes on with no more than what lies below ``offset``."""
        rest = CommittedLog(
            leader_epoch, offset, deleted=min(self.deleted, offset), hands_over=self.hands_over
        )
        for base, end, data in zip(self.bases, self.ends, self.batches, strict=True):
            if end <= offset:
                rest._add(base, end, data, "what is left")
        rest.deleted = self.deleted
        rest.end = max(rest.end, offset)
        return rest
