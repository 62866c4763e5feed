"""`penstock bench`: its figures, its loops against stand-ins, and what it refuses."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli import bench, bench_topic
from penstock.cli.app import app
from penstock.cli.bench_consume import ConsumeMode, ConsumeRun
from penstock.cli.bench_figures import Figures, Stopwatch, quantile, show
from penstock.cli.bench_produce import LatencyRun, Load, ManyRun, SendRun, longest_gap
from penstock.cli.bench_topic import BenchTopic, TopicPlan
from penstock.cli.interrupts import Interrupt
from penstock.cli.output import OutputFormat
from penstock.cli.pace import Progress
from penstock.cli.settings import Settings
from penstock.wire.errors import (
    BufferExhaustedError,
    DeliveryFailedError,
    NotEnoughReplicasError,
    RequestTimedOutError,
    UnknownTopicOrPartitionError,
)
from penstock.wire.ids import TopicPartition


class Bulk(Future[Any]):
    """What ``send_many`` gives."""

    def __init__(self, parts: list[Future[Any]]) -> None:
        super().__init__()
        self.parts = parts
        self.failed = [error for one in parts if (error := one.exception()) is not None]

    def outcomes(self) -> list[Any]:
        return [one.exception() for one in self.parts]


class StandInProducer:
    """Acknowledges at once, but for the records whose numbers ``refuses`` or ``silent`` name."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes]] = []
        self.refuses: set[int] = set()
        self.silent: set[int] = set()
        self.full_at: int | None = None
        self.on_send: dict[int, Any] = {}
        self.flushes: list[float | None] = []

    def send(self, topic: str, value: bytes) -> Future[Any]:
        number = len(self.sent)
        if number == self.full_at:
            raise BufferExhaustedError("full")
        if number in self.on_send:
            self.on_send[number]()
        self.sent.append((topic, value))
        future: Future[Any] = Future()
        if number in self.refuses:
            future.set_exception(NotEnoughReplicasError(f"record {number}"))
        elif number not in self.silent:
            future.set_result(None)
        return future

    def send_many(self, topic: str, values: list[bytes]) -> Future[Any]:
        """One future for all, as the real one: it fails where any record did."""
        futures = [self.send(topic, value) for value in values]
        whole = Bulk([one for one in futures if one.done()])
        if whole.failed:
            whole.set_exception(whole.failed[0])
        elif len(whole.parts) == len(futures):
            whole.set_result(None)
        return whole

    def flush(self, timeout_ms: float | None = None) -> None:
        self.flushes.append(timeout_ms)
        if self.silent:
            raise RequestTimedOutError("still queued")
        if self.refuses:
            raise DeliveryFailedError("some")


def quiet(total: int = 10) -> Progress:
    return Progress("sent", total)


def test_quantiles_are_by_nearest_rank() -> None:
    values = [float(number) for number in range(1, 101)]
    assert [quantile(values, part) for part in (0.5, 0.9, 0.99, 0.999, 1.0)] == [
        50, 90, 99, 100, 100,
    ]  # fmt: skip
    assert quantile([7.0], 0.5) == 7.0
    assert quantile([], 0.5) is None


def test_the_longest_gap_reaches_from_the_start_to_the_end() -> None:
    assert longest_gap(0.0, [5.0, 1.0, 2.0], 6.0) == 3.0
    assert longest_gap(0.0, [4.0, 5.0], 6.0) == 4.0
    assert longest_gap(0.0, [1.0], 9.0) == 8.0
    assert longest_gap(0.0, [], 2.0) == 2.0


def test_the_summary_has_what_programs_look_for() -> None:
    figures = Figures("produce", "send", "t", "of all", records=2_000_000, value_bytes=2e8)
    figures.seconds, figures.cpu_seconds = 4.0, 3.0
    figures.latencies = [0.003, 0.001, 0.002]
    summary = figures.summary()
    assert summary["records_per_s"] == 500_000
    assert summary["mb_per_s"] == 50
    assert summary["cpu_s_per_million"] == 1.5
    assert (summary["p50_ms"], summary["p99_ms"], summary["max_ms"]) == (2, 3, 3)
    assert summary["longest_gap_ms"] is None


