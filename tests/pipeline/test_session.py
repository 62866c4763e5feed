from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyspark
import pytest
from pyspark.sql import SparkSession

from penstock.client import AdminClient
from penstock.pipeline import session
from penstock.pipeline.java import find_java, usable_home
from tests.integration.cluster import Cluster


def test_a_session_computes_with_this_python(spark: SparkSession) -> None:
    def executable(batches):
        for _ in batches:
            yield pa.RecordBatch.from_pydict({"python": [sys.executable]})

    rows = spark.range(1, numPartitions=1).mapInArrow(executable, "python string").collect()
    assert [row.python for row in rows] == [sys.executable]


def test_a_task_has_four_attempts(spark: SparkSession, tmp_path: Path) -> None:
    def fail_three_times(batches):
        attempts = len(list(tmp_path.iterdir()))
        (tmp_path / f"{attempts}").touch()
        if attempts < 3:
            raise ValueError("as asked for")
        yield from batches

    assert spark.range(1, numPartitions=1).mapInArrow(fail_three_times, "id long").count() == 1


def test_a_second_session_is_the_first(spark: SparkSession) -> None:
    again = session("another", settings={"spark.sql.session.timeZone": "UTC"})
    assert again.sparkContext is spark.sparkContext
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.sparkContext.getConf().get("spark.driver.host") == "127.0.0.1"


def test_rows_become_pandas_without_a_warning(spark: SparkSession) -> None:
    assert spark.sql("select 1 as one, array('a') as names").toPandas().one.tolist() == [1]


_LOSES_FILES = """
import sys, time
from pathlib import Path
from penstock.pipeline import session
local = Path(sys.argv[1])
spark = session(settings={
    "spark.local.dir": str(local), "spark.driver.memory": "600m",
    "spark.executor.heartbeatInterval": "50ms",
})
pairs = spark.sparkContext.parallelize([(n % 5, 1) for n in range(100)], 2)
counted = pairs.reduceByKey(lambda one, other: one + other, 2)
before = counted.collect()
files = list(local.rglob("shuffle_*"))
for file in files:
    file.unlink()
assert files and sorted(counted.collect()) == sorted(before)
time.sleep(6)  # Twice the 60 heartbeats after which Spark would end.
print(spark.range(7).count())
spark.stop()
"""


def test_who_lost_shuffled_files_lives_on(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LOSES_FILES, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["7"], done.stderr[-4000:]


def test_spark_runs_on_the_java_that_comes_by_pip(tmp_path: Path) -> None:
    program = (
        "from penstock.pipeline import session\n"
        f"settings = {{'spark.local.dir': {str(tmp_path)!r}, 'spark.driver.memory': '600m'}}\n"
        "spark = session(settings=settings)\n"
        "home = spark._jvm.System.getProperty('java.home')\n"
        "print(home, spark.range(7).count())\n"
        "spark.stop()"
    )
    java = find_java({}, system=tmp_path)
    environment = {
        **os.environ,
        "JAVA_HOME": str(java.home),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [str(java.home), "7"], done.stderr
    assert list((tmp_path / "cache").rglob("java"))


@pytest.mark.parametrize("by", ["file", "spark-submit"])
def test_a_session_keeps_to_what_is_configured(tmp_path: Path, by: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from penstock.pipeline import session\n"
        "spark = session()\n"
        "values = spark.sparkContext.getConf()\n"
        "print('found', spark.sparkContext.master,\n"
        "    values.get('spark.sql.execution.arrow.maxRecordsPerBatch'),\n"
        "    values.get('spark.sql.execution.arrow.maxBytesPerBatch'))\n"
        "spark.stop()\n"
    )
    given = {
        "spark.master": "local[3,2]",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "50",
        "spark.local.dir": str(tmp_path),
        "spark.driver.memory": "600m",
    }
    command = [sys.executable, str(program)]
    if by == "file":
        lines = [f"{key} {value}\n" for key, value in given.items()]
        (tmp_path / "spark-defaults.conf").write_text("".join(lines))
    else:
        options = [word for pair in given.items() for word in ("--conf", "=".join(pair))]
        submit = Path(pyspark.__path__[0]) / "bin" / "spark-submit"
        command = [str(submit), *options, str(program)]
    environment = {
        **os.environ,
        "JAVA_HOME": str(usable_home(find_java())),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_CONF_DIR": str(tmp_path),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("found")]
    assert found == ["found local[3,2] 50 2147483647"], done.stderr


def test_the_cluster_of_these_tests_serves(penstock_cluster: Cluster) -> None:
    with AdminClient(penstock_cluster.bootstrap) as admin:
        assert len(admin.describe_cluster().brokers) == 3
