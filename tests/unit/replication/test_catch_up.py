"""Replicas that catch up take from those in sync neither time nor turns. In virtual time."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.replication.leader import CATCH_UP_PUSH_BYTES, FollowerStream
from penstock.broker.replication.manager import ReplicaManager
from penstock.broker.replication.ports import EOF, Push
from penstock.v1 import cluster_pb2, common_pb2, controller_pb2, replication_pb2
from penstock.wire.ids import TopicId, TopicIdPartition
from penstock.wire.laden import REPLICATION_PUSH
from penstock.wire.records import RecordData, encode_batch
from tests.unit.replication.memory_log import MemoryLogs
from tests.unit.replication.virtual_loop import clock_ms, run_virtually

LEADER = 1
TOPIC = "orders"
TOPIC_ID = TopicId(b"orders-id-16-by!")
BATCH = encode_batch([RecordData(0, None, bytes(50_000))])


def key(number: int) -> TopicIdPartition:
    return TopicIdPartition(TOPIC_ID, number)


class Link:
    """Both directions of a follower's stream; ``delay_s`` on the way there.

    The follower takes everything at once, and answers unless a partition of the push is ``held``.
    """

    def __init__(self, leader: Leader, node_id: int, delay_s: float = 0.001) -> None:
        self.pushes: list[tuple[int, replication_pb2.ReplicationFetchResponse]] = []
        self.ends: dict[int, int] = {}
        self.held: set[int] = set()  # Partitions whose pushes are not answered.
        self.unanswered: list[replication_pb2.ReplicationFetchResponse] = []
        self._delay_s = delay_s
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        hello = replication_pb2.FollowerHello(cluster_id="c", node_id=node_id, broker_epoch=node_id)
        self._task = asyncio.create_task(FollowerStream(leader.manager, hello).run(self))
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            traceback.print_exception(error)  # What is waited for then never comes.

    def state(self, ends: Mapping[int, int]) -> None:
        """State positions: log end offsets by partition."""
        positions: Any = replication_pb2.FollowerPositions()
        for number, end in ends.items():
            self.ends[number] = end
            entry = positions.start.add(
                leader_epoch=0, log_end_offset=end, last_epoch=0 if end else -1
            )
            entry.partition.topic_id = TOPIC_ID
            entry.partition.partition = number
        self._requests.put_nowait(replication_pb2.ReplicationFetchRequest(positions=positions))

    async def read_all(self, handle: Callable[[Any], object]) -> None:
        while (request := await self._requests.get()) is not EOF:
            handle(request)

    async def write(self, message: Push) -> None:
        await asyncio.sleep(self._delay_s)  # virtual time
        self.take(REPLICATION_PUSH.whole(message))

    def take(self, message: replication_pb2.ReplicationFetchResponse) -> None:
        self.pushes.append((clock_ms(), message))
        for push in message.pushes:
            if push.records:
                assert push.base_offset == self.ends[push.partition.partition]
                self.ends[push.partition.partition] += len(push.records) // len(BATCH)
        self.unanswered.append(message)
        self.answer()

    def answer(self) -> None:
        """Answer all that is not held."""
        left, self.unanswered = self.unanswered, []
        for message in left:
            if any(push.partition.partition in self.held for push in message.pushes):
                self.unanswered.append(message)
                continue
            ack: Any = replication_pb2.FollowerAck(sequence=message.sequence)
            for push in message.pushes:
                entry = ack.partitions.add(
                    leader_epoch=0, log_end_offset=self.ends[push.partition.partition]
                )
                entry.partition.CopyFrom(push.partition)
            self._requests.put_nowait(replication_pb2.ReplicationFetchRequest(ack=ack))

    async def end(self) -> None:
        self._requests.put_nowait(EOF)
        await self._task

    def carried(self, number: int) -> list[int]:
        """The sizes of the pushes with records of a partition."""
        return [
            len(push.records)
            for _, message in self.pushes
            for push in message.pushes
            if push.partition.partition == number and push.records
        ]


class Leader:
    """Broker 1 leads all partitions of a topic; who is in sync is given."""

    def __init__(self, isrs: Sequence[Sequence[int]], rate: int) -> None:
        image = MetadataImage()
        self.logs = MemoryLogs()
        self.manager = ReplicaManager(
            LEADER,
            self.logs,  # type: ignore[arg-type]
            image,
            alter_partition=self._alter,
            report_replicas=self._report,
            broker_epoch=lambda: LEADER,
            may_serve=lambda: True,
            open_stream=self._no_stream,
            ask_coordinator=lambda *_: None,
            clock_ms=clock_ms,
            catch_up_bytes_per_second=rate,
        )
        self.logs.on_durable = self.manager.on_durable  # type: ignore[assignment]
        self._image = image
        brokers = [cluster_pb2.BrokerRecord(node_id=n, broker_epoch=n) for n in (1, 2, 3)]
        self.partitions = [
            cluster_pb2.PartitionRecord(
                topic_id=TOPIC_ID, partition=number, replicas=[1, 2, 3], isr=isr, leader=LEADER
            )
            for number, isr in enumerate(isrs)
        ]
        self._index = 10
        self.publish(
            snapshot=True,
            cluster_id="c",
            brokers=brokers,
            topics=[
                cluster_pb2.TopicRecord(
                    topic_id=TOPIC_ID, name=TOPIC, configs={"min.insync.replicas": "1"}
                )
            ],
            partitions=self.partitions,
        )

    def publish(self, **changes: Any) -> None:
        self._index += 1
        change = self._image.apply(cluster_pb2.MetadataDelta(index=self._index, **changes))
        assert change is not None
        for _ in self.manager.on_metadata(change):
            pass  # All of it at once.

    async def append(self, number: int, *, wait: bool = True) -> None:
        await self.manager.append(
            TOPIC,
            b"",
            number,
            BATCH,
            acks=common_pb2.ACKS_ALL if wait else common_pb2.ACKS_NONE,
            timeout_ms=60_000,
        )

    async def fill(self, number: int, batches: int) -> None:
        """Have records in the log that only those in sync will have."""
        for _ in range(batches):
            await self.append(number, wait=False)
        await asyncio.sleep(0.001)  # virtual time, in which they are flushed

    async def _alter(self, command: Any) -> Any:
        result = cluster_pb2.AlterPartitionResult()
        for entry in command.partitions:
            record = self.partitions[entry.partition]
            record.partition_epoch += 1
            del record.isr[:]
            record.isr.extend(member.node_id for member in entry.new_isr)
            result.partitions.add().partition.CopyFrom(record)
        return controller_pb2.AlterPartitionResponse(result=result)

    async def _report(self, command: Any) -> Any:
        raise AssertionError("no disk fails here")

    async def _no_stream(self, node_id: int, host: str, port: int) -> Any:
        raise AssertionError("a leader of everything follows nobody")


async def settled(condition: Any, within_s: float) -> None:
    deadline = clock_ms() + within_s * 1000
    while not condition():
        assert clock_ms() < deadline, "not in time"
        await asyncio.sleep(0.001)  # virtual time


def test_a_write_waits_for_nothing_that_another_partition_is_to_catch_up_on():
    async def main() -> None:
        leader = Leader([[1, 2], [1]], rate=0)
        await leader.fill(1, 400)  # 20 MB that follower 2 lacks.
        link = Link(leader, 2, delay_s=0.004)
        link.state({0: 0, 1: 0})
        slowest_ms = 0
        while link.ends[1] < 400:
            begun = clock_ms()
            await leader.append(0)
            slowest_ms = max(slowest_ms, clock_ms() - begun)
        assert max(link.carried(1)) <= CATCH_UP_PUSH_BYTES
        # One piece that is on its way, and then the record itself.
        assert slowest_ms <= 9
        await link.end()

    run_virtually(main())


def test_a_write_is_acknowledged_while_a_piece_to_catch_up_on_is_not():
    async def main() -> None:
        leader = Leader([[1, 2], [1]], rate=0)
        await leader.fill(1, 100)
        link = Link(leader, 2)
        link.held.add(1)  # Its disk is slow for this partition.
        link.state({0: 0, 1: 0})
        await settled(lambda: link.unanswered, 1)
        for _ in range(20):
            begun = clock_ms()
            await leader.append(0)
            assert clock_ms() - begun <= 2
        assert len(link.carried(1)) == 1  # No second piece before the first is answered.
        link.held.clear()
        link.answer()
        await settled(lambda: link.ends[1] == 100, 1)
        await link.end()

    run_virtually(main())


def test_followers_share_the_rate_and_writes_are_outside_of_it():
    async def main() -> None:
        leader = Leader([[1, 2, 3], [1], [1]], rate=1_000_000)
        await leader.fill(1, 40)
        await leader.fill(2, 40)
        links = [Link(leader, 2), Link(leader, 3)]
        for link in links:
            link.state({0: 0, 1: 0, 2: 0})
        writes = 0
        while clock_ms() < 4_000:
            begun = clock_ms()
            await leader.append(0)  # 50 KB: far above the rate by itself.
            assert clock_ms() - begun <= 4
            writes += 1
        assert writes > 900
        got = [sum(link.carried(1)) + sum(link.carried(2)) for link in links]
        assert 3_800_000 <= sum(got) <= 4_700_000
        assert abs(got[0] - got[1]) <= 2 * CATCH_UP_PUSH_BYTES
        for link in links:
            await link.end()

    run_virtually(main())


@pytest.mark.parametrize("seed", range(6))
def test_no_turn_is_lost_in_whatever_order_things_happen(seed: int):
    async def main() -> None:
        leader = Leader([[1, 2, 3], [1], [1]], rate=1_000_000)
        await leader.fill(1, 20)
        await leader.fill(2, 20)
        links = [Link(leader, 2, delay_s=0.0005 * (seed % 3 + 1)), Link(leader, 3)]
        for link in links:
            link.state({0: 0, 1: 0, 2: 0})
        for _ in range(100):
            begun = clock_ms()
            await leader.append(0)
            assert clock_ms() - begun <= 4
        await settled(lambda: all(link.ends[1] == link.ends[2] == 20 for link in links), 10)
        for link in links:
            await link.end()

    run_virtually(main(), seed)


def test_who_is_about_to_join_the_in_sync_set_is_no_longer_held_back():
    async def main() -> None:
        leader = Leader([[1]], rate=50_000)
        await leader.fill(0, 12)
        link = Link(leader, 2)
        link.state({0: 0})
        # Of twelve batches five go at a time; then it is in sync, and nothing waits.
        await settled(lambda: 2 in leader.partitions[0].isr, 30)
        begun = clock_ms()
        assert begun >= 9_800
        for _ in range(100):
            await leader.append(0)
        assert clock_ms() - begun < 1_000
        await link.end()

    run_virtually(main())


def test_a_rate_below_what_is_written_keeps_nobody_out_of_the_in_sync_set():
    async def main() -> None:
        leader = Leader([[1]], rate=100_000)
        await leader.fill(0, 10)
        link = Link(leader, 2)
        link.state({0: 0})

        async def write() -> None:
            while True:  # 500 KB a second.
                await leader.append(0, wait=False)
                await asyncio.sleep(0.1)  # virtual time

        writer = asyncio.create_task(write())
        await settled(lambda: 2 in leader.partitions[0].isr, 20)
        writer.cancel()
        await link.end()

    run_virtually(main())


def test_a_rate_that_is_raised_helps_at_once():
    async def main() -> None:
        leader = Leader([[1]], rate=1_000)
        await leader.fill(0, 40)
        link = Link(leader, 2)
        link.state({0: 0})
        await settled(lambda: link.carried(0), 1)
        leader.manager.set_catch_up_rate(0)
        await settled(lambda: link.ends[0] == 40, 3)
        await link.end()

    run_virtually(main())


def test_a_batch_larger_than_a_piece_and_than_the_rate_is_sent_alone():
    async def main() -> None:
        leader = Leader([[1]], rate=50_000)
        large = encode_batch([RecordData(0, None, bytes(2 * CATCH_UP_PUSH_BYTES))])
        await leader.manager.append(
            TOPIC, b"", 0, large, acks=common_pb2.ACKS_NONE, timeout_ms=1_000
        )
        link = Link(leader, 2)
        link.state({0: 0})
        await settled(lambda: link.carried(0), 1)
        assert link.carried(0) == [len(large)]
        await link.end()

    run_virtually(main())


def test_high_watermarks_reach_a_follower_that_may_not_join():
    async def main() -> None:
        leader = Leader([[1]], rate=0)
        draining = cluster_pb2.BrokerRecord(node_id=2, broker_epoch=2, in_controlled_shutdown=True)
        leader.publish(brokers=[draining])
        link = Link(leader, 2)
        link.state({0: 0})
        await leader.append(0)
        await settled(
            lambda: any(
                push.high_watermark == 1 for _, message in link.pushes for push in message.pushes
            ),
            1,
        )
        count = len(link.pushes)
        await asyncio.sleep(10)  # virtual time in which nothing must happen
        assert len(link.pushes) == count  # Nothing is said twice.
        await link.end()

    run_virtually(main())
