from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

from penstock.client import AdminClient
from penstock.pipeline import session
from penstock.pipeline.java import find_java
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


def test_the_cluster_of_these_tests_serves(penstock_cluster: Cluster) -> None:
    with AdminClient(penstock_cluster.bootstrap) as admin:
        assert len(admin.describe_cluster().brokers) == 3
