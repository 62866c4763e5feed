"""Queries start although the processes that plan them are slow, as Spark itself has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)

# Longer than the ten seconds that Spark waits, the first time that a stream is planned.
_SLOW_PYTHON = """\
#!/bin/sh
case "$*" in
*python_streaming_source_runner*) mkdir '{mark}' 2>/dev/null && sleep 15 ;;
esac
exec '{python}' "$@"
"""

_PROGRAM = """\
import logging

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from penstock.pipeline import session, start_query


class Reader(DataSourceStreamReader):
    def initialOffset(self):
        return {{"at": 0}}

    def latestOffset(self, start, limit):
        return {{"at": 3}}

    def partitions(self, start, end):
        return [InputPartition(number) for number in range(start["at"], end["at"])]

    def read(self, partition):
        yield (partition.value,)


class Source(DataSource):
    @classmethod
    def name(cls):
        return "three"

    def schema(self):
        return "number int"

    def streamReader(self, schema):
        return Reader()


logging.basicConfig()
logging.getLogger("penstock.pipeline").setLevel(logging.INFO)
spark = session(settings={{"spark.local.dir": {directory!r}, "spark.driver.memory": "600m"}})
spark.dataSource.register(Source)
found = []
writer = spark.readStream.format("three").load().writeStream.foreachBatch(
    lambda rows, _: found.extend(row.number for row in rows.collect())
)
query = start_query(writer.option("checkpointLocation", {directory!r} + "/checkpoint"))
query.processAllAvailable()
print("found", sorted(found))
query.stop()
spark.stop()
"""


def test_a_query_whose_planning_starts_late_runs(tmp_path: Path) -> None:
    mark, python = tmp_path / "was slow", tmp_path / "python"
    python.write_text(_SLOW_PYTHON.format(mark=mark, python=sys.executable))
    python.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(directory=str(tmp_path))],
        env={**os.environ, "PYSPARK_PYTHON": str(python)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "found [0, 1, 2]" in done.stdout.splitlines(), done.stderr
    assert mark.is_dir()
    assert "is started again" in done.stderr
