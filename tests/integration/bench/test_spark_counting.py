"""What a topic has is counted with all that is committed, while markers are on their way too."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from bench.spark_counting import records_in

from penstock.client import AdminClient, Producer
from tests.integration.cluster import running_cluster
from tests.support import wait_until

pytestmark = pytest.mark.integration


def test_what_is_committed_a_moment_later_is_counted(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster, ThreadPoolExecutor(1) as other:
        with AdminClient(cluster.bootstrap) as admin:
            admin.create_topic("orders", 2, 3)
        with Producer(cluster.bootstrap, transactional_id="writer") as producer:
            producer.begin_transaction()
            for number in range(20):
                producer.send("orders", b"%d" % number, partition=number % 2)
            producer.flush()
            counted = other.submit(records_in, cluster.bootstrap, "orders", 2)
            wait_until(counted.running, "the counting begins")
            with pytest.raises(TimeoutError):
                counted.result(1.5)
            producer.commit_transaction()
            assert counted.result(60) == 20
