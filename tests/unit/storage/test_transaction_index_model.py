"""The aborted transactions of a log against a model, through all that can happen to a log."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant, precondition, rule

from penstock.broker.core.transactions import EndedTransaction
from penstock.wire.markers import MarkerType, marker_type
from tests.unit.storage.storage_kit import mark, transactional
from tests.unit.storage.test_log_model import LogMachine, Stored

PRODUCERS = st.integers(10, 12)


def ended_in(batches: list[Stored]) -> list[EndedTransaction]:
    """The aborted transactions by the definition, each time from the beginning."""
    found = []
    for at, one in enumerate(batches):
        if not one.header.is_control or marker_type(one.data) is not MarkerType.ABORT:
            continue
        mine = first_of(batches[:at], one.header.producer_id)
        if mine is not None:
            others = [first_of(batches[:at], other) for other in range(10, 13)]
            still = [
                first
                for other, first in zip(range(10, 13), others, strict=True)
                if first is not None and other != one.header.producer_id
            ]
            last = one.header.last_offset
            stable = min(still, default=last + 1)
            found.append(EndedTransaction(one.header.producer_id, mine, last, stable))
    return found


def first_of(batches: list[Stored], producer_id: int) -> int | None:
    """Where the producer's open transaction began, when these are all the batches."""
    first = None
    for one in batches:
        if one.header.producer_id == producer_id:
            if one.header.is_control:
                first = None
            elif first is None:
                first = one.header.base_offset
    return first


STEPS = st.tuples(PRODUCERS, st.sampled_from([None, None, *MarkerType]), st.integers(0, 300))


class TransactionMachine(LogMachine):
    told = 0  # The log was told that all below is committed.

    @rule(steps=st.lists(STEPS, min_size=1, max_size=8), at_once=st.booleans())
    def transact(self, steps: list[tuple[int, MarkerType | None, int]], at_once: bool) -> None:
        """Some producers write in their transactions, or end them: with no kind it is a record."""
        batches = []
        for at, (producer, kind, size) in enumerate(steps):
            offset, epoch = self.end + at, self.epoch
            if kind is not None:
                batches.append(mark(kind, producer, base_offset=offset, leader_epoch=epoch))
                continue
            who = (producer, 0, -1)
            value = "t" * size
            batches.append(
                transactional(value, producer=who, base_offset=offset, leader_epoch=epoch)
            )
        for part in [b"".join(batches)] if at_once else batches:
            self.log.append_as_follower(part)
        for data in batches:
            self._store(data)

    @rule(back=st.integers(1, 12))
    def cut_a_little(self, back: int) -> None:
        offset = max(self.end - back, self.start)
        if self.start < offset < self.end:
            self.truncate((offset - self.start) / (self.end - self.start))

    @rule(part=st.floats(0, 1))
    def commit(self, part: float) -> None:
        self.told = min(self.told, self.end)
        self.told += round((self.end - self.told) * part)
        self.log.note_committed(self.told)

    @rule(part=st.floats(0, 1.5), kind=st.integers(0, 9))
    def drop_some(self, part: float, kind: int) -> None:
        """Seldom: what is not there is not looked for."""
        if kind == 0:
            offset = round(self.end * part)
            self.log.truncate_fully_and_start_at(offset)
            self._dropped(offset)
        elif kind == 1:
            self.start += round((self.end - self.start) * min(part, 1) / 2)
            self.log.advance_log_start(self.start)

    def append_as_leader(self, *_: object) -> None:
        """Not here, as what follows: the steps are for what matters to transactions."""

    def append_as_follower(self, *_: object) -> None:
        """Not here."""

    def truncate_fully(self, *_: object) -> None:
        """Not so often."""

    def delete_records(self, *_: object) -> None:
        """Not so often."""

    def lead_in_a_new_epoch(self) -> None:
        """Not here."""

    def retry_the_last_batch(self) -> None:
        """Not here: no leader takes transactions yet."""

    @precondition(lambda self: len(self.log.files.segments) > 1)
    @rule(flip=st.booleans(), cold=st.booleans())
    def lose_an_index(self, flip: bool, cold: bool) -> None:
        segments = [one for one in self.log.files.segments[:-1] if one.index is None]
        if not segments:
            return
        segment = self.chance.choice(segments)
        path = segment.transaction_index_path
        if flip and path.exists():
            data = bytearray(path.read_bytes())
            data[self.chance.randrange(len(data))] ^= 1 << self.chance.randrange(8)
            path.write_bytes(data)
        else:
            path.unlink(missing_ok=True)
        segment.transactions = None
        if cold:
            warm = self.log.cold_aborted(self.start)
            if warm is not None:
                warm()

    @invariant()
    def aborted_agrees(self) -> None:
        if not hasattr(self, "log"):
            return
        ended = ended_in(self.batches)
        for _ in range(5):
            offset, below = sorted(self.chance.randint(self.start, self.end) for _ in range(2))
            found = self.log.aborted_transactions(offset, below=below)
            if not self.start:
                assert found == wanted(ended, offset, below)
            for one in self.batches:
                if one.header.is_transactional and offset <= one.header.base_offset < below:
                    assert covers(found, one) == covers(ended, one), one.header

    @invariant()
    def open_transactions_agree(self) -> None:
        if not hasattr(self, "log") or self.forgot or self.start:
            return
        first = {producer: first_of(self.batches, producer) for producer in range(10, 13)}
        found = {one.producer_id: one.first_offset for one in self.log.open_transactions()}
        assert found == {producer: at for producer, at in first.items() if at is not None}

    @invariant()
    def stable_offset_agrees(self) -> None:
        """Also where the log was opened, or cut, with a high watermark below its last marks."""
        if not hasattr(self, "log"):
            return
        told = self.told = min(self.told, self.end)
        high_watermark = self.chance.randint(min(self.start, told), self.end)
        found = self.log.last_stable_offset(high_watermark)
        least = stable_by_definition(self.batches, high_watermark)
        most = min(high_watermark, stable_by_definition(self.batches, max(told, high_watermark)))
        if self.forgot:
            return  # The first of a transaction may have been in what was dropped.
        assert max(least, min(self.start, high_watermark)) <= found
        assert found <= max(most, min(self.start, high_watermark))


def stable_by_definition(batches: list[Stored], high_watermark: int) -> int:
    """Where the oldest transaction begins that is open as of the high watermark, or that."""
    below = [one for one in batches if one.header.next_offset <= high_watermark]
    firsts = [first_of(below, producer) for producer in range(10, 13)]
    partly = [one for one in batches if one.header.base_offset < high_watermark]
    begun = [
        one.header.base_offset
        for one in partly[len(below) :]
        if one.header.is_transactional and not one.header.is_control
    ]
    known = [first for first in firsts if first is not None]
    return min([high_watermark, *known, *begun])


def wanted(ended: list[EndedTransaction], offset: int, below: int) -> list[EndedTransaction]:
    """What a lookup is to find, by its definition."""
    found = []
    for one in ended:
        if one.last_offset >= offset:
            if one.first_offset < below:
                found.append(one)
            if one.last_stable_offset >= below:
                break
    return found


def covers(aborted: list[EndedTransaction], one: Stored) -> bool:
    """Whether a reader drops the batch."""
    return any(
        each.producer_id == one.header.producer_id
        and each.first_offset <= one.header.base_offset <= each.last_offset
        for each in aborted
    )


TransactionMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestTransactions = TransactionMachine.TestCase
