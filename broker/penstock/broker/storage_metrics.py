"""Prometheus metrics of a broker's disks: retention, the cleaner, the scrubber."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.broker.durations import Durations, SharedDurations
from penstock.broker.storage.disk import Disk
from penstock.broker.storage.log_start import Why

if TYPE_CHECKING:
    from penstock.broker.scrubber import Round, Scrubber
    from penstock.broker.storage.cleaner.cleaner import LogCleaner
    from penstock.broker.storage.data_directory import DataDirectory


class StorageMetrics:
    """What is counted of segments that are deleted, cleaned and scrubbed. Safe on any thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry: Final = registry
        self.cleaning = CleanerMetrics(registry)
        self.scrubbing = ScrubberMetrics(registry)
        segments = Counter(
            "penstock_retention_deleted_segments",
            "Old segments deleted, by reason",
            ["reason"],
            registry=registry,
        )
        size = Counter(
            "penstock_retention_deleted_bytes",
            "Bytes of the old segments deleted, by reason",
            ["reason"],
            registry=registry,
        )
        self._flushes = FlushMetrics(registry)
        self.flush_counts: Final = self._flushes.of
        self._free = Gauge(
            "penstock_log_directory_free_bytes",
            "What the file system of a data directory has free; NaN where that is not known",
            ["directory"],
            registry=registry,
        )
        self._total = Gauge(
            "penstock_log_directory_total_bytes",
            "What the file system of a data directory holds; NaN where that is not known",
            ["directory"],
            registry=registry,
        )
        self._deleted = {
            why: (segments.labels(reason=why.value), size.labels(reason=why.value)) for why in Why
        }

    def segment_deleted(self, why: Why, size_bytes: int) -> None:
        """Count an old segment that goes."""
        segments, size = self._deleted[why]
        segments.inc()
        size.inc(size_bytes)

    def watch_room(self, homes: Sequence[DataDirectory]) -> None:
        """Show how much room there is, asked in the metrics' own thread. To be called once."""
        for home in homes:
            self._show_room(
                str(home.path),
                partial(_asked, home, home.room.free_bytes),
                partial(_asked, home, home.room.total_bytes),
            )
        Gauge(
            "penstock_full_log_directories",
            "Data directories of this broker that have too little room for what producers send",
            registry=self._registry,
        ).set_function(lambda: sum(_is_full(home) for home in homes))

    def watch_metadata_room(
        self,
        directory: Path,
        log_directories: Iterable[Path],
        device_of: Callable[[Path], int] = lambda path: path.stat().st_dev,
        disk: Disk | None = None,
    ) -> None:
        """Show the same of a controller's directory. Not where one of those that its broker shows
        is on the same file system: an alert would tell of that twice.
        """
        device = _device(directory, device_of)
        if device is not None and device in {_device(path, device_of) for path in log_directories}:
            return
        asked = disk or Disk()
        self._show_room(
            str(directory),
            partial(_known, partial(asked.free_bytes, directory)),
            partial(_known, partial(asked.total_bytes, directory)),
        )

    def _show_room(
        self, directory: str, free: Callable[[], float], total: Callable[[], float]
    ) -> None:
        self._free.labels(directory=directory).set_function(free)
        self._total.labels(directory=directory).set_function(total)


class DirectoryFlushes:
    """The FlushCounts of one directory."""

    def __init__(self) -> None:
        self.syncs: Final = SharedDurations()
        self.waits: Final = Durations()

    def synced(self, seconds: float) -> None:
        """Count an fdatasync."""
        self.syncs.observe(seconds)

    def flush_waited(self, seconds: float) -> None:
        """Count a round."""
        self.waits.observe(seconds)


