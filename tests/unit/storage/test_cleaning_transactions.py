"""Compaction of logs with transactions: what stays of them, and that readers see no difference."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from penstock.broker.core.transactions import Marker
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.recovery import SavedState
from penstock.client.core.aborted import AbortedBatches
from penstock.wire.ids import LeaderEpoch
from penstock.wire.records import RecordData, decode_batch, encode_batch, iter_batches
from tests.unit.storage.cleaning import COMPACTED, Broker, close_segment, compacted, put
from tests.unit.storage.storage_kit import Clock, open_in, read_all

EPOCH = LeaderEpoch(0)
RETENTION_MS = 1000  # delete.retention.ms of these logs.
DAY_MS = 86_400_000


class Writer:
    """Writes transactions of one producer, as its leader and its coordinator would."""

    def __init__(self, log: PartitionLog, producer_id: int = 7) -> None:
        self.log = log
        self.producer_id = producer_id
        self.epoch = 0
        self._sequence = 0

    def write(self, *pairs: tuple[str, str | None]) -> None:
        data = encode_batch(
            [
                RecordData(1000, key.encode(), None if value is None else value.encode())
                for key, value in pairs
            ],
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            base_sequence=self._sequence,
            is_transactional=True,
        )
        verified = (self.producer_id, self.epoch)
        self.log.append_as_leader(data, EPOCH, now_ms=1, verified=verified)
        self._sequence += len(pairs)

    def end(self, *, commit: bool) -> None:
        marker = Marker(self.producer_id, self.epoch + 1, commit, 0)
        self.log.append_markers([marker], EPOCH, now_ms=1)
        self.epoch += 1
        self._sequence = 0


def committed_in(log: PartitionLog) -> dict[int, tuple[str, str | None]]:
    """What a read_committed consumer gets that begins at the log's start, by offset."""
    below = log.last_stable_offset(log.log_end_offset)
    if log.log_start_offset >= below:
        return {}
    found = log.aborted_transactions(log.log_start_offset, below=below)
    aborted = AbortedBatches((one.producer_id, one.first_offset) for one in found)
    seen = {}
    for header, batch in iter_batches(read_all(log)):
        if header.last_offset >= below or aborted.covers(header) or header.is_control:
            continue
        for record in decode_batch(batch):
            value = None if record.value is None else record.value.decode()
            seen[record.offset] = ((record.key or b"").decode(), value)
    return seen


def values_in(log: PartitionLog) -> dict[str, str]:
    """What a reader makes of it: the last value of each key."""
    table = dict(committed_in(log).values())
    return {key: value for key, value in table.items() if value is not None}


def marks_in(log: PartitionLog) -> list[int]:
    return [one.base_offset for one, _ in iter_batches(read_all(log)) if one.is_control]


def batches_of(log: PartitionLog, producer_id: int = 7) -> list[int]:
    return [
        one.base_offset
        for one, _ in iter_batches(read_all(log))
        if one.producer_id == producer_id and not one.is_control
    ]


async def clean(log: PartitionLog, clock: Clock | None = None) -> bool:
    log.flush()
    close_segment(log)
    return await Broker(log, clock=clock).cleaner.clean_one()


async def test_an_aborted_record_replaces_nothing_and_goes(tmp_path: Path) -> None:
    log = compacted(tmp_path)
    put(log, ("a", "kept"))
    writer = Writer(log)
    writer.write(("a", "aborted"), ("b", "aborted"))
    writer.end(commit=False)
    await clean(log)
    assert committed_in(log) == {0: ("a", "kept")}
    assert batches_of(log) == []


async def test_a_committed_record_replaces_and_is_replaced(tmp_path: Path) -> None:
    log = compacted(tmp_path)
    put(log, ("a", "old"), ("b", "kept"))
    writer = Writer(log)
    writer.write(("a", "new"), ("c", "old"))
    writer.end(commit=True)
    put(log, ("c", "new"))
    await clean(log)
    assert committed_in(log) == {1: ("b", "kept"), 2: ("a", "new"), 5: ("c", "new")}


async def test_a_committed_tombstone_takes_its_key_away(tmp_path: Path) -> None:
    log, clock = compacted(tmp_path), Clock()
    put(log, ("a", "1"))
    writer = Writer(log)
    writer.write(("a", None), ("b", "1"))
    writer.end(commit=True)
    await clean(log, clock)
    assert committed_in(log) == {1: ("a", None), 2: ("b", "1")}
    clock.now_ms += RETENTION_MS
    put(log, ("x", "1"))
    await clean(log, clock)
    assert committed_in(log) == {2: ("b", "1"), 4: ("x", "1")}


