"""Makes the archive of classes with which the tests' Spark starts in half the time.

    python -m tests.pipeline.class_archive FILE

A JVM that starts Spark loads and verifies some ten thousand classes, at six seconds of a processor
or more, and the tests start dozens of short programs. With FILE, of java's class data sharing, it
maps them instead. JVMs take it where SPARK_SUBMIT_OPTS names it, and where it is of the same Java
and Spark; else they do without. A wish: where Java can make none, FILE is empty.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from penstock.pipeline import session

_CLIENT = """
import sys
from pyspark.sql import SparkSession
spark = SparkSession.builder.remote(sys.argv[1]).getOrCreate()
spark.range(9).selectExpr("id % 3 AS k").groupBy("k").count().toPandas()
spark.stop()
"""


def main(archive: Path) -> None:
    """Run a Spark that does a little of everything, and have its JVM write down what it loaded."""
    made = archive.with_suffix(".new")
    for old in (archive, made):
        old.unlink(missing_ok=True)
    why = "Java made none"
    try:
        with tempfile.TemporaryDirectory() as place:
            _run(Path(place), made)
    except Exception as error:  # Whatever it is: the tests are what finds out what is wrong.
        why = f"{type(error).__name__}: {error}"
        made.unlink(missing_ok=True)
    if made.exists():
        made.rename(archive)
    else:
        archive.touch()
        sys.stderr.write(f"no archive of classes, so the tests of Spark take longer: {why}\n")


def _run(directory: Path, made: Path) -> None:
    spark = session(
        settings={
            "spark.driver.memory": "600m",
            "spark.driver.extraJavaOptions": (
                f"-XX:ArchiveClassesAtExit={made.resolve()} -Xlog:cds=off -Xlog:cds+dynamic=off "
                "-XX:TieredStopAtLevel=1"
            ),
            "spark.local.dir": str(directory / "local"),
            "spark.sql.warehouse.dir": str(directory / "warehouse"),
            "spark.sql.shuffle.partitions": "2",
            "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": "0",
        }
    )
    rows = spark.range(100).selectExpr("id % 3 AS k", "CAST(id AS STRING) AS text")
    for kind in ("parquet", "json", "csv"):
        rows.write.format(kind).save(str(directory / kind))
    spark.read.parquet(str(directory / "parquet")).groupBy("k").count().toPandas()
    query = (
        spark.readStream.schema(rows.schema)
        .parquet(str(directory / "parquet"))
        .groupBy("k")
        .count()
        .writeStream.outputMode("complete")
        .foreachBatch(lambda batch, _: batch.collect())
        .option("checkpointLocation", str(directory / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    service = getattr(spark._jvm, "org.apache.spark.sql.connect.service.SparkConnectService$")
    url = f"sc://127.0.0.1:{getattr(service, 'MODULE$').localPort()}"
    subprocess.run([sys.executable, "-c", _CLIENT, url], check=True, timeout=120)
    gateway = spark.sparkContext._gateway
    spark.stop()
    # Its end is that of its standard input, and the archive is the last that it does.
    gateway.proc.stdin.close()
    gateway.proc.wait(240)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