class FlushMetrics(Collector):
    """How long the disks take, by directory."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._directories: dict[str, DirectoryFlushes] = {}
        registry.register(self)

    def of(self, directory: Path) -> DirectoryFlushes:
        """What counts for a directory; the same for the same one. Before the metrics are served."""
        return self._directories.setdefault(str(directory), DirectoryFlushes())

    def describe(self) -> Iterable[Metric]:
        """The families without samples."""
        return self._families()

    def collect(self) -> Iterator[Metric]:
        """The families with what was counted until now."""
        syncs, waits = self._families()
        for directory, flushes in list(self._directories.items()):
            flushes.syncs.add_to(syncs, (directory,))
            flushes.waits.add_to(waits, (directory,))
        yield from (syncs, waits)

    def _families(self) -> tuple[HistogramMetricFamily, HistogramMetricFamily]:
        return (
            HistogramMetricFamily(
                "penstock_fsync_seconds",
                "How long a write to a directory's disk took until it was there: an fdatasync of "
                "batches, or a transaction of the controller's journal",
                labels=["directory"],
            ),
            HistogramMetricFamily(
                "penstock_flush_wait_seconds",
                "From the first request of a round of flushes to the end of the round",
                labels=["directory"],
            ),
        )


class CleanerMetrics:
    """The Counts of a LogCleaner. Safe on any thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry: Final = registry
        self._cleans = Counter(
            "penstock_cleaner_cleans", "Logs that were compacted", registry=registry
        )
        self._failures = Counter(
            "penstock_cleaner_failures", "Compactions that failed", registry=registry
        )
        self._read_bytes = Counter(
            "penstock_cleaner_read_bytes", "Bytes of segments read to compact", registry=registry
        )
        self._written_bytes = Counter(
            "penstock_cleaner_written_bytes",
            "Bytes of segments written by compaction",
            registry=registry,
        )
        self._last_clean = Gauge(
            "penstock_cleaner_last_clean_timestamp_seconds",
            "When a log was compacted last, in seconds since 1970; 0: not since the start",
            registry=registry,
        )

    def watch(self, cleaner: LogCleaner) -> None:
        """Show how dirty the logs are, asked in the metrics' own thread. To be called once."""
        Gauge(
            "penstock_cleaner_dirtiest_ratio",
            "How much of the dirtiest log that can be compacted is dirty, 0 to 1",
            registry=self._registry,
        ).set_function(lambda: cleaner.dirtiest_ratio)
        Gauge(
            "penstock_cleaner_uncleanable_partitions",
            "Logs that can't be compacted, and grow",
            registry=self._registry,
        ).set_function(lambda: cleaner.uncleanable_count)

    def read(self, size_bytes: int) -> None:
        """Count what was read."""
        self._read_bytes.inc(size_bytes)

    def written(self, size_bytes: int) -> None:
        """Count what was written."""
        self._written_bytes.inc(size_bytes)

    def cleaned(self, now_ms: int) -> None:
        """Count a log that was compacted."""
        self._cleans.inc()
        self._last_clean.set(now_ms / 1000)

    def failed(self) -> None:
        """Count a log that was not."""
        self._failures.inc()


class ScrubberMetrics:
    """The Counts of a Scrubber. Safe on any thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry: Final = registry
        self._read_bytes = Counter(
            "penstock_scrubber_read_bytes", "Bytes of segments scrubbed", registry=registry
        )
        self._damaged = Counter(
            "penstock_scrubber_damaged_segments",
            "Segments that the scrubber found damaged, or whose index files were",
            registry=registry,
        )

    def watch(self, scrubber: Scrubber, directories: Sequence[Path]) -> None:
        """Show how far each round is, asked in the metrics' own thread. To be called once."""
        share = Gauge(
            "penstock_scrubber_progress_ratio",
            "How many of a data directory's partitions the newest round has read, 0 to 1",
            ["directory"],
            registry=self._registry,
        )
        began = Gauge(
            "penstock_scrubber_round_start_timestamp_seconds",
            "When the newest round began, in seconds since 1970",
            ["directory"],
            registry=self._registry,
        )
        for path in directories:
            share.labels(directory=str(path)).set_function(_of(scrubber, path, _share))
            began.labels(directory=str(path)).set_function(_of(scrubber, path, _began_s))

    def scrubbed(self, size_bytes: int) -> None:
        """Count what was read."""
        self._read_bytes.inc(size_bytes)

    def segment_damaged(self) -> None:
        """Count a segment that is not as it should be."""
        self._damaged.inc()


def _asked(home: DataDirectory, ask: Callable[[], int]) -> float:
    # A mount that went away leaves an empty directory on another disk.
    return nan if home.failure is not None else _known(ask)


def _known(ask: Callable[[], int]) -> float:
    try:
        return ask()
    except OSError:
        return nan


def _device(path: Path, device_of: Callable[[Path], int]) -> int | None:
    """The file system that a directory is on; None where that can't be found out."""
    try:
        return device_of(path)
    except OSError:
        return None


def _is_full(home: DataDirectory) -> bool:
    try:
        return home.failure is None and home.room.is_full()
    except OSError:
        return False


def _of(scrubber: Scrubber, path: Path, what: Callable[[Round], float]) -> Callable[[], float]:
    return lambda: what(scrubber.round(path))


def _share(one: Round) -> float:
    return one.share


def _began_s(one: Round) -> float:
    return one.began_ms / 1000
