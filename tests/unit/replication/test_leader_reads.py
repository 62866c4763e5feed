"""Who mends a log reads its leader's over one channel, and the leader reads off its event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from grpc import aio

from penstock.broker.leader_reads import LeaderReads
from penstock.broker.replication.connecting import ReplicationConnector
from penstock.raft_meta.connecting import NodeConnector
from penstock.wire.errors import (
    CorruptRecordError,
    FencedLeaderEpochError,
    NetworkError,
    NotLeaderError,
    OffsetOutOfRangeError,
)
from tests.support import eventually
from tests.unit.replication.brokers import KEY, Brokers, running
from tests.unit.replication.test_requests import values


class Channels:
    """Opens channels, and counts them."""

    def __init__(self) -> None:
        self.opened: list[int] = []
        self._open = ReplicationConnector(NodeConnector(None)).open

    async def __call__(self, node_id: int, host: str, port: int) -> aio.Channel:
        self.opened.append(node_id)
        return await self._open(node_id, host, port)


@asynccontextmanager
async def reading(brokers: Brokers) -> AsyncIterator[tuple[LeaderReads, Channels]]:
    """What broker 2 reads with."""
    channels = Channels()
    reads = LeaderReads(2, brokers[2].image, lambda: brokers[2].broker_epoch, channels)
    try:
        yield reads, channels
    finally:
        await reads.close()


async def test_all_is_read_over_one_channel() -> None:
    async with running(2) as brokers, reading(brokers) as (reads, channels):
        brokers.create_topic()
        for value in (b"a", b"b", b"c"):
            await brokers[1].append(value)
        assert [values(await reads.read(KEY, at))[0] for at in range(3)] == [b"a", b"b", b"c"]
        with pytest.raises(OffsetOutOfRangeError):
            await reads.read(KEY, 7)
        assert values(await reads.read(KEY, 2)) == [b"c"]
        assert channels.opened == [1]
        await reads.close()
        assert values(await reads.read(KEY, 2)) == [b"c"]
        assert channels.opened == [1, 1]


async def test_another_leader_is_asked_over_another_channel() -> None:
    async with running(2) as brokers, reading(brokers) as (reads, channels):
        brokers.create_topic()
        await brokers[1].append(b"a")
        await reads.read(KEY, 0)
        brokers.change(leader=2)
        assert values(await reads.read(KEY, 0)) == [b"a"]
        assert channels.opened == [1, 2]


async def test_after_a_broken_connection_another_one_is_made() -> None:
    async with running(2) as brokers, reading(brokers) as (reads, channels):
        brokers.create_topic()
        await brokers[1].append(b"a")
        await reads.read(KEY, 0)
        await brokers[1].server.stop(0)
        for _ in range(2):
            with pytest.raises(NetworkError, match="broker 1"):
                await reads.read(KEY, 0)
        assert channels.opened == [1, 1]


async def test_without_a_leader_nobody_is_asked() -> None:
    async with running(2) as brokers, reading(brokers) as (reads, channels):
        with pytest.raises(NetworkError, match="no leader"):
            await reads.read(KEY, 0)
        assert channels.opened == []


class SlowDisk:
    """What brings a read into memory, when the test says so."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.gate = threading.Event()
        self.thread = -1

    def __call__(self) -> None:
        self.thread = threading.get_ident()
        self.begun.set()
        self.gate.wait(20)


async def cold(brokers: Brokers, reads: LeaderReads, then: Callable[[], None]) -> bytes:
    """Read what the leader must fetch from its disk; ``then`` happens while it does."""
    disk = SlowDisk()
    brokers[1].log().cold = [disk]
    task = asyncio.create_task(reads.read(KEY, 0))
    try:
        await eventually(disk.begun.is_set)
        assert disk.thread != threading.get_ident()
        then()
    finally:
        disk.gate.set()
    return await task


async def test_the_leader_waits_for_its_disk_in_a_thread() -> None:
    async with running(2) as brokers, reading(brokers) as (reads, _):
        brokers.create_topic()
        await brokers[1].append(b"a")
        assert values(await cold(brokers, reads, lambda: None)) == [b"a"]


async def test_a_leadership_lost_while_the_disk_was_waited_for_is_told() -> None:
    async with running(2) as brokers, reading(brokers) as (reads, _):
        brokers.create_topic()
        await brokers[1].append(b"a")
        with pytest.raises((NotLeaderError, FencedLeaderEpochError)):
            await cold(brokers, reads, lambda: brokers.change(leader=2))


async def test_what_the_leader_has_damaged_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*_: object, **__: object) -> bytes:
        raise CorruptRecordError("a bit has flipped")

    async with running(2) as brokers, reading(brokers) as (reads, _):
        brokers.create_topic()
        await brokers[1].append(b"a")
        monkeypatch.setattr(brokers[1].log(), "read", damaged)
        with pytest.raises(CorruptRecordError, match="a bit has flipped"):
            await reads.read(KEY, 0)
