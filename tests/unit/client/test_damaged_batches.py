"""A batch that is damaged on one replica, or on the way: it is asked for again, and had."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from penstock.client import AsyncConsumer, CorruptRecordError
from penstock.client.core.fetch_events import (
    Effect,
    FetchAnswered,
    Fetched,
    PositionFound,
    RefreshMetadata,
    SendFetch,
    Woken,
)
from penstock.client.core.fetcher import Fetcher
from penstock.client.core.subscription import Position
from penstock.v1 import log_pb2
from penstock.wire.batch import checksum
from penstock.wire.records import offset_patch, parse_header
from tests.unit.client.fake_broker import FakeCluster, FakeNode
from tests.unit.client.reading import fill, numbers, read, values
from tests.unit.client.test_fetcher import (
    PATIENCE_MS,
    T0,
    T1,
    batch,
    led,
    make,
    start,
    take,
)

BAD = CorruptRecordError("t-0: the batch at byte 7 of 0.log is damaged")


def fetches(effects: list[Effect]) -> list[SendFetch]:
    return [effect for effect in effects if isinstance(effect, SendFetch)]


def refuse(fetcher: Fetcher, fetch: SendFetch, now_ms: float) -> list[Effect]:
    return fetcher.handle(FetchAnswered(fetch.fetch_id, (Fetched(T0, BAD, b""),)), now_ms)


def ask_again(fetcher: Fetcher) -> tuple[SendFetch, float]:
    """The next fetch and when it is sent: not before the fetcher wants to be woken."""
    at_ms = fetcher.next_deadline_ms()
    assert fetches(fetcher.handle(Woken(), at_ms - 1)) == []
    [fetch] = fetches(fetcher.handle(Woken(), at_ms))
    return fetch, at_ms


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def test_damage_is_no_news_for_who_polls_while_another_replica_may_lead() -> None:
    fetcher, metadata = make((1, 0))
    [fetch] = start(fetcher, offset=5)
    effects = refuse(fetcher, fetch, 0)
    assert RefreshMetadata(avoid=-1) in effects
    assert fetches(effects) == [], "not at once"
    assert take(fetcher, 9, 0) == []
    metadata.apply(led((2, 1), index=2), 1)
    [anew] = fetches(fetcher.handle(Woken(), 1))
    assert (anew.node_id, anew.wanted[0].offset) == (2, 5)
    fetcher.handle(FetchAnswered(anew.fetch_id, (Fetched(T0, None, batch(5, 2)),)), 2)
    assert [record.offset for record in take(fetcher, 9, 2)] == [5, 6]
    assert fetcher.trouble() is None


def test_the_same_leader_is_asked_again_and_again_with_a_growing_pause() -> None:
    fetcher, _ = make((1, 0))
    [fetch] = start(fetcher)
    now_ms, pauses = 0.0, []
    for _ in range(6):
        assert RefreshMetadata(avoid=-1) in refuse(fetcher, fetch, now_ms)
        assert take(fetcher, 9, now_ms) == []
        fetch, at_ms = ask_again(fetcher)
        pauses.append(at_ms - now_ms)
        now_ms = at_ms
    assert pauses == [20, 40, 80, 160, 200, 200]
    trouble = fetcher.trouble()
    assert isinstance(trouble, CorruptRecordError)
    assert "partition t-0, offset 0: t-0: the batch at byte 7 of 0.log" in trouble.message
    assert "asked for 6 times in 0 s" in trouble.message
    assert "goes on asking" in trouble.message
    assert "`penstock topics describe t`" in trouble.message
    fetcher.handle(FetchAnswered(fetch.fetch_id, (Fetched(T0, None, batch(0, 1)),)), now_ms)
    assert len(take(fetcher, 9, now_ms)) == 1


def test_damage_that_lasts_is_told_once_for_each_time_that_it_was_asked_for() -> None:
    fetcher, _ = make((1, 0))
    [fetch] = start(fetcher)
    now_ms = 0.0
    while now_ms < PATIENCE_MS:
        refuse(fetcher, fetch, now_ms)
        assert take(fetcher, 9, now_ms) == []
        fetch, now_ms = ask_again(fetcher)
    for _ in range(3):
        refuse(fetcher, fetch, now_ms)
        with pytest.raises(CorruptRecordError, match=r"t-0, offset 0.*in 6\d s"):
            take(fetcher, 9, now_ms)
        assert take(fetcher, 9, now_ms) == [], "only when it was asked again"
        fetch, now_ms = ask_again(fetcher)
    refuse(fetcher, fetch, now_ms)  # Nobody polls, but it is asked for on and on.
    fetch, now_ms = ask_again(fetcher)
    fetcher.handle(FetchAnswered(fetch.fetch_id, (Fetched(T0, None, batch(0, 1)),)), now_ms)
    assert len(take(fetcher, 9, now_ms)) == 1
    assert take(fetcher, 9, now_ms) == [], "what was not told in time is not told"


def test_other_damage_further_on_has_a_time_of_its_own() -> None:
    fetcher, _ = make((1, 0))
    [fetch] = start(fetcher)
    refuse(fetcher, fetch, 0)
    fetch, now_ms = ask_again(fetcher)
    results = (Fetched(T0, None, batch(0, 1)),)
    [fetch] = fetches(fetcher.handle(FetchAnswered(fetch.fetch_id, results), now_ms))
    assert len(take(fetcher, 9, now_ms)) == 1
    refuse(fetcher, fetch, PATIENCE_MS + 1)
    assert take(fetcher, 9, PATIENCE_MS + 1) == []


def test_a_seek_past_damage_goes_on_at_once() -> None:
    fetcher, _ = make((1, 0))
    [fetch] = start(fetcher)
    refuse(fetcher, fetch, 0)
    [anew] = fetches(fetcher.handle(PositionFound(T0, Position(3)), 0))
    assert anew.wanted[0].offset == 3


def test_what_came_damaged_is_dropped_with_all_behind_it_and_fetched_anew() -> None:
    fetcher, _ = make((1, 0), max_partition_bytes=100)
    [fetch] = start(fetcher)
    data = batch(0, 2) + flipped(batch(2, 2)) + batch(4, 2)
    effects = fetcher.handle(FetchAnswered(fetch.fetch_id, (Fetched(T0, None, data),)), 0)
    assert effects == [RefreshMetadata(avoid=-1)]
    assert [record.offset for record in take(fetcher, 99, 0)] == [0, 1]
    assert take(fetcher, 99, 0) == []
    fetcher.validate()
    assert fetcher.handle(Woken(), 0) == []
    anew, now_ms = ask_again(fetcher)
    assert (now_ms, anew.wanted[0].offset) == (20, 2)
    sound = (Fetched(T0, None, batch(2, 2) + batch(4, 2)),)
    fetcher.handle(FetchAnswered(anew.fetch_id, sound), now_ms)
    assert [record.offset for record in take(fetcher, 99, now_ms)] == [2, 3, 4, 5]


def test_what_comes_damaged_each_time_is_told_when_it_lasts() -> None:
    fetcher, _ = make((1, 0), max_partition_bytes=50)
    [fetch] = start(fetcher)
    now_ms, pauses = 0.0, []
    results = (Fetched(T0, None, flipped(batch(0, 2))),)
    while now_ms < PATIENCE_MS:
        fetcher.handle(FetchAnswered(fetch.fetch_id, results), now_ms)
        assert take(fetcher, 9, now_ms) == []
        fetcher.handle(Woken(), now_ms)
        fetch, at_ms = ask_again(fetcher)
        pauses.append(at_ms - now_ms)
        now_ms = at_ms
    assert pauses[:5] == [20, 40, 80, 160, 200]
    fetcher.handle(FetchAnswered(fetch.fetch_id, results), now_ms)
    with pytest.raises(CorruptRecordError, match=r"t-0, offset 0.*Seek to 2.*in 60 s"):
        take(fetcher, 9, now_ms)


def test_what_is_garbage_is_asked_for_again_and_what_is_before_it_is_kept() -> None:
    fetcher, _ = make((1, 0))
    [fetch] = start(fetcher)
    results = (Fetched(T0, None, batch(0, 2) + b"\xff" * 100),)
    effects = fetcher.handle(FetchAnswered(fetch.fetch_id, results), 0)
    assert fetches(effects) == []
    assert [record.offset for record in take(fetcher, 9, 0)] == [0, 1]
    anew, _ = ask_again(fetcher)
    assert anew.wanted[0].offset == 2


@pytest.mark.parametrize(
    ("data", "had"),
    [
        (batch(5, 2), 0),
        (batch(0, 2) + batch(5, 1), 2),
        (batch(0, 3) + batch(1, 3), 3),
        (batch(0, 2) + batch(0, 2), 2),
    ],
    ids=["later", "behind a gap", "overlapping", "twice"],
)
def test_what_is_of_another_place_in_the_log_is_asked_for_again(data: bytes, had: int) -> None:
    """No checksum of a batch covers its base offset, and older brokers send no other one."""
    fetcher, _ = make((1, 0))
    [fetch] = start(fetcher)
    fetcher.handle(FetchAnswered(fetch.fetch_id, (Fetched(T0, None, data),)), 0)
    assert [record.offset for record in take(fetcher, 9, 0)] == [*range(had)]
    anew, _ = ask_again(fetcher)
    assert anew.wanted[0].offset == had
    fetcher.validate()


def test_other_partitions_are_read_beside_damage() -> None:
    fetcher, _ = make((1, 0), (2, 0))
    [fetch] = start(fetcher)
    refuse(fetcher, fetch, 0)
    [other] = start(fetcher, T1)
    fetcher.handle(FetchAnswered(other.fetch_id, (Fetched(T1, None, batch(0, 3)),)), 1)
    assert len(take(fetcher, 9, 1)) == 3


def test_what_an_older_leader_wrote_does_not_follow_on_what_a_newer_one_did() -> None:
    """Nor does a checksum of a batch cover its leader epoch."""
    fetcher, _ = make((1, 0))
    [fetch] = start(fetcher)
    first, second = batch(0, 2), batch(2, 2)
    data = first[:12] + (3).to_bytes(4) + first[16:] + second[:12] + (1).to_bytes(4) + second[16:]
    fetcher.handle(FetchAnswered(fetch.fetch_id, (Fetched(T0, None, data),)), 0)
    assert [record.offset for record in take(fetcher, 9, 0)] == [0, 1]
    anew, _ = ask_again(fetcher)
    assert (anew.wanted[0].offset, anew.wanted[0].last_fetched_epoch) == (2, 3)


async def test_a_consumer_reads_on_from_the_new_leader(cluster: FakeCluster) -> None:
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 3))
    old = cluster.partition("t").leader
    refused: list[int] = []

    async def refuse_at_old(node: FakeNode, request: log_pb2.FetchRequest) -> Any:
        if node.number != old or request.partitions[0].fetch_offset != 0:
            return None
        refused.append(1)
        if len(refused) == 2:
            cluster.move("t", 0, 1 + old % 3)
        response = log_pb2.FetchResponse()
        error = BAD.to_proto()
        response.partitions.add(partition=request.partitions[0].partition, error=error)
        return response

    cluster.on_fetch = refuse_at_old
    async with AsyncConsumer(
        cluster.bootstrap, topics="t", auto_offset_reset="earliest"
    ) as consumer:
        assert values(await read(consumer, 3)) == numbers(0, 3)
    assert len(refused) >= 2


async def test_a_consumer_believes_no_answer_that_fails_its_checksum(cluster: FakeCluster) -> None:
    """Its batches are sound; what was flipped on the way is their leader epoch."""
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 3))
    damaged: list[int] = []

    async def damage_the_first(node: FakeNode, request: log_pb2.FetchRequest) -> Any:
        if damaged or not request.partitions:
            return None
        damaged.append(1)
        _, _, data = cluster.partition("t").batches[0]
        response = log_pb2.FetchResponse()
        result = response.partitions.add(partition=request.partitions[0].partition)
        result.high_watermark = 3
        result.records = offset_patch(parse_header(data), 0, 7) + data[16:]
        result.records_crc = checksum(data)
        return response

    cluster.on_fetch = damage_the_first
    async with AsyncConsumer(
        cluster.bootstrap, topics="t", auto_offset_reset="earliest"
    ) as consumer:
        records = await read(consumer, 3)
    assert damaged
    assert values(records) == numbers(0, 3)
    assert {record.leader_epoch for record in records} == {0}


async def test_a_consumer_that_raised_damage_reads_on_once_it_is_mended(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "penstock.client")
    cluster.add_topic("t")
    fill(cluster, "t", 0, numbers(0, 3))
    log = cluster.partition("t")
    sound = log.batches[1]
    log.batches[1] = (*sound[:2], flipped(sound[2]))
    async with AsyncConsumer(
        cluster.bootstrap, topics="t", auto_offset_reset="earliest", default_api_timeout_ms=100
    ) as consumer:
        assert values(await read(consumer, 1)) == [b"0"]
        for _ in range(2):
            with pytest.raises(CorruptRecordError, match=r"t-0, offset 1.*Seek to 2"):
                await consumer.poll(None)
        log.batches[1] = sound
        found: list[bytes] = []
        while len(found) < 2:
            try:
                found += values(await consumer.poll(5_000))
            except CorruptRecordError:
                continue  # Of an answer that was on its way.
        assert found == numbers(1, 3)
