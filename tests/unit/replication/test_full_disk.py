"""A disk that is full for a while: nothing spins, and nobody has to restart anything."""

from __future__ import annotations

import asyncio
import time

import pytest
from structlog.testing import capture_logs

from penstock.broker.core.partition_events import Role
from penstock.broker.replication import hosting
from penstock.broker.replication.leader import MAX_IN_FLIGHT, FollowerStream
from penstock.v1 import common_pb2
from penstock.wire.errors import DiskFullError, RequestTimedOutError
from tests.support import eventually
from tests.unit.replication.brokers import TOPIC, Brokers, running

REFUSALS = 5
PAUSES_S = 0.02 + 0.04 + 0.08 + 0.16
"""Between so many refusals lie these pauses at least."""


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "MIN_RETRY_S", 0.01)
    monkeypatch.setattr(hosting, "MAX_RETRY_S", 0.05)


async def test_a_follower_without_room_is_not_pushed_to_at_round_trip_speed() -> None:
    async with running(2) as brokers:
        brokers.create_topic(partitions=3)  # Broker 1 leads 0 and 2.
        await brokers[1].append(b"first")
        log = brokers[2].log()
        log.full = True
        [stream] = brokers[1].partition().feeds.values()
        assert isinstance(stream, FollowerStream)
        sent, began_s = stream.sequence, time.monotonic()
        # Many more pushes than are in flight: while one is refused, the next is on its way.
        values = [bytes([number]) * 300_000 for number in range(90)]
        appends = [asyncio.create_task(brokers[1].append(value)) for value in values]
        await eventually(lambda: log.refusals >= REFUSALS)
        assert time.monotonic() - began_s >= PAUSES_S
        # Nor is it pushed what it cannot append anyway: the rest of the log, in every pause.
        assert stream.sequence - sent <= REFUSALS * (MAX_IN_FLIGHT + 2)
        await brokers[1].append(b"elsewhere", partition=2)
        log.full = False
        await asyncio.gather(*appends)
        assert log.values() == [b"first", *values]


async def test_the_pauses_begin_anew_after_records_found_room() -> None:
    async with running(2) as brokers:
        brokers.create_topic()
        log = brokers[2].log()
        log.full = True
        append = asyncio.create_task(brokers[1].append(b"a"))
        await eventually(lambda: log.refusals >= REFUSALS)
        log.full = False
        await append
        link = brokers[2].manager._links._link_of(brokers[2].partition().key)
        assert link is not None
        [following] = link.followed.values()
        assert following.backoff_s == 0.02


async def hosts(brokers: Brokers, node_id: int, role: Role) -> None:
    await eventually(
        lambda: [p.replica.role for p in brokers[node_id].manager.partitions()] == [role]
    )


async def test_a_leader_without_room_for_the_log_leads_once_there_is_some() -> None:
    async with running(2) as brokers:
        brokers[1].logs.full = True
        brokers.create_topic()
        await eventually(lambda: brokers[1].logs.refusals >= 3)
        assert not list(brokers[1].manager.partitions())
        brokers[1].logs.full = False
        await hosts(brokers, 1, Role.LEADER)
        await brokers[1].append(b"a")
        assert brokers[2].log().values() == [b"a"]
        # And it has not gone on asking.
        refusals = brokers[1].logs.refusals
        brokers[1].logs.full = True
        await asyncio.sleep(0.15)  # Time in which nothing must happen.
        assert brokers[1].logs.refusals == refusals


async def test_a_follower_without_room_for_the_log_follows_once_there_is_some() -> None:
    async with running(2) as brokers:
        brokers[2].logs.full = True
        brokers.create_topic()
        pending = asyncio.create_task(brokers[1].append(b"a"))
        await eventually(lambda: brokers[2].logs.refusals >= 3)
        assert not pending.done()
        brokers[2].logs.full = False
        await pending
        assert brokers[2].log().values() == [b"a"]


