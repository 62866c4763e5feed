"""Sorts orders out, and gives those that are good what a list knows of their country.

Values are JSON objects with order_id, customer, country, cents and at. Orders whose country the
list has go to one topic, with its name and currency; what is no order, or for nothing, goes to
another one as it came. Both are written at once, and once (filter, mapValues, branch and a join
with a GlobalKTable, in Kafka Streams' terms)::

    penstock topics create orders
    penstock topics create good-orders
    penstock topics create refused-orders
    python examples/pipelines/streams/enrich.py --bootstrap localhost:9092
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from penstock.pipeline import PipelineError, run_until_stopped, session, start_query
from penstock.pipeline.functions import from_json, to_json

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ORDER = "order_id string, customer string, country string, cents bigint, at timestamp"
COUNTRIES = Path(__file__).with_name("countries.csv")


def enrich(records: DataFrame, countries: DataFrame, good: str, refused: str) -> DataFrame:
    """Rows for the sink, each with the topic that it belongs to.

    ``countries`` has the columns country, name and currency.
    """
    orders = records.withColumn("order", from_json("value", ORDER, mode="PERMISSIVE"))
    named = orders.join(
        sf.broadcast(countries), sf.col("order.country") == countries["country"], "left"
    )
    is_good = sf.expr("order.cents > 0 AND name IS NOT NULL")
    enriched = to_json(sf.struct("order.*", "name", "currency"))
    return named.select(
        sf.when(is_good, sf.lit(good)).otherwise(sf.lit(refused)).alias("topic"),
        sf.when(is_good, sf.col("order.customer").cast("binary"))
        .otherwise(sf.col("key"))
        .alias("key"),
        sf.when(is_good, enriched).otherwise(sf.col("value")).alias("value"),
    )


def main() -> None:
    """Go on until Ctrl-C, or with ``--once`` until what is there now is done."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bootstrap", default="localhost:9092", metavar="HOST:PORT")
    parser.add_argument("--orders", default="orders", help="the topic that is read")
    parser.add_argument("--good", default="good-orders", help="where good ones go")
    parser.add_argument("--refused", default="refused-orders", help="where the others go")
    parser.add_argument("--countries", type=Path, default=COUNTRIES, help="the list, a CSV file")
    parser.add_argument("--checkpoints", default="checkpoints/enrich")
    parser.add_argument("--once", action="store_true", help="end when all there is now is done")
    arguments = parser.parse_args()
    cluster = {"penstock.bootstrap.servers": arguments.bootstrap}
    with session("enrich") as spark:
        records = (
            spark.readStream.format("penstock")
            .options(**cluster, subscribe=arguments.orders, startingOffsets="earliest")
            .load()
        )
        countries = spark.read.option("header", "true").csv(str(arguments.countries))
        trigger = {"availableNow": True} if arguments.once else {"processingTime": "1 second"}
        query = start_query(
            enrich(records, countries, arguments.good, arguments.refused)
            .writeStream.format("penstock")
            .options(**cluster, checkpointLocation=arguments.checkpoints)
            .trigger(**trigger)
        )
        run_until_stopped(query)


if __name__ == "__main__":
    try:
        main()
    except PipelineError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
