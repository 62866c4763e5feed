"""Keeps an Elasticsearch index of what each key last said in a topic.

Values are JSON objects; a record without a value deletes its document. Run it with
``penstock dev`` and an Elasticsearch, as often as you like: it goes on where it was::

    penstock topics create users
    python examples/pipelines/to_elasticsearch.py users http://localhost:9200 --once
"""

from __future__ import annotations

import argparse

from penstock.pipeline import PipelineError, run_until_stopped, session, start_query


def main() -> None:
    """Go on until Ctrl-C, or with ``--once`` until what is there now is done."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("topic", help="what is read, and in lower case the index")
    parser.add_argument("url", help="Elasticsearch's, such as http://localhost:9200")
    parser.add_argument("--bootstrap", default="localhost:9092", metavar="HOST:PORT")
    parser.add_argument("--checkpoints", default="checkpoints/to-elasticsearch")
    parser.add_argument("--once", action="store_true", help="end when all there is now is done")
    arguments = parser.parse_args()
    with session("to-elasticsearch") as spark:
        records = (
            spark.readStream.format("penstock")
            .option("penstock.bootstrap.servers", arguments.bootstrap)
            .option("subscribe", arguments.topic)
            .option("startingOffsets", "earliest")
            .load()
        )
        trigger = {"availableNow": True} if arguments.once else {"processingTime": "1 second"}
        query = start_query(
            records.writeStream.format("penstock-elasticsearch")
            .option("url", arguments.url)
            .option("index", arguments.topic.lower())
            .option("id", "key")
            .option("checkpointLocation", arguments.checkpoints)
            .trigger(**trigger)
        )
        run_until_stopped(query)


if __name__ == "__main__":
    try:
        main()
    except PipelineError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
