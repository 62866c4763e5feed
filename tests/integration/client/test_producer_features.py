"""What producers promise, over real nodes, with the sync and with the asyncio producer."""

from __future__ import annotations

import asyncio
import concurrent.futures
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pyarrow as pa
import pytest

from penstock.client import (
    AdminClient,
    BufferExhaustedError,
    ClientClosedError,
    DeliveryFailedError,
    DeliveryTimeoutError,
    InvalidPartitionsError,
    InvalidRecordError,
    NotEnoughReplicasError,
    Producer,
    RecordTooLargeError,
    RequestTimedOutError,
    SerializationError,
    StallReason,
)
from penstock.client.core.partitioner import partition_for_key
from tests.integration.client.forms import Form, verdict
from tests.integration.client.group_members import settle
from tests.integration.cluster import Cluster, running_cluster
from tests.support import wait_until

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="module")
def admin(cluster: Cluster) -> Iterator[AdminClient]:
    with AdminClient(cluster.bootstrap) as client:
        yield client


@pytest.fixture(params=[False, True], ids=["sync", "asyncio"])
def form(cluster: Cluster, request: pytest.FixtureRequest) -> Form:
    return Form(cluster.bootstrap, request.param)


_made = 0


@pytest.fixture
def topic(admin: AdminClient) -> str:
    """A topic of the test's own, with four partitions."""
    return make_topic(admin, 4)


def make_topic(admin: AdminClient, partitions: int = 1, **configs: str) -> str:
    global _made  # noqa: PLW0603 - names that no other test of the module uses
    _made += 1
    name = f"topic-{_made}"
    replicas = int(configs.pop("replicas", "3"))
    settings = {key.replace("_", "."): value for key, value in configs.items()}
    admin.create_topic(name, partitions, replicas, settings)
    return name


@asynccontextmanager
async def restarted(cluster: Cluster) -> AsyncIterator[None]:
    """Whoever was killed in the block is back after it."""
    try:
        yield
    finally:
        cluster.start()


# --- acknowledgement ------------------------------------------------------------------------------


@pytest.mark.parametrize("acks", ["all", 1, 0])
async def test_every_kind_of_acknowledgement(form: Form, topic: str, acks: Any) -> None:
    async with form.producer(acks=acks) as producer:
        places = [
            await verdict(producer.send(topic, b"%d" % number, partition=0)) for number in range(3)
        ]
    assert [place.offset for place in places] == ([-1] * 3 if acks == 0 else [0, 1, 2])
    assert [record.value for record in await form.read(topic, 3)] == [b"0", b"1", b"2"]


async def test_order_and_no_duplicates_while_the_leader_is_killed(
    form: Form, admin: AdminClient, cluster: Cluster
) -> None:
    topic = make_topic(admin, 2)
    victim = cluster.topic(topic).partitions[0].leader
    async with restarted(cluster), form.producer(linger_ms=1, batch_size=500) as producer:
        outcomes = []
        for number in range(2_000):
            outcomes.append(
                await settle(producer.send(topic, b"%d" % number, partition=number % 2))
            )
            if number == 1_000:
                await verdict(outcomes[0])
                cluster.nodes[victim].kill()
        for outcome in outcomes:
            await verdict(outcome)
    values: dict[int, list[int]] = {0: [], 1: []}
    for record in await form.read(topic, 2_000):
        values[record.partition].append(int(record.value))
    assert values == {0: list(range(0, 2_000, 2)), 1: list(range(1, 2_000, 2))}


async def test_many_records_in_one_call_while_the_leader_is_killed(
    form: Form, admin: AdminClient, cluster: Cluster
) -> None:
    topic = make_topic(admin, 2)
    victim = cluster.topic(topic).partitions[0].leader
    values = [b"%d" % number for number in range(50_000)]
    async with restarted(cluster), form.producer() as producer:
        first = await settle(producer.send_many(topic, values[:25_000]))
        cluster.nodes[victim].kill()
        second = await settle(producer.send_many(topic, values[25_000:]))
        places = [*await verdict(first), *await verdict(second)]
    found = {
        (record.partition, record.offset): record.value for record in await form.read(topic, 50_000)
    }
    assert [found[place.partition, place.offset] for place in places] == values


