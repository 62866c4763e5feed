"""A driver at a Spark Connect server: a query from files to a topic by ``foreachBatch``.

Its argument is JSON. With ``crash_at`` the function fails behind the write of that batch; with
``name`` each write says who writes it, and its number.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pyspark.sql import DataFrame, SparkSession


def main(told: dict[str, Any]) -> None:
    spark = SparkSession.builder.remote(told["url"]).getOrCreate()
    rows = spark.readStream.option("maxFilesPerTrigger", 1).text(told["source"])

    def write(batch: DataFrame, number: int) -> None:
        options = dict(told["options"])
        if told["name"]:
            options |= {"txnAppId": told["name"], "txnVersion": str(number)}
        shuffled = batch.repartition(3, "value")
        shuffled.write.format("penstock").mode("append").options(**options).save()
        if number == told["crash_at"]:
            raise RuntimeError("the function fails behind the write")

    writer = rows.writeStream.foreachBatch(write).option("checkpointLocation", told["checkpoint"])
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    if (error := query.exception()) is not None:
        sys.exit(str(error))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
