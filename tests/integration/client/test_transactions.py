"""Transactions over real nodes: whatever dies, all of one is there or nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.client import (
    AdminClient,
    Consumer,
    FencedMemberEpochError,
    GroupCommitConflictError,
    GroupCommits,
    HangingSearch,
    InvalidTransactionTimeoutError,
    InvalidTxnStateError,
    Producer,
    ProducerFencedError,
    StaleGroupCommitError,
    TopicPartition,
    TransactionAbortableError,
    UnknownAttemptError,
    UnknownMemberIdError,
    UnstableOffsetCommitError,
    aio_transaction_admin,
)
from tests.integration.client.forms import Form
from tests.integration.client.group_members import settle
from tests.integration.cluster import Cluster, running_cluster
from tests.support import wait_until

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of the test's own, to be broken."""
    with running_cluster(tmp_path) as running:
        yield running


@pytest.fixture(params=[False, True], ids=["sync", "asyncio"])
def form(request: pytest.FixtureRequest, cluster: Cluster) -> Form:
    return Form(cluster.bootstrap, is_async=request.param)


@pytest.fixture
def topic(request: pytest.FixtureRequest, cluster: Cluster) -> str:
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic(name, 3)
    return name


def committed(bootstrap: str, topic: str, *, count: int, partitions: int = 3) -> list[bytes]:
    """The values that a reader of committed records comes to, which are so many."""
    found: list[bytes] = []
    with Consumer(bootstrap, isolation_level="read_committed") as consumer:
        every = [TopicPartition(topic, number) for number in range(partitions)]
        consumer.assign(every)
        consumer.seek_to_beginning()

        def all_read() -> bool:
            found.extend(record.value for record in consumer.poll(100))
            ends = consumer.end_offsets(every)
            return len(found) >= count and all(
                consumer.position(name) >= end for name, end in ends.items()
            )

        wait_until(all_read, f"{count} committed records are read")
    return sorted(found)


class Block:
    """``producer.transaction()`` of either form."""

    def __init__(self, producer: Any) -> None:
        self._block = producer.transaction()

    async def __aenter__(self) -> None:
        if hasattr(self._block, "__aenter__"):
            await self._block.__aenter__()
        else:
            self._block.__enter__()

    async def __aexit__(self, *what: Any) -> Any:
        if hasattr(self._block, "__aexit__"):
            return await self._block.__aexit__(*what)
        return self._block.__exit__(*what)


async def test_all_partitions_of_a_transaction_become_visible_together(
    form: Form, topic: str
) -> None:
    everywhere = [TopicPartition(topic, number) for number in range(3)]
    async with (
        form.producer(transactional_id=topic) as producer,
        form.consumer(isolation_level="read_committed") as reader,
    ):
        await settle(reader.assign(everywhere))
        await settle(reader.seek_to_beginning())
        async with Block(producer):
            for number in range(30):
                await settle(producer.send(topic, b"%02d" % number, partition=number % 3))
            await settle(producer.flush())
            assert await settle(reader.poll(300)) == []
            assert set((await settle(reader.end_offsets(everywhere))).values()) == {0}
        async with Block(producer):
            await settle(producer.send(topic, b"next", partition=0))
    assert committed(form.bootstrap, topic, count=31) == [
        *(b"%02d" % number for number in range(30)),
        b"next",
    ]


async def test_nothing_of_an_aborted_one_is_ever_read(form: Form, topic: str) -> None:
    async with form.producer(transactional_id=topic) as producer:
        for number in range(6):
            await settle(producer.begin_transaction())
            for partition in range(3):
                await settle(producer.send(topic, b"%d" % number, partition=partition))
            if number % 2:
                await settle(producer.flush())
                await settle(producer.abort_transaction())
            else:
                await settle(producer.commit_transaction())
    assert committed(form.bootstrap, topic, count=9) == sorted([b"0", b"2", b"4"] * 3)


