"""A query from files to a topic by way of the sink, as tests make it fail and go on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.cluster import Cluster
from tests.pipeline.logs import make_topic, values

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import DataStreamWriter, StreamingQuery

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

    def begin_as(self, query_id: str) -> None:
        """Have the query begin under an id that is known before it is started."""
        self.checkpoint.mkdir()
        (self.checkpoint / "metadata").write_text(json.dumps({"id": query_id}))

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

    @property
    def failed(self) -> list[str]:
        """The moments that came."""
        return sorted(mark.name for mark in self.marks.iterdir())

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
