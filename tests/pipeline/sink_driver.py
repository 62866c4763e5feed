"""A driver to be killed: a query from files or topics to a topic, in a process group of its own.

Its argument is JSON: where it reads, writes and keeps its checkpoint, and the options of the sink.
It reads by the source "penstock" where it has options of that, and text files otherwise.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.pipeline import session
from tests.pipeline.failing import FailingSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def main(told: dict[str, Any]) -> None:
    temporary = Path(told["temporary"])
    spark = session(
        "penstock-sink-driver",
        settings={
            "spark.driver.memory": "500m",
            "spark.driver.extraJavaOptions": (
                f"-Djava.io.tmpdir={temporary} -XX:-UsePerfData -XX:TieredStopAtLevel=1"
            ),
            "spark.local.dir": str(temporary),
            "spark.sql.warehouse.dir": str(temporary / "warehouse"),
            "spark.sql.shuffle.partitions": "2",
            **told.get("settings", {}),
        },
    )
    spark.dataSource.register(FailingSource)
    options = {**told["options"], "driver": str(os.getpid())}
    if told["form"] == "penstock":
        del options["driver"]
    if "reading" in told:
        records = spark.readStream.format("penstock").options(**told["reading"]).load()
        rows = records.selectExpr("CAST(value AS STRING) AS value")
    else:
        rows = spark.readStream.option("maxFilesPerTrigger", 1).text(told["source"]).repartition(2)

    def write(batch: DataFrame, _number: int) -> None:
        shuffled = batch.repartition(3, "value")
        shuffled.write.format(told["form"]).mode("append").options(**options).save()

    if told.get("foreach"):
        writer = rows.writeStream.foreachBatch(write)
    else:
        writer = rows.writeStream.format(told["form"]).options(**options)
    query = (
        writer.option("checkpointLocation", told["checkpoint"]).trigger(availableNow=True).start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