async def test_the_rows_of_an_arrow_table(form: Form, topic: str) -> None:
    table = pa.table(
        {
            "value": pa.array([b"%d" % number for number in range(20_000)]),
            "key": pa.array([b"k%d" % (number % 10) for number in range(20_000)]),
            "timestamp": pa.array(range(20_000), pa.timestamp("ms", tz="UTC")),
        }
    )
    async with form.producer(compression="lz4") as producer:
        places = await verdict(producer.send_arrow(topic, table))
    assert len(places) == 20_000
    for record in await form.read(topic, 20_000):
        number = int(record.value)
        assert record.timestamp_ms == number
        assert record.key == b"k%d" % (number % 10)
        assert record.partition == partition_for_key(record.key, 4)


async def test_many_records_in_one_call(form: Form, topic: str, admin: AdminClient) -> None:
    keys = [b"%d" % (number % 10) if number % 3 else None for number in range(3_000)]
    async with form.producer() as producer:
        sent = await settle(producer.send_many(topic, [b"%d" % n for n in range(3_000)], keys))
        places = await sent if form.is_async else sent.result(30)
    read = {(record.partition, record.offset): record for record in await form.read(topic, 3_000)}
    for number, (key, place) in enumerate(zip(keys, places, strict=True)):
        record = read.pop((place.partition, place.offset))
        assert (record.key, record.value) == (key, b"%d" % number)
        assert key is None or place.partition == partition_for_key(key, 4)
    small = make_topic(admin, max_message_bytes="1000")
    async with form.producer() as producer:
        values = [b"fits", b"x" * 2_000, b"fits too"]
        sent = await settle(producer.send_many(small, values, partition=0))
        first, second, third = await settle(sent.outcomes())
        assert (first.offset, type(second), third.offset) == (0, RecordTooLargeError, 1)
        with pytest.raises(DeliveryFailedError, match="1 of 3"):
            _ = await sent if form.is_async else sent.result(30)
        with pytest.raises(SerializationError):
            await settle(producer.send_many(small, [b"fits", "does not"]))


# --- batches and memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
async def test_every_compression(form: Form, topic: str, compression: str) -> None:
    async with form.producer(compression=compression) as producer:
        for number in range(100):
            await settle(producer.send(topic, b"value %d " % number * 10, b"%d" % number))
    found = {record.key: record.value for record in await form.read(topic, 100)}
    assert found == {b"%d" % number: b"value %d " % number * 10 for number in range(100)}


async def test_flush_and_close_wait_for_no_company(form: Form, topic: str) -> None:
    began = time.monotonic()
    async with form.producer(linger_ms=60_000) as producer:
        first = await settle(producer.send(topic, b"flushed", partition=0))
        assert not first.done()
        await settle(producer.flush())
        assert first.done()
        assert (await verdict(first)).offset == 0
        second = await settle(producer.send(topic, b"closed", partition=0))
    assert second.done()
    assert (await verdict(second)).offset == 1
    assert time.monotonic() - began < 30
    with pytest.raises(ClientClosedError):
        await settle(producer.send(topic, b"too late"))
    await settle(producer.close())  # Again is fine.


async def test_a_failure_that_nobody_looks_at_is_raised(form: Form, admin: AdminClient) -> None:
    topic = make_topic(admin, max_message_bytes="1000")
    async with form.producer() as producer:
        await settle(producer.send(topic, b"fits"))
        await settle(producer.flush())
        await settle(producer.send(topic, b"x" * 2_000))
        with pytest.raises(DeliveryFailedError) as caught:
            await settle(producer.flush())
        assert isinstance(caught.value.__cause__, RecordTooLargeError)
        with pytest.raises(RecordTooLargeError, match="max_request_size"):
            await settle(producer.send(topic, b"x" * 2_000_000))


