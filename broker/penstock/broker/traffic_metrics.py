"""Prometheus metrics of what clients ask: calls by method, streams, bytes and records by topic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from penstock.broker.core.metadata_image import ImageChange
from penstock.broker.durations import Durations
from penstock.broker.topic_labels import OTHER, TopicLabels

PRODUCE: Final = "Log.Produce"

_COUNTED: Final = {
    "produced_bytes": "Bytes of record batches appended",
    "produced_records": "Records appended",
    "fetched_bytes": "Bytes of record batches served",
}


class _Carried:
    """What went through one topic, or all of them."""

    __slots__ = ("fetched_bytes", "produced_bytes", "produced_records")

    def __init__(self) -> None:
        self.produced_bytes = 0
        self.produced_records = 0
        self.fetched_bytes = 0


class TrafficMetrics(Collector):
    """Counts calls (a penstock.raft_meta.metering.Meter) and what they carry.

    Counted on one event loop, at less than a microsecond a call; read in the metrics' own thread.
    Only methods that were called and topics that were used are shown.
    """

    def __init__(self, registry: CollectorRegistry, labels: TopicLabels) -> None:
        self._labels = labels
        self._durations: dict[str, Durations] = {}  # Of methods that any port serves.
        self._calls: dict[str, Durations] = {}  # Of those that were called.
        self._open: dict[str, int] = {}
        self._topics: dict[str, _Carried] = {}  # By topic; several may share what OTHER counts.
        self._shown: dict[str, _Carried] = {}  # By label.
        self._sum = _Carried()
        self._is_there: Callable[[str], bool] = lambda _: True
        registry.register(self)

    def watch(self, is_there: Callable[[str], bool]) -> None:
        """Count by topic only those that this finds: what is carried may end after its topic."""
        self._is_there = is_there

    # --- calls ------------------------------------------------------------------------------------

    def unary(self, method: str) -> Callable[[float], None]:
        """See Meter."""
        durations = self._durations.setdefault(method, Durations())

        def observe(seconds: float) -> None:
            durations.observe(seconds)
            if method not in self._calls:
                self._calls[method] = durations

        return observe

    def stream(self, method: str) -> Callable[[int], None]:
        """See Meter."""

        def count(step: int) -> None:
            self._open[method] = self._open.get(method, 0) + step

        return count

    # --- records ----------------------------------------------------------------------------------

    def produced(self, topic: str, size_bytes: int, records: int) -> None:
        """Count what was appended to a partition and acknowledged."""
        self._sum.produced_bytes += size_bytes
        self._sum.produced_records += records
        of_topic = self._topics.get(topic) or self._begin(topic)
        of_topic.produced_bytes += size_bytes
        of_topic.produced_records += records

    def fetched(self, topic: str, size_bytes: int) -> None:
        """Count what was served of a partition."""
        self._sum.fetched_bytes += size_bytes
        of_topic = self._topics.get(topic) or self._begin(topic)
        of_topic.fetched_bytes += size_bytes

    def _begin(self, topic: str) -> _Carried:
        if not self._is_there(topic):
            return _Carried()
        label = self._labels.label(topic)
        shown = self._shown.get(label)
        if shown is None:
            shown = self._shown[label] = _Carried()
        self._topics[topic] = shown
        return shown

    def on_metadata(self, change: ImageChange) -> None:
        """Forget the topics that are gone."""
        for topic in change.removed_topics:
            self._topics.pop(topic.name, None)
            if topic.name != OTHER:
                self._shown.pop(topic.name, None)
            self._labels.forget(topic.name)

    # --- showing ----------------------------------------------------------------------------------

    def describe(self) -> Iterable[Metric]:
        """The families without samples."""
        return [_calls(), _streams(), *_plain().values(), *_by_topic().values()]

    def collect(self) -> Iterator[Metric]:
        """The families with what was counted until now."""
        calls, streams, plain, by_topic = _calls(), _streams(), _plain(), _by_topic()
        for method, durations in sorted(self._calls.copy().items()):
            durations.add_to(calls, (method,))
        for method, count in sorted(self._open.copy().items()):
            streams.add_metric((method,), count)
        for name, family in plain.items():
            family.add_metric((), getattr(self._sum, name))
        for label, topic in sorted(self._shown.copy().items()):
            for name, family in by_topic.items():
                family.add_metric((label,), getattr(topic, name))
        yield from (calls, streams, *plain.values(), *by_topic.values())


def _calls() -> HistogramMetricFamily:
    return HistogramMetricFamily(
        "penstock_request_seconds",
        "From a request to its answer, by method; long polls with their waits",
        labels=["method"],
    )


def _streams() -> GaugeMetricFamily:
    return GaugeMetricFamily(
        "penstock_open_streams", "Streams that are open, by method", labels=["method"]
    )


def _plain() -> dict[str, CounterMetricFamily]:
    return {name: CounterMetricFamily(f"penstock_{name}", text) for name, text in _COUNTED.items()}


def _by_topic() -> dict[str, CounterMetricFamily]:
    return {
        name: CounterMetricFamily(f"penstock_topic_{name}", f"{text}, by topic", labels=["topic"])
        for name, text in _COUNTED.items()
    }