async def test_nothing_is_cleaned_from_the_last_stable_offset_on(tmp_path: Path) -> None:
    log = compacted(tmp_path)
    put(log, ("a", "1"))
    put(log, ("a", "2"))
    close_segment(log)
    writer = Writer(log)
    writer.write(("b", "1"))
    put(log, ("a", "3"))
    await clean(log)
    assert log.cleaned_offset == 2
    assert list(committed_in(log)) == [1]
    writer.end(commit=True)
    put(log, ("b", "2"))
    await clean(log)
    assert committed_in(log) == {3: ("a", "3"), 5: ("b", "2")}


async def test_a_mark_stays_while_something_of_its_transaction_does(tmp_path: Path) -> None:
    log, clock = compacted(tmp_path), Clock()
    writer = Writer(log)
    writer.write(("a", "1"), ("b", "1"))
    writer.end(commit=True)
    writer.write(("a", "2"))
    writer.end(commit=True)
    for _ in range(4):
        put(log, ("x", str(clock.now_ms)))
        await clean(log, clock)
        clock.now_ms += RETENTION_MS
        assert marks_in(log) == [2, 4]
    assert values_in(log)["b"] == "1"


async def test_a_mark_goes_once_nothing_is_left_and_its_time_has_passed(tmp_path: Path) -> None:
    log, clock = compacted(tmp_path), Clock()
    writer = Writer(log)
    writer.write(("a", "1"))
    writer.end(commit=False)
    writer.write(("a", "2"))
    writer.end(commit=True)
    broker = Broker(log, clock=clock)
    close_segment(log)
    assert await broker.cleaner.clean_one()
    assert marks_in(log) == [1, 3], "with the time at which the first may go"
    clock.now_ms += RETENTION_MS - 1
    assert not await broker.cleaner.clean_one()
    clock.now_ms += 1
    assert await broker.cleaner.clean_one(), "not for what is dirty, but for the mark"
    assert marks_in(log) == [3]
    assert log.aborted_transactions(0, below=log.log_end_offset) == []
    assert values_in(log) == {"a": "2"}


async def test_each_mark_is_kept_for_its_own_transaction(tmp_path: Path) -> None:
    log, clock = compacted(tmp_path), Clock()
    writer = Writer(log)
    for key, commit in (("a", True), ("b", False), ("c", True)):
        writer.write((key, "1"))
        writer.end(commit=commit)
    for _ in range(3):
        put(log, ("x", str(clock.now_ms)))
        await clean(log, clock)
        clock.now_ms += RETENTION_MS
    assert marks_in(log) == [1, 5]


async def test_the_last_mark_of_a_producer_fences_after_all(tmp_path: Path) -> None:
    log, clock = compacted(tmp_path), Clock()
    writer = Writer(log)
    writer.write(("a", "1"))
    writer.end(commit=False)
    for _ in range(3):
        put(log, ("x", str(clock.now_ms)))
        await clean(log, clock)
        clock.now_ms += RETENTION_MS
    assert batches_of(log) == []
    assert marks_in(log) == [1]
    log.close(save=False)
    for path in log.directory.glob("*.snapshot"):
        path.unlink()
    entry = open_in(tmp_path, config=COMPACTED).producers.entry(7)
    assert entry is not None
    assert entry.producer_epoch == 1


async def test_a_mark_of_a_forgotten_producer_goes(tmp_path: Path) -> None:
    home_clock, clock = Clock(), Clock()
    log = open_in(tmp_path, config=COMPACTED, clock=home_clock)
    writer = Writer(log)
    writer.write(("a", "1"))
    writer.end(commit=False)
    home_clock.now_ms += 2 * DAY_MS
    for _ in range(3):
        put(log, ("x", str(clock.now_ms)))
        await clean(log, clock)
        clock.now_ms += RETENTION_MS
    assert marks_in(log) == []


async def test_what_was_open_when_a_snapshot_was_taken_is_not_open_for_ever(
    tmp_path: Path,
) -> None:
    """Its mark may be gone by now, and a newer snapshot be lost."""
    home_clock, clock = Clock(), Clock()
    log = open_in(tmp_path, config=COMPACTED, clock=home_clock)
    put(log, ("k", "x" * 500))
    writer = Writer(log)
    writer.write(("a", "1"))
    put(log, ("l", "x" * 500))
    close_segment(log)
    older = max(log.directory.glob("*.snapshot"))
    data = older.read_bytes()
    writer.end(commit=False)
    home_clock.now_ms += 2 * DAY_MS
    put(log, ("m", "x" * 500))
    for _ in range(3):
        put(log, ("x", str(clock.now_ms)))
        await clean(log, clock)
        clock.now_ms += RETENTION_MS
    assert marks_in(log) == []
    end = log.log_end_offset
    log.close(save=True)
    for path in log.directory.glob("*.snapshot"):
        path.unlink()
    older.write_bytes(data)
    log = open_in(tmp_path, config=COMPACTED)
    assert log.last_stable_offset(end) == end
    assert log.open_transactions() == []