async def test_the_second_producer_of_a_name_ends_the_first(form: Form, topic: str) -> None:
    async with (
        form.producer(transactional_id=topic) as zombie,
        form.producer(transactional_id=topic) as heir,
    ):
        await settle(zombie.begin_transaction())
        await settle(zombie.send(topic, b"zombie", partition=0))
        await settle(zombie.flush())
        async with Block(heir):
            await settle(heir.send(topic, b"heir", partition=0))
        # Late, and to a partition where nothing of its transaction is.
        await settle(zombie.send(topic, b"zombie", partition=1))
        with pytest.raises(ProducerFencedError):
            await settle(zombie.commit_transaction())
        with pytest.raises(ProducerFencedError):
            await settle(zombie.begin_transaction())
        async with Block(heir):
            await settle(heir.send(topic, b"heir again", partition=1))
    assert committed(form.bootstrap, topic, count=2) == [b"heir", b"heir again"]


@pytest.mark.parametrize("writes_on", [False, True])
async def test_one_that_takes_too_long_is_aborted_and_the_next_one_works(
    form: Form, topic: str, writes_on: bool
) -> None:
    with AdminClient(form.bootstrap) as admin:
        async with form.producer(transactional_id=topic, transaction_timeout_ms=500) as producer:
            await settle(producer.begin_transaction())
            await settle(producer.send(topic, b"slow", partition=0))
            await settle(producer.flush())
            wait_until(
                lambda: admin.describe_transactions([topic])[0].state == "empty",
                "it is aborted by its timeout",
            )
            if writes_on:
                await settle(producer.send(topic, b"late", partition=0))
                await settle(producer.send(topic, b"late", partition=1))
            with pytest.raises(TransactionAbortableError):
                await settle(producer.commit_transaction())
            await settle(producer.abort_transaction())
            async with Block(producer):
                await settle(producer.send(topic, b"quick", partition=0))
    assert committed(form.bootstrap, topic, count=1) == [b"quick"]


async def test_a_timeout_that_brokers_do_not_allow(form: Form, topic: str) -> None:
    async with form.producer(transactional_id=topic, transaction_timeout_ms=10**8) as producer:
        with pytest.raises(InvalidTransactionTimeoutError, match="900000"):
            await settle(producer.init_transactions())


async def test_closing_aborts_so_that_readers_do_not_wait(form: Form, topic: str) -> None:
    async with form.producer(transactional_id=topic) as producer:
        await settle(producer.begin_transaction())
        await settle(producer.send(topic, b"left", partition=0))
        await settle(producer.flush())
    with Producer(form.bootstrap) as plain:
        plain.send(topic, b"plain", partition=0)
    assert committed(form.bootstrap, topic, count=1) == [b"plain"]


def coordinator_of(admin: AdminClient, transactional_id: str) -> int:
    [found] = [
        entry for entry in admin.list_transactions() if entry.transactional_id == transactional_id
    ]
    return found.coordinator


@pytest.mark.parametrize("who", ["coordinator", "leader"])
def test_a_transaction_outlives_the_broker_it_needs(fresh: Cluster, who: str) -> None:
    with AdminClient(fresh.bootstrap) as admin:
        admin.create_topic("t", 3, configs={"min.insync.replicas": 1})
        with Producer(fresh.bootstrap, transactional_id="mover", request_timeout_ms=5_000) as one:
            with one.transaction():
                one.send("t", b"0", partition=0)
            for number in range(1, 3):
                one.begin_transaction()
                one.send("t", b"%d-a" % number, partition=0)
                one.flush()
                victim = (
                    coordinator_of(admin, "mover")
                    if who == "coordinator"
                    else fresh.topic("t").partitions[0].leader
                )
                fresh.nodes[victim].kill()
                for partition in range(3):
                    one.send("t", b"%d-b" % number, partition=partition)
                if number == 1:
                    one.commit_transaction()
                else:
                    one.abort_transaction()
                fresh.nodes[victim].start()
                fresh.wait_ready()
            with one.transaction():
                one.send("t", b"3", partition=0)
    wanted = sorted([b"0", b"1-a", b"1-b", b"1-b", b"1-b", b"3"])
    assert committed(fresh.bootstrap, "t", count=len(wanted)) == wanted


