"""Keeps an Elasticsearch index of what each key last said in a topic.

Values are JSON objects; a record without a value deletes its document. Run it with
``penstock dev`` and an Elasticsearch, as often as you like: it goes on where it was::

    python examples/pipelines/to_elasticsearch.py localhost:9092 users http://localhost:9200
"""

from __future__ import annotations

import argparse

from penstock.pipeline import session
from penstock.pipeline.connectors import register


def main() -> None:
    """Write what is in the topic now, and end."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bootstrap")
    parser.add_argument("topic")
    parser.add_argument("url")
    parser.add_argument("--checkpoints", default="checkpoints/to-elasticsearch")
    arguments = parser.parse_args()
    spark = session("to-elasticsearch")
    register(spark)
    records = (
        spark.readStream.format("penstock")
        .option("penstock.bootstrap.servers", arguments.bootstrap)
        .option("subscribe", arguments.topic)
        .option("startingOffsets", "earliest")
        .load()
    )
    query = (
        records.writeStream.format("penstock-elasticsearch")
        .option("url", arguments.url)
        .option("index", arguments.topic.lower())
        .option("id", "key")
        .option("checkpointLocation", arguments.checkpoints)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
