from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock.client import ClientClosedError, Consumer, Producer, TopicPartition
from tests.unit.client.conftest import Background

T0 = TopicPartition("t", 0)


def produce(background: Background, count: int, partitions: int = 1) -> None:
    with Producer(background.cluster.bootstrap) as producer:
        for number in range(count):
            producer.send("t", b"%d" % number, partition=number % partitions)


def test_iterating_as_a_member(background: Background) -> None:
    background.cluster.add_topic("t")
    produce(background, 20)
    settings = {"group_id": "g", "auto_offset_reset": "earliest"}
    with Consumer(background.cluster.bootstrap, topics="t", **settings) as consumer:  # type: ignore[arg-type]
        found = [next(consumer).value for _ in range(8)]
    with Consumer(background.cluster.bootstrap, topics="t", **settings) as consumer:  # type: ignore[arg-type]
        while len(found) < 20:
            found += [record.value for record in consumer.poll(5_000)]
        assert consumer.position(T0) == 20
    assert found == [b"%d" % number for number in range(20)]
    assert background.cluster.groups["g"].members == {}


def test_a_batch_left_over_from_iteration_goes_to_poll(background: Background) -> None:
    background.cluster.add_topic("t")
    produce(background, 10)
    with Consumer(
        background.cluster.bootstrap, topics="t", auto_offset_reset="earliest"
    ) as consumer:
        found = [next(consumer).value]
        while len(found) < 10:
            found += [record.value for record in consumer.poll(5_000, 2)]
    assert found == [b"%d" % number for number in range(10)]


def test_the_listener_runs_in_the_callers_thread_and_may_commit(background: Background) -> None:
    background.cluster.add_topic("t")
    produce(background, 5)
    heard: list[tuple[str, int]] = []
    with Consumer(
        background.cluster.bootstrap,
        group_id="g",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    ) as consumer:

        class Listener:
            def on_partitions_assigned(self, partitions: Sequence[TopicPartition]) -> None:
                heard.append(("assigned", threading.get_ident()))
                consumer.seek(partitions[0], 2)

            def on_partitions_revoked(self, partitions: Sequence[TopicPartition]) -> None:
                heard.append(("revoked", threading.get_ident()))
                consumer.commit()

            def on_partitions_lost(self, partitions: Sequence[TopicPartition]) -> None:
                heard.append(("lost", threading.get_ident()))

        consumer.subscribe(["t"], Listener())
        found: list[bytes] = []
        while len(found) < 3:
            found += [record.value for record in consumer.poll(5_000)]
        assert found == [b"2", b"3", b"4"]
    here = threading.get_ident()
    assert heard == [("assigned", here), ("revoked", here)]
    assert background.cluster.groups["g"].offsets[T0].offset == 5


def test_asynchronous_commits_keep_their_order(background: Background) -> None:
    background.cluster.add_topic("t")
    told: list[BaseException | None] = []
    with Consumer(background.cluster.bootstrap, group_id="g", enable_auto_commit=False) as consumer:
        futures = [consumer.commit_async({T0: number}, told.append) for number in range(20)]
        for future in futures:
            future.result(10)
        commits = background.cluster.groups["g"].commits
        assert [commit[T0] for commit in commits] == list(range(20))
        assert told == [None] * 20
        entry = consumer.committed(T0)[T0]
        assert entry is not None
        assert entry.offset == 19


def test_a_closed_consumer_refuses(background: Background) -> None:
    background.cluster.add_topic("t")
    consumer = Consumer(background.cluster.bootstrap, topics="t")
    consumer.poll(10)
    consumer.close()
    consumer.close()
    with pytest.raises(ClientClosedError):
        consumer.poll()
    with pytest.raises(ClientClosedError):
        next(consumer)
    with pytest.raises(ClientClosedError):
        consumer.position(T0)


READS: list[Callable[[Consumer], object]] = [next, lambda consumer: consumer.poll(5_000, 2)]


@pytest.mark.parametrize("read", READS)
def test_what_an_interrupt_kept_from_the_application_comes_next(
    background: Background, monkeypatch: pytest.MonkeyPatch, read: Callable[[Consumer], object]
) -> None:
    background.cluster.add_topic("t")
    produce(background, 4)
    with Consumer(
        background.cluster.bootstrap, topics="t", auto_offset_reset="earliest"
    ) as consumer:
        run = consumer._thread.run

        def interrupted(*work: Any, **arguments: Any) -> None:
            if run(*work, **arguments):  # The engine took records; then came Ctrl-C.
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(consumer._thread, "run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                read(consumer)
        assert consumer.position(T0) == 0
        assert [next(consumer).offset for _ in range(4)] == [0, 1, 2, 3]
