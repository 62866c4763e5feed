"""A controller that is cut off from the quorum must not take its broker with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.cluster import Cluster
from tests.integration.proxy import Relay
from tests.integration.raw import create_topic, produce
from tests.support import wait_until

pytestmark = pytest.mark.integration


def test_a_broker_leaves_the_feed_of_a_controller_that_is_cut_off(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    voter = re.compile(r"3@127\.0\.0\.1:(\d+)")
    found = voter.search(cluster.nodes[3].config.read_text())
    assert found is not None
    relay = Relay(int(found[1]))
    for node in cluster.nodes.values():  # The third one's too: it tells others where it is.
        text = voter.sub(f"3@127.0.0.1:{relay.port}", node.config.read_text())
        node.config.write_text(text)
    try:
        cluster.start()
        # Stopped, the third one hands over, if it is the active controller.
        cluster.nodes[3].stop()
        cluster.start()
        relay.cut()
        # What the third controller never hears of, its broker must hear of from another.
        create_topic(cluster, "t", partitions=3)
        leaders = {partition.leader for partition in cluster.topic("t", 1).partitions}
        assert 3 in leaders
        for partition in range(3):
            produce(cluster, "t", [b"x"], partition=partition)
        wait_until(
            lambda: all(len(one.isr) == 3 for one in cluster.topic("t", 1).partitions),
            "every replica is in sync",
        )
    finally:
        cluster.close()
        relay.cut()