async def test_a_producer_that_never_waits_hears_of_a_topic_meanwhile(
    form: Form, topic: str
) -> None:
    async with form.producer(max_block_ms=0) as producer:
        with pytest.raises(RequestTimedOutError, match=topic):
            await settle(producer.send(topic, b"v"))
        async with asyncio.timeout(20):
            while True:
                try:
                    sent = await settle(producer.send(topic, b"v"))
                    break
                except RequestTimedOutError:
                    await asyncio.sleep(0.02)  # Until what was asked for is there.
        assert (await verdict(sent)).offset == 0


# --- records --------------------------------------------------------------------------------------


async def test_keys_lie_where_java_clients_put_them(form: Form, topic: str) -> None:
    async with form.producer() as producer:
        places = {
            key: (await verdict(producer.send(topic, b"v", key))).partition
            for key in (b"a", b"table-4", "ü".encode(), b"", b"x" * 200)
        }
        explicit = await verdict(producer.send(topic, b"v", b"a", partition=3))
        with pytest.raises(InvalidPartitionsError):
            await settle(producer.send(topic, b"v", partition=4))
    assert places == {key: partition_for_key(key, 4) for key in places}
    assert explicit.partition == 3


async def test_records_without_a_key_stick_to_a_partition_or_take_turns(
    form: Form, topic: str
) -> None:
    async with form.producer(linger_ms=60_000) as producer:
        sent = [await settle(producer.send(topic, b"v")) for _ in range(20)]
        await settle(producer.flush())
        assert len({(await verdict(future)).partition for future in sent}) == 1
    async with form.producer(partitioner="round_robin") as producer:
        sent = [await settle(producer.send(topic, b"v")) for _ in range(20)]
        counts = Counter([(await verdict(future)).partition for future in sent])
    assert counts == dict.fromkeys(range(4), 5)


async def test_a_partitioner_of_ones_own(form: Form, topic: str) -> None:
    asked: list[tuple[str, bytes | None, bytes | None, int, tuple[int, ...]]] = []

    def choose(
        name: str,
        key: bytes | None,
        value: bytes | None,
        partition_count: int,
        available: Sequence[int],
    ) -> int:
        asked.append((name, key, value, partition_count, tuple(available)))
        return int(key or b"")

    async with form.producer(partitioner=choose, key_serializer="str") as producer:
        assert (await verdict(producer.send(topic, b"v", "2"))).partition == 2
        with pytest.raises(InvalidPartitionsError, match="partitioner chose partition 7"):
            await settle(producer.send(topic, b"v", "7"))
    assert asked[0] == (topic, b"2", b"v", 4, (0, 1, 2, 3))


async def test_serialisers(form: Form, topic: str) -> None:
    async with form.producer(key_serializer="str", value_serializer="json") as producer:
        await verdict(producer.send(topic, {"ü": [1, None]}, "schlüssel", partition=0))
        await verdict(producer.send(topic, None, None, partition=0))
        with pytest.raises(SerializationError, match="bytes is not str"):
            await settle(producer.send(topic, {}, b"bytes"))
    async with form.producer(value_serializer=lambda pair: b"%d-%d" % pair) as producer:
        await verdict(producer.send(topic, (1, 2), partition=0))
    raw = await form.read(topic, 3)
    assert [record.key for record in raw] == ["schlüssel".encode(), None, None]
    assert [record.value for record in raw] == ['{"ü":[1,null]}'.encode(), None, b"1-2"]
    decoded = await form.read(
        topic, 3, key_deserializer="str", value_deserializer=lambda data: data and data[:1]
    )
    assert [(record.key, record.value) for record in decoded] == [
        ("schlüssel", b"{"),
        (None, None),
        (None, b"1"),
    ]


