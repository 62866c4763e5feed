"""Matches orders with their payments, and tells which orders nobody paid in time.

Both are JSON objects: orders with order_id, customer, cents and at, payments with order_id,
paid_cents and paid_at. A payment counts when it comes within ``--within`` of its order, by the
records' own times. An order without one is written with ``paid_at`` null, when no payment can come
any more (a KStream-KStream left join with JoinWindows and a grace period, in Kafka Streams'
terms)::

    penstock topics create orders
    penstock topics create payments
    penstock topics create matched-orders
    python examples/pipelines/streams/match_payments.py --bootstrap localhost:9092
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from penstock.pipeline import PipelineError, run_until_stopped, session, start_query
from penstock.pipeline.functions import from_json, to_json

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ORDER = "order_id string, customer string, cents bigint, at timestamp"
PAYMENT = "order_id string, paid_cents bigint, paid_at timestamp"


def match(orders: DataFrame, payments: DataFrame, within: str, grace: str) -> DataFrame:
    """Rows for the sink: each order once for each of its payments, or once without."""
    placed = (
        orders.select(from_json("value", ORDER, mode="PERMISSIVE").alias("order"))
        .select("order.*")
        .withWatermark("at", grace)
    )
    paid = (
        payments.select(from_json("value", PAYMENT, mode="PERMISSIVE").alias("payment"))
        .select(
            sf.col("payment.order_id").alias("paid_order"), "payment.paid_cents", "payment.paid_at"
        )
        .withWatermark("paid_at", grace)
    )
    matched = placed.join(
        paid,
        sf.expr(f"order_id = paid_order AND paid_at BETWEEN at AND at + INTERVAL {within}"),
        "leftOuter",
    )
    return matched.select(
        sf.col("order_id").alias("key"),
        to_json(sf.struct("order_id", "customer", "cents", "at", "paid_cents", "paid_at")).alias(
            "value"
        ),
    )


def main() -> None:
    """Go on until Ctrl-C, or with ``--once`` until what is there now is done."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bootstrap", default="localhost:9092", metavar="HOST:PORT")
    parser.add_argument("--orders", default="orders", help="a topic that is read")
    parser.add_argument("--payments", default="payments", help="the other one")
    parser.add_argument("--matched", default="matched-orders", help="where they go together")
    parser.add_argument("--within", default="1 hour", help="the time there is to pay")
    parser.add_argument("--grace", default="1 minute", help="how late a record may come")
    parser.add_argument("--checkpoints", default="checkpoints/match-payments")
    parser.add_argument("--once", action="store_true", help="end when all there is now is done")
    arguments = parser.parse_args()
    cluster = {"penstock.bootstrap.servers": arguments.bootstrap}
    with session("match-payments") as spark:
        orders, payments = (
            spark.readStream.format("penstock")
            .options(**cluster, subscribe=topic, startingOffsets="earliest")
            .load()
            for topic in (arguments.orders, arguments.payments)
        )
        trigger = {"availableNow": True} if arguments.once else {"processingTime": "1 second"}
        query = start_query(
            match(orders, payments, arguments.within, arguments.grace)
            .writeStream.format("penstock")
            .options(**cluster, topic=arguments.matched, checkpointLocation=arguments.checkpoints)
            .trigger(**trigger)
        )
        run_until_stopped(query)


if __name__ == "__main__":
    try:
        main()
    except PipelineError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
