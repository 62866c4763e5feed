"""What the sink writes through failures at every moment: nothing lost, nothing twice.

The same failures with ``delivery=at-least-once`` show that they do what is said of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.cluster import Cluster
from tests.integration.transacting import coordinator_of
from tests.pipeline import failing
from tests.pipeline.failing import FailingSource
from tests.pipeline.logs import make_topic, repeated, values
from tests.support import wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import DataStreamWriter, StreamingQuery

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

ROWS = 400


class Pipe:
    """A query from files to a topic: a batch for each file, started and started again."""

    def __init__(self, spark: SparkSession, cluster: Cluster, directory: Path, topic: str) -> None:
        self.spark, self.cluster, self.directory = spark, cluster, directory
        self.topic = make_topic(cluster, topic)
        self.files = 0
        self.source, self.marks = directory / "in", directory / "marks"
        self.source.mkdir()
        self.marks.mkdir()

    @property
    def checkpoint(self) -> Path:
        return self.directory / "checkpoint"

    def feed(self, files: int = 1) -> None:
        for _ in range(files):
            lines = "".join(f"{self.files:02}-{number:03}\n" for number in range(ROWS))
            (self.source / f"{self.files:02}.txt").write_text(lines)
            self.files += 1

    @property
    def wanted(self) -> list[str]:
        return [f"{file:02}-{number:03}" for file in range(self.files) for number in range(ROWS)]

    def rows(self) -> DataFrame:
        stream = self.spark.readStream.option("maxFilesPerTrigger", 1).text(str(self.source))
        return stream.repartition(2)

    def options(self, **more: str) -> dict[str, str]:
        return {"penstock.bootstrap.servers": self.cluster.bootstrap, "topic": self.topic, **more}

    def failing(self, moment: str, **more: str) -> dict[str, str]:
        return self.options(fail=moment, marks=str(self.marks), **more)

    def to_sink(self, form: str, options: dict[str, str]) -> DataStreamWriter:
        return self.rows().writeStream.format(form).options(**options)

    def for_each(self, function: Callable[[DataFrame, int], None]) -> DataStreamWriter:
        return self.rows().writeStream.foreachBatch(function)

    def start(self, writer: DataStreamWriter) -> StreamingQuery:
        kept = writer.option("checkpointLocation", str(self.checkpoint))
        return kept.trigger(availableNow=True).start()

    def run(self, writer: DataStreamWriter) -> StreamingQuery:
        """Until all files are written, or it fails; then its exception says why."""
        query = self.start(writer)
        query.awaitTermination(180)
        return query

    def run_driver(self, options: dict[str, str], **more: Any) -> int:
        """The same in a driver of its own; the status with which it ended."""
        temporary = self.directory / "tmp"
        temporary.mkdir(exist_ok=True)
        told = {
            "temporary": str(temporary),
            "source": str(self.source),
            "checkpoint": str(self.checkpoint),
            "form": "penstock-failing" if "fail" in options else "penstock",
            "options": options,
            **more,
        }
        with (self.directory / "driver.log").open("ab") as output:
            driver = subprocess.Popen(
                [sys.executable, "-m", "tests.pipeline.sink_driver", json.dumps(told)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            return driver.wait(240)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)

    def run_well(self, writer: DataStreamWriter) -> None:
        query = self.run(writer)
        assert not query.isActive

    def fail(self, writer: DataStreamWriter, text: str) -> str:
        """Run it to a failure that says this; all that it says."""
        with pytest.raises(Exception, match=text) as caught:
            self.run(writer)
        return str(caught.value)

    def read(self) -> list[str]:
        return values(self.cluster, self.topic)


@pytest.fixture
def pipe(
    spark: SparkSession, penstock_cluster: Cluster, tmp_path: Path, request: pytest.FixtureRequest
) -> Pipe:
    spark.dataSource.register(FailingSource)
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    return Pipe(spark, penstock_cluster, tmp_path, name)


@pytest.fixture
def small_batches(spark: SparkSession) -> Iterator[None]:
    """Tasks get their rows in several Arrow batches."""
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "50")
    yield
    spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize(
    "moment", [failing.TASK_AFTER_WRITE, failing.WORKER_IN_WRITE, failing.TWIN]
)
def test_tasks_that_fail_or_run_twice(pipe: Pipe, moment: str) -> None:
    pipe.feed(2)
    pipe.run_well(pipe.to_sink("penstock-failing", pipe.failing(moment)))
    assert len(list(pipe.marks.iterdir())) == 2
    assert pipe.read() == pipe.wanted


def test_at_least_once_shows_what_such_a_task_does(pipe: Pipe) -> None:
    pipe.feed(2)
    options = pipe.failing(failing.TASK_AFTER_WRITE, delivery="at-least-once")
    pipe.run_well(pipe.to_sink("penstock-failing", options))
    found = pipe.read()
    assert sorted(set(found)) == pipe.wanted
    assert repeated(found)


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_a_crash_between_the_sinks_commit_and_sparks(pipe: Pipe, delivery: str) -> None:
    pipe.feed(2)
    options = pipe.failing(failing.AFTER_COMMIT, delivery=delivery)
    pipe.fail(pipe.to_sink("penstock-failing", options), "when the sink has committed")
    pipe.feed(1)
    pipe.run_well(pipe.to_sink("penstock", pipe.options(delivery=delivery)))
    found = pipe.read()
    assert sorted(set(found)) == pipe.wanted
    assert len(repeated(found)) == (0 if delivery == "exactly-once" else ROWS)


def test_a_shuffled_foreach_batch_that_is_repeated(pipe: Pipe) -> None:
    pipe.feed(3)

    def written(rows: DataFrame, _batch: int) -> None:
        shuffled = rows.repartition(3, "value").sortWithinPartitions("value")
        shuffled.write.format("penstock").mode("append").options(**pipe.options()).save()

    def crashing(rows: DataFrame, batch: int) -> None:
        rows.write.format("penstock").mode("append").options(**pipe.options()).save()
        if batch == 1:
            raise RuntimeError("the driver fails behind the write")

    pipe.fail(pipe.for_each(crashing), "fails behind the write")
    pipe.run_well(pipe.for_each(written))
    assert pipe.read() == pipe.wanted


def twice(pipe: Pipe, *sink_ids: str, crash: bool = False) -> Callable[[DataFrame, int], None]:
    """A foreachBatch that writes each row as it is, and with a star."""

    def write(rows: DataFrame, _batch: int) -> None:
        for number, sink_id in enumerate(sink_ids):
            if number and crash:
                raise RuntimeError("the driver fails between the writes")
            marked = rows.selectExpr(f"value || '{'*' * number}' AS value")
            more = {"sinkId": sink_id} if sink_id else {}
            options = pipe.options(**more)
            marked.write.format("penstock").mode("append").options(**options).save()

    return write


def test_two_writes_of_a_batch_with_sink_ids_of_their_own(pipe: Pipe) -> None:
    pipe.feed(1)
    pipe.fail(pipe.for_each(twice(pipe, "", "stars", crash=True)), "between the writes")
    pipe.run_well(pipe.for_each(twice(pipe, "", "stars")))
    pipe.feed(1)
    pipe.run_well(pipe.for_each(twice(pipe, "", "stars")))
    assert pipe.read() == sorted([*pipe.wanted, *(f"{value}*" for value in pipe.wanted)])


@pytest.mark.parametrize("crash", [False, True])
def test_two_writes_of_a_batch_that_share_a_sink_id_are_an_error(pipe: Pipe, crash: bool) -> None:
    pipe.feed(1)
    if crash:
        # From the restart on both of them look like a repetition.
        pipe.fail(pipe.for_each(twice(pipe, "", "", crash=True)), "between the writes")
    for _ in range(2):
        said = pipe.fail(pipe.for_each(twice(pipe, "", "")), "SharedSinkIdError")
        assert "give this one its own option sinkId" in said
    assert pipe.read() == pipe.wanted
    # What the message says to do mends it.
    pipe.run_well(pipe.for_each(twice(pipe, "", "stars")))
    assert pipe.read() == sorted([*pipe.wanted, *(f"{value}*" for value in pipe.wanted)])


def test_two_writes_that_share_a_sink_id_are_an_error_also_where_the_first_has_no_rows(
    pipe: Pipe,
) -> None:
    pipe.feed(1)

    def write(rows: DataFrame, _batch: int) -> None:
        for which in ("false", "true"):
            some = rows.where(which).write.format("penstock").mode("append")
            some.options(**pipe.options()).save()

    pipe.fail(pipe.for_each(write), "SharedSinkIdError")
    assert pipe.read() == []


def test_a_checkpoint_that_is_older_than_what_was_written_is_refused(pipe: Pipe) -> None:
    pipe.feed(2)
    pipe.run_well(pipe.to_sink("penstock", pipe.options()))
    old = pipe.directory / "old"
    shutil.copytree(pipe.checkpoint, old)
    pipe.feed(2)
    pipe.run_well(pipe.to_sink("penstock", pipe.options()))
    shutil.rmtree(pipe.checkpoint)
    shutil.copytree(old, pipe.checkpoint)
    said = pipe.fail(pipe.to_sink("penstock", pipe.options()), "StaleCheckpointError")
    assert "start from the newest checkpoint" in said
    assert pipe.read() == pipe.wanted


@pytest.mark.parametrize("moment", [failing.DRIVER_BEFORE_COMMIT, failing.DRIVER_AFTER_COMMIT])
def test_a_driver_that_is_killed_at_the_commit(pipe: Pipe, moment: str) -> None:
    pipe.feed(2)
    assert pipe.run_driver(pipe.failing(moment)) == -signal.SIGKILL
    assert len(list(pipe.marks.iterdir())) == 1
    pipe.run_well(pipe.to_sink("penstock", pipe.options()))
    assert pipe.read() == pipe.wanted


def test_brokers_that_are_killed_while_a_query_writes(pipe: Pipe) -> None:
    cluster = pipe.cluster
    for whom in ("leader", "coordinator"):
        pipe.feed(5)
        begun = pipe.files - 4  # The batch behind which the node dies.
        writer = pipe.to_sink("penstock", pipe.options())
        query = pipe.start(writer)
        wait_until(
            lambda query=query, begun=begun: any(
                progress.batchId >= begun for progress in query.recentProgress
            ),
            f"batch {begun} is done",
            120.0,
        )
        if whom == "leader":
            node = cluster.topic(pipe.topic).partitions[0].leader
        else:
            node = coordinator_of(cluster, f"spark-{query.id}-{pipe.topic}")
        cluster.nodes[node].kill()
        try:
            assert query.awaitTermination(180)
        finally:
            cluster.start()
    assert pipe.read() == pipe.wanted
