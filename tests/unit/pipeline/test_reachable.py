"""What the sink asks before it has tasks write."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.client import (
    AccessForbiddenError,
    BootstrapError,
    PenstockError,
    UnknownTopicOrPartitionError,
)
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


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def sleep(span_s: float) -> None:
        now[0] += span_s

    monkeypatch.setattr(reachable, "monotonic", lambda: now[0])
    monkeypatch.setattr(reachable, "sleep", sleep)
    monkeypatch.setattr(reachable, "_seen", set())


def check(admin: Admin, topic: str | None = "orders", *, once: bool = False) -> None:
    given = {"penstock.bootstrap.servers": "nowhere:9092"}
    options = SinkOptions.load({**given, **({} if topic is None else {"topic": topic})})
    check_target(options, once=once, open_admin=admin)  # type: ignore[arg-type]


def unknown(count: int) -> list[UnknownTopicOrPartitionError]:
    return [UnknownTopicOrPartitionError("no such topic") for _ in range(count)]


def test_a_wrong_address_is_named_with_what_to_do() -> None:
    error = BootstrapError("no bootstrap address could be used; next: start a node there")
    with pytest.raises(
        WriteFailedError,
        match=r"penstock\.bootstrap\.servers=nowhere:9092: BootstrapError: no .*next: start",
    ):
        check(Admin(error))


def test_a_topic_that_is_not_there_is_named_with_what_to_do() -> None:
    with pytest.raises(
        WriteFailedError,
        match=r"no topic orders at nowhere:9092: UnknownTopic.*; next: make it \(`pens",
    ):
        check(Admin(*unknown(1000)))


def test_a_topic_that_a_broker_has_not_heard_of_yet_is_asked_for_again() -> None:
    check(Admin(*unknown(3)))


def test_where_rows_say_the_topic_the_cluster_is_asked() -> None:
    admin = Admin()
    check(admin, None)
    assert admin.asked == [[]]


def test_who_may_write_and_not_ask_is_not_refused() -> None:
    check(Admin(AccessForbiddenError("no right to describe")))


def test_a_query_asks_once() -> None:
    admin = Admin()
    check(admin, once=True)
    check(admin, once=True)
    check(admin)
    assert len(admin.asked) == 2
