"""Prometheus metrics of a controller: the quorum, and the cluster where it is the active one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.raft_meta.figures import ControllerFigures

_QUORUM: Final = {
    "active_controller": "1 where this node is the active controller, else 0",
    "raft_term": "The Raft term that this controller is in: the controller epoch",
    "raft_commit_index": "Up to where this controller knows the metadata log to be decided",
    "raft_applied_index": "Up to where this controller has applied it",
    "raft_last_index": "Up to where it has it",
    "metadata_version": "The metadata.version in force",
}
_CLUSTER: Final = {
    "offline_partitions": "Partitions without a leader; shown by the active controller",
    "not_preferred_partitions": (
        "Partitions that another than their preferred replica leads; by the active controller"
    ),
    "cluster_partitions": "Partitions of the cluster; by the active controller",
    "cluster_topics": "Topics of the cluster; by the active controller",
    "cluster_metadata_index": (
        "The last change of the metadata that brokers are told of; by the active controller"
    ),
}


class QuorumMetrics(Collector):
    """Shows what :meth:`watch` gives it to look at; nothing on a node without a controller."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._figures: Callable[[], ControllerFigures] | None = None
        registry.register(self)

    def watch(self, figures: Callable[[], ControllerFigures]) -> None:
        """Look at these, in the metrics' own thread."""
        self._figures = figures

    def describe(self) -> Iterable[Metric]:
        """The families without samples."""
        return self._families().values()

    def collect(self) -> Iterator[Metric]:
        """The families as things are now."""
        families = self._families()
        if self._figures is not None:
            self._add(families, self._figures())
        yield from families.values()

    def _add(
        self,
        families: dict[str, CounterMetricFamily | GaugeMetricFamily],
        figures: ControllerFigures,
    ) -> None:
        for name in _QUORUM:
            families[f"penstock_{name}"].add_metric((), getattr(figures, name))
        families["penstock_controller_elections"].add_metric((), figures.elections)
        for node_id, index in sorted(figures.match_index.items()):
            lag = max(0, figures.raft_last_index - index)
            families["penstock_raft_lag_entries"].add_metric((str(node_id),), lag)
        cluster = figures.cluster
        if cluster is None:
            return
        for name in _CLUSTER:
            families[f"penstock_{name}"].add_metric((), getattr(cluster, name))
        for state, count in cluster.brokers.items():
            families["penstock_cluster_brokers"].add_metric((state,), count)

    def _families(self) -> dict[str, CounterMetricFamily | GaugeMetricFamily]:
        plain = {**_QUORUM, **_CLUSTER}
        every: list[CounterMetricFamily | GaugeMetricFamily] = [
            *(GaugeMetricFamily(f"penstock_{name}", text) for name, text in plain.items()),
            CounterMetricFamily(
                "penstock_controller_elections",
                "Active controllers that this controller saw elected, itself among them",
            ),
            GaugeMetricFamily(
                "penstock_raft_lag_entries",
                "Entries of the metadata log that another controller lacks; by the active one",
                labels=["voter"],
            ),
            GaugeMetricFamily(
                "penstock_cluster_brokers",
                "Registered brokers by state; by the active controller",
                labels=["state"],
            ),
        ]
        return {family.name: family for family in every}
