"""What a follower says of its log: only what is durable, and only to the leader it follows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from structlog.testing import capture_logs

from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.replication.manager import ReplicaManager
from penstock.broker.replication.ports import Push
from penstock.v1 import cluster_pb2, replication_pb2
from penstock.wire.laden import Laden
from penstock.wire.records import offset_patch, parse_header
from tests.unit.replication.brokers import CLUSTER_ID, KEY, TOPIC, TOPIC_ID, batch
from tests.unit.replication.memory_log import MemoryLog, MemoryLogs
from tests.unit.replication.virtual_loop import run_virtually

SETTLED_S = 0.1  # Of virtual time, which passes once all that is ready was done.


async def settled() -> None:
    """Return when all that is ready was done, and what that made ready."""
    await asyncio.sleep(SETTLED_S)  # It takes virtual time alone.


class HeldStream:
    """A stream to a leader that is played by the test."""

    def __init__(self) -> None:
        self.written: list[replication_pb2.ReplicationFetchRequest] = []
        self.push: Callable[[Push], object] | None = None
        self._ended = asyncio.Event()

    async def read_all(self, handle: Callable[[Push], object]) -> None:
        self.push = handle
        await self._ended.wait()

    def write_now(self, message: replication_pb2.ReplicationFetchRequest) -> bool:
        self.written.append(message)
        return True

    async def write(self, message: replication_pb2.ReplicationFetchRequest) -> None:
        self.written.append(message)

    def cancel(self) -> None:
        self._ended.set()

    async def close(self) -> None:
        self._ended.set()

    def positions(self) -> list[tuple[int, int]]:
        """Leader epoch and log end of each position stated."""
        return [
            (start.leader_epoch, start.log_end_offset)
            for message in self.written
            for start in message.positions.start
        ]

    def acks(self) -> list[tuple[int, list[tuple[int, int]]]]:
        """Of each ack its sequence, and the leader epoch and log end of its partitions."""
        return [
            (
                message.ack.sequence,
                [(entry.leader_epoch, entry.log_end_offset) for entry in message.ack.partitions],
            )
            for message in self.written
            if message.HasField("ack")
        ]


class FollowerUnderTest:
    """Broker 2, which follows broker 1 in one partition; its disk waits for ``logs.release``."""

    def __init__(self) -> None:
        self.logs = MemoryLogs()
        self.logs.hold = True
        self.streams: list[HeldStream] = []
        self.image = MetadataImage()
        self.manager = ReplicaManager(
            2,
            self.logs,  # type: ignore[arg-type]
            self.image,
            alter_partition=_nobody,
            report_replicas=_nobody,
            broker_epoch=lambda: 1,
            may_serve=lambda: True,
            open_stream=self._open_stream,
            ask_coordinator=lambda *_: None,
            lag_max_ms=10_000,
        )
        self.logs.on_durable = self.manager.on_durable  # type: ignore[assignment]

    async def _open_stream(self, *_: Any) -> HeldStream:
        self.streams.append(HeldStream())
        return self.streams[-1]

    async def follow(self, leader_epoch: int) -> HeldStream:
        """Metadata say that broker 1 leads in this epoch; the stream to it, when all is said."""
        delta = cluster_pb2.MetadataDelta(
            index=leader_epoch + 1,
            cluster_id=CLUSTER_ID,
            brokers=[
                cluster_pb2.BrokerRecord(node_id=node, broker_epoch=1, host="h", port=node)
                for node in (1, 2)
            ],
            topics=[cluster_pb2.TopicRecord(topic_id=TOPIC_ID, name=TOPIC)],
            partitions=[
                cluster_pb2.PartitionRecord(
                    topic_id=TOPIC_ID,
                    replicas=[1, 2],
                    isr=[1, 2],
                    leader=1,
                    leader_epoch=leader_epoch,
                    partition_epoch=leader_epoch,
                )
            ],
        )
        change = self.image.apply(delta)
        assert change is not None
        for _ in self.manager.on_metadata(change):
            pass  # All of it at once.
        await settled()
        return self.streams[-1]

    @property
    def log(self) -> MemoryLog:
        return self.logs.open[KEY]


async def _nobody(_: Any) -> Any:
    raise AssertionError("a follower has nothing to tell the controllers")


def push_of(sequence: int, *values: bytes) -> Push:
    """A push of records at offset 0, in leader epoch 0."""
    response = replication_pb2.ReplicationFetchResponse(sequence=sequence)
    records = batch(*values)
    stamped = offset_patch(parse_header(records), 0, 0) + records[16:]
    push = response.pushes.add()
    push.partition.topic_id = TOPIC_ID
    return Laden(response, [stamped])


def test_an_ack_says_nothing_of_a_partition_that_follows_in_a_newer_epoch() -> None:
    """Its log may be cut and grow again, which a leader deposed must not count as its own."""

    async def main() -> None:
        node = FollowerUnderTest()
        await node.manager.start()
        stream = await node.follow(0)
        assert stream.positions() == [(0, 0)]
        assert stream.push is not None
        stream.push(push_of(1, b"a"))
        await settled()
        assert node.log.log_end_offset == 1
        assert stream.acks() == [], "it is not durable yet"
        assert await node.follow(1) is stream
        node.logs.release()
        await settled()
        assert stream.acks() == [(1, [])], "the push is answered, and nothing said with it"
        assert stream.positions() == [(0, 0), (1, 1)]
        await node.manager.stop()

    run_virtually(main())


def test_an_ack_in_the_same_epoch_says_what_is_durable() -> None:
    async def main() -> None:
        node = FollowerUnderTest()
        await node.manager.start()
        stream = await node.follow(0)
        assert stream.push is not None
        stream.push(push_of(1, b"a"))
        node.logs.release()
        await settled()
        assert stream.acks() == [(1, [(0, 1)])]
        await node.manager.stop()

    run_virtually(main())


def test_a_position_is_stated_once_all_of_the_log_is_durable() -> None:
    """The leader takes the end that it is told for durable, and commits by it."""

    async def main() -> None:
        node = FollowerUnderTest()
        await node.manager.start()
        stream = await node.follow(0)
        assert stream.push is not None
        stream.push(push_of(1, b"a"))
        await node.follow(1)
        assert stream.positions() == [(0, 0)], "it has a record that it could lose with its power"
        node.logs.release()
        await settled()
        assert stream.positions() == [(0, 0), (1, 1)]
        await node.manager.stop()

    run_virtually(main())


def test_what_the_leader_pushes_while_a_follower_stops_is_no_trouble() -> None:
    """It wakes who states positions, when nothing is followed any more."""

    async def main() -> None:
        node = FollowerUnderTest()
        await node.manager.start()
        stream = await node.follow(0)
        assert stream.push is not None
        stream.push(push_of(1, b"a"))
        await node.follow(1)
        stopping = asyncio.ensure_future(node.manager.stop())
        await asyncio.sleep(0)  # One turn: the links are about to stop.
        stream.push(push_of(2, b"b"))
        await stopping
        assert stream.positions() == [(0, 0)], "its log is not durable"

    with capture_logs() as told:
        run_virtually(main())
    assert [one for one in told if one["log_level"] == "error"] == []
