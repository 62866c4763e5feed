"""Reads that wait for the disk hold up nobody else, and look again when the disk has answered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from penstock.v1 import common_pb2, log_pb2
from penstock.wire.errors import ErrorCode
from penstock.wire.laden import FETCH_RESPONSE, Laden
from tests.support import eventually
from tests.unit.replication.brokers import TOPIC, TOPIC_ID, Brokers, batch, running
from tests.unit.replication.test_requests import values

DEADLINE_S = 20


class SlowDisk:
    """A job of a cold read that ends when the test says so."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.gate = threading.Event()
        self.runs = 0
        self.thread = -1

    def __call__(self) -> None:
        self.runs += 1
        self.thread = threading.get_ident()
        self.begun.set()
        self.gate.wait(DEADLINE_S)

    async def is_read(self) -> None:
        await eventually(self.begun.is_set)


@pytest.fixture
def disk() -> Iterator[SlowDisk]:
    made = SlowDisk()
    yield made
    made.gate.set()


def fetch_of_both(brokers: Brokers, min_bytes: int) -> asyncio.Task[Laden[log_pb2.FetchResponse]]:
    """Of partitions 0 and 1 of broker 1, in this order or the other."""
    request = log_pb2.FetchRequest(min_bytes=min_bytes, max_wait_ms=60_000)
    for partition in (0, 1):
        request.partitions.add(
            partition=common_pb2.TopicPartition(topic=TOPIC, partition=partition),
            current_leader_epoch=-1,
            last_fetched_epoch=-1,
        )
    return asyncio.create_task(brokers[1].manager.fetch(request))


async def test_a_cold_fetch_waits_in_a_thread_and_the_others_do_not(disk: SlowDisk) -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        await brokers[1].append(b"a")
        brokers[1].log().cold = [disk]
        cold = asyncio.create_task(brokers[1].fetch(0))
        await disk.is_read()
        assert values((await brokers[1].fetch(0)).records) == [b"a"]
        await brokers[1].append(b"b")
        assert not cold.done()
        disk.gate.set()
        assert values((await cold).records) == [b"a", b"b"]
        assert (disk.runs, disk.thread != threading.get_ident()) == (1, True)


async def test_a_leadership_lost_while_the_disk_was_waited_for_is_told(disk: SlowDisk) -> None:
    async with running(2) as brokers:
        brokers.create_topic()
        await brokers[1].append(b"a")
        brokers[1].log().cold = [disk]
        cold = asyncio.create_task(brokers[1].fetch(0))
        await disk.is_read()
        brokers.change(leader=2)
        disk.gate.set()
        result = await cold
        assert result.error.code == ErrorCode.NOT_LEADER
        assert result.error.current_leader.node_id == 2
        assert not result.records


async def test_a_topic_deleted_while_the_disk_was_waited_for_is_told(disk: SlowDisk) -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        await brokers[1].append(b"a")
        brokers[1].log().cold = [disk]
        cold = asyncio.create_task(brokers[1].fetch(0))
        await disk.is_read()
        brokers.partitions.clear()
        brokers.publish(removed_topics=[TOPIC_ID])
        disk.gate.set()
        result = await cold
        assert result.error.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert not result.records


async def test_records_deleted_while_the_disk_was_waited_for_are_not_read(disk: SlowDisk) -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        for value in (b"a", b"b"):
            await brokers[1].append(value)
        brokers[1].log().cold = [disk]
        cold = asyncio.create_task(brokers[1].fetch(0))
        await disk.is_read()
        brokers[1].partition().advance_log_start(1)
        disk.gate.set()
        assert (await cold).error.code == ErrorCode.OFFSET_OUT_OF_RANGE


@pytest.mark.parametrize("waits_first", [False, True])
async def test_what_is_appended_while_the_disk_is_waited_for_wakes_the_fetch(
    disk: SlowDisk, waits_first: bool
) -> None:
    async with running(1) as brokers:
        brokers.create_topic(partitions=2)
        if not waits_first:
            await brokers[1].append(b"cold", partition=0)
            # The first round begins with another partition every time: this time with 1.
            brokers[1].log(0).cold = [disk]
        fetching = fetch_of_both(brokers, 2 * len(batch(b"cold")))
        if waits_first:
            await eventually(lambda: bool(brokers[1].partition(0).fetch_waiters))
            brokers[1].log(0).cold = [disk]
            await brokers[1].append(b"cold", partition=0)
        await disk.is_read()
        await brokers[1].append(b"news", partition=1)
        disk.gate.set()
        response = await asyncio.wait_for(fetching, DEADLINE_S)
        assert [values(result.records) for result in FETCH_RESPONSE.whole(response).partitions] == [
            [b"cold"],
            [b"news"],
        ]


