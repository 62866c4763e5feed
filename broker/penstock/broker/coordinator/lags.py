"""How far behind the groups are that this broker coordinates, for its metrics."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final, Protocol

import grpc
import structlog
from grpc import aio

from penstock.broker.core.group_progress import Committed, GroupProgress, Lag
from penstock.broker.core.metadata_image import MetadataImage
from penstock.v1 import common_pb2, log_pb2
from penstock.v1.log_pb2_grpc import LogStub
from penstock.wire.ids import TopicPartition
from penstock.wire.transport import format_address

INTERVAL_S: Final = 10.0
_TIMEOUT_S: Final = 5.0

log = structlog.get_logger()

Lags = dict[tuple[str, str], Lag]
"""By group and topic how the group stands."""


class LocalLogs(Protocol):
    """What is asked of the partitions that this broker leads."""

    def list_offsets(self, request: log_pb2.ListOffsetsRequest) -> log_pb2.ListOffsetsResponse:
        """Answer an offset query."""
        ...


class GroupLags:
    """Compares, now and then, what is committed with where the partitions' leaders end.

    A topic of which one leader does not answer is left out (:class:`GroupProgress`). Used on one
    event loop.
    """

    def __init__(
        self,
        node_id: int,
        image: MetadataImage,
        logs: LocalLogs,
        committed: Callable[[], Committed],
        *,
        open_channel: Callable[[str, int], aio.Channel],
        show: Callable[[Lags], None],
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node_id = node_id
        self._image = image
        self._logs = logs
        self._committed = committed
        self._open_channel = open_channel
        self._show = show
        self._interval_s = interval_s
        self._clock = clock
        self._progress = GroupProgress()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look."""
        self._task = asyncio.create_task(self._run(), name="group lags")

    async def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                self._show(await self.look())
            except Exception:
                # Figures for people must not end with the first surprise.
                log.exception("group lags not found; trying again")

    async def look(self) -> Lags:
        """The lags now."""
        committed = self._committed()
        by_leader: dict[int, set[TopicPartition]] = defaultdict(set)
        for positions in committed.values():
            for partition in positions:
                record = self._image.partition(partition.topic, partition.partition)
                by_leader[-1 if record is None else record.leader].add(partition)
        answers = await asyncio.gather(
            *(self._ends(leader, wanted) for leader, wanted in by_leader.items())
        )
        ends = {partition: end for answer in answers for partition, end in answer.items()}
        return self._progress.look(committed, ends, self._clock())

    async def _ends(self, leader: int, wanted: set[TopicPartition]) -> dict[TopicPartition, int]:
        request = log_pb2.ListOffsetsRequest(
            partitions=[
                log_pb2.ListOffsetsPartition(
                    partition=common_pb2.TopicPartition(topic=topic, partition=number),
                    timestamp_ms=-1,
                    current_leader_epoch=-1,
                )
                for topic, number in sorted(wanted)
            ]
        )
        response = await self._ask(leader, request)
        return {
            TopicPartition(entry.partition.topic, entry.partition.partition): entry.offset
            for entry in response.partitions
            if not entry.HasField("error")
        }

    async def _ask(
        self, leader: int, request: log_pb2.ListOffsetsRequest
    ) -> log_pb2.ListOffsetsResponse:
        """What the leader answers; nothing where it cannot be asked."""
        if leader == self._node_id:
            return self._logs.list_offsets(request)
        broker = self._image.brokers.get(leader)
        if broker is None:
            return log_pb2.ListOffsetsResponse()
        channel = self._open_channel(format_address(broker.host, broker.port), leader)
        try:
            stub: Any = LogStub(channel)
            answer: log_pb2.ListOffsetsResponse = await stub.ListOffsets(
                request, timeout=_TIMEOUT_S
            )
        except grpc.RpcError:
            return log_pb2.ListOffsetsResponse()
        finally:
            await channel.close(None)
        return answer
