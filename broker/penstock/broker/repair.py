"""Mends damaged logs with what other replicas have (a bit that flipped on a disk)."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, Protocol

import grpc
import structlog
from grpc import aio

from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.replication.ports import ChannelFactory
from penstock.broker.storage.damage import Damage, Examination, Findings, mend, patch_of
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.segment import Segment
from penstock.v1 import replication_pb2
from penstock.v1.replication_pb2_grpc import ReplicationStub
from penstock.wire.errors import (
    CorruptRecordError,
    NetworkError,
    OffsetOutOfRangeError,
    PenstockError,
    error_from_proto,
)
from penstock.wire.ids import TopicIdPartition

logger = structlog.get_logger()

ASK_AGAIN_S: Final = 60.0
"""So often a damaged replica that nobody can stand in for is looked at again."""

GIVEN_UP_S: Final = 3600.0
"""So long what can't be mended is left alone: each attempt moves the leadership away."""

_ATTEMPTS: Final = 3
_READ_BYTES: Final = 256 * 1024
_TIMEOUT_S: Final = 10.0
_MIN_BACKOFF_S: Final = 0.1
_MAX_BACKOFF_S: Final = 10.0


class Replicas(Protocol):
    """What is asked of the replica manager."""

    def set_damaged(self, key: TopicIdPartition, reason: PenstockError) -> None:
        """A part of the log can't be read: others are to lead, and it is to be mended."""
        ...

    def set_sound(self, key: TopicIdPartition) -> None:
        """The log was mended, or can't be."""
        ...

    def may_mend(self, key: TopicIdPartition) -> bool:
        """Whether the replica is out of the in-sync set, and another leads."""
        ...


class CannotBeMendedError(Exception):
    """No replica has what is missing here, as far as can be told. Says why."""


