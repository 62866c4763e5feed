"""`penstock replay`: what it copies, how far it says it is, and what it refuses."""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli import replay, replay_run
from penstock.cli.app import app
from penstock.cli.interrupts import Interrupt
from penstock.cli.pace import Progress, Schedule
from penstock.cli.replay_run import Replay, Span
from penstock.client import ConsumerRecord, OffsetAndTimestamp
from penstock.client.descriptions import (
    ClusterDescription,
    PartitionDescription,
    TopicDescription,
)
from penstock.wire.errors import (
    NotEnoughReplicasError,
    RecordTooLargeError,
    RequestTimedOutError,
    UnknownTopicOrPartitionError,
)
from penstock.wire.ids import TopicPartition

P0, P1 = TopicPartition("src", 0), TopicPartition("src", 1)


def record(partition: int, offset: int) -> ConsumerRecord:
    return ConsumerRecord(
        "src", partition, offset, 1_000 + offset, b"k%d" % offset, b"v%d" % offset,
        (("h", b"x"), ("h", None)), 0,
    )  # fmt: skip


class StandInConsumer:
    """Two partitions with these offsets, handed out two at a time from where was sought."""

    def __init__(self, *offsets: list[int], ends: tuple[int, ...] = ()) -> None:
        self._offsets = offsets
        self._ends = ends or tuple(entry[-1] + 1 if entry else 0 for entry in offsets)
        self._positions: dict[TopicPartition, int] = {}
        self._paused: set[TopicPartition] = set()
        self.on_poll: Callable[[], None] = lambda: None

    def __enter__(self) -> StandInConsumer:
        return self

    def assign(self, partitions: list[TopicPartition]) -> None:
        self._positions = dict.fromkeys(partitions, 0)

    def seek(self, where: TopicPartition, offset: int) -> None:
        assert where in self._positions
        self._positions[where] = offset

    def poll(self, timeout_ms: float) -> list[ConsumerRecord]:
        self.on_poll()
        found = []
        for where, position in self._positions.items():
            if where in self._paused:
                continue
            there = [offset for offset in self._offsets[where.partition] if offset >= position][:2]
            found += [record(where.partition, offset) for offset in there]
            self._positions[where] = there[-1] + 1 if there else self._ends[where.partition]
        return found

    def pause(self, *partitions: TopicPartition) -> None:
        self._paused.update(partitions)

    def position(self, where: TopicPartition) -> int:
        return self._positions[where]