async def test_headers_and_timestamps(form: Form, topic: str, admin: AdminClient) -> None:
    headers = [("a", b"1"), ("a", None), ("ü", b"")]
    stamped = make_topic(admin, message_timestamp_type="LogAppendTime")
    began_ms = int(time.time() * 1_000)
    async with form.producer() as producer:
        place = await verdict(
            producer.send(topic, b"v", headers=headers, timestamp_ms=1_234, partition=0)
        )
        assert place.timestamp_ms == 1_234
        await verdict(producer.send(topic, b"v", headers={"b": b"2"}, partition=0))
        appended = await verdict(producer.send(stamped, b"v", timestamp_ms=1_234))
    first, second = await form.read(topic, 2)
    assert (first.headers, first.timestamp_ms) == (tuple(headers), 1_234)
    assert second.headers == (("b", b"2"),)
    assert began_ms <= second.timestamp_ms <= int(time.time() * 1_000)
    [third] = await form.read(stamped, 1)
    assert third.timestamp_ms == appended.timestamp_ms >= began_ms


async def test_what_a_topic_refuses_can_be_told_by_its_class(
    form: Form, admin: AdminClient
) -> None:
    topic = make_topic(admin, cleanup_policy="compact")
    async with form.producer() as producer:
        with pytest.raises(InvalidRecordError, match="key"):
            await verdict(producer.send(topic, b"no key"))
        assert (await verdict(producer.send(topic, b"v", b"k"))).offset == 0


# --- callbacks, threads, fork ---------------------------------------------------------------------


async def test_callbacks_hear_each_verdict_and_may_send(form: Form, topic: str) -> None:
    heard: list[int] = []
    all_heard = threading.Event()

    def note(done: Any) -> None:
        heard.append(done.result().offset)
        if len(heard) == 10:
            all_heard.set()

    async with form.producer() as producer:
        for _ in range(10):
            future = await settle(producer.send(topic, b"v", partition=0))
            future.add_done_callback(note)
        await settle(producer.flush())
        await asyncio.to_thread(all_heard.wait, 20)
    assert heard == list(range(10))


def test_many_threads_share_a_producer(cluster: Cluster, topic: str) -> None:
    def send_all(producer: Producer, thread: int) -> list[Any]:
        return [producer.send(topic, b"%d" % n, b"%d" % thread) for n in range(500)]

    with (
        Producer(cluster.bootstrap) as producer,
        concurrent.futures.ThreadPoolExecutor(8) as threads,
    ):
        sent = [threads.submit(send_all, producer, number) for number in range(8)]
        for thread in sent:
            offsets = [future.result(30).offset for future in thread.result(30)]
            assert offsets == sorted(offsets)
    found: dict[bytes, list[int]] = {}
    for record in asyncio.run(Form(cluster.bootstrap, is_async=False).read(topic, 4_000)):
        found.setdefault(record.key, []).append(int(record.value))
    assert found == {b"%d" % thread: list(range(500)) for thread in range(8)}


async def test_many_tasks_share_a_producer(cluster: Cluster, topic: str) -> None:
    form = Form(cluster.bootstrap, is_async=True)
    async with form.producer() as producer:

        async def send_all(task: int) -> None:
            for number in range(100):
                await producer.send_and_wait(topic, b"%d" % number, b"%d" % task)

        await asyncio.gather(*(send_all(task) for task in range(8)))
    found: dict[bytes, list[int]] = {}
    for record in await form.read(topic, 800):
        found.setdefault(record.key, []).append(int(record.value))
    assert found == {b"%d" % task: list(range(100)) for task in range(8)}


