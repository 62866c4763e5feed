"""Keeps a table of how many customers each country has, from the table of customers.

Customers are a compacted topic: keys are customers, values JSON objects with country. Who moves is
one less there and one more here, who is deleted counts no more, and a country that nobody is left
in is deleted from the result, which is a compacted topic as well (table(), groupBy() and count(),
in Kafka Streams' terms; the topic in between is the repartition topic)::

    penstock topics create customers --config cleanup.policy=compact
    penstock topics create moves
    penstock topics create countries --config cleanup.policy=compact
    python examples/pipelines/streams/count_customers.py --bootstrap localhost:9092
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import Row
from pyspark.sql import functions as sf
from pyspark.sql.streaming.stateful_processor import (
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)

from penstock.client import PenstockError
from penstock.pipeline import PipelineError, run_until_stopped, session, start_query
from penstock.pipeline.functions import from_json, to_json
from penstock.pipeline.session import ROCKSDB_STATE
from penstock.pipeline.tables import upserts_into

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

CUSTOMER = "country string"
CHANGE = "change bigint"


class Moves(StatefulProcessor):
    """Knows where each customer is, and says who leaves a country and who comes to one."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """What is kept for each customer."""
        self.country = handle.getValueState("country", "country string")

    def handleInputRows(
        self, key: Any, rows: Iterator[Row], timerValues: TimerValues
    ) -> Iterator[Row]:
        """Of a customer's records in a batch the last one counts."""
        there = self.country.get()
        before = there[0] if there else None
        after = max(rows, key=lambda row: row.offset).country
        if after == before:
            return
        if before is not None:
            yield Row(country=before, change=-1)
        if after is None:
            self.country.clear()
        else:
            self.country.update((after,))
            yield Row(country=after, change=1)


def moves(customers: DataFrame) -> DataFrame:
    """Rows for the topic in between: keys are countries, values say one more or one less."""
    records = customers.select(
        sf.col("key").cast("string").alias("customer"),
        "offset",
        from_json("value", CUSTOMER)["country"].alias("country"),
    )
    changes = records.groupBy("customer").transformWithState(
        Moves(), "country string, change bigint", outputMode="Append", timeMode="None"
    )
    return changes.select(
        sf.col("country").alias("key"), to_json(sf.struct("change")).alias("value")
    )


def count(records: DataFrame) -> DataFrame:
    """Rows of the result; as a stream in the output mode update, those that change."""
    counts = records.groupBy("key").agg(
        sf.sum(from_json("value", CHANGE)["change"]).alias("customers")
    )
    value = sf.when(sf.col("customers") > 0, to_json(sf.struct("customers")))
    return counts.select("key", value.alias("value"))


def main() -> None:
    """Go on until Ctrl-C, or with ``--once`` until what is there now is done."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bootstrap", default="localhost:9092", metavar="HOST:PORT")
    parser.add_argument("--customers", default="customers", help="the table that is read")
    parser.add_argument("--moves", default="moves", help="the topic in between")
    parser.add_argument("--countries", default="countries", help="the table that is kept")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints/count-customers"))
    parser.add_argument("--once", action="store_true", help="end when all there is now is done")
    arguments = parser.parse_args()
    cluster = {"penstock.bootstrap.servers": arguments.bootstrap}
    trigger = {"availableNow": True} if arguments.once else {"processingTime": "1 second"}
    with session("count-customers", settings=ROCKSDB_STATE) as spark:

        def stream(topic: str) -> DataFrame:
            return (
                spark.readStream.format("penstock")
                .options(**cluster, subscribe=topic, startingOffsets="earliest")
                .load()
            )

        moving = start_query(
            moves(stream(arguments.customers))
            .writeStream.format("penstock")
            .options(**cluster, topic=arguments.moves)
            .option("checkpointLocation", str(arguments.checkpoints / "moves"))
            .trigger(**trigger)
        )
        if arguments.once:
            run_until_stopped(moving)
        counting = start_query(
            count(stream(arguments.moves))
            .writeStream.outputMode("update")
            .foreachBatch(upserts_into(arguments.countries, cluster))
            .option("checkpointLocation", str(arguments.checkpoints / "counts"))
            .trigger(**trigger)
        )
        run_until_stopped(moving, counting)


if __name__ == "__main__":
    try:
        main()
    except (PipelineError, PenstockError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