class Repairs:
    """One task a damaged partition, from when the damage is found until it is mended.

    A replica is mended only while it is out of the in-sync set, by the controllers' word, so that
    it is never elected with a hole. The only one in sync goes on as it is: it serves what is sound,
    and refuses the rest with CorruptRecordError. Used on one event loop; files are read, and
    synced, in other threads.
    """

    def __init__(
        self,
        node_id: int,
        image: MetadataImage,
        replicas: Replicas,
        get_log: Callable[[TopicIdPartition], PartitionLog | None],
        *,
        broker_epoch: Callable[[], int],
        channel_factory: ChannelFactory,
        count_damaged: Callable[[], None],
        count_mended: Callable[[], None],
    ) -> None:
        self._node_id = node_id
        self._image = image
        self._replicas = replicas
        self._get_log = get_log
        self._broker_epoch = broker_epoch
        self._channel_factory = channel_factory
        self._count_damaged = count_damaged
        self._count_mended = count_mended
        self._segments: dict[TopicIdPartition, set[int]] = {}  # Base offsets, still to be mended.
        self._tasks: dict[TopicIdPartition, asyncio.Task[None]] = {}
        self._given_up: dict[TopicIdPartition, float] = {}  # Until when, by the loop's clock.
        self._told: set[tuple[TopicIdPartition, int]] = set()
        self._moved = asyncio.Event()  # Set, and replaced, when the metadata moved on.
        self._stopped = False

    @property
    def damaged_count(self) -> int:
        """How many replicas are damaged. Safe on any thread."""
        return len(self._segments) + len(self._given_up)

    def found(self, log: PartitionLog, offset: int) -> None:
        """A batch in the segment that holds ``offset`` is not sound. Called again and again."""
        key = log.key
        base_offset = log.files.segment_of(offset).base_offset
        if self._stopped or self._is_given_up(key):
            return
        waiting = self._segments.setdefault(key, set())
        if base_offset in waiting:
            return
        waiting.add(base_offset)
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._run(key))

    def on_metadata(self) -> None:
        """The metadata have moved on: another may lead what is damaged here."""
        if self._segments:
            self._moved.set()
            self._moved = asyncio.Event()

    async def stop(self) -> None:
        """Mend nothing more."""
        self._stopped = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _is_given_up(self, key: TopicIdPartition) -> bool:
        until = self._given_up.get(key)
        if until is None:
            return False
        if asyncio.get_running_loop().time() < until:
            return True
        del self._given_up[key]
        return False

    # --- one partition ---------------------------------------------------------------------------

    async def _run(self, key: TopicIdPartition) -> None:
        waiting = self._segments[key]
        backoff_s, told = _MIN_BACKOFF_S, ""
        try:
            while waiting and (log := self._get_log(key)) is not None:
                base_offset = min(waiting)
                try:
                    await self._mend_segment(log, base_offset)
                except CannotBeMendedError as error:
                    self._give_up(log, str(error))
                    return
                except PenstockError as error:
                    if error.message != told:
                        told = error.message
                        logger.warning("log not mended yet", partition=log.name, reason=told)
                    await asyncio.sleep(backoff_s)
                    backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
                    continue
                waiting.discard(base_offset)
                backoff_s = _MIN_BACKOFF_S
        except Exception:
            logger.exception("mending failed", topic_partition_id=str(key))
        finally:
            del self._segments[key], self._tasks[key]
            if not self._stopped:
                self._replicas.set_sound(key)

    def _give_up(self, log: PartitionLog, reason: str) -> None:
        self._given_up[log.key] = asyncio.get_running_loop().time() + GIVEN_UP_S
        logger.error(
            "log can't be mended",
            partition=log.name,
            directory=str(log.directory),
            reason=reason,
            next_step="if another replica has these records, stop this broker, move the directory "
            "away and start it again: it then copies the partition anew from its leader",
        )

    async def _mend_segment(self, log: PartitionLog, base_offset: int) -> None:
        """Look at the segment, and mend it, until all of it is sound."""
        mended: Counter[int] = Counter()
        while True:
            segment = _segment_at(log, base_offset)
            if segment is None:
                return  # It was deleted, or cut away.
            findings = await self._examine(log, segment)
            if _segment_at(log, base_offset) is not segment:
                continue
            if not findings.damages:
                if findings.index_is_damaged:
                    await mend_index(log, segment)
                return
            self._tell(log, segment, findings)
            await self._until_out_of_sync(log, findings.damages[0])
            for damage in findings.damages:
                mended[damage.offset] += 1
                if mended[damage.offset] > _ATTEMPTS:
                    raise CannotBeMendedError(
                        f"offset {damage.offset} was mended {_ATTEMPTS} times and is read as "
                        "damaged all the same: the disk or the memory is at fault"
                    )
                await self._mend(log, segment, damage)

    async def _examine(self, log: PartitionLog, segment: Segment) -> Findings:
        examination = Examination(log, segment)
        findings = await asyncio.to_thread(examination.run)
        if findings.error is not None:
            raise log.home.translate(findings.error, f"reading {segment.path}")
        return findings

    def _tell(self, log: PartitionLog, segment: Segment, findings: Findings) -> None:
        for damage in findings.damages:
            place = log.key, damage.offset
            if place in self._told:
                continue
            self._told.add(place)
            self._count_damaged()
            logger.error(
                "damaged batch found",
                partition=log.name,
                offset=damage.offset,
                segment=str(segment.path),
                position=damage.position,
                reason=damage.what,
                next_step="it is not served, and mended from another replica in sync if there is "
                "one; check the disk and its cables, for this should not happen",
            )

    async def _until_out_of_sync(self, log: PartitionLog, damage: Damage) -> None:
        """Have the controllers take the replica out of the in-sync set, and another one lead."""
        key = log.key
        while not self._replicas.may_mend(key):
            if self._get_log(key) is not log:
                raise CorruptRecordError("the log is no longer here")
            self._replicas.set_damaged(key, CorruptRecordError(f"{log.name}: {damage.what}"))
            moved = self._moved
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ASK_AGAIN_S):
                    await moved.wait()

    async def _mend(self, log: PartitionLog, segment: Segment, damage: Damage) -> None:
        try:
            sound = await self._read_from_leader(log.key, damage.offset)
        except (CorruptRecordError, OffsetOutOfRangeError) as error:
            raise CannotBeMendedError(
                f"the leader has not got it either: {error.message}"
            ) from None
        cut = damage.position >= segment.size_bytes
        if cut or _segment_at(log, segment.base_offset) is not segment:
            return  # It is looked at again.
        patch = patch_of(log, segment, damage, sound)
        if patch is None:
            raise CannotBeMendedError(
                f"the leader's batches from offset {damage.offset} on do not fit in the place of "
                f"the damaged ones"
            )
        sync = mend(log, segment, damage, patch)
        try:
            await asyncio.to_thread(sync)
        except OSError as error:
            raise log.home.fail(error, f"flushing {segment.path}") from error
        self._told.discard((log.key, damage.offset))
        self._count_mended()
        logger.info(
            "damaged batch mended",
            partition=log.name,
            offset=damage.offset,
            segment=str(segment.path),
            bytes=len(patch),
        )

    async def _read_from_leader(self, key: TopicIdPartition, offset: int) -> bytes:
        """Batches from ``offset`` on, as the leader has them. Raises PenstockError."""
        record = self._image.partition_by_id(key)
        leader = None if record is None else self._image.brokers.get(record.leader)
        if record is None or leader is None:
            raise NetworkError("the partition has no leader to copy from now")
        request = replication_pb2.ReadBatchesRequest(
            hello=replication_pb2.FollowerHello(
                cluster_id=self._image.cluster_id,
                node_id=self._node_id,
                broker_epoch=self._broker_epoch(),
            ),
            partition=replication_pb2.ReplicaPartition(
                topic_id=key.topic_id, partition=key.partition
            ),
            leader_epoch=record.leader_epoch,
            offset=offset,
            max_bytes=_READ_BYTES,
        )
        try:
            channel = await self._channel_factory(leader.node_id, leader.host, leader.port)
            try:
                stub: Any = ReplicationStub(channel)
                response = await stub.ReadBatches(request, timeout=_TIMEOUT_S)
            finally:
                await channel.close(None)
        except aio.AioRpcError as error:
            code = error.code()
            name = code.name if isinstance(code, grpc.StatusCode) else str(code)
            raise NetworkError(f"broker {leader.node_id}: {name} {error.details()}") from error
        if response.HasField("error"):
            raise error_from_proto(response.error)
        return bytes(response.records)


async def mend_index(log: PartitionLog, segment: Segment) -> None:
    """Make the index of a closed, sound segment anew. Raises what reading raises."""
    logger.warning("damaged index made anew", partition=log.name, segment=str(segment.path))
    await asyncio.to_thread(segment.preparation())
    if not log.is_closed and segment in log.files.segments and segment.index is None:
        segment.mend_index()


def _segment_at(log: PartitionLog, base_offset: int) -> Segment | None:
    segment = log.files.segment_of(base_offset)
    return segment if segment.base_offset == base_offset else None
