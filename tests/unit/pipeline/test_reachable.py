"""What the sink asks before it has tasks write."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from pyspark.sql.types import StructType

from penstock.client import (
    AccessForbiddenError,
    BootstrapError,
    InvalidTopicError,
    PenstockError,
    UnknownTopicOrPartitionError,
)
from penstock.pipeline import datasource
from penstock.pipeline.datasource import PenstockDataSource
from penstock.pipeline.errors import WriteFailedError
from penstock.pipeline.sink import reachable
from penstock.pipeline.sink.reachable import check_target
from penstock.pipeline.sink_options import SinkOptions


class Admin:
    """Answers each question with the next of these errors, and then with none."""

    def __init__(self, *errors: PenstockError) -> None:
        self.errors = list(errors)
        self.asked: list[Any] = []

    def __call__(self, _servers: str, **_settings: Any) -> Admin:
        return self

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def describe_topics(self, names: list[str]) -> None:
        self.asked.append(names)
        if self.errors:
            raise self.errors.pop(0)

    def describe_cluster(self) -> None:
        self.describe_topics([])


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def pass_by(self, span_s: float) -> None:
        self.now_s += span_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(reachable, "monotonic", made)
    monkeypatch.setattr(reachable, "sleep", made.pass_by)
    monkeypatch.setattr(reachable, "_seen", set())
    return made


def check(admin: Admin, topic: str | None = "orders", **settings: str) -> None:
    given = {"penstock.bootstrap.servers": "nowhere:9092", **settings}
    options = SinkOptions.load({**given, **({} if topic is None else {"topic": topic})})
    check_target(options, open_admin=admin)  # type: ignore[arg-type]


def unknown(count: int) -> list[PenstockError]:
    return [UnknownTopicOrPartitionError("no such topic") for _ in range(count)]


def away(count: int) -> list[PenstockError]:
    return [BootstrapError("no address could be used; next: start a node") for _ in range(count)]


def test_a_wrong_address_is_named_with_what_to_do(clock: Clock) -> None:
    with pytest.raises(
        WriteFailedError,
        match=r"written to penstock\.bootstrap\.servers=nowhere:9092: BootstrapError: no .*next: ",
    ):
        check(Admin(*away(10_000)))
    assert 30 <= clock.now_s < 31


def test_who_gives_writes_less_time_is_told_sooner(clock: Clock) -> None:
    impatient = {"penstock.delivery.timeout.ms": "4000", "penstock.linger.ms": "0"}
    with pytest.raises(WriteFailedError, match="BootstrapError"):
        check(Admin(*away(10_000)), **impatient)
    assert 4 <= clock.now_s < 5


def test_an_outage_of_half_a_minute_ends_nothing(clock: Clock) -> None:
    check(Admin(*away(280)))
    assert 27 < clock.now_s < 30


def test_a_topic_that_is_not_there_is_named_with_what_to_do(clock: Clock) -> None:
    with pytest.raises(
        WriteFailedError,
        match=r"written, for there is no topic orders at nowhere:9092: UnknownTopic.*; next: "
        r"make it \(`penstock topics create orders`\)",
    ):
        check(Admin(*unknown(10_000)))
    assert 5 <= clock.now_s < 6


def test_a_topic_that_a_broker_has_not_heard_of_yet_is_asked_for_again() -> None:
    check(Admin(*unknown(3)))


def test_how_long_a_topic_is_absent_counts_from_when_a_broker_said_so(clock: Clock) -> None:
    check(Admin(*away(280), *unknown(40)))
    check(Admin(*unknown(40), *away(1), *unknown(40)), "others")


def test_a_name_that_no_topic_can_have_is_said_at_once(clock: Clock) -> None:
    with pytest.raises(WriteFailedError, match=r"no topic can have the name a b: InvalidTopicE"):
        check(Admin(InvalidTopicError("a blank")), "a b")
    assert clock.now_s == 0


def test_where_rows_say_the_topic_the_cluster_is_asked() -> None:
    admin = Admin()
    check(admin, None)
    assert admin.asked == [[]]


def test_who_may_write_and_not_ask_is_not_refused() -> None:
    check(Admin(AccessForbiddenError("no right to describe")))


def test_a_process_does_not_ask_again_for_what_it_has_found() -> None:
    admin = Admin()
    check(admin)
    check(admin)
    check(admin, "others")
    assert admin.asked == [["orders"], ["others"]]


@pytest.mark.parametrize("kind", ["writer", "streamWriter"])
def test_only_who_plans_a_batch_asks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark hands a pickled source to the process that commits and aborts."""
    asked: list[str | None] = []
    monkeypatch.setattr(datasource, "check_target", lambda options: asked.append(options.topic))
    monkeypatch.setattr(datasource, "settle_in", lambda: None)
    made = PenstockDataSource({"penstock.bootstrap.servers": "nowhere:9092", "topic": "orders"})
    columns = StructType().add("value", "string")
    getattr(made, kind)(columns, overwrite=False)
    assert asked == ["orders"]
    sent = pickle.loads(pickle.dumps(made))
    getattr(sent, kind)(columns, overwrite=False)
    assert asked == ["orders"]