async def test_every_replica_there_was_no_room_for_is_made_in_the_end() -> None:
    async with running(1) as brokers:
        brokers[1].logs.full = True
        brokers.create_topic(partitions=20)
        await eventually(lambda: brokers[1].logs.refusals >= 23)
        brokers[1].logs.full = False
        for partition in range(20):
            await eventually(lambda p=partition: brokers[1].manager.leader_epoch_of(TOPIC, p) == 0)


async def test_a_replica_that_was_never_made_and_is_wanted_no_more_is_not_asked_for() -> None:
    async with running(1) as brokers:
        brokers[1].logs.full = True
        brokers.create_topic()
        await eventually(lambda: brokers[1].logs.refusals >= 3)
        brokers.publish(removed_topics=[brokers.topic.topic_id])
        refusals = brokers[1].logs.refusals
        await asyncio.sleep(0.15)  # Time in which nothing must happen.
        assert brokers[1].logs.refusals == refusals
        brokers[1].logs.full = False
        assert not brokers[1].logs.open


async def test_a_manager_that_stops_asks_for_room_no_more() -> None:
    async with running(1) as brokers:
        brokers[1].logs.full = True
        brokers.create_topic()
        await brokers[1].stop()
        refusals = brokers[1].logs.refusals
        await asyncio.sleep(0.1)  # Time in which nothing must happen.
        assert brokers[1].logs.refusals == refusals


async def test_a_leader_without_room_refuses_the_append_and_leads_on() -> None:
    async with running(2) as brokers:
        brokers.create_topic()
        log = brokers[1].log()
        log.full = True
        with pytest.raises(Exception, match="no room"):
            await brokers[1].append(b"a", acks=common_pb2.ACKS_LEADER)
        log.full = False
        await brokers[1].append(b"b")
        assert brokers[2].log().values() == [b"b"]


async def test_a_follower_whose_cut_waits_for_a_moment_is_nothing_to_warn_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wait(*_: object, **__: object) -> None:
        raise RequestTimedOutError("what producers wrote is being read; it goes on by itself")

    async with running(2) as brokers:
        brokers.create_topic()
        log = brokers[2].log()
        with capture_logs() as lines, monkeypatch.context() as patched:
            patched.setattr(log, "append_as_follower", wait)
            append = asyncio.create_task(brokers[1].append(b"a"))
            await eventually(lambda: any("replica" in line["event"] for line in lines))
            patched.undo()
            await append
        told = [(line["event"], line["log_level"]) for line in lines if "replica" in line["event"]]
        assert told[0] == ("replica waits", "info")
        assert ("replica cannot follow", "warning") not in told


async def test_a_follower_without_room_says_so_once_and_once_when_it_follows_again() -> None:
    async with running(2) as brokers:
        brokers.create_topic()
        log = brokers[2].log()
        with capture_logs() as lines:
            log.full = True
            append = asyncio.create_task(brokers[1].append(b"a"))
            await eventually(lambda: log.refusals >= REFUSALS)
            log.full = False
            await append
        told = [line["event"] for line in lines if "follow" in line["event"]]
        assert told == ["replica cannot follow", "replica follows again"]


async def test_a_follower_that_knows_of_no_room_asks_for_nothing() -> None:
    async with running(2) as brokers:
        brokers.create_topic()
        log = brokers[2].log()
        log.full, log.has_room = True, False
        append = asyncio.create_task(brokers[1].append(b"a"))
        await eventually(lambda: log.refusals == 1)
        await asyncio.sleep(0.3)  # Time for several attempts, none of which may be made.
        assert log.refusals == 1
        log.full, log.has_room = False, True
        await append
        assert log.values() == [b"a"]


async def test_a_leader_without_room_names_itself() -> None:
    async with running(2) as brokers:
        brokers.create_topic()
        brokers[1].log().full = True
        with pytest.raises(DiskFullError, match="broker 1: no room"):
            await brokers[1].append(b"a")
