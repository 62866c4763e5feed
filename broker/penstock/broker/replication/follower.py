"""The follower's side of replication: one stream to each broker that leads something here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import grpc
import structlog

from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.core.partition_events import Pushed, Role
from penstock.broker.core.ports import EpochEnd, Log
from penstock.broker.replication.partition import Partition
from penstock.broker.replication.ports import (
    LeaderStream,
    Push,
    StreamBrokenError,
    StreamOpener,
)
from penstock.v1 import replication_pb2
from penstock.wire.batch import Buffer
from penstock.wire.ids import TopicId, TopicIdPartition

logger = structlog.get_logger()

_MIN_BACKOFF_S: Final = 0.02
_MAX_BACKOFF_S: Final = 1.0
_NO_PUSH: Final = 0  # The sequence of an ack that answers none: they count from 1.


@dataclass(slots=True)
class Following:
    """One partition followed on a link."""

    partition: Partition
    leader_epoch: int
    backoff_s: float = _MIN_BACKOFF_S
    timer: asyncio.TimerHandle | None = None


@dataclass(frozen=True, slots=True)
class _Applied:
    """A push that was appended: durable once the log is durable up to ``end_offset``.

    Or one that moved the log's start: durable once it begins at ``start_offset`` for good.
    """

    partition: Partition
    leader_epoch: int
    end_offset: int = 0
    start_offset: int = 0

    @property
    def is_current(self) -> bool:
        """Whether the replica is still here and follows in the epoch it was appended under."""
        replica = self.partition.replica
        return (
            not self.partition.closed
            and replica.role is Role.FOLLOWER
            and replica.leader_epoch == self.leader_epoch
        )

    @property
    def is_settled(self) -> bool:
        """Whether it is durable, or no longer a matter of this leadership."""
        log = self.partition.log
        return not self.is_current or (
            log.durable_offset >= min(self.end_offset, log.log_end_offset)
            and log.durable_start_offset >= min(self.start_offset, log.log_start_offset)
        )


@dataclass(frozen=True, slots=True)
class _Ack:
    sequence: int
    applied: tuple[_Applied, ...]

    @property
    def is_settled(self) -> bool:
        """Whether all of the push can be answered for."""
        return all(entry.is_settled for entry in self.applied)


class LeaderLink:
    """The stream to one leading broker; opened again as long as anything is led there."""

    def __init__(self, leader_id: int, links: FollowerLinks) -> None:
        self.leader_id = leader_id
        self.followed: dict[TopicIdPartition, Following] = {}
        self._links = links
        self._to_state: dict[TopicIdPartition, None] = {}  # Of those that are followed.
        self._stops: list[TopicIdPartition] = []
        self._acks: list[_Ack] = []
        self._starts: dict[TopicIdPartition, _Applied] = {}  # Not durable yet, told apart.
        self._wake = asyncio.Event()
        self._kick = asyncio.Event()  # Something changed that makes a new attempt worth while.
        self._endpoint: tuple[str, int, int] | None = None  # With the own broker epoch.
        self._healthy = False
        self._session_task: asyncio.Task[None] | None = None
        self._task = asyncio.create_task(self._run())

    def follow(self, partition: Partition) -> None:
        """Follow a partition; its position is stated when ``state`` is called."""
        assert not partition.closed, f"{partition.name} is here no more"
        self.followed[partition.key] = Following(partition, partition.replica.leader_epoch)

    def unfollow(self, key: TopicIdPartition) -> None:
        """Follow it no longer."""
        following = self.followed.pop(key, None)
        if following is None:
            return
        if following.timer is not None:
            following.timer.cancel()
        self._to_state.pop(key, None)
        self._starts.pop(key, None)
        self._stops.append(key)
        self._wake.set()

    def state(self, key: TopicIdPartition, *, pause: bool) -> None:
        """State the partition's position: at once, or after a pause that grows."""
        following = self.followed.get(key)
        if following is None or following.timer is not None:
            return  # A pause that is under way is neither cut short nor made longer.
        if not pause:
            self._to_state[key] = None
            self._wake.set()
            return
        loop = asyncio.get_running_loop()
        following.timer = loop.call_later(following.backoff_s, self._resume, key)
        following.backoff_s = min(2 * following.backoff_s, _MAX_BACKOFF_S)

    def _resume(self, key: TopicIdPartition) -> None:
        following = self.followed.get(key)
        if following is None:
            return
        following.timer = None
        if following.partition.log.has_room:
            self._to_state[key] = None
            self._wake.set()
        else:  # What would be sent could not be appended.
            self.state(key, pause=True)

    def durable(self) -> None:
        """A log became durable further on."""
        if self._acks or self._starts or self._to_state:
            self._wake.set()

    def metadata_changed(self) -> None:
        """The leader may have another address, or this broker another epoch."""
        if self._endpoint != self._links.endpoint(self.leader_id):
            self._kick.set()
            if self._session_task is not None:
                self._session_task.cancel()

    async def stop(self) -> None:
        """End the stream for good."""
        for following in self.followed.values():
            if following.timer is not None:
                following.timer.cancel()
        self.followed.clear()
        # The writer lives until the stream is closed, and may be woken before.
        self._to_state.clear()
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    # --- The stream -----------------------------------------------------------------------

    async def _run(self) -> None:
        backoff_s = _MIN_BACKOFF_S
        told = False  # One line for each time that it breaks, not for each attempt.
        while True:
            self._kick.clear()
            self._healthy = False
            self._endpoint = self._links.endpoint(self.leader_id)
            reason = "the metadata has no address of it"
            if self._endpoint is not None:
                reason = await self._attempt(*self._endpoint)
            if self._healthy:
                backoff_s, told = _MIN_BACKOFF_S, False
            if not told:
                logger.warning("replication stream ended", leader=self.leader_id, reason=reason)
                told = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff_s):
                    await self._kick.wait()
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _attempt(self, host: str, port: int, broker_epoch: int) -> str:
        """Run one stream until it ends; why it ended."""
        self._session_task = asyncio.create_task(self._session(host, port, broker_epoch))
        try:
            await asyncio.wait((self._session_task,))
        except asyncio.CancelledError:
            self._session_task.cancel()
            await asyncio.wait((self._session_task,))
            raise
        task, self._session_task = self._session_task, None
        if task.cancelled():
            return "the metadata changed"
        error = task.exception()
        if error is None:
            return "the leader ended it"
        if isinstance(error, StreamBrokenError):
            if error.status is not grpc.StatusCode.UNAVAILABLE:
                logger.warning(
                    "replication stream refused", leader=self.leader_id, reason=error.reason
                )
            return error.reason or error.status.name
        logger.error("replication stream failed", leader=self.leader_id, exc_info=error)
        return repr(error)

    async def _session(self, host: str, port: int, broker_epoch: int) -> None:
        hello = replication_pb2.FollowerHello(
            cluster_id=self._links.cluster_id,
            node_id=self._links.node_id,
            broker_epoch=broker_epoch,
        )
        stream = await self._links.open_stream(self.leader_id, host, port, hello)
        try:
            self._acks.clear()
            self._starts.clear()
            self._stops.clear()
            self._to_state = dict.fromkeys(self.followed)
            self._wake.set()
            writer = asyncio.create_task(self._write(stream))
            writer.add_done_callback(partial(self._writer_ended, stream))
            try:
                await stream.read_all(partial(self._pushed, stream))
            finally:
                writer.cancel()
                await asyncio.wait((writer,))
        finally:
            await stream.close()

    def _writer_ended(self, stream: LeaderStream, writer: asyncio.Task[None]) -> None:
        """Have the reader end too. It learns only that the stream is over: why is said here."""
        stream.cancel()
        if not writer.cancelled() and (error := writer.exception()) is not None:
            logger.error("replication stream failed", leader=self.leader_id, exc_info=error)

    async def _write(self, stream: LeaderStream) -> None:
        # When the stream breaks, the reader learns why.
        with contextlib.suppress(StreamBrokenError):
            while True:
                await self._wake.wait()
                self._wake.clear()
                for ack in self._take_settled():
                    await stream.write(_ack_message(ack))
                positions = self._take_positions()
                if positions.start or positions.stop:
                    await stream.write(replication_pb2.ReplicationFetchRequest(positions=positions))

    def _take_settled(self) -> list[_Ack]:
        """What can be answered now, in any order: a push that is large, or of a slow disk, holds
        up the answer to no other. A log start that was not durable with its push comes by itself.
        """
        settled = [ack for ack in self._acks if ack.is_settled]
        if settled:
            self._acks = [ack for ack in self._acks if ack not in settled]
        starts = [applied for applied in self._starts.values() if applied.is_settled]
        for applied in starts:
            del self._starts[applied.partition.key]
        return [*settled, _Ack(_NO_PUSH, tuple(starts))] if starts else settled

    def _take_positions(self) -> replication_pb2.FollowerPositions:
        positions = replication_pb2.FollowerPositions()
        for key in self._stops:
            positions.stop.add(topic_id=key.topic_id, partition=key.partition)
        self._stops.clear()
        for key in list(self._to_state):
            following = self.followed[key]
            log = following.partition.log
            if log.durable_offset < log.log_end_offset:
                # Only what is durable counts, and pushes continue where the log ends.
                self._links.flush_soon(log)
                continue
            del self._to_state[key]
            position = positions.start.add(
                leader_epoch=following.leader_epoch,
                log_end_offset=log.log_end_offset,
                last_epoch=log.last_epoch,
                log_start_offset=log.durable_start_offset,
                knows_no_producers=log.knows_no_producers,
            )
            position.partition.topic_id = key.topic_id
            position.partition.partition = key.partition
        return positions

    def _pushed(self, stream: LeaderStream, response: Push) -> None:
        self._healthy = True
        applied: list[_Applied] = []
        for push, records in zip(response.message.pushes, response.records, strict=True):
            key = TopicIdPartition(TopicId(push.partition.topic_id), push.partition.partition)
            following = self.followed.get(key)
            if following is None or push.leader_epoch != following.leader_epoch:
                continue
            if push.HasField("error"):
                logger.debug(
                    "follower refused",
                    partition=str(following.partition.name),
                    leader=self.leader_id,
                    error=push.error.message,
                )
                self.state(key, pause=True)
                continue
            self._apply(following, push, records)
            self._note_start(following)
            if not push.HasField("diverging_epoch"):
                end_offset = following.partition.log.log_end_offset
                applied.append(_Applied(following.partition, push.leader_epoch, end_offset))
        ack = _Ack(response.message.sequence, tuple(applied))
        if not ack.is_settled or not stream.write_now(_ack_message(ack)):
            self._acks.append(ack)
        if self._acks or self._starts or self._stops or self._to_state:
            self._wake.set()

    def _note_start(self, following: Following) -> None:
        """The leader is to hear of a log start that the disk does not have yet once it has it."""
        log = following.partition.log
        if log.durable_start_offset < log.log_start_offset:
            self._starts[following.partition.key] = _Applied(
                following.partition, following.leader_epoch, start_offset=log.log_start_offset
            )

    def _apply(
        self, following: Following, push: replication_pb2.ReplicaPush, records: Buffer
    ) -> None:
        diverging: EpochEnd | None = None
        if push.HasField("diverging_epoch"):
            end = push.diverging_epoch
            diverging = EpochEnd(end.leader_epoch, end.end_offset)
        log = following.partition.log
        log_end, paused = log.log_end_offset, following.timer is not None
        following.partition.handle(
            Pushed(
                leader_epoch=push.leader_epoch,
                high_watermark=push.high_watermark,
                log_start_offset=push.log_start_offset,
                base_offset=push.base_offset,
                records=records,
                diverging=diverging,
                producers=push.producers,
            )
        )
        if log.log_end_offset > log_end:
            following.backoff_s = _MIN_BACKOFF_S
        elif following.timer is not None and not paused:
            # It could not be appended: until the pause is over, what follows comes for nothing.
            self._stops.append(following.partition.key)
            self._wake.set()


