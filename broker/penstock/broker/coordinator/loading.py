"""Reading a partition of ``__consumer_offsets`` back into groups."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from penstock.broker.coordinator.ports import ReplicaLog
from penstock.broker.core.group_shard import GroupShard
from penstock.broker.topics import OFFSETS_TOPIC
from penstock.wire.records import decode_batch, iter_batches

_READ_BYTES: Final = 1024 * 1024

log = structlog.get_logger()


async def load(replicas: ReplicaLog, partition: int, shard: GroupShard) -> int:
    """Replay the whole log into ``shard`` and wait until all of it is committed.

    Returns how many records there were. Nobody else appends meanwhile: only the coordinator
    writes, and it writes nothing before it has loaded. Raises the replicas' refusals, and
    CorruptRecordError when the log holds what no coordinator wrote.
    """
    end = replicas.log_end_offset(OFFSETS_TOPIC, partition)
    offset = max(replicas.log_start_offset(OFFSETS_TOPIC, partition), 0)
    count = skipped = 0
    while offset < end:
        data = replicas.read_log(OFFSETS_TOPIC, partition, offset, _READ_BYTES, to_end=True)
        after = offset
        for header, batch in iter_batches(data):
            after = header.next_offset
            if header.is_control:
                continue
            for record in decode_batch(batch):
                if record.offset < offset or record.key is None:
                    continue
                count += 1
                skipped += not shard.replay(record.key, record.value)
        if after == offset:
            break  # What compaction left empty at the end.
        offset = after
        await asyncio.sleep(0)  # A long log must not hold up everybody else.
    if skipped:
        log.warning("group records of a newer version skipped", partition=partition, count=skipped)
    await replicas.wait_high_watermark(OFFSETS_TOPIC, partition, end)
    return count
