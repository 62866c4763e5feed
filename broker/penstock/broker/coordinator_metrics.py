"""Prometheus metrics of what a broker coordinates: groups and transactions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.broker.core.group_progress import Lag
from penstock.broker.topic_labels import OTHER, largest

GROUP_STATES: Final = ("assigning", "empty", "reconciling", "stable")
TRANSACTION_STATES: Final = ("empty", "ongoing", "prepare_abort", "prepare_commit")


class GroupCounts(Protocol):
    """What is asked of the group coordinator, in the metrics' own thread."""

    def count_states(self) -> tuple[Mapping[str, int], int]:
        """Groups by state, and the members of all of them."""
        ...


class TransactionCounts(Protocol):
    """What is asked of the transaction coordinator, in the metrics' own thread."""

    def count_states(self) -> tuple[Mapping[str, int], float]:
        """Transactional ids by state, and for how many seconds the oldest has been open."""
        ...


class CoordinatorMetrics(Collector):
    """Shows what :meth:`watch` gives it to look at, and counts what it is told.

    At most ``most`` pairs of group and topic are shown by name: those with the largest lag.
    """

    def __init__(self, registry: CollectorRegistry, most: int) -> None:
        self._most = most
        self._groups: GroupCounts | None = None
        self._transactions: TransactionCounts | None = None
        self._lag = Gauge(
            "penstock_group_lag_records",
            "Records that a group coordinated here has not committed yet, by topic",
            ["group", "topic"],
            registry=registry,
        )
        self._stalled = Gauge(
            "penstock_group_stalled_seconds",
            "For how long a group coordinated here has committed the same position in a partition"
            " that has more, by topic; of the partition where that is longest",
            ["group", "topic"],
            registry=registry,
        )
        self._shown_lags: set[tuple[str, str]] = set()
        self._rebalances = Counter(
            "penstock_group_rebalances",
            "Times that the partitions of a group coordinated here were to be assigned anew",
            registry=registry,
        )
        ended = Counter(
            "penstock_transactions_ended",
            "Transactions coordinated here that were decided, by outcome",
            ["outcome"],
            registry=registry,
        )
        self._ended = {
            True: ended.labels(outcome="commit"),
            False: ended.labels(outcome="abort"),
        }
        registry.register(self)

    def watch(self, groups: GroupCounts, transactions: TransactionCounts) -> None:
        """Look at these."""
        self._groups, self._transactions = groups, transactions

    def rebalanced(self) -> None:
        """Count a group epoch that rose."""
        self._rebalances.inc()

    def transaction_ended(self, commit: bool) -> None:
        """Count a decision."""
        self._ended[commit].inc()

    def group_lags(self, lags: Mapping[tuple[str, str], Lag]) -> None:
        """Show these lags by group and topic, and no others. On one thread alone."""
        shown, others = largest(lags, self._most, lambda lag: lag.records)
        if others:
            shown[OTHER, OTHER] = Lag(
                sum(lag.records for lag in others), max(lag.stalled_s for lag in others)
            )
        for gone in self._shown_lags - shown.keys():
            self._lag.remove(*gone)
            self._stalled.remove(*gone)
        for (group, topic), lag in shown.items():
            self._lag.labels(group=group, topic=topic).set(lag.records)
            self._stalled.labels(group=group, topic=topic).set(lag.stalled_s)
        self._shown_lags = set(shown)

    def describe(self) -> Iterable[Metric]:
        """The families without samples."""
        return self._families().values()

    def collect(self) -> Iterator[Metric]:
        """The families as things are now."""
        families = self._families()
        if self._groups is not None and self._transactions is not None:
            states, members = self._groups.count_states()
            for state in GROUP_STATES:
                families["penstock_groups"].add_metric((state,), states.get(state, 0))
            families["penstock_group_members"].add_metric((), members)
            states, oldest_s = self._transactions.count_states()
            for state in TRANSACTION_STATES:
                families["penstock_transactions"].add_metric((state,), states.get(state, 0))
            families["penstock_oldest_transaction_seconds"].add_metric((), oldest_s)
        yield from families.values()

    def _families(self) -> dict[str, GaugeMetricFamily]:
        every = [
            GaugeMetricFamily(
                "penstock_groups", "Groups coordinated here, by state", labels=["state"]
            ),
            GaugeMetricFamily("penstock_group_members", "Members of the groups coordinated here"),
            GaugeMetricFamily(
                "penstock_transactions",
                "Transactional ids coordinated here, by state",
                labels=["state"],
            ),
            GaugeMetricFamily(
                "penstock_oldest_transaction_seconds",
                "For how long the oldest transaction coordinated here has been open; 0: none is",
            ),
        ]
        return {family.name: family for family in every}
