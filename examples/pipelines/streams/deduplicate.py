"""Passes each order on once, however often it was sent.

Orders are JSON objects with order_id and at. One whose order_id came before is left out, as long
as the one before is remembered: for ``--remember`` at least, by the orders' own time. What is no
order, or has no order_id or time, is left out as well::

    penstock topics create orders
    penstock topics create unique-orders
    python examples/pipelines/streams/deduplicate.py --bootstrap localhost:9092
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from penstock.pipeline import PipelineError, run_until_stopped, session, start_query
from penstock.pipeline.functions import from_json

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ORDER = "order_id string, at timestamp"


def deduplicate(records: DataFrame, remember: str) -> DataFrame:
    """Rows for the sink, with key and value as they came."""
    order = from_json("value", ORDER, mode="PERMISSIVE")
    orders = records.select("key", "value", order.alias("order")).select("key", "value", "order.*")
    return (
        orders.where("order_id IS NOT NULL AND at IS NOT NULL")
        .withWatermark("at", remember)
        .dropDuplicatesWithinWatermark(["order_id"])
        .select("key", "value")
    )


def main() -> None:
    """Go on until Ctrl-C, or with ``--once`` until what is there now is done."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bootstrap", default="localhost:9092", metavar="HOST:PORT")
    parser.add_argument("--orders", default="orders", help="the topic that is read")
    parser.add_argument("--unique", default="unique-orders", help="where each goes once")
    parser.add_argument("--remember", default="1 hour", help="how far copies lie apart at most")
    parser.add_argument("--checkpoints", default="checkpoints/deduplicate")
    parser.add_argument("--once", action="store_true", help="end when all there is now is done")
    arguments = parser.parse_args()
    cluster = {"penstock.bootstrap.servers": arguments.bootstrap}
    with session("deduplicate") as spark:
        records = (
            spark.readStream.format("penstock")
            .options(**cluster, subscribe=arguments.orders, startingOffsets="earliest")
            .load()
        )
        trigger = {"availableNow": True} if arguments.once else {"processingTime": "1 second"}
        query = start_query(
            deduplicate(records, arguments.remember)
            .writeStream.format("penstock")
            .options(**cluster, topic=arguments.unique, checkpointLocation=arguments.checkpoints)
            .trigger(**trigger)
        )
        run_until_stopped(query)


if __name__ == "__main__":
    try:
        main()
    except PipelineError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
