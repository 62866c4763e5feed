"""Reading a partition of an internal topic back into the state that it keeps."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final, Protocol, runtime_checkable

import structlog

from penstock.broker.coordinator.ports import ReplicaLog
from penstock.broker.core.group_values import Producer
from penstock.wire.ids import TopicPartition
from penstock.wire.markers import MarkerType, marker_type
from penstock.wire.records import decode_batch, iter_batches

_READ_BYTES: Final = 1024 * 1024

log = structlog.get_logger()


class Replayable(Protocol):
    """State that records are read into."""

    def replay(self, key: bytes, value: bytes | None) -> bool:
        """Take over one record; False for a kind that this version does not know.

        Raises CorruptRecordError when it is not what a coordinator writes.
        """
        ...


@runtime_checkable
class TransactionReplayable(Protocol):
    """State that transactions write to as well."""

    def replay_transactional(self, producer: Producer, key: bytes, value: bytes | None) -> bool:
        """Take over one record of a transaction; as ``replay``."""
        ...

    def replay_marker(self, ended: Producer, *, commit: bool) -> None:
        """Take over a mark, which ends what its producer wrote in earlier epochs."""
        ...


async def load(replicas: ReplicaLog, topic: str, partition: int, shard: Replayable) -> int:
    """Replay the whole log into ``shard`` and wait until all of it is committed.

    Returns how many records there were. Only marks of transactions are appended meanwhile: else
    only the coordinator writes, and it writes nothing before it has loaded. Raises the replicas'
    refusals, and CorruptRecordError when the log holds what no coordinator wrote.
    """
    end = replicas.log_end_offset(topic, partition)
    offset = max(replicas.log_start_offset(topic, partition), 0)
    count = skipped = 0
    while offset < end:
        data = replicas.read_log(topic, partition, offset, _READ_BYTES, to_end=True)
        after = offset
        for header, batch in iter_batches(data):
            after = header.next_offset
            producer = Producer(header.producer_id, header.producer_epoch)
            if header.is_control:
                if isinstance(shard, TransactionReplayable):
                    commits = marker_type(batch) is MarkerType.COMMIT
                    shard.replay_marker(producer, commit=commits)
                continue
            replay = shard.replay
            if header.is_transactional and isinstance(shard, TransactionReplayable):
                replay = partial(shard.replay_transactional, producer)
            for record in decode_batch(batch):
                if record.offset < offset or record.key is None:
                    continue
                count += 1
                skipped += not replay(record.key, record.value)
        if after == offset:
            break  # What compaction left empty at the end.
        offset = after
        await asyncio.sleep(0)  # A long log must not hold up everybody else.
    if skipped:
        log.warning(
            "coordinator records of a newer version skipped",
            partition=str(TopicPartition(topic, partition)),
            count=skipped,
        )
    await replicas.wait_high_watermark(topic, partition, end)
    return count
