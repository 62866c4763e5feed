"""Flags samples of metrics that lie far from what their series did in the last two days.

The topic ``metrics`` has samples, keyed by the name of their series, as ``{"time": ..., "value":
...}``. Each is compared with the mean and the standard deviation of the 576 samples before it, and
goes with both to the topic ``metric-statistics``; what is further away than five deviations goes to
``anomalies`` as well. Topics are made where they are missing. Run it with ``penstock dev``::

    python examples/pipelines/cloud_metrics/detect.py localhost:9092 --work work

It ends by Ctrl-C, or with ``--once`` when everything that was there is done.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pandas as pd
from pyspark.sql import functions as sf
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from penstock.client import AdminClient, PenstockError
from penstock.pipeline import PipelineError, run_until_stopped, session, start_query

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

METRICS: Final = "metrics"
STATISTICS: Final = "metric-statistics"
ANOMALIES: Final = "anomalies"
WINDOW: Final = 576
"""Samples: two days of one in five minutes."""
LEAST: Final = 144
"""Before there are so many nothing is flagged."""
LIMIT: Final = 5.0
"""Standard deviations."""

SETTINGS: Final = {
    "spark.sql.session.timeZone": "UTC",
    # transformWithState keeps its state nowhere else.
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
}
_SAMPLE: Final = "time string, value double"
_RESULT: Final = (
    "series string, time string, value double, mean double, deviation double, anomaly boolean"
)
_CHUNK: Final = 4_096


class Rolling(StatefulProcessor):
    """Of each series keeps the last samples, and compares each new one with those before it."""

    def init(self, handle: Any) -> None:
        """Spark gives the state."""
        self._last = handle.getValueState("last", "samples array<double>")

    def handleInputRows(  # noqa: N802 - Spark's name.
        self,
        key: Any,
        rows: Iterator[pd.DataFrame],
        timerValues: Any,  # noqa: N803 - Spark's name.
    ) -> Iterator[pd.DataFrame]:
        """The new samples of a series, in any order; they are taken in the order of the topic."""
        new = pd.concat(rows).sort_values("offset")
        values = new["value"].to_numpy(dtype=float)
        found = self._last.get()
        before = np.array(found[0] if found else [], dtype=float)
        mean, deviation = statistics(before, values)
        self._last.update((np.concatenate([before, values])[-WINDOW:].tolist(),))
        yield pd.DataFrame(
            {
                "series": key[0],
                "time": new["time"].to_numpy(),
                "value": values,
                "mean": mean,
                "deviation": deviation,
                "anomaly": np.abs(values - mean) > LIMIT * deviation,
            }
        )

    def close(self) -> None:
        """Nothing is open."""


def statistics(before: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the samples before each value; NaN where they are too few.

    Each window is added up anew: sums that are carried on gather errors, and a series that stands
    still would seem to move.
    """
    both = np.concatenate([np.full(WINDOW, np.nan), before, values])[-WINDOW - len(values) : -1]
    windows = np.lib.stride_tricks.sliding_window_view(both, WINDOW)
    mean = np.full(len(values), np.nan)
    deviation = np.full(len(values), np.nan)
    for start in range(0, len(values), _CHUNK):
        part = windows[start : start + _CHUNK]
        enough = np.count_nonzero(~np.isnan(part), axis=1) >= LEAST
        place = start + np.flatnonzero(enough)
        mean[place] = np.nanmean(part[enough], axis=1)
        deviation[place] = np.nanstd(part[enough], axis=1)
    return mean, deviation


def start(spark: SparkSession, bootstrap: str, work: str) -> StreamingQuery:
    """Start the query, with its checkpoint under ``work``."""
    where = {"penstock.bootstrap.servers": bootstrap}
    records = (
        spark.readStream.format("penstock")
        .options(**where, subscribe=METRICS, startingOffsets="earliest")
        .load()
    )
    samples = records.select(
        sf.col("key").cast("string").alias("series"),
        "offset",
        sf.from_json(sf.col("value").cast("string"), _SAMPLE).alias("sample"),
    ).select("series", "offset", "sample.*")
    return start_query(
        _records(
            samples.groupBy("series").transformWithStateInPandas(
                Rolling(), _RESULT, outputMode="append", timeMode="none"
            )
        )
        .writeStream.format("penstock")
        .options(**where)
        .queryName("detect")
        .option("checkpointLocation", f"{work}/checkpoints/detect")
    )


def _records(found: DataFrame) -> DataFrame:
    """A record for each sample, and one more for what is flagged."""
    topics = sf.when(sf.col("anomaly"), sf.array(sf.lit(STATISTICS), sf.lit(ANOMALIES)))
    return found.select(
        sf.explode(topics.otherwise(sf.array(sf.lit(STATISTICS)))).alias("topic"),
        sf.col("series").alias("key"),
        sf.to_json(sf.struct("time", "value", "mean", "deviation", "anomaly")).alias("value"),
    )


def make_topics(bootstrap: str) -> None:
    """Make those topics that are missing, each with three replicas."""
    with AdminClient(bootstrap) as admin:
        for topic in (METRICS, STATISTICS, ANOMALIES):
            admin.create_topic(topic, 6, 3, if_not_exists=True)


def main() -> None:
    """Run the query."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bootstrap")
    parser.add_argument("--work", default="cloud-metrics", help="for checkpoints")
    parser.add_argument("--once", action="store_true", help="do what there is, and end")
    arguments = parser.parse_args()
    make_topics(arguments.bootstrap)
    # Its end stops what still runs, also where Ctrl-C comes while it drains.
    with session("cloud-metrics", settings=SETTINGS) as spark:
        query = start(spark, arguments.bootstrap, str(Path(arguments.work).resolve()))
        if arguments.once:
            query.processAllAvailable()
        else:
            run_until_stopped(query)


if __name__ == "__main__":
    try:
        main()
    except (PipelineError, PenstockError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