def test_a_run_without_a_record_divides_by_nothing() -> None:
    summary = Figures("consume", "poll", "t", "calls").summary()
    assert summary["records_per_s"] == 0
    assert summary["cpu_s_per_million"] is None
    assert summary["p99_ms"] is None


def test_the_table_shows_gaps_where_they_were_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    figures = Figures("latency", "send", "t", "of all", records=1, longest_gap=0.25)
    show(figures, as_json=False)
    printed = capsys.readouterr().out
    assert "250.00 ms" in printed
    assert "not acknowledged" not in printed
    figures.unacknowledged = 3
    show(figures, as_json=False)
    assert "not acknowledged" in capsys.readouterr().out


def test_the_stopwatch_counts_up_to_its_last_mark() -> None:
    watch = Stopwatch()
    assert watch.seconds == 0
    watch.mark()
    marked = watch.seconds
    assert marked > 0
    assert watch.seconds == marked


@pytest.mark.parametrize(
    ("records", "rate", "block"),
    [(1, 0, 1), (5_000, 0, 1), (1_000_000, 0, 200), (10**9, 0, 1_000), (10**6, 2_000, 20),
     (10**6, 10, 1)],
)  # fmt: skip
def test_how_many_records_go_between_two_looks_at_the_clock(
    records: int, rate: float, block: int
) -> None:
    assert Load("t", records, 3, rate).block == block


def test_values_have_the_size_and_differ() -> None:
    values = Load("t", 500_000, 40, 0).values()
    assert {len(value) for value in values} == {40}
    assert len(set(values)) == len(values) == 100
    assert Load("t", 1, 0, 0).values() == [b""]


def test_every_record_is_sent_and_looked_at() -> None:
    producer = StandInProducer()
    producer.refuses = {3, 11_999}
    load = Load("t", 12_001, 10, 0)
    figures = SendRun(producer, load, Interrupt()).run(quiet())  # type: ignore[arg-type]  # A stand-in.
    assert len(producer.sent) == 12_001
    assert all(topic == "t" and len(value) == 10 for topic, value in producer.sent)
    assert (figures.records, figures.errors, figures.unacknowledged) == (11_999, 2, 0)
    assert figures.value_bytes == 119_990
    assert str(figures.first_error) == "record 3"
    # Blocks of 2, and a last one of 1; the timed record 3 of a block was not the first of it.
    assert len(figures.latencies) == 6_001


def test_many_are_sent_by_the_call_and_each_is_counted() -> None:
    producer = StandInProducer()
    producer.refuses = {3, 4, 11_999}
    load = Load("t", 12_001, 10, 0, many=True)
    assert load.block == 120
    figures = ManyRun(producer, load, Interrupt()).run(quiet())  # type: ignore[arg-type]  # A stand-in.
    assert len(producer.sent) == 12_001
    assert (figures.records, figures.errors, figures.unacknowledged) == (11_998, 3, 0)
    assert str(figures.first_error) == "record 3"
    assert len(figures.latencies) == 99, "of 101 calls two failed"


def test_calls_without_a_verdict_are_said_when_it_is_stopped() -> None:
    interrupt = Interrupt()
    producer = StandInProducer()
    producer.silent = {1}
    producer.on_send[25] = lambda: signal.raise_signal(signal.SIGINT)
    load = Load("t", 1_000, 1, 0, many=True)
    with interrupt.installed():
        figures = ManyRun(producer, load, interrupt).run(quiet())  # type: ignore[arg-type]  # A stand-in.
    assert (figures.records, figures.errors, figures.unacknowledged) == (20, 0, 10)


@pytest.mark.parametrize(
    ("records", "size", "block"),
    [(10, 100, 1), (10**7, 10, 10_000), (10**7, 1_000, 1_000), (10**7, 5_000_000, 1)],
)
def test_a_call_has_at_most_so_many_records_and_bytes(records: int, size: int, block: int) -> None:
    assert Load("t", records, size, 0, many=True).block == block


