"""What a web server's access log says, asked while it is written: five queries over topics.

::

    access-log -> parse -+-> requests -+-> minutes   requests and errors of each minute and path
                         |             +-> sessions  what each client did until it paused
                         |             +-> paths     totals of each path so far
                         |             `-> alerts    clients that ask for what is not there
                         `-> dead-letters            lines that are none, as they came

``minutes`` are Parquet files, all else are topics; ``paths`` and ``alerts`` are compacted ones.
Each query writes exactly once and goes on after its last checkpoint, whatever is killed. The topic
``access-log`` has lines in Apache's combined format, keyed by client address, so that those of one
client stay in order. Other topics are made where they are missing. Run it with ``penstock dev``::

    penstock topics create access-log --partitions 6
    python examples/pipelines/access_log/queries.py localhost:9092 --work work

or give it to a cluster (``spark-submit --master spark://HOST:7077 ...``). It ends by Ctrl-C, or
with ``--once`` when everything that was there is done.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as sf

from penstock.client import AdminClient, PenstockError
from penstock.pipeline import PipelineError, run_until_stopped, session, start_query
from penstock.pipeline.progress import watch

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

LINES: Final = "access-log"
REQUESTS: Final = "requests"
DEAD_LETTERS: Final = "dead-letters"
SESSIONS: Final = "sessions"
PATHS: Final = "paths"
ALERTS: Final = "alerts"
MINUTES: Final = "minutes"
"""The directory, under the one for work, of the Parquet files."""

PARTITIONS: Final = 6

LATENESS: Final = "1 day"
"""For so long a window waits for what is late.

A log that is played back in seconds shows days of it in the time in which a broker is replaced, so
that this is more than a live log would want, where a few minutes do.
"""
PAUSE: Final = "90 minutes"
"""A client that is silent for so long has left. (The sample log has one minute of each hour.)"""
ALERT_WINDOW: Final = "10 minutes"
ALERT_MISSING: Final = 3
"""So many 404s of one client in one window are an alert."""

SETTINGS: Final = {
    "spark.sql.session.timeZone": "UTC",
    # Spark's own type for times in Parquet says nothing of their zone.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}
"""Of the session. Times of the log have their zone; what is written has UTC."""

_TEXT: Final = r'((?:[^"\\]|\\.)*)'
_COMBINED: Final = (
    r"^(\S+) \S+ (\S+) \[([^\]]+)\] "
    rf'"(\S+) (\S+) \S+" (\d{{3}}) (\d{{1,18}}|-) "{_TEXT}" "{_TEXT}"$'
)
_REQUEST: Final = (
    "client string, user string, time timestamp, method string, path string, status int,"
    " bytes bigint, referrer string, agent string, partition int, offset bigint"
)


class AccessLog:
    """The queries, each with its checkpoint under ``work``, which Spark's workers reach as well."""

    def __init__(self, spark: SparkSession, bootstrap: str, work: str) -> None:
        self._spark = spark
        self._bootstrap = bootstrap
        self._work = work

    def start(self) -> list[StreamingQuery]:
        """Start all of them; a query comes after the one whose topic it reads."""
        requests = self._requests()
        return [
            self._begin("parse", self._sink(parsed(self._source(LINES)))),
            self._begin(
                MINUTES,
                minutes(requests)
                .writeStream.format("parquet")
                .option("path", f"{self._work}/{MINUTES}"),
            ),
            self._begin(SESSIONS, self._sink(sessions(requests), SESSIONS)),
            self._begin(PATHS, self._upserts(paths(requests), PATHS)),
            self._begin(ALERTS, self._upserts(alerts(requests), ALERTS)),
        ]

    def _source(self, topic: str) -> DataFrame:
        return (
            self._spark.readStream.format("penstock")
            .option("penstock.bootstrap.servers", self._bootstrap)
            .option("subscribe", topic)
            .option("startingOffsets", "earliest")
            .load()
        )

    def _requests(self) -> DataFrame:
        value = sf.col("value").cast("string")
        return self._source(REQUESTS).select(sf.from_json(value, _REQUEST).alias("r")).select("r.*")

    def _sink(self, rows: DataFrame, topic: str | None = None) -> DataStreamWriter:
        writer = rows.writeStream.format("penstock").options(**self._where())
        return writer if topic is None else writer.option("topic", topic)

    def _upserts(self, rows: DataFrame, topic: str) -> DataStreamWriter:
        """Whatever a batch has changed, which a sink in Python takes by foreachBatch alone."""

        def write(changed: DataFrame, _batch_id: int) -> None:
            changed.write.format("penstock").mode("append").options(
                **self._where(), topic=topic
            ).save()

        return rows.writeStream.outputMode("update").foreachBatch(write)

    def _where(self) -> dict[str, str]:
        return {"penstock.bootstrap.servers": self._bootstrap}

    def _begin(self, name: str, writer: DataStreamWriter) -> StreamingQuery:
        checkpoint = f"{self._work}/checkpoints/{name}"
        # One after the other: the processes of five at once would be slow to start.
        return start_query(writer.queryName(name).option("checkpointLocation", checkpoint))


