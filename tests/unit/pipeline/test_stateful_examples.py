"""The examples' processors alone, by Spark's own driver for tests, which needs no Java."""

from __future__ import annotations

from pyspark.sql import Row
from pyspark.sql.streaming.tws_tester import TwsTester

from examples.pipelines.streams.count_customers import Moves
from examples.pipelines.streams.remind import Reminders


def test_who_moves_is_one_less_here_and_one_more_there() -> None:
    tester = TwsTester(Moves())

    def put(*records: tuple[int, str | None]) -> list[tuple[str, int]]:
        rows = [Row(offset=offset, country=country) for offset, country in records]
        return [(row.country, row.change) for row in tester.test("ann", rows)]

    assert put((0, "SE")) == [("SE", 1)]
    assert put((1, "SE")) == []
    # A batch's rows come in no certain order.
    assert put((3, "GB"), (2, "DE")) == [("SE", -1), ("GB", 1)]
    assert tester.peekValueState("country", "ann") == ("GB",)
    assert put((4, None)) == [("GB", -1)]
    assert tester.peekValueState("country", "ann") is None
    assert put((5, None)) == []


def test_an_order_that_nobody_pays_is_reminded_of_and_given_up() -> None:
    tester = TwsTester(
        Reminders(after_ms=100), timeMode="EventTime", eventTimeExtractor=lambda row: row.at_ms
    )

    def happen(name: str, event: str, at_ms: int) -> None:
        assert tester.test(name, [Row(order_id=name, event=event, at_ms=at_ms)]) == []

    def steps(until_ms: int) -> list[tuple[str, str]]:
        return sorted((row.order_id, row.step) for row in tester.setWatermark(until_ms))

    happen("a", "placed", 10)
    happen("b", "placed", 20)
    happen("c", "paid", 30)
    happen("c", "placed", 25)
    assert steps(109) == []
    assert steps(110) == [("a", "first reminder")]
    happen("b", "cancelled", 115)
    assert steps(200) == []
    # Time has jumped over the last step: it is taken as soon as time goes on at all.
    assert steps(1000) == [("a", "second reminder")]
    assert steps(1001) == [("a", "given up")]
    assert [tester.peekValueState("order", name) for name in "abc"] == [None, None, None]
