"""What is printed, and that a group is told exactly that."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from penstock.cli import consume as module
from penstock.cli.client_warnings import client_warnings
from penstock.cli.consume import (
    _PRINTERS,
    Isolation,
    RecordFormat,
    Session,
)
from penstock.cli.interrupts import Interrupt
from penstock.cli.output import OutputFormat
from penstock.cli.settings import Settings
from penstock.client.model import ConsumerRecord, OffsetAndMetadata
from penstock.wire.errors import (
    FencedMemberEpochError,
    InvalidPartitionsError,
    LeaderNotAvailableError,
    PenstockError,
    RequestTimedOutError,
)
from penstock.wire.ids import TopicPartition
from penstock.wire.stalls import StallReason

P0 = TopicPartition("orders", 0)


def record(offset: int, value: bytes | None = b"v", key: bytes | None = None) -> ConsumerRecord:
    return ConsumerRecord("orders", 0, offset, 1_700_000_000_000, key, value, (), 0)


class FakeConsumer:
    """Hands out the batches given; then nothing, or what ``at_end`` does."""

    def __init__(self, *batches: Sequence[ConsumerRecord]) -> None:
        self.batches = list(batches)
        self.commits: list[dict[TopicPartition, int]] = []
        self.limits: list[int] = []
        self.waits: list[float] = []
        self.calls: list[Any] = []
        self.at_end: Any = lambda: None
        self.closed = False
        self.hindered: PenstockError | None = None
        self.places: dict[TopicPartition, int] = {}  # After what was handed out.
        self.group_has: dict[TopicPartition, int] = {}

    def trouble(self) -> PenstockError | None:
        return self.hindered

    def partitions_for(self, topic: str) -> tuple[int, ...]:
        return (0, 1)

    def subscribe(self, topics: Sequence[str], listener: object) -> None:
        self.calls.append(("subscribe", list(topics)))

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        self.calls.append(("assign", list(partitions)))

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self.calls.append(("seek", partition, offset))

    def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        self.calls.append(("beginning", *partitions))

    def seek_to_end(self, *partitions: TopicPartition) -> None:
        self.calls.append(("end", *partitions))

    def poll(self, timeout_ms: float, max_records: int) -> list[ConsumerRecord]:
        self.limits.append(max_records)
        self.waits.append(timeout_ms)
        if self.batches:
            batch = list(self.batches.pop(0))
            if len(batch) > max_records:
                self.batches.insert(0, batch[max_records:])
            return batch[:max_records]
        self.at_end()
        return []

    def positions(self) -> dict[TopicPartition, OffsetAndMetadata]:
        return {name: OffsetAndMetadata(offset) for name, offset in self.places.items()}

    def committed(self, *names: TopicPartition) -> dict[TopicPartition, OffsetAndMetadata | None]:
        self.calls.append(("committed", *names))
        return {
            name: OffsetAndMetadata(self.group_has[name]) if name in self.group_has else None
            for name in names
        }

    def commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        self.commits.append({name: entry.offset for name, entry in offsets.items()})

    def commit_async(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> Future[None]:
        done: Future[None] = Future()
        try:
            self.commit(offsets)
        except PenstockError as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        return done

    def close(self) -> None:
        self.closed = True


def session(
    consumer: FakeConsumer,
    *,
    out: Any = None,
    record_format: RecordFormat = RecordFormat.VALUE,
    commits: bool = True,
    from_beginning: bool = False,
    interrupt: Interrupt | None = None,
) -> Session:
    return Session(
        consumer,  # type: ignore[arg-type]
        "orders",
        _PRINTERS[record_format],
        out if out is not None else io.BytesIO(),
        interrupt or Interrupt(),
        commits=commits,
        from_beginning=from_beginning,
    )


def test_values_one_a_line() -> None:
    out = io.BytesIO()
    run = session(FakeConsumer([record(0, b"a"), record(1, None), record(2, b"")]), out=out)
    run.run(None, 0.0)
    assert out.getvalue() == b"a\nnull\n\n"


def test_json_carries_everything() -> None:
    out = io.BytesIO()
    whole = ConsumerRecord(
        "orders", 3, 7, 1_700_000_000_000, b"k", "ü".encode(), (("trace", b"1"), ("n", None)), 2
    )
    session(FakeConsumer([whole]), out=out, record_format=RecordFormat.JSON).run(None, 0.0)
    assert json.loads(out.getvalue()) == {
        "topic": "orders",
        "partition": 3,
        "offset": 7,
        "timestamp_ms": 1_700_000_000_000,
        "key": "k",
        "value": "ü",
        "headers": [{"key": "trace", "value": "1"}, {"key": "n", "value": None}],
    }


def test_bytes_that_are_no_text_are_base64() -> None:
    out = io.BytesIO()
    consumer = FakeConsumer([record(0, b"\xff\x00", key=None)])
    session(consumer, out=out, record_format=RecordFormat.JSON).run(None, 0.0)
    document = json.loads(out.getvalue())
    assert document["value_base64"] == "/wA="
    assert "value" not in document
    assert document["key"] is None


def test_it_ends_after_the_records_asked_for() -> None:
    consumer = FakeConsumer([record(0), record(1), record(2)])
    run = session(consumer)
    run.run(2, None)
    run.end()
    assert run.printed == 2
    assert consumer.limits == [2]
    assert consumer.commits == [{P0: 2}]
    assert consumer.closed


def test_a_group_is_told_what_was_printed_though_nothing_more_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_COMMIT_SECONDS", 0.0)
    consumer = FakeConsumer([record(0), record(1)])
    interrupt = Interrupt()
    consumer.at_end = lambda: os.kill(os.getpid(), signal.SIGINT)
    run = session(consumer, interrupt=interrupt)
    with interrupt.installed():
        run.run(None, None)
    assert consumer.commits == [{P0: 2}]


def test_the_wait_for_records_ends_when_a_commit_is_due() -> None:
    consumer = FakeConsumer([record(0)])
    consumer.at_end = lambda: os.kill(os.getpid(), signal.SIGINT)
    interrupt = Interrupt()
    run = session(consumer, interrupt=interrupt)
    with interrupt.installed():
        run.run(None, None)
    first, second = consumer.waits
    assert first == 5_000
    assert 0 < second <= 1_000


def test_a_group_is_told_what_was_printed_before_a_partition_goes() -> None:
    run = session(FakeConsumer([record(4), record(5)]))
    run.run(2, None)
    run.on_partitions_revoked([P0])
    assert run.consumer.commits == [{P0: 6}]  # type: ignore[attr-defined]
    run.end()
    assert run.consumer.commits == [{P0: 6}]  # type: ignore[attr-defined]


def test_a_group_goes_past_the_marks_behind_what_was_printed() -> None:
    consumer = FakeConsumer([record(0)])
    consumer.places = {P0: 2}
    run = session(consumer)
    run.run(1, None)
    run.end()
    assert consumer.commits == [{P0: 2}]


def test_marks_that_come_later_are_gone_past_without_a_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_COMMIT_SECONDS", 0.0)
    consumer = FakeConsumer([record(0)])
    run = session(consumer)
    run.run(1, None)
    assert consumer.commits == [{P0: 1}]
    consumer.places = {P0: 2}
    run.run(None, 0.0)
    run.end()
    assert consumer.commits == [{P0: 1}, {P0: 2}]


@pytest.mark.parametrize(
    ("group_has", "from_beginning", "commits"),
    [(2, False, [{P0: 5}]), (5, False, []), (None, True, [{P0: 5}]), (None, False, [])],
)
def test_where_all_was_aborted_a_group_goes_past_it_if_it_began_before(
    group_has: int | None, from_beginning: bool, commits: list[dict[TopicPartition, int]]
) -> None:
    """A group without a position, that is not to begin at the log's start, is given none: it
    could not be asked to another time.
    """
    consumer = FakeConsumer()
    consumer.places = {P0: 5}
    if group_has is not None:
        consumer.group_has = {P0: group_has}
    run = session(consumer, from_beginning=from_beginning)
    run.run(None, 0.0)
    run.end()
    assert consumer.commits == commits
    assert consumer.calls == ([] if from_beginning else [("committed", P0)])


def test_a_partition_that_went_and_came_back_is_asked_about_again() -> None:
    consumer = FakeConsumer()
    consumer.places = {P0: 5}
    run = session(consumer)
    run.run(None, 0.0)
    for gone in (run.on_partitions_revoked, run.on_partitions_lost):
        gone([P0])
        run.run(None, 0.0)
    assert consumer.calls == [("committed", P0)] * 3


def test_what_was_lost_is_not_committed() -> None:
    run = session(FakeConsumer([record(4)]))
    run.run(1, None)
    run.on_partitions_lost([P0])
    run.end()
    assert run.consumer.commits == []  # type: ignore[attr-defined]


def test_without_a_group_nothing_is_committed() -> None:
    run = session(FakeConsumer([record(0)]), commits=False)
    run.run(1, None)
    run.end()
    assert run.consumer.commits == []  # type: ignore[attr-defined]


def test_what_met_a_closed_pipe_is_not_committed() -> None:
    class Closed(io.BytesIO):
        def flush(self) -> None:
            raise BrokenPipeError

    run = session(FakeConsumer([record(0)]), out=Closed())
    with pytest.raises(BrokenPipeError):
        run.run(1, None)
    run.end()
    assert run.consumer.commits == []  # type: ignore[attr-defined]
    assert run.consumer.closed  # type: ignore[attr-defined]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_waiting_ends_at_once_and_commits(number: signal.Signals) -> None:
    consumer = FakeConsumer([record(0)])
    consumer.at_end = lambda: os.kill(os.getpid(), number)
    interrupt = Interrupt()
    run = session(consumer, interrupt=interrupt)
    with interrupt.installed():
        try:
            run.run(None, None)
        finally:
            run.end()
    assert interrupt.signal_number == number
    assert consumer.commits == [{P0: 1}]
    assert consumer.closed


def test_a_signal_while_printing_leaves_the_rest_to_others() -> None:
    interrupt = Interrupt()

    class Interrupting(io.BytesIO):
        def write(self, data: Any) -> int:
            os.kill(os.getpid(), signal.SIGINT)
            return super().write(data)

    out = Interrupting()
    consumer = FakeConsumer([record(0), record(1), record(2)])
    consumer.places = {P0: 4}
    run = session(consumer, out=out, interrupt=interrupt)
    with interrupt.installed():
        try:
            run.run(None, None)
        finally:
            run.end()
    assert out.getvalue() == b"v\n"
    assert consumer.commits == [{P0: 1}]


@pytest.mark.parametrize(
    ("start", "wanted"),
    [
        (17, ("seek", P0, 17)),
        ("earliest", ("beginning", P0)),
        ("latest", ("end", P0)),
    ],
)
def test_one_partition_is_read_from_where_it_is_said(start: Any, wanted: Any) -> None:
    consumer = FakeConsumer()
    session(consumer).begin(0, start)
    assert consumer.calls == [("assign", [P0]), wanted]


def test_a_partition_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidPartitionsError, match="has no partition 5; it has 2, from 0 to 1"):
        session(FakeConsumer()).begin(5, "latest")


def test_the_end_by_timeout_is_a_failure_while_a_partition_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_PASSING_SECONDS", 0.01)
    out = io.BytesIO()
    consumer = FakeConsumer([record(0, b"a")])
    consumer.hindered = LeaderNotAvailableError("partition orders-1 has no leader")
    with pytest.raises(LeaderNotAvailableError, match="orders-1 has no leader"):
        session(consumer, out=out).run(None, 0.0)
    assert out.getvalue() == b"a\n"


def test_a_trouble_at_the_end_that_passes_is_no_failure_and_what_comes_after_it_is_read() -> None:
    out = io.BytesIO()
    consumer = FakeConsumer([record(0, b"a")], [], [], [record(1, b"b")])
    consumer.hindered = LeaderNotAvailableError("partition orders-0 has no leader")

    def it_passes() -> None:
        consumer.hindered = None

    consumer.at_end = it_passes
    session(consumer, out=out).run(None, 0.0)
    assert out.getvalue() == b"a\nb\n"


def test_the_end_by_timeout_before_an_open_transaction_is_the_end_of_what_is_committed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    consumer = FakeConsumer([record(0, b"a")])
    consumer.hindered = RequestTimedOutError("a transaction is open at 1; next: look whose")
    consumer.hindered.reason = StallReason.OPEN_TRANSACTION
    session(consumer).run(None, 0.0)
    assert capsys.readouterr().err == "warning: a transaction is open at 1\nnext: look whose\n"


def test_the_records_asked_for_are_enough_whatever_else_cannot_be_read() -> None:
    consumer = FakeConsumer([record(0, b"a")])
    consumer.hindered = LeaderNotAvailableError("partition orders-1 has no leader")
    session(consumer).run(1, 0.0)


def test_what_the_client_warns_of_is_said_with_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    client = logging.getLogger("penstock.client")
    with client_warnings():
        client.warning("partition %s has no leader; next: start %d brokers", P0, 2)
        client.warning("on we go")
        client.info("not for people")
    assert capsys.readouterr().err == (
        "warning: partition orders-0 has no leader\nnext: start 2 brokers\nwarning: on we go\n"
    )
    assert not client.handlers


def test_a_commit_that_failed_for_good_is_not_tried_again_at_the_end() -> None:
    consumer = FakeConsumer([record(0)])
    asked: list[Mapping[TopicPartition, OffsetAndMetadata]] = []

    def fail(offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        asked.append(offsets)
        raise FencedMemberEpochError("another member has it")

    consumer.commit = fail  # type: ignore[method-assign]  # What the broker does.
    run = session(consumer)
    run._last_commit -= 10  # A commit is due.
    with pytest.raises(FencedMemberEpochError):
        run.run(None, 60.0)
    run.end()
    assert (len(asked), consumer.closed) == (1, True)


def test_reading_goes_on_while_the_coordinator_is_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_COMMIT_SECONDS", 0.0)
    consumer = FakeConsumer(*[[record(offset)] for offset in range(5)])
    take, away = consumer.commit, 3

    def commit(offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        nonlocal away
        away -= 1
        if away >= 0:
            raise RequestTimedOutError("nobody answers")
        take(offsets)

    consumer.commit = commit  # type: ignore[method-assign]  # What the broker does.
    run = session(consumer)
    run.run(5, None)
    assert run.printed == 5
    run.end()
    assert consumer.commits == [{P0: 4}, {P0: 5}]
    told = capsys.readouterr().err
    assert told.count("warning: ") == 1
    assert "reading goes on" in told
    assert "nobody answers" in told
    assert told.count("the group is told again") == 1


def test_a_commit_that_hangs_holds_up_no_reading(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(module, "_SLOW_COMMIT_SECONDS", 0.0)
    consumer = FakeConsumer(*[[record(offset)] for offset in range(5)])
    hangs: list[Future[None]] = []

    def commit_async(_: Mapping[TopicPartition, OffsetAndMetadata]) -> Future[None]:
        hangs.append(Future())
        return hangs[-1]

    consumer.commit_async = commit_async  # type: ignore[method-assign]  # As above.
    run = session(consumer)
    run.run(5, None)
    assert run.printed == 5
    assert len(hangs) == 1, "one at a time"
    assert capsys.readouterr().err.count("warning: ") == 1
    # What was not committed is at the end; what the group took from this member is not.
    other = TopicPartition("orders", 1)
    assert run._pending is not None
    run._pending.offsets[other] = OffsetAndMetadata(9)
    run.on_partitions_lost([other])
    hangs[0].set_exception(RequestTimedOutError("nobody answers"))
    with pytest.raises(RequestTimedOutError):
        run.end()
    assert run._uncommitted == {P0: record(4).position_after}
    assert consumer.closed


@pytest.mark.parametrize(
    ("timeout", "wanted_ms"),
    [(None, 60_000), (0.0, 5_000), (4.0, 5_000), (20.0, 20_000), (600.0, 60_000)],
)
def test_who_is_to_end_soon_waits_no_longer_for_one_answer(
    monkeypatch: pytest.MonkeyPatch, timeout: float | None, wanted_ms: int
) -> None:
    """Of brokers that hang, so that the end does not come a minute later than was asked for."""
    given: list[dict[str, Any]] = []
    monkeypatch.setattr("penstock.client.Consumer", lambda *_, **named: given.append(named))
    settings = Settings("127.0.0.1:1", OutputFormat.TABLE)
    for group in (None, "g"):
        module._connect(settings, group, "latest", timeout, Isolation.READ_COMMITTED)
    assert [named["isolation_level"] for named in given] == ["read_committed"] * 2
    assert [named["default_api_timeout_ms"] for named in given] == [wanted_ms] * 2


def test_what_a_signal_kept_from_being_printed_is_not_gone_past() -> None:
    """It came when the records were handed out, and before anybody had them."""
    out = io.BytesIO()
    consumer = FakeConsumer([record(0)])
    consumer.places = {P0: 1}
    run = session(consumer, out=out)

    def handed_out_and_interrupted() -> None:
        consumer.places = {P0: 3}
        os.kill(os.getpid(), signal.SIGINT)

    consumer.at_end = handed_out_and_interrupted
    with run.interrupt.installed():
        run.run(None, None)
    run.end()
    assert run.interrupt.count == 1
    assert out.getvalue() == b"v\n"
    assert consumer.commits == [{P0: 1}]
    run.on_partitions_revoked([P0])  # As closing does.
    assert consumer.commits == [{P0: 1}]
