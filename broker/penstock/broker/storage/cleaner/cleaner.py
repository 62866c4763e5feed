"""The cleaner of a broker: finds the dirtiest compacted log, cleans it, finds the next."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import structlog

from penstock.broker.core.epoch_history import EpochHistory
from penstock.broker.storage.cleaner.copying import copy
from penstock.broker.storage.cleaner.counting import Counts, Uncounted
from penstock.broker.storage.cleaner.filtering import AbortedRanges, Filter
from penstock.broker.storage.cleaner.offset_map import OffsetMap
from penstock.broker.storage.cleaner.planning import Plan, close_overdue, plan_for
from penstock.broker.storage.cleaner.reading import (
    CleaningStoppedError,
    LastBatches,
    MapTooSmallError,
    Reading,
    Source,
    note_batches,
)
from penstock.broker.storage.cleaner.swapping import SwapFiles, commit, finish
from penstock.broker.storage.cleaner.throttle import Throttle
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.placing import SegmentDamagedError
from penstock.broker.storage.segment import Segment
from penstock.broker.storage.settings import CleanerSettings
from penstock.wire.errors import CorruptRecordError, PenstockError
from penstock.wire.ids import TopicIdPartition

_NEVER = 2**63 - 1
_LOOKED_AT_ONCE = 20
_TRY_AGAIN_MS = 3_600_000  # What could not be read may have been the memory's fault.
_Extent = tuple[int, int, int]
T = TypeVar("T")
_log = structlog.get_logger()


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


class Logs(Protocol):
    """What is asked of the log manager."""

    def logs(self) -> Sequence[PartitionLog]:
        """Every open log."""
        ...

    def high_watermark(self, key: TopicIdPartition) -> int:
        """Everything below it is committed, as far as is known here."""
        ...


class _AbandonedError(Exception):
    """What was made is dropped, and made anew later: the log's segments are others by now, or it
    is closed; or there is no memory.
    """


class LogCleaner:
    """Compacts logs, those that lead and those that follow, each for itself.

    Everything is called on the event loop. There the cleaner decides and swaps; it reads, copies
    and syncs in its own threads, at most ``io_max_bytes_per_second`` of all of them together.

    ``dirtiest_ratio`` is how much of the dirtiest log was dirty, of all that could be cleaned when
    the cleaner last looked: 0 to 1. Safe to read on any thread.
    """

    def __init__(
        self,
        logs: Logs,
        settings: CleanerSettings,
        *,
        counts: Counts | None = None,
        wall_clock_ms: Callable[[], int] = _wall_ms,
    ) -> None:
        self.dirtiest_ratio = 0.0
        self._logs = logs
        self._counts = counts or Uncounted()
        self._settings = settings
        self._wall_clock_ms = wall_clock_ms
        self._stopping = threading.Event()
        self._stop_soon = asyncio.Event()
        self._throttle = Throttle(settings.io_max_bytes_per_second, self._stopping.wait)
        self._pool = ThreadPoolExecutor(max(settings.threads, 1), "clean")
        self._workers: list[asyncio.Task[None]] = []
        self._busy: set[TopicIdPartition] = set()
        # Logs that can't be cleaned: as they were then, and when they are tried again all the same.
        self._uncleanable: dict[TopicIdPartition, tuple[_Extent, int]] = {}
        self._horizons_ms: dict[TopicIdPartition, int] = {}  # When tombstones may go next.

    @property
    def uncleanable_count(self) -> int:
        """How many logs grow because they can't be cleaned. Safe on any thread."""
        return len(self._uncleanable)

    async def start(self) -> None:
        """Begin to clean."""
        self._workers = [asyncio.create_task(self._work()) for _ in range(self._settings.threads)]

    async def stop(self) -> None:
        """Clean no more. What was begun is dropped; the logs are as before it."""
        self._stopping.set()
        self._stop_soon.set()
        await asyncio.gather(*self._workers)
        self._pool.shutdown()

    async def _work(self) -> None:
        while not self._stop_soon.is_set():
            if not await self.clean_one():
                await self._pause()

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self._settings.backoff_ms / 1000):
                await self._stop_soon.wait()
        except TimeoutError:
            return

    async def clean_one(self) -> bool:
        """Clean the log that is the dirtiest; False when none needs it."""
        plan = await self._dirtiest()
        if plan is None:
            return False
        key = plan.log.key
        self._busy.add(key)
        plan.log.home.cleaning.add(plan.log.directory)
        try:
            return await self._guarded_clean(plan)
        finally:
            plan.log.home.cleaning.discard(plan.log.directory)
            self._busy.discard(key)

    # --- choosing --------------------------------------------------------------------------------

    async def _dirtiest(self) -> Plan | None:
        best: Plan | None = None
        dirtiest_ratio = 0.0
        logs = self._logs.logs()
        for gone in self._uncleanable.keys() - {log.key for log in logs if log.config.compacts}:
            del self._uncleanable[gone]
        for gone in self._horizons_ms.keys() - {log.key for log in logs}:
            del self._horizons_ms[gone]
        for number, log in enumerate(logs):
            if number % _LOOKED_AT_ONCE == _LOOKED_AT_ONCE - 1:
                await asyncio.sleep(0)
            plan = self._plan(log)
            if plan is None:
                continue
            dirtiest_ratio = max(dirtiest_ratio, plan.dirty_ratio)
            if self._is_due(plan) and (best is None or _urgency(plan) > _urgency(best)):
                best = plan
        self.dirtiest_ratio = dirtiest_ratio
        if best is None or best.log.key in self._busy or best.log.is_closed:
            return None  # Another worker was quicker.
        return best

    def _plan(self, log: PartitionLog) -> Plan | None:
        """The plan for a log that may be cleaned."""
        if not log.config.compacts or log.is_closed or log.home.failure is not None:
            return None
        now_ms = self._wall_clock_ms()
        if log.key in self._busy or self._is_given_up(log, now_ms):
            return None
        if log.known_producers.are_in_doubt:
            return None  # Which batch is a producer's last is known once that is mended.
        try:
            close_overdue(log, now_ms)
            high_watermark = self._logs.high_watermark(log.key)
            return plan_for(log, high_watermark=high_watermark, now_ms=now_ms)
        except PenstockError as error:
            self._give_up(log, error.message)
            return None

    def _is_due(self, plan: Plan) -> bool:
        horizon_ms = self._horizons_ms.get(plan.log.key, _NEVER)
        return plan.is_due or self._wall_clock_ms() >= horizon_ms

    # --- one log ---------------------------------------------------------------------------------

    async def _guarded_clean(self, plan: Plan) -> bool:
        """Whether to go on at once with the next one."""
        log = plan.log
        try:
            await self._clean(plan)
        except (CleaningStoppedError, _AbandonedError) as reason:
            _log.debug("clean_abandoned", partition=log.name, reason=str(reason))
            return False
        except (CorruptRecordError, MapTooSmallError) as error:
            _tell_of_damage(log, error)
            self._give_up(log, str(error))
        except PenstockError as error:
            self._counts.failed()
            _log.warning("log_not_cleaned", partition=log.name, reason=error.message)
            return False
        except OSError as error:
            if not log.is_closed:  # Else its directory has another name by now.
                self._counts.failed()
                failure = log.home.translate(error, f"cleaning {log.name}")
                _log.warning("log_not_cleaned", partition=log.name, reason=failure.message)
            return False
        except Exception as error:
            # A fault of the cleaner's own must not end its work on the other logs.
            _log.exception("log_not_cleaned", partition=log.name)
            self._give_up(log, f"the cleaner failed: {error!r}")
        return True

    def _give_up(self, log: PartitionLog, reason: str) -> None:
        self._counts.failed()
        self._uncleanable[log.key] = _extent(log), self._wall_clock_ms() + _TRY_AGAIN_MS
        _log.error(
            "log_not_cleanable",
            partition=log.name,
            reason=reason,
            next_step="it grows until this is mended: a damaged replica is, from another one, and "
            "then cleaned; for lack of memory raise log.cleaner.dedupe.buffer.bytes and restart "
            "the broker",
        )

    def _is_given_up(self, log: PartitionLog, now_ms: int) -> bool:
        """Whether nothing has changed since the log could not be cleaned, an hour ago or less."""
        extent, again_ms = self._uncleanable.get(log.key, (None, 0))
        return extent == _extent(log) and now_ms < again_ms

    async def _clean(self, plan: Plan) -> None:
        log, settings = plan.log, self._settings
        size_bytes = sum(segment.size_bytes for segment in plan.segments)
        reading = Reading(
            disk=log.home.disk,
            throttle=self._throttle,
            epochs=EpochHistory(log.epochs.entries),
            log_start_offset=log.log_start_offset,
            is_stopping=self._stopping.is_set,
            counts=self._counts,
        )
        latest = _map_of(settings.dedupe_buffer_bytes // settings.threads)
        try:
            aborted = await self._aborted_in(plan)
            producers = LastBatches(log.producers)
            end_offset = await self._note_batches(plan, reading, latest, aborted, producers)
            batches = Filter(
                latest=latest,
                aborted=aborted,
                log_start_offset=log.log_start_offset,
                end_offset=end_offset,
                last_batches=producers.below(end_offset),
                epochs=producers.epochs,
                now_ms=self._wall_clock_ms(),
                delete_retention_ms=log.config.delete_retention_ms,
            )
            for group in plan.groups(end_offset):
                size_bytes -= await self._clean_group(log, group, reading, batches)
        finally:
            latest.close()
        self._horizons_ms[log.key] = batches.horizon_ms
        log.cleaned_up_to(end_offset)
        self._uncleanable.pop(log.key, None)
        self._counts.cleaned(self._wall_clock_ms())
        _log.info(
            "log_cleaned",
            partition=log.name,
            end_offset=end_offset,
            bytes_before=plan.clean_bytes + plan.dirty_bytes,
            bytes_after=size_bytes,
        )

    async def _aborted_in(self, plan: Plan) -> AbortedRanges:
        """What was aborted of what is to be cleaned, from indexes that are read in a thread."""
        log = plan.log
        job = log.cold_aborted(log.log_start_offset)
        if job is not None:
            await self._run(job)
        return AbortedRanges(log.aborted_transactions(log.log_start_offset, below=plan.end_offset))

    async def _note_batches(
        self,
        plan: Plan,
        reading: Reading,
        latest: OffsetMap,
        aborted: AbortedRanges,
        producers: LastBatches,
    ) -> int:
        """Read the dirty part as far as the map has room; up to where that was."""
        reached = plan.dirty_offset
        for segment, end in plan.dirty_segments():
            with _Sources(plan.log, [(segment, end)]) as [source]:
                reached = await self._run(
                    partial(
                        note_batches,
                        source,
                        reading,
                        latest,
                        aborted,
                        producers,
                        from_offset=plan.dirty_offset,
                        end_offset=plan.end_offset,
                    )
                )
            if reached < end:
                break
        if plan.dirty_bytes and reached <= plan.dirty_offset:
            raise MapTooSmallError(
                f"the batch at offset {plan.dirty_offset} has more keys than the "
                f"{self._settings.dedupe_buffer_bytes} bytes of log.cleaner.dedupe.buffer.bytes "
                "have room for"
            )
        return reached

    async def _clean_group(
        self,
        log: PartitionLog,
        group: list[tuple[Segment, int]],
        reading: Reading,
        batches: Filter,
    ) -> int:
        """Make one segment of some; by how many bytes that is less."""
        segments = [segment for segment, _ in group]
        size_bytes = sum(segment.size_bytes for segment in segments)
        files = SwapFiles(log.directory, segments[0].base_offset, group[-1][1])
        log.check_room(size_bytes, f"cleaning {log.name}")
        try:
            with _Sources(log, group) as sources:
                interval_bytes = log.config.index_interval_bytes
                copied = await self._run(
                    partial(copy, sources, reading, batches, files, interval_bytes)
                )
            if not copied.changed:
                files.discard(reading.disk)
                return 0
            _check(log, segments)
            log.files.begin_swap(files)
            await self._run(partial(commit, reading.disk, files))
            _check(log, segments)
            if not log.files.is_swapping(files):
                raise _AbandonedError("a cut came in between")
            doomed = log.files.swap(files, segments, copied.size_bytes)
        except BaseException as error:
            if log.home.failure is None:  # Else the next start brings it to an end.
                files.discard(reading.disk)
            if isinstance(error, FileNotFoundError):  # Of what a cut has discarded.
                raise _AbandonedError("a cut came in between") from error
            raise
        await self._finish(log, files, doomed)
        return size_bytes - copied.size_bytes

    async def _finish(self, log: PartitionLog, files: SwapFiles, doomed: Sequence[Path]) -> None:
        try:
            await self._run(partial(finish, log.home.disk, files, doomed))
        except OSError as error:
            if log.is_closed:  # The next start finds what a closed log ended with.
                raise
            # For want of room as well: a start would put the swap file, if it is still there, over
            # whatever a later clean or cut leaves, and nobody knows which names are on the disk.
            raise log.home.fail(error, f"cleaning {log.name}") from error
        log.files.end_swap(files)

    async def _run(self, job: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, job)


def _map_of(size_bytes: int) -> OffsetMap:
    try:
        return OffsetMap(size_bytes)
    except OSError as error:  # Which tells of memory, and nothing of the disk.
        raise _AbandonedError(f"no memory for {size_bytes} bytes: {error}") from error


def _tell_of_damage(log: PartitionLog, error: Exception) -> None:
    """Have what the cleaner came upon mended, as what a read or the scrubber did."""
    if isinstance(error, SegmentDamagedError) and not log.is_closed:
        log.home.damage_found(log, error.offset)


def _extent(log: PartitionLog) -> _Extent:
    """What is another when it may be worth while to try to clean the log again."""
    return log.log_start_offset, log.cleaned_offset, log.rewrites


def _urgency(plan: Plan) -> tuple[bool, float]:
    return plan.is_overdue, plan.dirty_ratio


def _check(log: PartitionLog, segments: Sequence[Segment]) -> None:
    """Raise _AbandonedError unless the segments are still the log's, and closed."""
    if log.is_closed or not log.files.are_closed(segments):
        raise _AbandonedError("the log is closed, or the segments have gone")


class _Sources:
    """Segments held open, for another thread to read."""

    def __init__(self, log: PartitionLog, group: Sequence[tuple[Segment, int]]) -> None:
        self._log = log
        self._group = group
        self._sources: list[Source] = []

    def __enter__(self) -> list[Source]:
        _check(self._log, [segment for segment, _ in self._group])
        try:
            for segment, end in self._group:
                file = segment.file.acquire()
                self._sources.append(Source(file, segment.base_offset, end, segment.size_bytes))
        except BaseException:
            self._release()
            raise
        return self._sources

    def __exit__(self, *_: object) -> None:
        self._release()

    def _release(self) -> None:
        for source in self._sources:
            source.file.release()
