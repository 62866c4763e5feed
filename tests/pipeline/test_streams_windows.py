"""The examples that go by time: windows, joins of streams, deduplication."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as sf

from examples.pipelines.streams.deduplicate import deduplicate
from examples.pipelines.streams.match_payments import match
from examples.pipelines.streams.revenue import revenue
from tests.pipeline.streams import Streams, at, minutes

if TYPE_CHECKING:
    from pyspark.sql import Column

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def order(minute: float, cents: int, country: str = "DE") -> dict[str, object]:
    return {"country": country, "cents": cents, "at": at(minute)}


def sums(found: dict[str, list[Any]]) -> set[tuple[str, float, float, int, int]]:
    """Country, start and end in minutes, orders and cents."""
    rows = [value for values in found.values() for value in values]
    as_set = {
        (row["country"], minutes(row["start"]), minutes(row["end"]), row["orders"], row["cents"])
        for row in rows
    }
    assert len(as_set) == len(rows), "a window was written twice"
    return as_set


def test_a_window_is_written_once_and_without_what_comes_too_late(streams: Streams) -> None:
    orders, target = streams.topic("orders"), streams.topic("revenue")

    def run() -> None:
        rows = revenue(streams.stream(orders), sf.window("at", "1 minute"), "30 seconds")
        streams.run(rows, topic=target)

    streams.send(orders, order(0.1, 5), order(0.9, 6), order(0.5, 7, "SE"), order(2, 1), b"no JSON")
    run()
    first = {("DE", 0, 1, 2, 11), ("SE", 0, 1, 1, 7)}
    assert sums(streams.written(target)) == first
    streams.crash()
    # The first minute is written, and 1.5 is as far as time has come for those who are late.
    streams.send(orders, order(0.2, 1000), order(1.6, 8), order(2.1, 2), order(4, 1))
    run()
    assert sums(streams.written(target)) == first | {("DE", 1, 2, 1, 8), ("DE", 2, 3, 2, 3)}


@pytest.mark.parametrize(
    ("window", "wanted"),
    [
        (
            sf.window,
            {("DE", -1, 1, 1, 1), ("DE", 0, 2, 2, 3), ("DE", 1, 3, 1, 2), ("DE", 4, 6, 1, 4),
             ("DE", 5, 7, 1, 4)},
        ),
        (sf.session_window, {("DE", 0.5, 3.5, 2, 3), ("DE", 5.5, 7.5, 1, 4)}),
    ],
    ids=["overlapping", "sessions"],
)  # fmt: skip
def test_windows_of_other_kinds(streams: Streams, window: Any, wanted: Any) -> None:
    orders, target = streams.topic("orders"), streams.topic("revenue")
    streams.send(orders, order(0.5, 1), order(1.5, 2), order(5.5, 4), order(30, 9))
    of: Column = window("at", "2 minutes", *["1 minute"] if window is sf.window else [])
    streams.run(revenue(streams.stream(orders), of, "1 minute"), topic=target)
    assert sums(streams.written(target)) == wanted


def test_orders_meet_their_payments_or_are_told_to_have_none(streams: Streams) -> None:
    orders, payments = streams.topic("orders"), streams.topic("payments")
    target = streams.topic("matched")

    def place(name: str, minute: float) -> None:
        streams.send(orders, {"order_id": name, "customer": "ann", "cents": 9, "at": at(minute)})

    def pay(name: str, minute: float, cents: int = 9) -> None:
        streams.send(payments, {"order_id": name, "paid_cents": cents, "paid_at": at(minute)})

    def run() -> dict[str, list[tuple[int | None, float | None]]]:
        rows = match(streams.stream(orders), streams.stream(payments), "1 hour", "5 minutes")
        streams.run(rows, topic=target)
        return {
            name: sorted(
                (value["paid_cents"], value["paid_at"] and minutes(value["paid_at"]))
                for value in values
            )
            for name, values in streams.written(target).items()
        }

    place("now", 0)
    place("in parts", 1)
    place("never", 2)
    place("too late", 3)
    pay("now", 0.5)
    pay("in parts", 2, 4)
    pay("nobody's", 3)
    matched = run()
    assert matched == {"now": [(9, 0.5)], "in parts": [(4, 2)]}
    # Time stands still, so that the last batch is the one that writes.
    pay("in parts", 3, 1)
    matched = run()
    assert matched == {"now": [(9, 0.5)], "in parts": [(1, 3), (4, 2)]}
    streams.crash()
    pay("in parts", 20, 5)
    pay("too late", 64)
    place("later", 80)
    pay("later", 80)
    # Now both streams have come so far that the hour is over for the first orders.
    place("last", 200)
    pay("other", 200)
    matched = run()
    assert matched == {
        "now": [(9, 0.5)],
        "in parts": [(1, 3), (4, 2), (5, 20)],
        "never": [(None, None)],
        "too late": [(None, None)],
        "later": [(9, 80)],
    }


def test_each_order_passes_once(streams: Streams) -> None:
    orders, target = streams.topic("orders"), streams.topic("unique")

    def send(*entries: tuple[str, float, int]) -> None:
        for name, minute, copy in entries:
            value = {"order_id": name, "at": at(minute), "copy": copy}
            streams.send(orders, value, key=name)

    def run() -> dict[str, list[int]]:
        streams.run(deduplicate(streams.stream(orders), "10 minutes"), topic=target)
        found = streams.written(target)
        return {name: [value["copy"] for value in values] for name, values in found.items()}

    send(("a", 0, 1), ("b", 1, 1), ("a", 0, 2), ("b", 3, 2))
    streams.send(orders, b"no JSON", {"at": at(0)}, {"order_id": "timeless"})
    assert run() == {"a": [1], "b": [1]}
    # Time stands still, so that the last batch is the one that writes.
    send(("a", 2, 3), ("c", 3, 1), ("c", 3, 2))
    assert run() == {"a": [1], "b": [1], "c": [1]}
    streams.crash()
    send(("e", 3, 1))
    assert run() == {"a": [1], "b": [1], "c": [1], "e": [1]}
    # Time goes on, and what is forgotten by then passes again.
    send(("d", 60, 1))
    run()
    send(("a", 61, 4), ("c", 3, 3))
    assert run() == {"a": [1, 4], "b": [1], "c": [1], "d": [1], "e": [1]}