# --- against a model -----------------------------------------------------------------------------

STEP = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 2), st.integers(0, 4), st.booleans()),
    st.tuples(st.just("write"), st.integers(0, 2), st.integers(0, 4), st.booleans()),
    st.tuples(st.just("end"), st.integers(0, 2), st.integers(0, 0), st.booleans()),
    st.tuples(st.just("plain"), st.integers(0, 0), st.integers(0, 4), st.booleans()),
    st.tuples(st.just("clean"), st.integers(0, 0), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("reopen"), st.integers(0, 0), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("copy"), st.integers(0, 0), st.integers(0, 0), st.booleans()),
)


class Model:
    """What a reader of committed records is to make of the log."""

    def __init__(self) -> None:
        self.records: list[tuple[str, str | None, list[bool]]] = []  # The last: how it ended.
        self.open: dict[int, list[bool]] = {}

    def values(self) -> dict[str, str]:
        table: dict[str, str] = {}
        for key, value, outcome in self.records:
            if not outcome:
                break  # Where the oldest open transaction begins.
            if outcome != [True]:
                continue
            if value is None:
                table.pop(key, None)
            else:
                table[key] = value
        return table


class Run:
    """One log through a history."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = Clock()
        self.log = open_in(root, config=COMPACTED)
        self.model = Model()
        self.writers = [Writer(self.log, 10 + number) for number in range(3)]
        self.count = 0

    def do(self, kind: str, who: int, key: int, flag: bool) -> None:
        self.count += 1
        pair = (f"k{key}", None if flag and key == 4 else f"{self.count:040d}")
        match kind:
            case "plain":
                put(self.log, pair)
                self.model.records.append((*pair, [True]))
            case "write":
                self.writers[who].write(pair)
                self.model.records.append((*pair, self.model.open.setdefault(who, [])))
            case "end" if who in self.model.open:
                self.writers[who].end(commit=flag)
                self.model.open.pop(who).append(flag)
            case "clean":
                asyncio.run(self._clean())
                self.clock.now_ms += RETENTION_MS * flag
            case "reopen":
                self._reopen(key, save=flag)
            case "copy":
                self._copy()

    async def _clean(self) -> None:
        if self.count % 2:
            close_segment(self.log)
        self.log.flush()
        await Broker(self.log, clock=self.clock).cleaner.clean_one()

    def _reopen(self, key: int, *, save: bool) -> None:
        log = self.log
        log.flush()
        saved = SavedState(log.recovery_point if key else 0, log.log_start_offset, save)
        log.close(save=save)
        if not save and key % 2:
            for suffix in ("snapshot", "txnindex"):
                for path in log.directory.glob(f"*.{suffix}"):
                    path.unlink()
        self.log = open_in(self.root, config=COMPACTED, saved=saved)
        for writer in self.writers:
            writer.log = self.log

    def _copy(self) -> None:
        """Another broker copies what is left of the log, knows no more than that, and leads."""
        root = self.root / f"{self.count}"
        root.mkdir()
        copy = open_in(root, config=COMPACTED)
        for _, batch in iter_batches(read_all(self.log)):
            copy.append_as_follower(bytes(batch))
        end = self.log.log_end_offset
        assert copy.log_end_offset == end
        copy.note_committed(end)
        self.log.close(save=False)
        self.root, self.log = root, copy
        for writer in self.writers:
            writer.log = copy

    def check(self) -> None:
        assert values_in(self.log) == self.model.values()
        is_open = {one.producer_id - 10 for one in self.log.open_transactions()}
        assert is_open == set(self.model.open)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(STEP, max_size=40))
def test_readers_see_no_difference(steps: list[tuple[str, int, int, bool]]) -> None:
    root = Path(tempfile.mkdtemp(prefix="penstock-clean-"))
    run = Run(root)
    try:
        for step in steps:
            run.do(*step)
            run.check()
        for who in list(run.model.open):
            run.do("end", who, 0, who % 2 == 0)
        for _ in range(3):
            run.do("clean", 0, 0, True)
            run.do("clean", 0, 0, True)
            run.check()
        run.do("copy", 0, 0, True)
        run.check()
    finally:
        run.log.close(save=False)
        shutil.rmtree(root)
