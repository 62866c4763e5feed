"""Prometheus metrics of a broker. Label children are made once and kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge

from penstock.broker.coordinator_metrics import CoordinatorMetrics
from penstock.broker.core.partition_events import IsrChanged, OutOfSync
from penstock.broker.partition_metrics import PartitionMetrics
from penstock.broker.process_metrics import ProcessMetrics
from penstock.broker.quorum_metrics import QuorumMetrics
from penstock.broker.storage_metrics import StorageMetrics
from penstock.broker.topic_labels import TopicLabels
from penstock.broker.traffic_metrics import TrafficMetrics
from penstock.wire.errors import ErrorCode, PenstockError


class IncomingCounts:
    """Counts connections that brought no whole requests, and were closed for that."""

    def __init__(self, overfull: Counter, idle: Counter) -> None:
        self.client_overfull: Final[Callable[[], None]] = overfull.inc
        self.client_idle: Final[Callable[[], None]] = idle.inc


class UnsentCounts:
    """Counts what was refused, and who was disconnected, since answers were not taken."""

    def __init__(self, refused: Counter, stalled: Counter) -> None:
        self.answer_refused: Final[Callable[[], None]] = refused.inc
        self.client_stalled: Final[Callable[[], None]] = stalled.inc


class BrokerMetrics:
    """What a node counts and shows; the parts by subject, and here what has none of its own.

    ``most_labels`` topics, and pairs of group and topic, are shown by name. Safe on any thread, but
    for ``traffic``, which is the event loop's. A count costs about a microsecond.
    """

    def __init__(self, most_labels: int = 1000) -> None:
        self.registry: Final = CollectorRegistry()
        labels = TopicLabels(most_labels)
        self.process: Final = ProcessMetrics(self.registry)
        self.traffic: Final = TrafficMetrics(self.registry, labels)
        self.storage: Final = StorageMetrics(self.registry)
        self.partitions: Final = PartitionMetrics(self.registry, labels)
        self.coordinators: Final = CoordinatorMetrics(self.registry, most_labels)
        self.quorum: Final = QuorumMetrics(self.registry)
        self._damaged_batches = Counter(
            "penstock_damaged_batches",
            "Batches found on the disks that fail their checksum",
            registry=self.registry,
        )
        self._mended_batches = Counter(
            "penstock_mended_batches",
            "Damaged batches that were replaced by those of another replica",
            registry=self.registry,
        )
        self._damaged_logs = Counter(
            "penstock_damaged_logs",
            "Logs that did not open, since records that were on the disk are gone or damaged",
            registry=self.registry,
        )
        self._copied_logs = Counter(
            "penstock_copied_logs",
            "Logs that did not open and were copied anew from another replica",
            registry=self.registry,
        )
        self._refused_batches = Counter(
            "penstock_refused_batches",
            "Produce requests refused for one partition, by error",
            ["error"],
            registry=self.registry,
        )
        self._refused: dict[ErrorCode, Counter] = {}  # Of the errors that there were.
        self._controller_refused = Counter(
            "penstock_controller_refusals",
            "What this node refused as the active controller, by command and error: one of each "
            "partition of a command about partitions",
            ["command", "error"],
            registry=self.registry,
        )
        left = Counter(
            "penstock_isr_left",
            "Followers that left the in-sync set of a partition that this broker leads, by reason",
            ["reason"],
            registry=self.registry,
        )
        self._isr_left = {why: left.labels(reason=why.value) for why in OutOfSync}
        self._isr_joined = Counter(
            "penstock_isr_joined",
            "Followers that joined the in-sync set of a partition that this broker leads",
            registry=self.registry,
        )
        self._elected = Counter(
            "penstock_leader_elections",
            "Times that a replica of this broker became leader",
            registry=self.registry,
        )
        self._elected_uncleanly = Counter(
            "penstock_unclean_leader_elections",
            "Those of them of a replica that was not in sync, and may lack acknowledged records",
            registry=self.registry,
        )
        self._stream_refusals = Counter(
            "penstock_replication_refusals",
            "Connections for replication in frames that were refused, by cause",
            ["cause"],
            registry=self.registry,
        )
        self._streams = Counter(
            "penstock_replication_streams",
            "Streams of followers that this broker began to serve, by what carries them",
            ["transport"],
            registry=self.registry,
        )
        self._answers_refused = Counter(
            "penstock_answers_refused",
            "Calls without room for their answer in time, since clients did not take others",
            ["ports"],
            registry=self.registry,
        )
        self._stalled_clients = Counter(
            "penstock_stalled_clients",
            "Connections that were closed since their clients took nothing of their answers",
            ["ports"],
            registry=self.registry,
        )
        self._unsent_bytes = Gauge(
            "penstock_unsent_bytes",
            "Bytes of answers that are yet to be taken, to fetches and others that are large",
            ["ports"],
            registry=self.registry,
        )
        self._overfull_clients = Counter(
            "penstock_overfull_clients",
            "Connections that were closed since their clients sent too much of requests in part",
            ["ports"],
            registry=self.registry,
        )
        self._idle_clients = Counter(
            "penstock_idle_clients",
            "Connections that were closed since they asked for nothing, and their port had many",
            ["ports"],
            registry=self.registry,
        )
        self._unfinished_bytes = Gauge(
            "penstock_unfinished_bytes",
            "Bytes of requests that were sent in part, to ports for clients and to those for nodes",
            ["ports"],
            registry=self.registry,
        )
        for transport in ("frames", "grpc"):
            self._streams.labels(transport=transport)

    def elected(self, *, uncleanly: bool) -> None:
        """Count a replica here that leads from now on."""
        self._elected.inc()
        if uncleanly:
            self._elected_uncleanly.inc()

    def watch_unsent(self, ports: str, total_bytes: Callable[[], int]) -> None:
        """Show what is yet to be taken from these ports, asked in the metrics' own thread. Once."""
        self._unsent_bytes.labels(ports=ports).set_function(total_bytes)

    def unsent(self, ports: str) -> UnsentCounts:
        """What counts answers of the ports for ``clients`` or ``nodes`` that nobody takes."""
        return UnsentCounts(
            self._answers_refused.labels(ports=ports), self._stalled_clients.labels(ports=ports)
        )

    def watch_unfinished(self, ports: str, total_bytes: Callable[[], int]) -> None:
        """Show what is sent in part to these ports, asked in the metrics' own thread. Once."""
        self._unfinished_bytes.labels(ports=ports).set_function(total_bytes)

    def incoming(self, ports: str) -> IncomingCounts:
        """What counts the connections to ``clients`` or to ``nodes`` that were closed."""
        return IncomingCounts(
            self._overfull_clients.labels(ports=ports), self._idle_clients.labels(ports=ports)
        )

    def watch_fenced(self, may_serve: Callable[[], bool]) -> None:
        """Show whether this broker may serve, asked in the metrics' own thread. Once."""
        Gauge(
            "penstock_broker_fenced",
            "1 while the controllers do not let this broker serve, or are not heard; else 0",
            registry=self.registry,
        ).set_function(lambda: 0 if may_serve() else 1)

    def watch_metadata(self, index: Callable[[], int]) -> None:
        """Show how far the broker's metadata are, asked in the metrics' own thread. Once."""
        Gauge(
            "penstock_metadata_index",
            "The last change of the metadata that this broker has taken over",
            registry=self.registry,
        ).set_function(index)

    def stream_refused(self, cause: str) -> None:
        """Count a connection for replication that was refused."""
        self._stream_refusals.labels(cause=cause).inc()

    def stream_served(self, transport: str) -> None:
        """Count a follower's stream that begins."""
        self._streams.labels(transport=transport).inc()

    def watch_followers(self, out_of_sync: Callable[[OutOfSync], int]) -> None:
        """Show what this counts, asked in the metrics' own thread. To be called once."""
        gauge = Gauge(
            "penstock_out_of_sync_followers",
            "Followers that are not in sync with a partition that this broker leads, by reason",
            ["reason"],
            registry=self.registry,
        )
        for why in OutOfSync:
            gauge.labels(reason=why.value).set_function(partial(out_of_sync, why))

    def isr_changed(self, change: IsrChanged) -> None:
        """Count who left and who joined the in-sync set of a partition that is led here."""
        for why in change.left.values():
            self._isr_left[why].inc()
        self._isr_joined.inc(len(change.joined))

    def watch_damage(self, replicas: Callable[[], int], unmendable: Callable[[], int]) -> None:
        """Show what these count, asked in the metrics' own thread. To be called once."""
        Gauge(
            "penstock_unmendable_replicas",
            "Damaged replicas of this broker that no replica in sync can mend now",
            registry=self.registry,
        ).set_function(unmendable)
        Gauge(
            "penstock_damaged_replicas",
            "Replicas of this broker that are damaged and not mended yet",
            registry=self.registry,
        ).set_function(replicas)

    def damaged(self) -> None:
        """Count a batch that was found damaged."""
        self._damaged_batches.inc()

    def mended(self) -> None:
        """Count a damaged stretch that was mended."""
        self._mended_batches.inc()

    def damaged_log(self) -> None:
        """Count a log that does not open."""
        self._damaged_logs.inc()

    def copied_log(self) -> None:
        """Count one that was copied anew for that."""
        self._copied_logs.inc()

    def watch_offline(self, directories: Callable[[], int], replicas: Callable[[], int]) -> None:
        """Show what these two count, asked in the metrics' own thread. To be called once."""
        Gauge(
            "penstock_offline_log_directories",
            "Data directories of this broker that have failed",
            registry=self.registry,
        ).set_function(directories)
        Gauge(
            "penstock_offline_replicas",
            "Replicas that this broker has and can't serve: a failed directory, a damaged log",
            registry=self.registry,
        ).set_function(replicas)

    def refused(self, error: PenstockError) -> None:
        """Count a refusal."""
        counter = self._refused.get(error.code)
        if counter is None:
            counter = self._refused_batches.labels(error=error.code.name)
            self._refused[error.code] = counter
        counter.inc()

    def controller_refused(self, command: str, code: int) -> None:
        """Count what the active controller in this process refused."""
        name = ErrorCode(code).name
        self._controller_refused.labels(command=command or "none", error=name).inc()