def test_what_send_refuses_ends_the_run_with_what_was_measured() -> None:
    producer = StandInProducer()
    producer.full_at = 7
    figures = SendRun(producer, Load("t", 20, 1, 0), Interrupt()).run(quiet())  # type: ignore[arg-type]  # A stand-in.
    assert (figures.records, figures.errors) == (7, 1)
    assert isinstance(figures.first_error, BufferExhaustedError)


def test_ctrl_c_ends_the_sending_and_what_has_no_verdict_is_said() -> None:
    interrupt = Interrupt()
    producer = StandInProducer()
    producer.silent = {4}
    producer.on_send[5] = lambda: signal.raise_signal(signal.SIGINT)
    with interrupt.installed():
        figures = SendRun(producer, Load("t", 1_000, 1, 0), interrupt).run(quiet())  # type: ignore[arg-type]  # A stand-in.
    assert interrupt.count == 1
    assert len(producer.sent) == 6
    assert producer.flushes == [5_000], "for a few seconds, not for all the time there is"
    assert (figures.records, figures.errors, figures.unacknowledged) == (5, 0, 1)


def test_a_rate_is_kept() -> None:
    began = time.perf_counter()
    load = Load("t", 21, 1, 100)
    figures = SendRun(StandInProducer(), load, Interrupt()).run(quiet())  # type: ignore[arg-type]  # A stand-in.
    assert time.perf_counter() - began >= 0.2
    assert figures.behind is not None


def test_latencies_are_of_every_record() -> None:
    producer = StandInProducer()
    producer.refuses = {2}
    load = Load("t", 10, 1, 1_000)
    figures = LatencyRun(producer, load, Interrupt()).run(quiet())  # type: ignore[arg-type]  # A stand-in.
    assert (figures.records, figures.errors, len(figures.latencies)) == (9, 1, 9)
    assert figures.longest_gap is not None
    assert 0 < figures.longest_gap <= figures.seconds


class StandInConsumer:
    """Hands out records until there are none, three to a call."""

    def __init__(self, count: int) -> None:
        self.left = count

    def _record(self) -> Any:
        self.left -= 1
        return SimpleNamespace(value=b"12345")

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        assert self.left > 0, "iteration would wait for ever"
        return self._record()

    def poll(self, timeout_ms: float) -> list[Any]:
        return [self._record() for _ in range(min(3, self.left))]

    def poll_batch(self, timeout_ms: float) -> dict[TopicPartition, list[Any]]:
        records = self.poll(timeout_ms)
        split = {TopicPartition("t", 0): records[:1], TopicPartition("t", 1): records[1:]}
        return {partition: some for partition, some in split.items() if some}

    def fetch_arrow(self, timeout_ms: float) -> Any:
        values = [record.value for record in self.poll(timeout_ms)]
        column = [SimpleNamespace(as_py=lambda value=value: value) for value in values]
        return SimpleNamespace(num_rows=len(values), column=lambda name: {"value": column}[name])


@pytest.mark.parametrize("mode", list(ConsumeMode))
def test_all_that_was_wanted_is_read(mode: ConsumeMode) -> None:
    consumer = StandInConsumer(1_201)
    run = ConsumeRun(consumer, mode, "t", 1_201, Interrupt())  # type: ignore[arg-type]  # A stand-in.
    figures = run.run(quiet())
    assert (figures.records, figures.value_bytes, consumer.left) == (1_201, 6_005, 0)
    assert figures.latencies
    assert figures.seconds > 0


@pytest.mark.parametrize("mode", [mode for mode in ConsumeMode if mode is not ConsumeMode.ITERATE])
def test_a_log_with_fewer_records_than_offsets_ends(mode: ConsumeMode) -> None:
    run = ConsumeRun(StandInConsumer(7), mode, "t", 50, Interrupt())  # type: ignore[arg-type]  # A stand-in.
    assert run.run(quiet()).records == 7


