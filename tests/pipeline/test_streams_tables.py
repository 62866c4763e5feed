"""Tables in compacted topics: read, joined, kept by upserts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from examples.pipelines.streams.enrich import COUNTRIES, enrich
from examples.pipelines.streams.name_customers import naming
from examples.pipelines.streams.totals import totals
from penstock.client import AdminClient, UnknownTopicOrPartitionError
from penstock.pipeline import OptionError, SchemaError
from penstock.pipeline.tables import latest_by_key, read_table, upserts_into
from tests.pipeline.logs import read
from tests.pipeline.streams import COMPACTED, Streams

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def table(rows: DataFrame) -> dict[str, str]:
    """Keys and values; a key that comes twice is an error."""
    found = [(bytes(row.key).decode(), row.value) for row in rows.collect()]
    assert len(dict(found)) == len(found)
    return {key: value and bytes(value).decode() for key, value in found}


def test_orders_are_sorted_out_and_enriched(streams: Streams) -> None:
    orders, good, refused = (streams.topic(name) for name in ("orders", "good", "refused"))
    countries = streams.spark.read.option("header", "true").csv(str(COUNTRIES))

    def run() -> None:
        streams.run(enrich(streams.stream(orders), countries, good, refused))

    def order(country: str | None, cents: int) -> dict[str, object]:
        return {"order_id": "1", "customer": "ann", "country": country, "cents": cents}

    streams.send(orders, order("SE", 5), order("SE", 0), order("Mars", 5), b"{", None, key="k")
    run()
    streams.crash()
    streams.send(orders, order(None, 7), order("DE", 7))
    run()
    more = {"order_id": "1", "customer": "ann", "at": None}
    assert streams.written(good) == {
        "ann": [
            {**more, "country": "SE", "cents": 5, "name": "Sweden", "currency": "SEK"},
            {**more, "country": "DE", "cents": 7, "name": "Germany", "currency": "EUR"},
        ]
    }
    values = [(record.key, record.value) for record in read(streams.cluster, refused)]
    assert sorted(values, key=repr) == sorted(
        [
            (b"k", b'{"order_id": "1", "customer": "ann", "country": "SE", "cents": 0}'),
            (b"k", b'{"order_id": "1", "customer": "ann", "country": "Mars", "cents": 5}'),
            (b"k", b"{"),
            (b"k", None),
            (None, b'{"order_id": "1", "customer": "ann", "country": null, "cents": 7}'),
        ],
        key=repr,
    )


def test_a_table_has_what_each_key_said_last(streams: Streams) -> None:
    topic = streams.topic("table", **COMPACTED)
    streams.put(topic, a=b"1", b=b"1", c=b"1", d=b"1")
    streams.put(topic, a=b"2", c=None, d=None)
    streams.put(topic, d=b"3")
    found = read_table(streams.spark, topic, streams.options)
    assert table(found) == {"a": "2", "b": "1", "d": "3"}
    assert found.columns == [
        "key", "value", "topic", "partition", "offset", "timestamp", "timestampType"
    ]  # fmt: skip
    with_deleted = latest_by_key(
        streams.spark.read.format("penstock").options(**streams.options, subscribe=topic).load()
    )
    assert table(with_deleted) == {"a": "2", "b": "1", "c": None, "d": "3"}


def test_of_a_key_in_two_partitions_the_newer_one_counts(streams: Streams) -> None:
    topic = streams.topic("table", **COMPACTED)
    for number in range(20):
        streams.put(topic, **{f"k{number}": b"old"})
    with AdminClient(streams.cluster.bootstrap) as admin:
        admin.create_partitions(topic, 7)
    for number in range(0, 20, 2):
        streams.put(topic, **{f"k{number}": b"new"})
    records = read(streams.cluster, topic)
    assert len({(record.key, record.partition) for record in records}) > 20
    assert table(read_table(streams.spark, topic, streams.options)) == {
        f"k{number}": "old" if number % 2 else "new" for number in range(20)
    }


def test_every_batch_meets_the_table_as_it_is_then(streams: Streams) -> None:
    orders, customers = streams.topic("orders"), streams.topic("customers", **COMPACTED)
    target = streams.topic("named")

    def send(*orders_of: tuple[str, str]) -> None:
        for number, customer in orders_of:
            streams.send(orders, {"order_id": number, "customer": customer, "cents": 1})

    streams.put(customers, ann={"name": "Ann", "tier": "gold"}, bob={"name": "Bob"})
    streams.put(customers, ann={"name": "Anna", "tier": "gold"})
    send(("1", "ann"), ("2", "bob"), ("3", "cid"))
    writer = streams.stream(orders).writeStream
    # In one run, for it is the running query that has to look again.
    query = streams.start(writer.foreachBatch(naming(customers, target, streams.options)))
    streams.wait_for(query, lambda: sum(map(len, streams.written(target).values())) == 3)
    streams.put(customers, bob=None, cid={"name": "Cid"}, ann={"name": "Annie", "tier": "none"})
    send(("4", "ann"), ("5", "bob"), ("6", "cid"))
    streams.wait_for(query, lambda: sum(map(len, streams.written(target).values())) == 6)
    query.stop()
    found = {
        value["order_id"]: (value["name"], value["tier"])
        for values in streams.written(target).values()
        for value in values
    }
    assert found == {
        "1": ("Anna", "gold"), "2": ("Bob", None), "3": (None, None),
        "4": ("Annie", "none"), "5": (None, None), "6": ("Cid", None),
    }  # fmt: skip


def test_totals_that_change_are_upserted_once(streams: Streams) -> None:
    orders, target = streams.topic("orders"), streams.topic("totals", **COMPACTED)

    def send(*amounts: tuple[str, int]) -> None:
        streams.send(orders, *[{"customer": name, "cents": cents} for name, cents in amounts])

    def run() -> None:
        writer = totals(streams.stream(orders)).writeStream.outputMode("update")
        streams.finish(writer.foreachBatch(upserts_into(target, streams.options)))

    send(("ann", 5), ("bob", 7), ("ann", 1))
    streams.send(orders, b"no JSON")
    run()
    streams.crash()
    run()
    send(("bob", 2))
    run()
    assert streams.written(target) == {
        "ann": [{"orders": 2, "cents": 6}],
        "bob": [{"orders": 1, "cents": 7}, {"orders": 2, "cents": 9}],
    }
    assert table(read_table(streams.spark, target, streams.options)).keys() == {"ann", "bob"}


def test_the_last_of_a_batchs_rows_for_a_key_is_upserted(streams: Streams) -> None:
    source, target = streams.topic("source"), streams.topic("copy", **COMPACTED)
    streams.put(source, a=b"1", b=b"1")
    streams.put(source, a=b"2", b=None)
    rows = streams.stream(source).select("key", "value", "offset")
    upsert = upserts_into(target, streams.options, latest_by="offset")
    streams.finish(rows.writeStream.foreachBatch(upsert))
    assert streams.written(target) == {"a": [2], "b": [None]}


def test_upserts_want_a_compacted_topic_and_its_columns(streams: Streams) -> None:
    topic = streams.topic("log")
    with pytest.raises(OptionError, match=r"cleanup.policy=delete.*penstock topics alter"):
        upserts_into(topic, streams.options)
    with pytest.raises(UnknownTopicOrPartitionError):
        upserts_into(f"{topic}-not", streams.options)
    upsert = upserts_into(streams.topic("table", **COMPACTED), streams.options, latest_by="at")
    with pytest.raises(SchemaError, match="no column at, value"):
        upsert(streams.spark.sql("SELECT 'a' AS key, 1 AS number"), 0)
