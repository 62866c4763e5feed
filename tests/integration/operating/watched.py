"""A cluster whose nodes show their metrics."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.integration.cluster import Cluster
from tests.integration.ports import free_ports


class WatchedCluster(Cluster):
    """Each node serves its metrics on a port of its own."""

    def __init__(
        self, directory: Path, count: int = 3, settings: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(directory, count, settings)
        self.metrics_ports = dict(zip(self.nodes, free_ports(count), strict=True))
        for node_id, node in self.nodes.items():
            with node.config.open("a") as file:
                file.write(f'metrics.listen = "127.0.0.1:{self.metrics_ports[node_id]}"\n')

    def shown(self, node_id: int) -> str:
        """All that a node shows."""
        url = f"http://127.0.0.1:{self.metrics_ports[node_id]}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            text: str = answer.read().decode()
        return text

    def value(self, node_id: int, name: str, **labels: str) -> float | None:
        """One sample of a node, by all of its labels; None where it is not shown."""
        for family in text_string_to_metric_families(self.shown(node_id)):
            for sample in family.samples:
                if sample.name == name and dict(sample.labels) == labels:
                    return float(sample.value)
        return None

    def total(self, name: str, **labels: str) -> float:
        """The sum over all nodes that run."""
        return sum(
            self.value(node.node_id, name, **labels) or 0
            for node in self.nodes.values()
            if node.alive
        )


@contextmanager
def watched_cluster(
    directory: Path, count: int = 3, settings: Mapping[str, object] | None = None
) -> Iterator[WatchedCluster]:
    """A started one that is stopped at the end, whatever happens."""
    cluster = WatchedCluster(directory, count, settings)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
