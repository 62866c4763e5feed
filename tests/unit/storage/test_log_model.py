"""A partition's log against a model of it: appends, cuts, restarts and power cuts in any order."""

from __future__ import annotations

import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from penstock.broker.core.ports import TimestampedOffset
from penstock.broker.core.producer_state import ANY_PRODUCER, ProducerState
from penstock.broker.storage.flush import FlushTask
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.recovery import SavedState
from penstock.wire.records import BatchHeader, Record, offset_patch, parse_header
from tests.unit.storage.storage_kit import (
    PowerCutDisk,
    PowerCutError,
    batch,
    lose_power,
    open_in,
    read_all,
    records_of,
)

DURATIONS = st.integers(0, 50)


@dataclass(frozen=True)
class Stored:
    """A batch as it must be in the log."""

    data: bytes
    header: BatchHeader
    records: tuple[Record, ...]


class LogMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="penstock-log-"))
        self.disk = PowerCutDisk()
        self.chance = random.Random(seed)
        self.saved = SavedState()
        self.batches: list[Stored] = []
        self.start = 0
        self.end = 0
        self.durable = 0  # The largest durable_offset ever told, since the last cut below it.
        self.epoch = 1
        self.flushes: list[FlushTask] = []
        self.forgot = False
        self.log = self._open()

    def _open(self, *, clean: bool = False) -> PartitionLog:
        log = open_in(self.root, saved=self.saved._replace(clean=clean), disk=self.disk)
        log.home.lower_recovery_point = self._lower
        log.home.save_soon = self._save_start
        return log

    def _save_start(self, log: PartitionLog) -> None:
        """The new start is durable at once, and only then is anything deleted."""
        saved = log.start.saving()
        self.saved = self.saved._replace(log_start_offset=log.log_start_offset)
        if saved():
            log.delete_old_segments()

    def _lower(self, _key: object, offset: int) -> None:
        point = min(self.saved.recovery_point, offset)
        self.saved = self.saved._replace(recovery_point=point)

    def teardown(self) -> None:
        if hasattr(self, "log"):
            self._settle()
            self.log.close(save=False)
            shutil.rmtree(self.root)

    def _settle(self) -> None:
        for task in self.flushes:
            task.run()
            self.log.finish_flush(task)
        self.flushes = []

    # --- what can happen -------------------------------------------------------------------------

    def _store(self, data: bytes) -> None:
        header = parse_header(data)
        self.batches.append(Stored(data, header, tuple(records_of(data))))
        self.end = header.next_offset

    @rule(
        sizes=st.lists(st.integers(0, 120), min_size=1, max_size=3),
        count=st.integers(1, 3),
        producer=st.none() | st.integers(0, 2),
        timestamp=st.integers(0, 3000),
    )
    def append_as_leader(
        self, sizes: list[int], count: int, producer: int | None, timestamp: int
    ) -> None:
        values = ["v" * size for size in sizes]
        sent = []
        entry = self.log.producers.entry(-1 if producer is None else producer)
        first = entry.batches[-1].next_sequence if entry is not None else 0
        for index in range(count):
            who = (-1, -1, -1)
            if producer is not None:
                who = (producer, 0, first + index * len(values))
            sent.append(batch(*values, timestamp_ms=timestamp + index * 7, producer=who))
        info = self.log.append_as_leader(b"".join(sent), self.epoch, now_ms=5)
        assert (info.base_offset, info.duplicate) == (self.end, False)
        for data in sent:
            self._store(offset_patch(data, self.end, self.epoch) + data[16:])
        assert info.last_offset == self.end - 1

    @rule(size=st.integers(0, 200), epochs=st.integers(0, 2), timestamp=st.integers(0, 3000))
    def append_as_follower(self, size: int, epochs: int, timestamp: int) -> None:
        self.epoch += epochs
        data = batch(
            "f" * size, timestamp_ms=timestamp, base_offset=self.end, leader_epoch=self.epoch
        )
        self.log.append_as_follower(data)
        self._store(data)

    @rule()
    def retry_the_last_batch(self) -> None:
        known = [stored for stored in self.batches if stored.header.producer_id >= 0]
        if known and not self.forgot:
            last = known[-1]
            info = self.log.append_as_leader(last.data, self.epoch, now_ms=5)
            assert info.duplicate
            assert info.base_offset == last.header.base_offset

    @rule()
    def lead_in_a_new_epoch(self) -> None:
        self.epoch += 1
        self.log.assign_epoch(self.epoch)
        assert self.log.last_epoch == self.epoch

    @rule()
    def begin_flush(self) -> None:
        self.flushes.append(self.log.begin_flush())

    @precondition(lambda self: self.flushes)
    @rule()
    def end_flush(self) -> None:
        task = self.flushes.pop(0)
        task.run()
        self.log.finish_flush(task)

    @rule()
    def flush(self) -> None:
        self._settle()
        self.log.flush()
        assert self.log.durable_offset == self.end

    @rule()
    def checkpoint(self) -> None:
        self.saved = SavedState(self.log.recovery_point, self.log.log_start_offset)

    @rule(part=st.floats(0, 1))
    def truncate(self, part: float) -> None:
        offset = self.start + round((self.end - self.start) * part)
        self.log.truncate_to(offset)
        if offset >= self.end:
            return
        if offset <= self.start:
            self._dropped(offset)
            return
        cut = [one for one in self.batches if one.header.next_offset > offset]
        self.end = cut[0].header.base_offset
        self.batches = self.batches[: -len(cut)]
        self._after_cut()

    @rule(part=st.floats(0, 1.5))
    def truncate_fully(self, part: float) -> None:
        offset = round(self.end * part)
        self.log.truncate_fully_and_start_at(offset)
        self._dropped(offset)

    def _dropped(self, offset: int) -> None:
        self.batches = []
        self.start = self.end = offset
        self.forgot = self.forgot or offset > 0
        self.saved = self.saved._replace(log_start_offset=min(self.saved.log_start_offset, offset))
        self._after_cut()

    def _after_cut(self) -> None:
        self.start = min(self.start, self.end)
        self.durable = min(self.durable, self.end)

    @rule(part=st.floats(0, 1))
    def delete_records(self, part: float) -> None:
        self.start = self.start + round((self.end - self.start) * part)
        self.log.advance_log_start(self.start)

    @rule()
    def restart(self) -> None:
        self._settle()
        self.log.close(save=True)
        self.saved = SavedState(self.log.recovery_point, self.log.log_start_offset)
        assert self.log.recovery_point == self.end
        self.log = self._open(clean=True)
        assert self.log.opened_clean
        self.durable = self.end

    @rule()
    def kill(self) -> None:
        """The process dies; what was written is in the page cache."""
        self.flushes = []
        self.log.close(save=False)
        self.log = self._open()
        self._after_crash()
        assert self.log.log_end_offset == self.end

    @rule(calls=st.none() | st.integers(0, 9), again=st.none() | st.integers(0, 12))
    def power_cut(self, calls: int | None, again: int | None) -> None:
        """The machine dies, perhaps in the middle of a cut or a flush, and of the recovery."""
        cut_to = self.end
        if calls is not None:
            self._settle()
            self.disk.cut_after = calls
            try:
                if self.chance.random() < 0.5 and self.end > self.start:
                    cut_to = self.chance.randint(self.start, self.end)
                    self.log.truncate_to(cut_to)
                else:
                    self.log.flush()
            except PowerCutError:
                pass
            self.disk.cut_after = None
        self.flushes = []
        self.log.close(save=False)
        self._lose_power()
        kept = [one for one in self.batches if one.header.next_offset <= cut_to]
        # Nothing is promised of offsets below the log's start.
        promised = self.durable if self.durable > self.start else 0
        floor = min(promised, kept[-1].header.next_offset if kept else 0)
        if again is not None:
            self.disk.cut_after = again
            try:
                self._open().close(save=False)
            except PowerCutError:
                self._lose_power()
            self.disk.cut_after = None
        self.log = self._open()
        assert self.log.log_end_offset >= floor, "something durable was lost"
        self._after_crash()

    def _lose_power(self) -> None:
        self.disk = lose_power(self.root, self.disk, self.chance)

    def _after_crash(self) -> None:
        end = self.log.log_end_offset
        assert end <= self.end or end == self.saved.log_start_offset
        self.batches = [one for one in self.batches if one.header.next_offset <= end]
        self.end = end
        self.start = self.log.log_start_offset
        assert self.log.durable_offset == end
        self.durable = end

    # --- what must always hold -------------------------------------------------------------------

    @invariant()
    def ends_agree(self) -> None:
        if not hasattr(self, "log"):
            return
        log = self.log
        assert (log.log_start_offset, log.log_end_offset) == (self.start, self.end)
        assert log.durable_offset <= log.log_end_offset
        self.durable = max(self.durable, log.durable_offset)
        log.epochs.validate()
        log.producers.validate()

    @invariant()
    def content_agrees(self) -> None:
        if not hasattr(self, "log"):
            return
        visible = [one for one in self.batches if one.header.next_offset > self.start]
        assert read_all(self.log) == b"".join(one.data for one in visible)
        offset = self.chance.randint(self.start, self.end)
        rest = b"".join(one.data for one in visible if one.header.next_offset > offset)
        assert read_all(self.log, offset, max_bytes=200) == rest

    @invariant()
    def time_agrees(self) -> None:
        if not hasattr(self, "log"):
            return
        below = self.chance.randint(self.start, self.end)
        records = [
            (record, one.header.leader_epoch)
            for one in self.batches
            for record in one.records
            if self.start <= record.offset < below
        ]
        wanted = self.chance.randint(0, 3100)
        first = next((pair for pair in records if pair[0].timestamp_ms >= wanted), None)
        assert self.log.offset_for_timestamp(wanted, below=below) == _timestamped(first)
        latest = max(records, key=lambda pair: pair[0].timestamp_ms, default=None)
        assert self.log.max_timestamp(below=below) == _timestamped(latest)

    @invariant()
    def producers_agree(self) -> None:
        if not hasattr(self, "log") or self.forgot:
            return
        expected = ProducerState()
        for one in self.batches:
            expected.record(one.header, one.header.base_offset, 0)
        known = self.log.producers
        if known.forgotten_up_to == ANY_PRODUCER:
            self.forgot = True  # Old segments went, and with them what they said.
            return
        for producer_id in range(3):
            mine, theirs = expected.entry(producer_id), known.entry(producer_id)
            if mine is not None:
                assert theirs is not None
                assert theirs.batches == mine.batches

    @invariant()
    def epochs_agree(self) -> None:
        if not hasattr(self, "log"):
            return
        for one in self.batches:
            if one.header.base_offset >= self.start:
                epoch = one.header.leader_epoch
                assert self.log.epochs.epoch_at(one.header.base_offset) == epoch
                assert self.log.end_of_epoch(epoch).end_offset >= one.header.next_offset


def _timestamped(found: tuple[Record, int] | None) -> TimestampedOffset | None:
    if found is None:
        return None
    return TimestampedOffset(found[0].offset, found[0].timestamp_ms, found[1])


TestLogMachine = LogMachine.TestCase
TestLogMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