def test_a_driver_commits_attempts_once(cluster: Cluster, topic: str) -> None:
    with GroupCommits(cluster.bootstrap, f"group-{topic}") as commits:
        assert commits.last_committed().epoch_number == -1
        winners = []
        for task in range(3):
            for attempt in range(2):
                with commits.begin_attempt(0, task, attempt) as writer:
                    writer.send(topic, b"task %d, attempt %d" % (task, attempt), partition=task)
                    winners.append(writer.prepare())
        chosen = winners[1::2]
        assert commits.commit(0, chosen) is False
        assert commits.commit(0, chosen) is True
        with pytest.raises(GroupCommitConflictError):
            commits.commit(0, winners[::2])
        with pytest.raises(StaleGroupCommitError):
            commits.begin_attempt(0, 0, 9)
        with commits.begin_attempt(1, 0, 0) as writer:
            writer.send(topic, b"never", partition=0)
            writer.flush()  # And not prepared: its block aborts it.
        with pytest.raises(UnknownAttemptError):
            commits.commit(1, [writer.handle])
        with commits.begin_attempt(1, 0, 1) as idle:
            nothing = idle.prepare()
        commits.commit(1, [nothing])
        assert commits.last_committed().winners == (nothing,)
    assert committed(cluster.bootstrap, topic, count=3) == [
        b"task %d, attempt 1" % task for task in range(3)
    ]


def test_a_handle_does_not_stand_for_a_writer_that_began_the_same_attempt_again(
    cluster: Cluster, topic: str
) -> None:
    with GroupCommits(cluster.bootstrap, f"group-{topic}") as commits:
        with commits.begin_attempt(0, 0, 0) as first:
            first.send(topic, b"first", partition=0)
            handle = first.prepare()
        with commits.begin_attempt(0, 0, 0) as second:
            second.send(topic, b"half of the second", partition=0)
            second.flush()
            with pytest.raises(UnknownAttemptError, match="producer"):
                commits.commit(0, [handle])
            assert commits.last_committed().epoch_number == -1
            second.send(topic, b"the other half", partition=0)
            other = second.prepare()
        assert commits.commit(0, [other]) is False
        with pytest.raises(GroupCommitConflictError):
            commits.commit(0, [handle])
        assert commits.commit(0, [other]) is True
    assert committed(cluster.bootstrap, topic, count=2) == [
        b"half of the second",
        b"the other half",
    ]


def test_what_a_group_has_decided_no_writer_changes(cluster: Cluster, topic: str) -> None:
    with GroupCommits(cluster.bootstrap, f"group-{topic}") as commits:
        winner, loser, late = (commits.begin_attempt(4, task, 0) for task in range(3))
        with winner, loser, late:
            for writer in (winner, loser, late):
                writer.send(topic, writer.handle.encode())
                writer.flush()
            loser.prepare()
            commits.commit(4, [winner.prepare()])
            with pytest.raises(InvalidTxnStateError, match="committed by its group"):
                winner.abort()
            loser.abort()  # It is, and may hear so.
            late.send(topic, b"too late")
            with pytest.raises((ProducerFencedError, TransactionAbortableError)):
                late.prepare()
    assert committed(cluster.bootstrap, topic, count=1) == [winner.handle.encode()]


def test_people_see_and_abort_what_is_open(cluster: Cluster, topic: str) -> None:
    with (
        AdminClient(cluster.bootstrap) as admin,
        Producer(cluster.bootstrap, transactional_id=topic) as producer,
    ):
        producer.begin_transaction()
        place = producer.send(topic, b"open", partition=1).result(20)
        [listed] = [
            entry
            for entry in admin.list_transactions(["ongoing"])
            if entry.transactional_id == topic
        ]
        [described] = admin.describe_transactions([topic])
        assert (described.state, described.partitions) == ("ongoing", (place.topic_partition,))
        assert described.producer_id == listed.producer_id
        assert listed.since_ms == described.start_ms
        assert described.last_ended_by == "nobody"
        assert abs(described.start_ms - time.time() * 1000) < 60_000
        found = admin.describe_producers([place.topic_partition])[place.topic_partition]
        [writer] = [entry for entry in found.producers if entry.is_open]
        assert writer.producer_id == listed.producer_id
        assert (writer.transaction_start_offset, found.last_stable_offset) == (0, 0)
        assert admin.find_hanging([place.topic_partition], older_than_ms=0) == HangingSearch()
        with pytest.raises(InvalidTxnStateError, match=f"transactional id '{topic}' has this"):
            admin.abort_hanging(place.topic_partition, listed.producer_id)
        admin.abort_transaction(topic)
        [described] = admin.describe_transactions([topic])
        assert (described.last_committed, described.last_ended_by) == (False, "timeout_or_person")
        with pytest.raises(TransactionAbortableError):
            producer.commit_transaction()
        producer.abort_transaction()
        with producer.transaction():
            producer.send(topic, b"next", partition=1)
        [described] = admin.describe_transactions([topic])
        assert (described.last_committed, described.last_ended_by) == (True, "producer")
    assert committed(cluster.bootstrap, topic, count=1) == [b"next"]


