"""Gives orders what a table says of their customers now.

Orders are JSON objects with order_id, customer and cents. The table is a compacted topic, whose
keys are customers and whose values JSON objects with name and tier. Every batch reads it anew, so
that orders meet what it says then; an order whose customer it does not have, or has no more, goes
without (a left join of a KStream with a GlobalKTable, in Kafka Streams' terms)::

    penstock topics create orders
    penstock topics create customers --config cleanup.policy=compact
    penstock topics create named-orders
    python examples/pipelines/streams/name_customers.py --bootstrap localhost:9092
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from penstock.pipeline import PipelineError, run_until_stopped, session, start_query
from penstock.pipeline.functions import from_json, to_json
from penstock.pipeline.tables import read_table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ORDER = "order_id string, customer string, cents bigint"
CUSTOMER = "name string, tier string"


def name_customers(records: DataFrame, table: DataFrame) -> DataFrame:
    """Rows for the sink, one for each order. ``table`` is of ``read_table``."""
    orders = records.select(from_json("value", ORDER, mode="PERMISSIVE").alias("order"))
    customers = table.select(
        sf.col("key").cast("string").alias("customer"),
        from_json("value", CUSTOMER).alias("is"),
    )
    named = orders.select("order.*").join(customers.select("customer", "is.*"), "customer", "left")
    return named.select(
        sf.col("customer").alias("key"),
        to_json(sf.struct("order_id", "customer", "name", "tier", "cents")).alias("value"),
    )


def naming(
    customers: str, named: str, cluster: Mapping[str, str]
) -> Callable[[DataFrame, int], None]:
    """What ``foreachBatch`` calls with the orders of each batch."""

    def write(orders: DataFrame, _batch_id: int) -> None:
        # Made here it is read anew. Of a table made before the query, Spark reads for ever what
        # was in it when the first batch was planned.
        table = read_table(orders.sparkSession, customers, cluster)
        rows = name_customers(orders, table)
        rows.write.format("penstock").mode("append").options(**cluster, topic=named).save()

    return write


def main() -> None:
    """Go on until Ctrl-C, or with ``--once`` until what is there now is done."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bootstrap", default="localhost:9092", metavar="HOST:PORT")
    parser.add_argument("--orders", default="orders", help="the topic that is read")
    parser.add_argument("--customers", default="customers", help="the table, a compacted topic")
    parser.add_argument("--named", default="named-orders", help="where orders go with names")
    parser.add_argument("--checkpoints", default="checkpoints/name-customers")
    parser.add_argument("--once", action="store_true", help="end when all there is now is done")
    arguments = parser.parse_args()
    cluster = {"penstock.bootstrap.servers": arguments.bootstrap}
    with session("name-customers") as spark:
        orders = (
            spark.readStream.format("penstock")
            .options(**cluster, subscribe=arguments.orders, startingOffsets="earliest")
            .load()
        )
        trigger = {"availableNow": True} if arguments.once else {"processingTime": "1 second"}
        query = start_query(
            orders.writeStream.foreachBatch(naming(arguments.customers, arguments.named, cluster))
            .option("checkpointLocation", arguments.checkpoints)
            .trigger(**trigger)
        )
        run_until_stopped(query)


if __name__ == "__main__":
    try:
        main()
    except PipelineError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
