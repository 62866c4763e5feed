"""The client against real nodes: whatever dies, what was acknowledged is read once."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.client import (
    AdminClient,
    Consumer,
    DeliveryTimeoutError,
    GroupIdNotFoundError,
    InvalidConfigError,
    InvalidPartitionsError,
    NonEmptyGroupError,
    Producer,
    RecordTooLargeError,
    TopicAlreadyExistsError,
    TopicPartition,
    UnknownTopicOrPartitionError,
)
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


def leader_of(cluster: Cluster, topic: str, partition: int = 0) -> int:
    return cluster.topic(topic).partitions[partition].leader


class Reader:
    """A member of a group in a thread of its own; counts what it reads until told to stop."""

    def __init__(self, cluster: Cluster, topic: str, group: str) -> None:
        # Never changed, only replaced: others read it while the thread reads on.
        self.seen: Counter[bytes] = Counter()
        self.owned: frozenset[TopicPartition] = frozenset()
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(cluster.bootstrap, topic, group))
        self._thread.start()

    def _run(self, bootstrap: str, topic: str, group: str) -> None:
        try:
            with Consumer(
                bootstrap, topics=topic, group_id=group, auto_offset_reset="earliest"
            ) as consumer:
                while not self._stop.is_set():
                    self.seen = self.seen + Counter(record.value for record in consumer.poll(100))
                    self.owned = consumer.assignment()
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_what_is_written_is_read_in_every_compression(cluster: Cluster, compression: str) -> None:
    topic = f"compressed-{compression}"
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic(topic, 2)
    with Producer(cluster.bootstrap, compression=compression) as producer:  # type: ignore[arg-type]
        for number in range(1_000):
            producer.send(
                topic, b"value %d" % number, b"key %d" % (number % 7), {"h": b"%d" % number}
            )
    found: dict[bytes, list[int]] = {}
    with Consumer(cluster.bootstrap, topics=topic, auto_offset_reset="earliest") as consumer:
        while sum(map(len, found.values())) < 1_000:
            for record in consumer.poll(5_000):
                number = int(record.headers[0][1] or b"")
                assert record.value == b"value %d" % number
                found.setdefault(record.key, []).append(number)
    assert found == {b"key %d" % key: list(range(key, 1_000, 7)) for key in range(7)}


def test_two_members_while_a_leader_is_killed_and_comes_back(fresh: Cluster) -> None:
    with AdminClient(fresh.bootstrap) as admin:
        admin.create_topic("t", 6, 3, {"min.insync.replicas": "2"})
    readers = [Reader(fresh, "t", "g") for _ in range(2)]
    try:
        wait_until(lambda: [len(reader.owned) for reader in readers] == [3, 3], "a fair share")
        total = 6_000
        victim = leader_of(fresh, "t")
        with Producer(fresh.bootstrap) as producer:
            futures = []
            for number in range(total):
                futures.append(producer.send("t", b"%d" % number, partition=number % 6))
                if number == total // 3:
                    producer.flush()
                    fresh.nodes[victim].kill()
                if number == 2 * total // 3:
                    fresh.nodes[victim].start()
            producer.flush()
        assert [future.exception() for future in futures] == [None] * total
        wanted = Counter(b"%d" % number for number in range(total))
        wait_until(
            lambda: sum((reader.seen for reader in readers), Counter()) >= wanted,
            "all is read",
            30,
        )
    finally:
        for reader in readers:
            reader.stop()
    assert sum((reader.seen for reader in readers), Counter()) == wanted
    fresh.wait_ready()
    with AdminClient(fresh.bootstrap) as admin:
        places = {TopicPartition("t", number): "latest" for number in range(6)}
        ends = admin.list_offsets(places)  # type: ignore[arg-type]
        assert {entry.offset for entry in ends.values()} == {total // 6}
        committed = admin.list_group_offsets("g")
        assert {entry.offset for entry in committed.values()} == {total // 6}


def test_a_group_outlives_its_coordinator(fresh: Cluster) -> None:
    with AdminClient(fresh.bootstrap) as admin:
        admin.create_topic("t", 2)
        reader = Reader(fresh, "t", "g")
        try:
            wait_until(lambda: len(reader.owned) == 2, "an assignment")
            with Producer(fresh.bootstrap) as producer:
                for number in range(100):
                    producer.send("t", b"a%d" % number)
            wait_until(lambda: len(reader.seen) == 100, "the first hundred")
            [group] = admin.describe_groups(["g"])
            [member] = group.members
            fresh.nodes[group.coordinator].kill()
            with Producer(fresh.bootstrap) as producer:
                for number in range(100):
                    producer.send("t", b"b%d" % number)
            wait_until(lambda: len(reader.seen) == 200, "the second hundred", 30)

            def settled() -> bool:
                [after] = admin.describe_groups(["g"])
                return after.coordinator != group.coordinator and [
                    found.member_id for found in after.members
                ] == [member.member_id]

            wait_until(settled, "the same member at another coordinator", 30)
        finally:
            reader.stop()
        assert set(reader.seen.values()) == {1}
        committed = admin.list_group_offsets("g")
        assert sum(entry.offset for entry in committed.values()) == 200


def test_everything_acknowledged_survives_the_death_of_all_nodes(fresh: Cluster) -> None:
    with AdminClient(fresh.bootstrap) as admin:
        admin.create_topic("t", 3)
    acknowledged: list[bytes] = []
    with Producer(fresh.bootstrap) as producer:
        futures = [(b"%d" % n, producer.send("t", b"%d" % n)) for n in range(500)]
        for value, future in futures:
            future.result(30)
            acknowledged.append(value)
        for node in fresh.nodes.values():
            node.kill()
        fresh.start()
        # The same producer goes on where it was.
        producer.send("t", b"after").result(60)
    seen: Counter[bytes] = Counter()
    with Consumer(fresh.bootstrap, topics="t", auto_offset_reset="earliest") as consumer:
        while sum(seen.values()) < 501:
            seen.update(record.value for record in consumer.poll(5_000))
        assert consumer.poll(200) == []
    assert seen == Counter([*acknowledged, b"after"])


def test_a_leader_that_hangs_is_left(fresh: Cluster) -> None:
    with AdminClient(fresh.bootstrap) as admin:
        admin.create_topic("t")
    victim = leader_of(fresh, "t")
    with Producer(fresh.bootstrap) as producer:
        producer.send("t", b"before").result(30)
        fresh.nodes[victim].signal(signal.SIGSTOP)
        try:
            # broker.session.timeout.ms fences it after 6 s; request_timeout_ms is 30 s.
            producer.send("t", b"after").result(25)
        finally:
            fresh.nodes[victim].signal(signal.SIGCONT)
    with Consumer(fresh.bootstrap, topics="t", auto_offset_reset="earliest") as consumer:
        found: list[bytes] = []
        while len(found) < 2:
            found += [record.value for record in consumer.poll(5_000)]
    assert found == [b"before", b"after"]


def test_too_few_in_sync_replicas_are_named(fresh: Cluster) -> None:
    with AdminClient(fresh.bootstrap) as admin:
        admin.create_topic("t", 1, 3, {"min.insync.replicas": "3"})
        leader = leader_of(fresh, "t")
        victim = next(number for number in fresh.nodes if number != leader)
        fresh.nodes[victim].kill()
        wait_until(
            lambda: len(admin.describe_topics(["t"])[0].partitions[0].isr) == 2, "a smaller set"
        )
        with Producer(fresh.bootstrap, delivery_timeout_ms=2_000) as producer:
            with pytest.raises(DeliveryTimeoutError) as caught:
                producer.send("t", b"v").result(30)
            for part in ("t-0", "min.insync.replicas", "3"):
                assert part in caught.value.message
            fresh.nodes[victim].start()
            fresh.wait_ready()
            wait_until(
                lambda: len(admin.describe_topics(["t"])[0].partitions[0].isr) == 3, "all back"
            )
            producer.send("t", b"w").result(30)


def test_administration(cluster: Cluster) -> None:
    with AdminClient(cluster.bootstrap) as admin:
        made = admin.create_topic("managed", 2, 3, {"retention.ms": "1000"})
        assert made.created
        assert [len(replicas) for replicas in made.replicas] == [3, 3]
        with pytest.raises(TopicAlreadyExistsError):
            admin.create_topic("managed")
        assert not admin.create_topic("managed", if_not_exists=True).created
        with pytest.raises(InvalidConfigError, match=r"retention\.ms"):
            admin.create_topic("other", configs={"retention.mss": "1"})
        admin.create_partitions("managed", 4)
        wait_until(
            lambda: admin.describe_topics(["managed"])[0].partition_count == 4, "4 partitions"
        )
        with pytest.raises(InvalidPartitionsError):
            admin.create_partitions("managed", 3)
        admin.alter_configs("managed", {"segment.ms": "5000"}, ["retention.ms"])

        def configs() -> dict[str, tuple[str, str]]:
            return {e.key: (e.value, e.source) for e in admin.describe_configs("managed")}

        wait_until(lambda: configs()["segment.ms"] == ("5000", "topic"), "the config is set")
        assert configs()["retention.ms"][1] == "default"
        quorum = admin.describe_quorum()
        assert quorum.leader_id in cluster.nodes
        assert {voter.node_id for voter in quorum.voters} == set(cluster.nodes)
        described = admin.describe_cluster()
        assert {broker.node_id for broker in described.brokers} == set(cluster.nodes)
        assert admin.elect_leaders([TopicPartition("managed", 0)]) in (
            {},
            {TopicPartition("managed", 0): made.replicas[0][0]},
        )
        admin.delete_topic("managed")
        with pytest.raises(UnknownTopicOrPartitionError):
            admin.delete_topic("managed")


def test_groups_can_be_listed_reset_and_deleted(cluster: Cluster) -> None:
    partition = TopicPartition("grouped", 0)
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic("grouped")
        with Producer(cluster.bootstrap) as producer:
            for number in range(10):
                producer.send("grouped", b"%d" % number)
        with Consumer(
            cluster.bootstrap, topics="grouped", group_id="readers", auto_offset_reset="earliest"
        ) as consumer:
            found: list[bytes] = []
            while len(found) < 10:
                found += [record.value for record in consumer.poll(5_000)]
            consumer.commit()
            [group] = admin.describe_groups(["readers"])
            assert [member.assigned for member in group.members] == [(partition,)]
            assert group.offsets[partition].offset == 10
            with pytest.raises(NonEmptyGroupError):
                admin.delete_groups(["readers"])
        assert "readers" in {group.group_id for group in admin.list_groups()}
        admin.alter_group_offsets("readers", {partition: 4})
        with Consumer(cluster.bootstrap, topics="grouped", group_id="readers") as consumer:
            assert consumer.poll(10_000, 1)[0].offset == 4
        admin.delete_groups(["readers"])
        with pytest.raises(GroupIdNotFoundError):
            admin.describe_groups(["readers"])


def test_what_users_get_wrong(cluster: Cluster) -> None:
    with AdminClient(cluster.bootstrap) as admin:
        admin.create_topic("payments", configs={"max.message.bytes": "2000"})
    with Producer(cluster.bootstrap) as producer:
        with pytest.raises(UnknownTopicOrPartitionError, match="payments"):
            producer.send("payment", b"v")
        # Together too large for the topic: the batch is split, and all arrive.
        futures = [producer.send("payments", b"x" * 500) for _ in range(20)]
        assert sorted(future.result(30).offset for future in futures) == list(range(20))
        with pytest.raises(RecordTooLargeError, match=r"max\.message\.bytes"):
            producer.send("payments", b"x" * 3_000).result(30)
    with (
        Consumer(cluster.bootstrap, topics="payment") as consumer,
        pytest.raises(UnknownTopicOrPartitionError, match="payments"),
    ):
        consumer.poll(5_000)