def parsed(records: DataFrame) -> DataFrame:
    """Lines as records of ``requests``, and those that are none as records of ``dead-letters``."""
    line = sf.col("value").cast("string")
    field = {
        name: sf.regexp_extract(line, _COMBINED, number)
        for number, name in enumerate(
            ("client", "user", "time", "method", "path", "status", "bytes", "referrer", "agent"), 1
        )
    }
    time = sf.try_to_timestamp(field["time"], sf.lit("dd/MMM/yyyy:HH:mm:ss Z"))
    request = sf.struct(
        field["client"].alias("client"),
        field["user"].alias("user"),
        time.alias("time"),
        field["method"].alias("method"),
        sf.substring_index(field["path"], "?", 1).alias("path"),
        field["status"].try_cast("int").alias("status"),
        sf.coalesce(field["bytes"].try_cast("bigint"), sf.lit(0)).alias("bytes"),
        field["referrer"].alias("referrer"),
        field["agent"].alias("agent"),
        "partition",
        "offset",
    )
    # A pattern that does not match gives empty fields, and a time that is none gives NULL.
    is_request = sf.coalesce(sf.is_valid_utf8(line) & time.isNotNull(), sf.lit(False))
    why_not = sf.when(
        sf.is_valid_utf8(line) & (field["client"] != ""), sf.lit("no such time")
    ).otherwise(sf.lit("not in the combined format"))
    return records.select(
        sf.when(is_request, sf.lit(REQUESTS)).otherwise(sf.lit(DEAD_LETTERS)).alias("topic"),
        "key",
        sf.when(is_request, sf.to_json(request).cast("binary"))
        .otherwise(sf.col("value"))
        .alias("value"),
        sf.when(~is_request, _headers(reason=why_not)).alias("headers"),
    )


def _headers(**more: Column) -> Column:
    """Where a record comes from, and what else is to be said of it."""
    said = {"topic": sf.col("topic"), "partition": sf.col("partition"), "offset": sf.col("offset")}
    return sf.array(
        *(
            sf.struct(sf.lit(name).alias("key"), text.cast("string").cast("binary").alias("value"))
            for name, text in (said | more).items()
        )
    )


def minutes(requests: DataFrame) -> DataFrame:
    """Requests and errors of each minute and path, once the minute is over."""
    return (
        requests.withWatermark("time", LATENESS)
        .groupBy(sf.window("time", "1 minute"), "path")
        .agg(sf.count("*").alias("requests"), _errors().alias("errors"))
        .select(sf.col("window.start").alias("minute"), "path", "requests", "errors")
    )


def sessions(requests: DataFrame) -> DataFrame:
    """What each client did from its first request to its pause, once that is over."""
    found = (
        requests.withWatermark("time", LATENESS)
        .groupBy(sf.session_window("time", PAUSE), "client")
        .agg(
            sf.count("*").alias("requests"),
            _errors().alias("errors"),
            sf.sum("bytes").alias("bytes"),
            sf.min("time").alias("begun"),
            sf.max("time").alias("ended"),
            # A client's lines are all in one partition, in the log's order.
            sf.min_by("path", "offset").alias("landing"),
            sf.max_by("path", "offset").alias("exit"),
        )
        .drop("session_window")
    )
    return _records(found, sf.col("client"))


def paths(requests: DataFrame) -> DataFrame:
    """Totals of each path so far."""
    totals = requests.groupBy("path").agg(
        sf.count("*").alias("requests"), _errors().alias("errors"), sf.sum("bytes").alias("bytes")
    )
    return _records(totals, sf.col("path"))


def alerts(requests: DataFrame) -> DataFrame:
    """Clients that got too many 404s in a window, as soon as it is so, with their number so far."""
    found = (
        requests.withWatermark("time", LATENESS)
        .where("status = 404")
        .groupBy(sf.window("time", ALERT_WINDOW), "client")
        .agg(sf.count("*").alias("missing"), sf.max_by("path", "offset").alias("last"))
        .where(sf.col("missing") >= ALERT_MISSING)
        .select("client", sf.col("window.start").alias("since"), "missing", "last")
    )
    return _records(found, sf.concat_ws(" ", "client", sf.col("since").cast("string")))


def _errors() -> Column:
    return sf.count_if(sf.col("status") >= 400)


def _records(rows: DataFrame, key: Column) -> DataFrame:
    return rows.select(key.alias("key"), sf.to_json(sf.struct("*")).alias("value"))


def make_topics(bootstrap: str) -> None:
    """Make those topics that are missing, each with three replicas."""
    with AdminClient(bootstrap) as admin:
        for topic in (LINES, REQUESTS, DEAD_LETTERS, SESSIONS, PATHS, ALERTS):
            config = {"cleanup.policy": "compact"} if topic in (PATHS, ALERTS) else {}
            admin.create_topic(topic, PARTITIONS, 3, config, if_not_exists=True)


def drain(queries: list[StreamingQuery]) -> None:
    """Return when all that is in their topics is done, and what follows of it.

    Raises StreamingQueryException where one of them has failed.
    """
    for query in queries:
        query.processAllAvailable()


def main() -> None:
    """Run the queries."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bootstrap")
    parser.add_argument("--work", default="access-log", help="for checkpoints and Parquet files")
    parser.add_argument("--once", action="store_true", help="do what there is, and end")
    arguments = parser.parse_args()
    make_topics(arguments.bootstrap)
    # Its end stops what still runs, also where Ctrl-C comes while it drains.
    with session("access-log", settings=SETTINGS) as spark:
        watch(spark, arguments.bootstrap)
        work = str(Path(arguments.work).resolve())
        queries = AccessLog(spark, arguments.bootstrap, work).start()
        if arguments.once:
            drain(queries)
        else:
            run_until_stopped(*queries)


if __name__ == "__main__":
    try:
        main()
    except (PipelineError, PenstockError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
