"""What a broker shows of the partitions that it leads, of those that lack something above all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from penstock.broker.core.partition_events import Role
from penstock.broker.metrics import BrokerMetrics
from penstock.v1 import cluster_pb2
from penstock.wire.ids import TopicPartition


class Led:
    """A broker that leads these partitions, and what it shows of them."""

    def __init__(self, most_labels: int = 10) -> None:
        self.metrics = BrokerMetrics(most_labels)
        self.partitions: list[Any] = []
        self.records: dict[int, cluster_pb2.PartitionRecord] = {}
        self.deleted: set[str] = set()
        image: Any = SimpleNamespace(
            topic=lambda name: None if name in self.deleted else name,
            partition_by_id=self.records.get,
        )
        self.metrics.partitions.watch(lambda: self.partitions, image, lambda _: 100)

    def has(
        self,
        isr: Iterable[int],
        *,
        topic: str = "orders",
        replicas: Sequence[int] = (1, 2, 3),
        min_isr: int = 2,
        adding: Sequence[int] = (),
        removing: Sequence[int] = (),
        role: Role = Role.LEADER,
        ends: dict[int, int] | None = None,
    ) -> None:
        """One more; ``ends`` are the log end offsets of followers, of a log from 10 to 30."""
        key = len(self.partitions)
        followers = {
            node: SimpleNamespace(log_end_offset=end) for node, end in (ends or {}).items()
        }
        replica = SimpleNamespace(
            role=role, isr=frozenset(isr), min_isr=min_isr, followers=lambda: followers
        )
        waiters: dict[str, list[object]] = {
            f"{kind}_waiters": [] for kind in ("commit", "durable", "high_watermark", "fetch")
        }
        waiters["fetch_waiters"] = [object()] * 2
        self.partitions.append(
            SimpleNamespace(
                name=TopicPartition(topic, key),
                key=key,
                replica=replica,
                log=SimpleNamespace(log_start_offset=10, log_end_offset=30),
                **waiters,
            )
        )
        self.records[key] = cluster_pb2.PartitionRecord(
            replicas=replicas, isr=isr, adding_replicas=adding, removing_replicas=removing
        )

    def shows(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"penstock_{name}", labels)

    def troubles(self) -> tuple[float | None, ...]:
        """Those under-replicated, at min ISR, under min ISR, and on their way."""
        names = ("under_replicated", "at_min_isr", "under_min_isr", "reassigning")
        return tuple(self.shows(f"{name}_partitions") for name in names)


def test_partitions_are_told_apart_by_what_they_lack() -> None:
    led = Led()
    led.has((1, 2, 3))
    assert led.troubles() == (0, 0, 0, 0)
    led.has((1, 2))
    assert led.troubles() == (1, 1, 0, 0)
    led.has((1,))
    assert led.troubles() == (2, 1, 1, 0)
    assert (led.shows("replica_partitions"), led.shows("leader_partitions")) == (3, 3)


def test_who_lacks_nothing_is_not_near_to_refuse_though_no_replica_could_be_missed() -> None:
    led = Led()
    led.has((1, 2), replicas=(1, 2))
    led.has((1,), replicas=(1,), min_isr=1)
    assert led.troubles() == (0, 0, 0, 0)


def test_a_replica_that_is_only_being_added_is_not_lacking_and_stands_in_for_nobody() -> None:
    led = Led()
    led.has((1, 2, 3), replicas=(1, 2, 3, 4), adding=(4,))
    assert led.troubles() == (0, 0, 0, 1)
    # The newcomer is in sync, and an old one is not.
    led.has((1, 2, 4), replicas=(1, 2, 3, 4), adding=(4,), removing=(3,))
    assert led.troubles() == (1, 0, 0, 2)


def test_a_follower_counts_as_a_replica_and_troubles_nobody() -> None:
    led = Led()
    led.has((2,), role=Role.FOLLOWER)
    assert led.troubles() == (0, 0, 0, 0)
    assert (led.shows("replica_partitions"), led.shows("leader_partitions")) == (1, 0)
    assert led.shows("waiting_requests", kind="records") == 0


def test_what_followers_lack_is_summed_over_partitions_from_the_start_of_the_log_on() -> None:
    led = Led()
    led.has((1, 2, 3), ends={2: 30, 3: 25})
    led.has((1, 2), ends={2: 29, 3: -1})  # The third has not said yet what it has.
    assert led.shows("replica_lag_records", follower="2") == 1
    assert led.shows("replica_lag_records", follower="3") == 5 + 20
    assert led.shows("waiting_requests", kind="records") == 4


def test_a_topic_that_is_gone_makes_room_for_the_name_of_another() -> None:
    led = Led(most_labels=1)
    led.has((1, 2, 3), topic="first")
    led.has((1, 2, 3), topic="second")
    assert led.shows("log_size_bytes", topic="first") == 100
    assert led.shows("log_size_bytes", topic="(other)") == 100
    del led.partitions[0]
    led.deleted.add("first")
    assert led.shows("log_size_bytes", topic="first") is None
    assert led.shows("log_size_bytes", topic="second") == 100