FORKING = """
    import os, sys
    from penstock.client import AsyncProducer, ForkedProcessError, Producer

    bootstrap, topic = sys.argv[1:]
    producer = Producer(bootstrap)
    producer.send(topic, b"before", partition=0).result(30)
    if (child := os.fork()) == 0:
        refused = 0
        for use in (
            lambda: producer.send(topic, b"from the child"),
            lambda: Producer(bootstrap),
            lambda: AsyncProducer(bootstrap),
        ):
            try:
                use()
            except ForkedProcessError as error:
                refused += "spawn" in error.message
        producer.close()  # The parent's, which goes on with it.
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert producer.send(topic, b"after", partition=0).result(30).offset == 1
    producer.close()
"""


def test_a_forked_child_is_refused_and_the_parent_goes_on(cluster: Cluster, topic: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORKING), cluster.bootstrap, topic],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_process_that_ends_without_closing_has_written_what_it_sent(
    cluster: Cluster, topic: str
) -> None:
    script = """
        import sys
        from penstock.client import Producer

        producer = Producer(sys.argv[1], linger_ms=60_000)
        producer.send(sys.argv[2], b"v", partition=0)
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), cluster.bootstrap, topic],
        timeout=60,
        check=True,
    )
    [record] = asyncio.run(Form(cluster.bootstrap, is_async=False).read(topic, 1))
    assert record.value == b"v"


# --- while nothing is acknowledged ----------------------------------------------------------------


@pytest.fixture(scope="class")
def stuck(cluster: Cluster, admin: AdminClient) -> Iterator[str]:
    """A topic that acknowledges nothing: one of the two replicas that must be in sync is down."""
    admin.create_topic("stuck", replica_assignments=[[1, 3]], configs={"min.insync.replicas": "2"})
    cluster.nodes[3].kill()
    wait_until(lambda: admin.describe_topics(["stuck"])[0].partitions[0].isr == (1,), "one is left")
    yield "stuck"
    cluster.start()


class TestWhileNothingIsAcknowledged:
    async def test_too_few_replicas_end_in_a_timeout_that_says_so(
        self, form: Form, stuck: str
    ) -> None:
        began = time.monotonic()
        async with form.producer(delivery_timeout_ms=6_000) as producer:
            future = await settle(producer.send(stuck, b"v"))
            reason = None
            while reason is None and time.monotonic() < began + 5:
                trouble = await settle(producer.trouble())
                reason = None if trouble is None else trouble.reason
                await asyncio.sleep(0.01)  # It is looked at again and again.
            assert reason is StallReason.UNDER_MIN_ISR
            with pytest.raises(DeliveryTimeoutError, match="not written") as caught:
                await verdict(future)
        assert isinstance(caught.value.__cause__, NotEnoughReplicasError)
        assert time.monotonic() - began > 5.9

    async def test_full_memory_blocks_and_then_raises(self, form: Form, stuck: str) -> None:
        async with form.producer(
            buffer_memory=20_000, max_block_ms=300, delivery_timeout_ms=4_000
        ) as producer:
            first = [await settle(producer.send(stuck, b"x" * 4_000)) for _ in range(4)]
            began = time.monotonic()
            with pytest.raises(BufferExhaustedError, match="buffer_memory=20000"):
                await settle(producer.send(stuck, b"x" * 4_000))
            assert time.monotonic() - began > 0.25
            for future in first:
                with pytest.raises(DeliveryTimeoutError):
                    await verdict(future)
            # There is room again.
            last = producer.send(stuck, b"x" * 4_000)
            with pytest.raises(DeliveryTimeoutError):
                await verdict(last)

    async def test_flush_and_close_end_in_their_time(self, form: Form, stuck: str) -> None:
        async with form.producer() as producer:
            future = await settle(producer.send(stuck, b"v"))
            with pytest.raises(RequestTimedOutError, match="timeout_ms=100"):
                await settle(producer.flush(timeout_ms=100))
            assert not future.done()
            with pytest.raises(DeliveryFailedError, match="1 record"):
                await settle(producer.close(timeout_ms=100))
            with pytest.raises(ClientClosedError):
                await verdict(future)