class StandInAdmin:
    """Knows one topic, ``there`` of two partitions; remembers what is made and deleted."""

    def __init__(self) -> None:
        self.made: list[tuple[str, int, int]] = []
        self.deleted: list[str] = []
        self.delete_error: Exception | None = None

    @contextmanager
    def connect(self, settings: Settings) -> Iterator[StandInAdmin]:
        yield self

    def describe_topics(self, names: list[str]) -> list[Any]:
        if names != ["there"]:
            raise UnknownTopicOrPartitionError("no such topic")
        return [SimpleNamespace(partition_count=2)]

    def describe_cluster(self) -> Any:
        return SimpleNamespace(brokers=[SimpleNamespace(fenced=fenced) for fenced in (False, True)])

    def create_topic(self, name: str, partitions: int, replication_factor: int) -> None:
        self.made.append((name, partitions, replication_factor))

    def delete_topic(self, name: str) -> None:
        if self.delete_error is not None:
            raise self.delete_error
        self.deleted.append(name)


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> StandInAdmin:
    stand_in = StandInAdmin()
    monkeypatch.setattr(bench_topic, "admin_client", stand_in.connect)
    return stand_in


SETTINGS = Settings("nowhere:1", OutputFormat.TABLE)


def test_a_topic_that_is_there_is_used_and_left(admin: StandInAdmin) -> None:
    with bench_topic.bench_topic(SETTINGS, TopicPlan("there", 6, None, keep=False)) as topic:
        assert topic == BenchTopic("there", is_new=False, partitions=2)
    assert (admin.made, admin.deleted) == ([], [])


def test_a_topic_that_is_made_goes_again_whatever_happens(admin: StandInAdmin) -> None:
    def interrupted() -> None:
        plan = TopicPlan("absent", 4, None, keep=False)
        with bench_topic.bench_topic(SETTINGS, plan) as topic:
            assert (topic.is_new, topic.partitions) == (True, 4)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert admin.made == [("absent", 4, 1)], "as many copies as live brokers"
    assert admin.deleted == ["absent"]


def test_a_topic_is_kept_when_asked_and_named(
    admin: StandInAdmin, capsys: pytest.CaptureFixture[str]
) -> None:
    with bench_topic.bench_topic(SETTINGS, TopicPlan(None, 6, 2, keep=True)) as topic:
        assert topic.name.startswith("penstock-bench-")
    assert admin.made == [(topic.name, 6, 2)]
    assert admin.deleted == []
    assert f"kept topic {topic.name}" in capsys.readouterr().err


def test_a_topic_that_cannot_be_deleted_does_not_hide_the_figures(
    admin: StandInAdmin, capsys: pytest.CaptureFixture[str]
) -> None:
    admin.delete_error = RequestTimedOutError("no controller")
    with bench_topic.bench_topic(SETTINGS, TopicPlan("absent", 6, 1, keep=False)):
        pass
    assert "topic absent could not be deleted: no controller" in capsys.readouterr().err


def run_command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments])


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["produce", "--records", "0"], "--records"),
        (["produce", "--mode", "mail"], "--mode"),
        (["latency", "--rate", "0"], "--rate"),
        (["consume", "--mode", "arow"], "iterate"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: list[str], wanted: str) -> None:
    result = run_command(*arguments)
    assert result.exit_code == 2
    assert wanted in result.stderr


def test_an_empty_topic_says_how_to_fill_it(
    admin: StandInAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "readable_records", lambda settings, topic: 0)
    result = run_command("consume", "--topic", "there")
    assert result.exit_code == 1
    assert "topic there has no records to read" in result.stderr
    assert "next: write some with" in result.stderr


@pytest.mark.parametrize("as_json", [False, True])
def test_failed_records_are_told_after_the_figures(
    as_json: bool, admin: StandInAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def producer(self: Any, producing: Any) -> Iterator[StandInProducer]:
        stand_in = StandInProducer()
        stand_in.refuses = {1, 2}
        yield stand_in

    monkeypatch.setattr(bench._Run, "producer", producer)
    monkeypatch.setattr(bench, "warm_up", lambda *arguments: None)
    options = ["--output", "json"] if as_json else []
    result = run_command("produce", "--records", "10", "--topic", "there", *options)
    assert result.exit_code == 1
    assert "error (the first of 2): record 1" in result.stderr
    if as_json:
        assert json.loads(result.stdout)["errors"] == 2
    else:
        assert "client CPU-s per million records" in result.stdout
