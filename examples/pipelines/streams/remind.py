"""Reminds those who ordered and do not pay: twice, and then gives the order up.

Events are JSON objects with order_id, event (placed, paid or cancelled) and at. Each order has a
state and a timer of its own. Timers go off when the events' own time has come so far, whether
anything came for that order or not (a Processor with a state store and punctuators, in Kafka
Streams' terms)::

    penstock topics create order-events
    penstock topics create reminders
    python examples/pipelines/streams/remind.py --bootstrap localhost:9092 --after-minutes 30
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import Row
from pyspark.sql import functions as sf
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)

from penstock.pipeline import PipelineError, run_until_stopped, session, start_query
from penstock.pipeline.functions import from_json, to_json
from penstock.pipeline.session import ROCKSDB_STATE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

EVENT: Final = "order_id string, event string, at timestamp"
STEPS: Final = ("first reminder", "second reminder", "given up")


class Reminders(StatefulProcessor):
    """What is to be done about each order: the steps that were taken, and a timer for the next."""

    def __init__(self, after_ms: int) -> None:
        """The first step comes ``after_ms`` after the order, and each further one as long after."""
        self._after_ms = after_ms

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Spark calls this in each task, before anything else."""
        self._handle = handle
        self._state = handle.getValueState("order", "is_settled boolean, steps int")

    def handleInputRows(
        self, key: Any, rows: Iterator[Row], timerValues: TimerValues
    ) -> Iterator[Row]:
        """The events of one order in a batch, in no certain order."""
        events = list(rows)
        last_ms = max(event.at_ms for event in events)
        known = self._state.get()
        if any(event.event in ("paid", "cancelled") for event in events):
            # It is kept for a while: the order itself may come later than its payment.
            for timer_ms in list(self._handle.listTimers()):
                self._handle.deleteTimer(timer_ms)
            self._state.update((True, 0))
            self._set_timer(last_ms, timerValues)
        elif known is None:
            self._state.update((False, 0))
            self._set_timer(last_ms, timerValues)
        return iter(())

    def handleExpiredTimer(
        self, key: Any, timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo
    ) -> Iterator[Row]:
        """The time for an order's next step has come."""
        known = self._state.get()
        assert known is not None  # It goes with the last timer.
        is_settled, steps = known
        if not is_settled:
            yield Row(order_id=key[0], step=STEPS[steps])
            steps += 1
        if is_settled or steps == len(STEPS):
            self._state.clear()
        else:
            self._state.update((False, steps))
            self._set_timer(expiredTimerInfo.getExpiryTimeInMs(), timerValues)

    def _set_timer(self, from_ms: int, timer_values: TimerValues) -> None:
        # Time may have jumped, and Spark takes no timers for what has passed.
        earliest_ms = timer_values.getCurrentWatermarkInMs() + 1
        self._handle.registerTimer(max(from_ms + self._after_ms, earliest_ms))


def remind(records: DataFrame, after_ms: int, grace: str) -> DataFrame:
    """Rows for the sink, one for each step."""
    events = (
        records.select(from_json("value", EVENT, mode="PERMISSIVE").alias("event"))
        .select("event.*")
        .where("order_id IS NOT NULL AND at IS NOT NULL")
        .withWatermark("at", grace)
        .withColumn("at_ms", sf.unix_millis("at"))
    )
    steps = events.groupBy("order_id").transformWithState(
        Reminders(after_ms),
        "order_id string, step string",
        outputMode="Append",
        timeMode="EventTime",
    )
    return steps.select(
        sf.col("order_id").alias("key"), to_json(sf.struct("order_id", "step")).alias("value")
    )


def main() -> None:
    """Go on until Ctrl-C, or with ``--once`` until what is there now is done."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bootstrap", default="localhost:9092", metavar="HOST:PORT")
    parser.add_argument("--events", default="order-events", help="the topic that is read")
    parser.add_argument("--reminders", default="reminders", help="where reminders go")
    parser.add_argument("--after-minutes", type=int, default=30, help="the time between steps")
    parser.add_argument("--grace", default="1 minute", help="how late an event may come")
    parser.add_argument("--checkpoints", default="checkpoints/remind")
    parser.add_argument("--once", action="store_true", help="end when all there is now is done")
    arguments = parser.parse_args()
    cluster = {"penstock.bootstrap.servers": arguments.bootstrap}
    with session("remind", settings=ROCKSDB_STATE) as spark:
        records = (
            spark.readStream.format("penstock")
            .options(**cluster, subscribe=arguments.events, startingOffsets="earliest")
            .load()
        )
        trigger = {"availableNow": True} if arguments.once else {"processingTime": "1 second"}
        query = start_query(
            remind(records, arguments.after_minutes * 60_000, arguments.grace)
            .writeStream.format("penstock")
            .options(**cluster, topic=arguments.reminders, checkpointLocation=arguments.checkpoints)
            .trigger(**trigger)
        )
        run_until_stopped(query)


if __name__ == "__main__":
    try:
        main()
    except PipelineError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