def test_ids_of_all_coordinators_are_listed_by_the_page(
    cluster: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aio_transaction_admin, "_LISTED_AT_ONCE", 2)
    names = [f"{topic}-{number}" for number in range(9)]
    for name in names:
        with Producer(cluster.bootstrap, transactional_id=name) as producer:
            producer.begin_transaction()
            producer.abort_transaction()
    with AdminClient(cluster.bootstrap) as admin:
        listed = [entry.transactional_id for entry in admin.list_transactions()]
    assert [name for name in listed if name.startswith(topic)] == names


async def write(producer: Any, topic: str, value: bytes, *positions: Any) -> None:
    """One transaction of a record and positions."""
    async with Block(producer):
        await settle(producer.send(topic, value, partition=1))
        await settle(producer.send_offsets_to_transaction(*positions))


async def test_positions_become_the_groups_with_the_results_or_never(
    form: Form, topic: str
) -> None:
    place = TopicPartition(topic, 0)
    with Producer(form.bootstrap) as plain:
        plain.send_many(topic, [b"%d" % number for number in range(10)], partition=0).result(20)
    async with (
        form.consumer(
            topics=topic, group_id=topic, enable_auto_commit=False, auto_offset_reset="earliest"
        ) as reader,
        form.producer(transactional_id=topic) as producer,
    ):
        records = await settle(reader.poll(20_000, max_records=4))
        for is_committed in (False, True):
            await settle(producer.begin_transaction())
            await settle(producer.send(topic, b"result", partition=1))
            await settle(
                producer.send_offsets_to_transaction(
                    {place: records[-1].position_after}, await settle(reader.group_metadata())
                )
            )
            with (
                Consumer(form.bootstrap, group_id=topic, default_api_timeout_ms=2_000) as other,
                pytest.raises(UnstableOffsetCommitError),
            ):
                other.committed(place)  # Where it will go on is not known yet.
            if is_committed:
                await settle(producer.commit_transaction())
            else:
                await settle(producer.abort_transaction())
            [position] = (await settle(reader.committed(place))).values()
            assert (position.offset if position else None) == (4 if is_committed else None)
    assert committed(form.bootstrap, topic, count=11).count(b"result") == 1


async def test_a_member_that_is_none_any_more_commits_no_positions(form: Form, topic: str) -> None:
    place = TopicPartition(topic, 0)
    with Producer(form.bootstrap) as plain:
        plain.send(topic, b"source", partition=0).result(20)
    settings = {"topics": topic, "group_id": topic, "auto_offset_reset": "earliest"}
    async with form.consumer(**settings, enable_auto_commit=False) as zombie:
        assert await settle(zombie.poll(20_000))
        its_last = await settle(zombie.group_metadata())
    with Consumer(form.bootstrap, **settings, enable_auto_commit=False) as heir:
        assert heir.poll(20_000)
        async with form.producer(transactional_id=topic) as producer:
            with pytest.raises(TransactionAbortableError) as raised:
                await write(producer, topic, b"zombie's", {place: 1}, its_last)
            assert isinstance(raised.value.__cause__, UnknownMemberIdError | FencedMemberEpochError)
            assert heir.committed(place) == {place: None}
            await write(producer, topic, b"heir's", {place: 1}, heir.group_metadata())
    assert committed(form.bootstrap, topic, count=2) == [b"heir's", b"source"]