class StandInProducer:
    """Remembers records; acknowledges at once, but for the values that are refused or silent."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []
        self.refuses: set[bytes] = set()
        self.silent: set[bytes] = set()
        self.too_large: set[bytes] = set()

    def send(self, topic: str, value: bytes, key: bytes, headers: Any, **where: Any) -> Future[Any]:
        if value in self.too_large:
            raise RecordTooLargeError("too large")
        self.sent.append((topic, key, value, headers, where["partition"], where["timestamp_ms"]))
        future: Future[Any] = Future()
        if value in self.refuses:
            future.set_exception(NotEnoughReplicasError("too few"))
        elif value not in self.silent:
            future.set_result(None)
        return future

    def flush(self, timeout_ms: float | None = None) -> None:
        if self.silent and timeout_ms is not None:
            raise RequestTimedOutError("still queued")

    def close(self, timeout_ms: float) -> None:
        assert timeout_ms == 0


def make(
    consumer: StandInConsumer, producer: StandInProducer, *ends: int, **changes: Any
) -> Replay:
    interrupt = changes.pop("interrupt", Interrupt())
    spans = {TopicPartition("src", number): Span(0, end) for number, end in enumerate(ends)}
    settings: dict[str, Any] = {
        "consumer": consumer,
        "producer": producer,
        "dest": "dst",
        "spans": spans,
        "same_partition": True,
        "limit": None,
        "schedule": Schedule(0, interrupt),
        "interrupt": interrupt,
        "progress": Progress("replayed", sum(ends)),
    }
    return Replay(**(settings | changes))


def test_every_part_of_a_record_is_copied() -> None:
    producer = StandInProducer()
    run = make(StandInConsumer([0, 1, 2], [0]), producer, 3, 1)
    run.run()
    assert ("dst", b"k2", b"v2", (("h", b"x"), ("h", None)), 0, 1_002) in producer.sent
    assert [(sent[4], sent[2]) for sent in producer.sent] == [
        (0, b"v0"), (0, b"v1"), (1, b"v0"), (0, b"v2"),
    ]  # fmt: skip
    assert (run.records, run.value_bytes, run.is_complete) == (4, 8, True)
    assert run.next_offsets == {P0: 3, P1: 1}


def test_keys_choose_the_partition_when_asked() -> None:
    producer = StandInProducer()
    make(StandInConsumer([0]), producer, 1, same_partition=False).run()
    assert [sent[4] for sent in producer.sent] == [None]


def test_only_the_span_is_copied() -> None:
    producer = StandInProducer()
    spans = {P0: Span(1, 3), P1: Span(5, 5)}
    run = make(StandInConsumer([0, 1, 2, 3, 4], [5, 6]), producer, spans=spans)
    run.run()
    assert [sent[2] for sent in producer.sent] == [b"v1", b"v2"]
    assert run.next_offsets == {P0: 3, P1: 5}


def test_a_span_that_ends_in_offsets_without_a_record_ends() -> None:
    # Compaction took 3 and 4; nothing will come.
    run = make(StandInConsumer([0, 2], ends=(5,)), StandInProducer(), 5)
    run.run()
    assert (run.records, run.next_offsets, run.is_complete) == (2, {P0: 5}, True)


def test_it_ends_though_another_partition_is_still_written_to() -> None:
    written = [0]
    consumer = StandInConsumer([0, 2], written, ends=(5, 1))

    def write_on() -> None:
        written.append(written[-1] + 1)
        assert len(written) < 50, "the first span's last offsets have no records: nothing will come"

    consumer.on_poll = write_on
    run = make(consumer, StandInProducer(), 5, 1)
    run.run()
    assert (run.next_offsets, run.is_complete) == ({P0: 5, P1: 1}, True)


def test_so_many_records_and_no_more() -> None:
    producer = StandInProducer()
    run = make(StandInConsumer([0, 1, 2, 3]), producer, 4, limit=3)
    run.run()
    assert (len(producer.sent), run.next_offsets, run.is_complete) == (3, {P0: 3}, False)


def test_a_refused_record_ends_it_and_is_the_next_one() -> None:
    producer = StandInProducer()
    producer.refuses = {b"v1"}
    run = make(StandInConsumer([0, 1, 2, 3]), producer, 4)
    with pytest.raises(NotEnoughReplicasError):
        run.run()
    assert (run.records, run.next_offsets) == (1, {P0: 1})
    assert run.unacknowledged == 1


def test_a_record_that_is_too_large_is_named() -> None:
    producer = StandInProducer()
    producer.too_large = {b"v1"}
    run = make(StandInConsumer([0, 1]), producer, 2)
    with pytest.raises(RecordTooLargeError) as raised:
        run.run()
    assert raised.value.__notes__ == ["at offset 1 of src-0"]
    assert run.next_offsets == {P0: 1}


def test_a_stop_signal_waits_for_what_is_on_its_way_and_goes_on_there() -> None:
    interrupt = Interrupt()
    consumer, producer = StandInConsumer([0, 1, 2, 3, 4, 5]), StandInProducer()
    producer.silent = {b"v3"}
    polls = iter([1, 2, 3])

    def stop_at_the_third() -> None:
        if next(polls) == 3:
            signal.raise_signal(signal.SIGINT)

    consumer.on_poll = stop_at_the_third
    run = make(consumer, producer, 6, interrupt=interrupt)
    with interrupt.installed():
        run.run()
    assert interrupt.count == 1
    assert (run.records, run.unacknowledged, run.next_offsets) == (3, 1, {P0: 3})


def test_memory_is_bounded_by_what_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_run, "ON_THEIR_WAY_BYTES", 1)
    waiting: list[Future[Any]] = []
    producer = StandInProducer()

    def send(*_record: Any, **_where: Any) -> Future[Any]:
        assert all(future.done() for future in waiting), "sent before there was room"
        future: Future[Any] = Future()
        waiting.append(future)
        # Not yet done when it is given out; asked for its result, it is.
        future.result = lambda timeout=None: future.done() or future.set_result(None)  # type: ignore[method-assign, assignment, return-value, func-returns-value]  # A stand-in.
        return future

    producer.send = send  # type: ignore[method-assign]  # A stand-in.
    producer.flush = lambda timeout_ms=None: [f.result() for f in waiting]  # type: ignore[method-assign, assignment, misc]  # A stand-in.
    run = make(StandInConsumer([0, 1, 2]), producer, 3)
    run.run()
    assert run.records == 3


# --- the command ----------------------------------------------------------------------------------


class StandInAdmin:
    """``src`` of two partitions, from offset 2 to 6; ``dst`` of two, ``narrow`` of one."""

    def __init__(self, cluster_id: str = "c") -> None:
        self.cluster_id = cluster_id

    def describe_topics(self, names: list[str]) -> list[TopicDescription]:
        counts = {"src": 2, "dst": 2, "narrow": 1}
        if names[0] not in counts:
            raise UnknownTopicOrPartitionError(f"there is no topic {names[0]!r}")
        partitions = tuple(
            PartitionDescription(number, 1, 0, (1,), (1,), (), 0)
            for number in range(counts[names[0]])
        )
        return [TopicDescription(names[0], "id", False, {}, partitions)]

    def describe_cluster(self) -> ClusterDescription:
        return ClusterDescription(self.cluster_id, 1, 1, 1, (), 1)

    def list_offsets(self, partitions: dict[TopicPartition, Any]) -> dict[TopicPartition, Any]:
        places = {"earliest": 2, "latest": 6, 5_000: 4, 9_000: -1}
        return {where: OffsetAndTimestamp(places[spec], 0, 0) for where, spec in partitions.items()}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> StandInProducer:
    producer = StandInProducer()

    @contextmanager
    def admin(settings: Any) -> Iterator[StandInAdmin]:
        yield StandInAdmin("far" if settings.bootstrap == "far:1" else "c")

    @contextmanager
    def consumer(settings: Any) -> Iterator[StandInConsumer]:
        yield StandInConsumer([2, 3, 4, 5], [2, 3, 4, 5])

    @contextmanager
    def connected(*_arguments: Any) -> Iterator[StandInProducer]:
        yield producer

    monkeypatch.setattr(replay, "admin_client", admin)
    monkeypatch.setattr(replay, "_consumer", consumer)
    monkeypatch.setattr(replay, "_producer", connected)
    return producer


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["replay", *arguments], env={"PENSTOCK_BOOTSTRAP": "near:1"})


@pytest.mark.parametrize(
    ("options", "offsets"),
    [
        ([], {0: [2, 3, 4, 5], 1: [2, 3, 4, 5]}),
        (["--from", "1970-01-01T00:00:05"], {0: [4, 5], 1: [4, 5]}),
        (["--to", "5000"], {0: [2, 3], 1: [2, 3]}),
        (["--to", "9000"], {0: [2, 3, 4, 5], 1: [2, 3, 4, 5]}),
        (["--from", "latest"], {}),
        (["--from-offset", "5"], {0: [5], 1: [5]}),
        (["--from-offset", "0=5", "--to-offset", "1=3"], {0: [5], 1: [2]}),
        (["--from-offset", "4", "--from-offset", "1=5", "--to-offset", "99"], {0: [4, 5], 1: [5]}),
        (["--from-offset", "5", "--to-offset", "3"], {}),
    ],
)
def test_what_is_copied_is_between_the_places(
    runs: StandInProducer, options: list[str], offsets: dict[int, list[int]]
) -> None:
    result = command("src", "dst", *options, "--output", "json")
    assert result.exit_code == 0, result.output
    found: dict[int, list[int]] = {}
    for _, key, _, _, partition, _ in runs.sent:
        found.setdefault(partition, []).append(int(key.removeprefix(b"k")))
    assert found == offsets
    assert json.loads(result.stdout)["complete"] is True


def test_how_to_go_on_goes_on_there(runs: StandInProducer) -> None:
    options = ("--max-records", "3", "--rate", "5000.0", "--compression", "lz4")
    result = command("src", "dst", *options)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("replayed 3 records, 6 B in ")
    line = result.stderr.strip().splitlines()[-1]
    _, _, rest = line.partition("to go on: ")
    words = shlex.split(rest)
    assert words[:2] == ["penstock", "replay"]
    assert words[2:4] == ["--bootstrap", "near:1"]
    assert "--compression" in words
    assert words[words.index("--max-records") + 1] == "3", "as many again"
    words[words.index("--max-records") + 1] = "100"
    again = CliRunner().invoke(app, words[1:])
    assert again.exit_code == 0, again.output
    keys = sorted((partition, key) for _, key, _, _, partition, _ in runs.sent)
    assert keys == [(number, b"k%d" % offset) for number in (0, 1) for offset in range(2, 6)]


def test_a_failure_says_how_to_go_on_as_well(runs: StandInProducer) -> None:
    runs.refuses = {b"v3"}
    result = command("src", "dst")
    assert result.exit_code == 1
    assert "to go on; " in result.stderr
    assert "--from-offset 0=3" in result.stderr
    assert "error: too few" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "wanted"),
    [
        (["src", "src"], 2, "it is SOURCE"),
        (["src", "src", "--to-bootstrap", "near-too:1"], 1, "would be copied to itself"),
        (["src", "narrow"], 1, "narrow has 1 partition, and src has 2"),
        (["src", "absent"], 1, "there is no topic 'absent'"),
        (["src", "dst", "--from", "then"], 2, "'then' is not a time"),
        (["src", "dst", "--from-offset", "x=1"], 2, "is not OFFSET, nor PARTITION=OFFSET"),
        (["src", "dst", "--to-offset", "=1"], 2, "is not OFFSET, nor PARTITION=OFFSET"),
        (["src", "dst", "--from-offset", "0=1", "--from-offset", "0=2"], 2, "there twice"),
        (["src", "dst", "--from-offset", "7=1"], 1, "src has no partition 7; it has 2"),
        (["src", "dst", "--partition-by", "luck"], 2, "--partition-by"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    runs: StandInProducer, arguments: list[str], status: int, wanted: str
) -> None:
    result = command(*arguments)
    assert result.exit_code == status, result.output
    assert wanted in result.stderr
    assert "next: " in result.stderr
    assert runs.sent == []


def test_the_same_name_in_another_cluster_is_another_topic(runs: StandInProducer) -> None:
    assert command("src", "src", "--to-bootstrap", "far:1").exit_code == 0
    assert len(runs.sent) == 8
    assert command("src", "narrow", "--partition-by", "key").exit_code == 0
