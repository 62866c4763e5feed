from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from pyspark.sql import SparkSession

from penstock.client import AdminClient, TopicPartition
from penstock.pipeline.progress import watch
from tests.integration.cluster import Cluster
from tests.pipeline.source_tools import Batches, Topics
from tests.support import wait_until

pytestmark = pytest.mark.timeout(600)


def test_a_watched_query_shows_its_lag_exactly(
    spark: SparkSession, penstock_cluster: Cluster, tmp_path: Path
) -> None:
    topics = Topics(spark, penstock_cluster)
    topics.make("progress-lag")
    topics.send("progress-lag", range(30))
    where = TopicPartition("progress-lag", 0)
    registry = CollectorRegistry()
    listener = watch(spark, penstock_cluster.bootstrap, registry=registry)
    try:
        frame = topics.stream("progress-lag", maxOffsetsPerTrigger="10")
        query = Batches().start(frame, tmp_path, processingTime="0 seconds")
        try:
            labels = {"query": str(query.id)}
            lag = {**labels, "topic": where.topic, "partition": "0"}

            def value(name: str, wanted: dict[str, str]) -> float | None:
                return registry.get_sample_value(f"penstock_query_{name}", wanted)

            wait_until(lambda: value("rows_total", labels) == 30, "all is shown", 60)
            wait_until(lambda: value("lag_offsets", lag) == 0, "nothing is left", 60)
            with AdminClient(penstock_cluster.bootstrap) as admin:

                def committed() -> bool:
                    return admin.list_group_offsets(f"spark-{query.id}")[where].offset == 30

                # Not a batch late: all three are done.
                wait_until(committed, "the group has all of it", 60)
        finally:
            query.stop()
        wait_until(lambda: value("rows_total", labels) is None, "it is shown no more", 60)
    finally:
        listener.close()
    assert list(registry.collect()) == []
