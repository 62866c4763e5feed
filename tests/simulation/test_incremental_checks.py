"""What checkers look at only where something changed is what they would see in all of it."""

from __future__ import annotations

from random import Random

import pytest

from penstock.broker.core.transactions import EndedTransaction, Marker
from penstock.chaos.simulator.contents import Contents
from penstock.chaos.simulator.memory_log import MemoryLog
from penstock.wire.ids import LeaderEpoch
from penstock.wire.markers import MarkerType, marker_type
from penstock.wire.records import RecordData, encode_batch


def all_aborted(log: MemoryLog) -> list[EndedTransaction]:
    """By a look at the whole log."""
    transactions = log.contents.before.transactions.copy()
    ended = [
        (transactions.note(header, header.base_offset), header, data)
        for header, data in log.contents.batches
    ]
    return [
        one
        for one, header, data in ended
        if one is not None and header.is_control and marker_type(data) is MarkerType.ABORT
    ]


class Writer:
    """Does to a log what chance decides."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.log = MemoryLog(Contents())
        self.log.internal = True  # Batches need no sequences.

    def append(self) -> None:
        producer = self.rng.randint(1, 3)
        records = encode_batch(
            [RecordData(0, None, b"x")] * self.rng.randint(1, 3),
            producer_id=producer,
            producer_epoch=0,
            is_transactional=True,
        )
        self.log.append_as_leader(records, LeaderEpoch(0), now_ms=0, verified=(producer, 0))

    def mark(self) -> None:
        open_ = self.log.open_transactions()
        if open_:
            producer_id = self.rng.choice(open_).producer_id
            marker = Marker(producer_id, 0, self.rng.random() < 0.5, 0)
            self.log.append_markers([marker], LeaderEpoch(0), now_ms=0)

    def cut(self) -> None:
        start, end = self.log.log_start_offset, self.log.log_end_offset
        self.log.truncate_to(self.rng.randint(max(start, end - 6), end))

    def delete(self) -> None:
        start, end = self.log.log_start_offset, self.log.log_end_offset
        self.log.advance_log_start(self.rng.randint(start, min(end, start + 4)))

    def begin_anew(self) -> None:
        self.log.truncate_fully_and_start_at(self.log.log_end_offset + self.rng.randint(0, 2))

    def step(self) -> None:
        steps = (self.append, self.mark, self.cut, self.delete, self.begin_anew)
        [step] = self.rng.choices(steps, (10, 8, 2, 2, 0.2))
        step()


@pytest.mark.parametrize("seed", range(60))
def test_aborted_transactions_are_those_of_the_whole_log(seed: int) -> None:
    writer = Writer(seed)
    for _ in range(60):
        writer.step()
        log, rng = writer.log, writer.rng
        if rng.random() < 0.5:
            offset, below = sorted(rng.randint(0, log.log_end_offset + 1) for _ in range(2))
            assert log.aborted_transactions(offset, below=below) == [
                one
                for one in all_aborted(log)
                if one.last_offset >= offset and one.first_offset < below
            ]


@pytest.mark.parametrize("seed", range(60))
def test_where_nothing_changed_producers_are_where_they_were(seed: int) -> None:
    """The checkers look at producers again once ``changes`` is another number."""
    writer = Writer(seed)
    log = writer.log

    def look() -> tuple[object, ...]:
        """Where the log ends, and all offsets that producers are known by."""
        return log.log_end_offset, [log.producers.touches(at) for at in range(80)]

    seen = look()
    for _ in range(60):
        changes = log.changes
        writer.step()
        now = look()
        assert now == seen or log.changes != changes
        seen = now
