"""Keeps a table of what each customer has ordered so far, in a compacted topic.

Orders are JSON objects with customer and cents. Each batch writes the totals that it changed, and
no others; the topic is the table's changelog, and after compaction the table (groupByKey,
aggregate and toStream().to(), in Kafka Streams' terms)::

    penstock topics create orders
    penstock topics create totals --config cleanup.policy=compact
    python examples/pipelines/streams/totals.py --bootstrap localhost:9092
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from penstock.client import PenstockError
from penstock.pipeline import PipelineError, run_until_stopped, session, start_query
from penstock.pipeline.functions import from_json, to_json
from penstock.pipeline.tables import upserts_into

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ORDER = "customer string, cents bigint"


def totals(records: DataFrame) -> DataFrame:
    """Rows of the table; as a stream in the output mode update, those that change."""
    orders = records.select(from_json("value", ORDER, mode="PERMISSIVE").alias("order"))
    sums = (
        orders.where("order.customer IS NOT NULL")
        .groupBy(sf.col("order.customer").alias("key"))
        .agg(sf.count("*").alias("orders"), sf.sum("order.cents").alias("cents"))
    )
    return sums.select("key", to_json(sf.struct("orders", "cents")).alias("value"))


def main() -> None:
    """Go on until Ctrl-C, or with ``--once`` until what is there now is done."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bootstrap", default="localhost:9092", metavar="HOST:PORT")
    parser.add_argument("--orders", default="orders", help="the topic that is read")
    parser.add_argument("--totals", default="totals", help="the table, a compacted topic")
    parser.add_argument("--checkpoints", default="checkpoints/totals")
    parser.add_argument("--once", action="store_true", help="end when all there is now is done")
    arguments = parser.parse_args()
    cluster = {"penstock.bootstrap.servers": arguments.bootstrap}
    with session("totals") as spark:
        records = (
            spark.readStream.format("penstock")
            .options(**cluster, subscribe=arguments.orders, startingOffsets="earliest")
            .load()
        )
        trigger = {"availableNow": True} if arguments.once else {"processingTime": "1 second"}
        query = start_query(
            totals(records)
            .writeStream.outputMode("update")
            .foreachBatch(upserts_into(arguments.totals, cluster))
            .option("checkpointLocation", arguments.checkpoints)
            .trigger(**trigger)
        )
        run_until_stopped(query)


if __name__ == "__main__":
    try:
        main()
    except (PipelineError, PenstockError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
