"""What the tests of the cleaner share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.broker.storage.cleaner.cleaner import LogCleaner
from penstock.broker.storage.cleaner.counting import Counts
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.settings import CleanerSettings
from penstock.wire.ids import LeaderEpoch, TopicIdPartition
from penstock.wire.records import Compression, Record, RecordData, encode_batch
from tests.unit.storage.storage_kit import Clock, open_in, read_all, records_of, small_config

EPOCH = LeaderEpoch(0)
COMPACTED = small_config(compacts=True, deletes=False, min_cleanable_dirty_ratio=0.0)


def compacted(tmp_path: Path, **config: int | bool | float) -> PartitionLog:
    """An empty log of a compacted topic."""
    values = {"compacts": True, "deletes": False, "min_cleanable_dirty_ratio": 0.0} | config
    return open_in(tmp_path, config=small_config(**values))


class Broker:
    """Some logs with a cleaner; all in them is committed, unless ``committed`` says less."""

    def __init__(
        self,
        *logs: PartitionLog,
        clock: Clock | None = None,
        counts: Counts | None = None,
        **settings: int,
    ) -> None:
        self.open = list(logs)
        self.clock = clock or Clock()
        self.committed: dict[TopicIdPartition, int] = {}
        values = {"dedupe_buffer_bytes": 1 << 16, "io_max_bytes_per_second": 1 << 40} | settings
        self.cleaner = LogCleaner(
            self, CleanerSettings(**values), counts=counts, wall_clock_ms=self.clock
        )

    def logs(self) -> Sequence[PartitionLog]:
        return self.open

    def high_watermark(self, key: TopicIdPartition) -> int:
        [log] = [log for log in self.open if log.key == key]
        return self.committed.get(key, log.log_end_offset)


def put(
    log: PartitionLog,
    *pairs: tuple[str | None, str | None],
    timestamp_ms: int = 1000,
    producer: tuple[int, int, int] = (-1, -1, -1),
    compression: Compression = Compression.NONE,
) -> None:
    """Append one batch of keys and values, durably; a value None is a tombstone."""
    records = [
        RecordData(
            timestamp_ms + at,
            None if key is None else key.encode(),
            None if value is None else value.encode(),
        )
        for at, (key, value) in enumerate(pairs)
    ]
    producer_id, producer_epoch, sequence = producer
    data = encode_batch(
        records,
        compression=compression,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=sequence,
    )
    log.append_as_leader(data, EPOCH, now_ms=1)
    log.flush()


def close_segment(log: PartitionLog) -> None:
    """Close the active segment, on the disk."""
    log.roll()
    log.flush()


def shown(log: PartitionLog) -> dict[int, tuple[str, str | None]]:
    """Keys and values by offset."""
    return {record.offset: pair_of(record) for record in records_of(read_all(log))}


def pair_of(record: Record) -> tuple[str, str | None]:
    value = None if record.value is None else record.value.decode()
    return (record.key or b"").decode(), value


def names_in(log: PartitionLog) -> list[str]:
    """The files of the segments, and what is left of any clean."""
    kept = (".log", ".swap", ".cleaned", ".deleted", ".tmp")
    return sorted(path.name for path in Path(log.directory).iterdir() if path.suffix in kept)
