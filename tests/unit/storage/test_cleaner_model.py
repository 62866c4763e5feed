"""Compaction against a model: appends, rolls, cleans, deletions, and crashes at every step."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.recovery import SavedState
from penstock.wire.ids import LeaderEpoch
from penstock.wire.records import Compression, Record, RecordData, encode_batch, iter_batches
from tests.unit.storage.cleaning import Broker
from tests.unit.storage.storage_kit import (
    EVERYTHING,
    PARTITION,
    Clock,
    PowerCutDisk,
    PowerCutError,
    lose_power,
    open_in,
    read_all,
    records_of,
    small_config,
)

RETENTION_MS = 100
KEYS = [b"a", b"b", b"c", b"d", b""]
CONFIG = small_config(
    compacts=True,
    deletes=False,
    min_cleanable_dirty_ratio=0.0,
    delete_retention_ms=RETENTION_MS,
    segment_bytes=700,
)
ENTRIES = st.lists(
    st.tuples(st.sampled_from(KEYS), st.none() | st.integers(0, 60), st.integers(0, 3000)),
    min_size=1,
    max_size=4,
)


Entry = tuple[bytes, int | None, int]


class CleanerMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**32), memory=st.sampled_from([0, 400, 1 << 16]))
    def begin(self, seed: int, memory: int) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="penstock-clean-"))
        self.chance = random.Random(seed)
        self.disk = PowerCutDisk()
        self.clock = Clock()
        self.memory = memory
        self.saved = SavedState()
        self.records: dict[int, Record] = {}  # All that was ever appended.
        self.boundaries = [0]  # Where batches began, as they were appended.
        self.tombstone_until: dict[int, int] = {}  # Until then they stay for certain.
        self.start = 0
        self.epoch = 0
        self.sequences: dict[int, int] = {}
        self.log = self._open()

    def _open(self, *, clean: bool = False) -> PartitionLog:
        log = open_in(
            self.root,
            saved=self.saved._replace(clean=clean),
            disk=self.disk,
            config=CONFIG,
            clock=self.clock,
        )
        log.home.lower_recovery_point = self._lower
        return log

    def _lower(self, _key: object, offset: int) -> None:
        point = min(self.saved.recovery_point, offset)
        self.saved = self.saved._replace(recovery_point=point)

    def teardown(self) -> None:
        if hasattr(self, "log"):
            self.log.close(save=False)
            shutil.rmtree(self.root)

    # --- what can happen -------------------------------------------------------------------------

    @rule(
        batches=st.lists(
            st.tuples(
                ENTRIES,
                st.none() | st.integers(0, 2),
                st.sampled_from([Compression.NONE, Compression.LZ4]),
                st.booleans(),
            ),
            min_size=1,
            max_size=6,
        )
    )
    def append(self, batches: list[tuple[list[Entry], int | None, Compression, bool]]) -> None:
        for entries, producer, compression, roll in batches:
            self._append(entries, producer, compression)
            if roll:
                self.log.roll()
        self.log.flush()

    def _append(
        self,
        entries: list[Entry],
        producer: int | None,
        compression: Compression,
    ) -> None:
        data = [
            RecordData(time, key, None if size is None else b"v" * size)
            for key, size, time in entries
        ]
        sequence = self.sequences.get(-1 if producer is None else producer, 0)
        sent = encode_batch(
            data,
            compression=compression,
            producer_id=-1 if producer is None else producer,
            producer_epoch=-1 if producer is None else 0,
            base_sequence=-1 if producer is None else sequence,
        )
        info = self.log.append_as_leader(sent, LeaderEpoch(self.epoch), now_ms=1)
        if producer is not None:
            self.sequences[producer] = sequence + len(data)
        for at, record in enumerate(data):
            offset = info.base_offset + at
            self.records[offset] = Record(offset, record.timestamp_ms, record.key, record.value)
        self.boundaries.append(info.last_offset + 1)

    @rule()
    def lead_in_a_new_epoch(self) -> None:
        self.epoch += 1
        self.log.assign_epoch(LeaderEpoch(self.epoch))
        self.log.flush()

    @rule(part=st.floats(0, 0.5))
    def delete_records(self, part: float) -> None:
        self.start += round((self.log.log_end_offset - self.start) * part)
        self.log.advance_log_start(self.start)
        self.log.flush()
        self.saved = self.saved._replace(log_start_offset=self.start)

    @rule(ms=st.integers(1, RETENTION_MS))
    def wait(self, ms: int) -> None:
        self.clock.now_ms += ms

    @rule()
    def checkpoint(self) -> None:
        log = self.log
        self.saved = SavedState(
            log.recovery_point, log.log_start_offset, cleaned_offset=log.cleaned_offset
        )

    @rule()
    def clean(self) -> None:
        self._clean()
        log = self.log
        seen = [record for record in records_of(read_all(log)) if record.offset >= self.start]
        keys = [record.key for record in seen if record.offset < log.cleaned_offset]
        assert len(keys) == len(set(keys)), "a key is there twice in what is clean"

    def _clean(self) -> None:
        """Clean until nothing is left to do, or the power goes."""
        for record in self.records.values():
            if record.value is None and record.offset < self.log.files.active.base_offset:
                self.tombstone_until.setdefault(record.offset, self.clock.now_ms + RETENTION_MS)

        async def clean() -> None:
            broker = Broker(self.log, clock=self.clock, dedupe_buffer_bytes=self.memory)
            try:
                while await broker.cleaner.clean_one():
                    pass
            finally:
                await broker.cleaner.stop()

        asyncio.run(clean())

    @rule()
    def restart(self) -> None:
        self.log.close(save=True)
        self.checkpoint()
        self.log = self._open(clean=True)
        assert self.log.opened_clean

    @rule(
        calls=st.integers(0, 40),
        again=st.none() | st.integers(0, 12),
        snapshots_kept=st.booleans(),
    )
    def power_cut(self, calls: int, again: int | None, *, snapshots_kept: bool) -> None:
        """The machine dies in the middle of a clean, and perhaps in that of the recovery."""
        self.disk.cut_after = calls
        with contextlib.suppress(PowerCutError):
            self._clean()
        self.disk.cut_after = None
        self.log.close(save=False)
        self._lose_power()
        if again is not None:
            self.disk.cut_after = again
            try:
                self._open().close(save=False)
            except PowerCutError:
                self._lose_power()
            self.disk.cut_after = None
        if not snapshots_kept:
            for path in (self.root / str(PARTITION)).glob("*.snapshot"):
                path.unlink()
        self.log = self._open()

    def _lose_power(self) -> None:
        self.disk = lose_power(self.root, self.disk, self.chance)

    # --- what must always hold -------------------------------------------------------------------

    @invariant()
    def what_must_be_there_is_there_and_nothing_else(self) -> None:
        if not hasattr(self, "log"):
            return
        log = self.log
        assert log.log_end_offset == self.boundaries[-1]
        assert log.log_start_offset == self.start
        found = [one for one in records_of(read_all(log)) if one.offset >= self.start]
        assert [one.offset for one in found] == sorted({one.offset for one in found})
        for record in found:
            assert record == self.records[record.offset]
        offsets = {record.offset for record in found}
        last: dict[bytes | None, Record] = {}
        for offset in sorted(self.records):
            record = self.records[offset]
            if offset >= self.start:
                last[record.key] = record
            if offset >= log.files.active.base_offset and offset >= self.start:
                assert offset in offsets, "the active segment was cleaned"
        for key, record in last.items():
            if record.value is not None:
                assert record.offset in offsets, f"the value of {key!r} is lost"
            elif record.offset not in offsets:
                assert self.clock.now_ms >= self.tombstone_until[record.offset]
                assert not [one for one in found if one.key == key], f"{key!r} came back"

    @invariant()
    def batches_follow_each_other(self) -> None:
        if not hasattr(self, "log"):
            return
        headers = [header for header, _ in iter_batches(read_all(self.log))]
        for before, after in itertools.pairwise(headers):
            assert before.next_offset == after.base_offset
            assert before.leader_epoch <= after.leader_epoch
        assert not [path for path in self.log.directory.iterdir() if ".cleaned" in path.name]

    @invariant()
    def whoever_was_somewhere_reads_on_from_there(self) -> None:
        if not hasattr(self, "log"):
            return
        offset = self.chance.choice([at for at in self.boundaries if at >= self.start] or [0])
        if offset < self.start:
            return
        [*headers] = [header for header, _ in iter_batches(read_all(self.log, offset, 300))]
        assert not headers or headers[0].base_offset == offset
        every = {one.offset for one in records_of(read_all(self.log)) if one.offset >= offset}
        assert {one.offset for one in records_of(read_all(self.log, offset, 300))} == every

    @invariant()
    def times_are_found(self) -> None:
        if not hasattr(self, "log"):
            return
        log = self.log
        below = self.chance.randint(self.start, log.log_end_offset)
        visible = [one for one in records_of(read_all(log)) if self.start <= one.offset < below]
        wanted = self.chance.randint(0, 3100)
        first = next((one.offset for one in visible if one.timestamp_ms >= wanted), None)
        found = log.offset_for_timestamp(wanted, below=below)
        assert (found.offset if found else None) == first
        latest = max(visible, key=lambda one: one.timestamp_ms, default=None)
        largest = log.max_timestamp(below=below)
        assert (largest.offset if largest else None) == (latest.offset if latest else None)

    @invariant()
    def producers_are_remembered(self) -> None:
        if not hasattr(self, "log") or self.start:
            return  # What was deleted may have been the last of a producer.
        for producer_id, sequence in self.sequences.items():
            entry = self.log.producers.entry(producer_id)
            assert entry is not None
            assert entry.batches[-1].next_sequence == sequence

    @invariant()
    def it_can_be_copied(self) -> None:
        if not hasattr(self, "log") or self.chance.random() < 0.8:
            return
        root = self.root / "copy"
        root.mkdir()
        copy = open_in(root, config=CONFIG)
        copy.truncate_fully_and_start_at(self.start)
        while copy.log_end_offset < self.log.log_end_offset:
            copy.append_as_follower(self.log.read(copy.log_end_offset, 500, below=EVERYTHING))
        assert read_all(copy) == read_all(self.log)
        copy.close(save=False)
        shutil.rmtree(root)


CleanerMachine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestCompactionAgainstModel = CleanerMachine.TestCase