async def test_a_fetch_given_up_leaves_no_job_undone(disk: SlowDisk) -> None:
    async with running(1) as brokers:
        brokers.create_topic()
        await brokers[1].append(b"a")
        loop = asyncio.get_running_loop()
        busy = threading.Event()
        # No thread is free for the job before the fetch is given up.
        held = [loop.run_in_executor(None, busy.wait, DEADLINE_S) for _ in range(64)]
        brokers[1].log().cold = [disk]
        cold = asyncio.create_task(brokers[1].fetch(0))
        await eventually(lambda: not brokers[1].log().cold)
        cold.cancel()
        await asyncio.wait([cold])
        assert disk.runs == 0
        disk.gate.set()
        busy.set()
        await asyncio.gather(*held)
        await eventually(lambda: disk.runs == 1)


# --- pushes --------------------------------------------------------------------------------------


async def test_a_cold_push_holds_up_no_other_partition(disk: SlowDisk) -> None:
    async with running(2) as brokers:
        brokers.create_topic(partitions=3)  # 0 and 2 are led by broker 1.
        brokers[1].log(0).cold = [disk]
        cold = asyncio.create_task(brokers[1].append(b"cold"))
        await disk.is_read()
        await brokers[1].append(b"warm", partition=2)
        assert not cold.done()
        late = asyncio.create_task(brokers[1].append(b"late"))
        await eventually(lambda: brokers[1].log(0).log_end_offset == 2)
        await brokers[1].append(b"warm too", partition=2)
        assert brokers[2].log(0).log_end_offset == 0
        disk.gate.set()
        await asyncio.gather(cold, late)
        assert brokers[2].log(0).values() == [b"cold", b"late"]
        assert (disk.runs, disk.thread != threading.get_ident()) == (1, True)


async def test_a_cold_push_of_a_lost_leadership_is_dropped(disk: SlowDisk) -> None:
    async with running(2) as brokers:
        brokers.create_topic()
        await brokers[1].append(b"a")
        brokers[1].log().cold = [disk]
        lost = asyncio.create_task(brokers[1].append(b"lost"))
        await disk.is_read()
        brokers.change(leader=2)
        with pytest.raises(Exception, match="does not lead"):
            await lost
        await brokers[2].append(b"b")
        disk.gate.set()
        await brokers[2].append(b"c")
        for node in (1, 2):
            assert brokers[node].log().values() == [b"a", b"b", b"c"]


async def test_a_partition_led_again_is_pushed_from_where_the_follower_is(disk: SlowDisk) -> None:
    async with running(2) as brokers:
        brokers.create_topic()
        brokers[1].log().cold = [disk]
        lost = asyncio.create_task(brokers[1].append(b"lost"))
        await disk.is_read()
        brokers.change(leader=2)
        with pytest.raises(Exception, match="does not lead"):
            await lost
        await brokers[2].append(b"b")
        brokers.change(leader=1)
        again = asyncio.create_task(brokers[1].append(b"c"))
        await eventually(lambda: brokers[1].log().log_end_offset == 2)
        disk.gate.set()
        await again
        for node in (1, 2):
            assert brokers[node].log().values() == [b"b", b"c"]


async def test_a_topic_deleted_while_a_push_waits_for_the_disk_ends_nothing_else(
    disk: SlowDisk,
) -> None:
    async with running(2) as brokers:
        brokers.create_topic(partitions=3)
        brokers[1].log(0).cold = [disk]
        lost = asyncio.create_task(brokers[1].append(b"lost"))
        await disk.is_read()
        record = brokers.partitions.pop(0)
        del record.replicas[:]
        record.leader, record.partition_epoch = -1, record.partition_epoch + 1
        brokers.publish(partitions=[record])  # It moves away from both.
        with pytest.raises(Exception, match="orders-0"):
            await lost
        disk.gate.set()
        await brokers[1].append(b"warm", partition=2)
        assert brokers[2].log(2).values() == [b"warm"]