def _ack_message(ack: _Ack) -> replication_pb2.ReplicationFetchRequest:
    """The ack as things stand now. Nothing is said of a partition that follows in a newer epoch:
    its log may have been cut and grown again, which the former leader must not count.
    """
    message = replication_pb2.ReplicationFetchRequest()
    message.ack.sequence = ack.sequence
    for entry in ack.applied:
        if not entry.is_current:
            continue
        log = entry.partition.log
        position = message.ack.partitions.add(
            leader_epoch=entry.leader_epoch,
            log_end_offset=log.durable_offset,
            log_start_offset=log.durable_start_offset,
        )
        position.partition.topic_id = entry.partition.key.topic_id
        position.partition.partition = entry.partition.key.partition
    return message


class FollowerLinks:
    """All links of this broker: one to each broker that leads something it follows."""

    def __init__(
        self,
        node_id: int,
        image: MetadataImage,
        *,
        broker_epoch: Callable[[], int],
        open_stream: StreamOpener,
        flush_soon: Callable[[Log], None],
    ) -> None:
        self.node_id = node_id
        self.open_stream = open_stream
        self.flush_soon = flush_soon
        self._image = image
        self._broker_epoch = broker_epoch
        self._links: dict[int, LeaderLink] = {}
        self._leader_of: dict[TopicIdPartition, int] = {}
        self._stopping: set[asyncio.Task[None]] = set()

    @property
    def cluster_id(self) -> str:
        """The cluster's id."""
        return self._image.cluster_id

    def endpoint(self, leader_id: int) -> tuple[str, int, int] | None:
        """Host and port of a broker and this broker's own epoch, or None while unknown."""
        broker = self._image.brokers.get(leader_id)
        return None if broker is None else (broker.host, broker.port, self._broker_epoch())

    def follow(self, partition: Partition) -> None:
        """Follow the partition on the link to its leader; no longer on another."""
        self.unfollow(partition.key)
        leader = partition.replica.leader
        link = self._links.get(leader)
        if link is None:
            link = self._links[leader] = LeaderLink(leader, self)
        self._leader_of[partition.key] = leader
        link.follow(partition)

    def unfollow(self, key: TopicIdPartition) -> None:
        """Follow the partition no longer; a link without partitions ends."""
        leader = self._leader_of.pop(key, None)
        link = None if leader is None else self._links.get(leader)
        if link is not None:
            link.unfollow(key)

    def state(self, key: TopicIdPartition, *, pause: bool) -> None:
        """State the partition's position to its leader."""
        link = self._link_of(key)
        if link is not None:
            link.state(key, pause=pause)

    def durable(self, key: TopicIdPartition) -> None:
        """The partition's log became durable further on."""
        link = self._link_of(key)
        if link is not None:
            link.durable()

    def metadata_changed(self) -> None:
        """A step of metadata was taken over: end what has no use, renew what has moved."""
        for leader_id, link in list(self._links.items()):
            if link.followed:
                link.metadata_changed()
                continue
            del self._links[leader_id]
            task = asyncio.create_task(link.stop())
            self._stopping.add(task)
            task.add_done_callback(self._stopping.discard)

    async def stop(self) -> None:
        """End all links."""
        links = list(self._links.values())
        self._links.clear()
        self._leader_of.clear()
        await asyncio.gather(*(link.stop() for link in links), *self._stopping)

    def _link_of(self, key: TopicIdPartition) -> LeaderLink | None:
        leader = self._leader_of.get(key)
        return None if leader is None else self._links.get(leader)
