"""Adds up what each country orders in windows of time, and says each window's sum once.

Orders are JSON objects with country, cents and at. Time is the orders' own. A window is written
when it is over and late orders have had their time (``--grace``); what comes later than that is
left out. Windows follow each other, overlap (``--slide``), or end where nothing was ordered for a
while (``--gap``): tumbling, hopping and session windows, in Kafka Streams' terms, with a grace
period and suppress(untilWindowCloses)::

    penstock topics create orders
    penstock topics create revenue
    python examples/pipelines/streams/revenue.py --bootstrap localhost:9092 --window "1 minute"
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from penstock.pipeline import PipelineError, run_until_stopped, session, start_query
from penstock.pipeline.functions import from_json, to_json

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

ORDER = "country string, cents bigint, at timestamp"


def revenue(records: DataFrame, window: Column, grace: str) -> DataFrame:
    """Rows for the sink, one for each window and country. ``window`` is over the column ``at``."""
    orders = records.select(from_json("value", ORDER, mode="PERMISSIVE").alias("order"))
    sums = (
        orders.select("order.*")
        .withWatermark("at", grace)
        .groupBy(window.alias("window"), "country")
        .agg(sf.count("*").alias("orders"), sf.sum("cents").alias("cents"))
    )
    return sums.select(
        sf.col("country").alias("key"),
        to_json(sf.struct("country", "window.start", "window.end", "orders", "cents")).alias(
            "value"
        ),
    )


def main() -> None:
    """Go on until Ctrl-C, or with ``--once`` until what is there now is done."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bootstrap", default="localhost:9092", metavar="HOST:PORT")
    parser.add_argument("--orders", default="orders", help="the topic that is read")
    parser.add_argument("--revenue", default="revenue", help="where the sums go")
    parser.add_argument("--window", default="1 minute", help="how long a window is")
    parser.add_argument("--slide", help="how long after a window the next one begins")
    parser.add_argument("--gap", help="windows end after so long without an order, instead")
    parser.add_argument("--grace", default="10 seconds", help="how late an order may come")
    parser.add_argument("--checkpoints", default="checkpoints/revenue")
    parser.add_argument("--once", action="store_true", help="end when all there is now is done")
    arguments = parser.parse_args()
    cluster = {"penstock.bootstrap.servers": arguments.bootstrap}
    if arguments.gap:
        window = sf.session_window("at", arguments.gap)
    else:
        window = sf.window("at", arguments.window, arguments.slide)
    with session("revenue") as spark:
        records = (
            spark.readStream.format("penstock")
            .options(**cluster, subscribe=arguments.orders, startingOffsets="earliest")
            .load()
        )
        trigger = {"availableNow": True} if arguments.once else {"processingTime": "1 second"}
        query = start_query(
            revenue(records, window, arguments.grace)
            .writeStream.format("penstock")
            .options(**cluster, topic=arguments.revenue, checkpointLocation=arguments.checkpoints)
            .trigger(**trigger)
        )
        run_until_stopped(query)


if __name__ == "__main__":
    try:
        main()
    except PipelineError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
