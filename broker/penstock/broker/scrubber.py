"""Reads what lies on the disks, slowly, to find what is damaged before it is needed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import structlog

from penstock.broker.repair import mend_index
from penstock.broker.storage.checkpoints import write_atomically
from penstock.broker.storage.damage import Examination
from penstock.broker.storage.disk import Disk
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.ownership import why_wrong, write_anew
from penstock.broker.storage.segment import Segment
from penstock.wire.errors import PenstockError
from penstock.wire.ids import TopicId, TopicIdPartition

logger = structlog.get_logger()

PROGRESS_FILE: Final = ".scrub"
_SAVE_EVERY_S: Final = 10.0


class Logs(Protocol):
    """What is asked of the log manager."""

    def get(self, key: TopicIdPartition) -> PartitionLog | None:
        """The log of a partition, if it is here and open."""
        ...

    def held_in(self, path: Path) -> list[TopicIdPartition]:
        """The partitions known to be in the data directory ``path``."""
        ...


class Counts(Protocol):
    """Hears what the scrubber does."""

    def scrubbed(self, size_bytes: int) -> None:
        """So many bytes were read. Called in the scrubber's threads."""
        ...

    def segment_damaged(self) -> None:
        """A segment was found damaged, or its index files were, which are made anew."""
        ...


class Uncounted:
    """Counts nothing."""

    def scrubbed(self, size_bytes: int) -> None:
        """Forget it."""

    def segment_damaged(self) -> None:
        """Forget it."""


class Progress(NamedTuple):
    """How far a round through a directory has come; it outlives the process.

    Everything before ``segment`` of ``partition`` was read, in the order of their ids and offsets;
    None: everything. ``began_ms`` is the wall clock's.
    """

    began_ms: int
    partition: TopicIdPartition | None = None
    segment: int = 0

    def encode(self) -> bytes:
        """The file."""
        at = self.partition
        place = None if at is None else [at.topic_id.hex(), at.partition, self.segment]
        return json.dumps({"began_ms": self.began_ms, "next": place}).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> Progress:
        """What a file tells. Raises ValueError and the like for what is none."""
        fields = json.loads(data)
        began_ms = int(fields["began_ms"])
        if fields["next"] is None:
            return cls(began_ms)
        topic_id, partition, segment = fields["next"]
        key = TopicIdPartition(TopicId(bytes.fromhex(topic_id)), int(partition))
        return cls(began_ms, key, int(segment))


class Round(NamedTuple):
    """A round through a directory, as people follow it.

    ``began_ms`` is the wall clock's, and 0 before there was one; ``share`` is 1 when all partitions
    of the directory were read.
    """

    began_ms: int
    share: float


_START: Final = TopicIdPartition(TopicId(b""), 0)
"""Before every partition."""


class Scrubber:
    """Reads every closed segment of each data directory once in ``interval_ms``.

    Directories are read side by side, each at ``bytes_per_second`` at most, in a thread of its own;
    an interval of 0 reads nothing. What is damaged goes to ``found``, with an offset in its
    segment. What says whose log it is (``partition.metadata``) is written anew where it is wrong.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        logs: Logs,
        found: Callable[[PartitionLog, int], None],
        *,
        cluster_id: str,
        interval_ms: int,
        bytes_per_second: int,
        counts: Counts | None = None,
        wall_clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._directories = directories
        self._logs = logs
        self._found = found
        self._cluster_id = cluster_id
        self._interval_ms = interval_ms
        self._bytes_per_second = bytes_per_second
        self._counts = counts or Uncounted()
        self._wall_clock_ms = wall_clock_ms
        self._rounds = dict.fromkeys(directories, Round(0, 0.0))
        self._tasks: list[asyncio.Task[None]] = []
        self._threads = ThreadPoolExecutor(max(len(directories), 1), "scrub")
        self._ending = threading.Event()

    def round(self, path: Path) -> Round:
        """How far the newest round through a data directory is. Safe on any thread."""
        return self._rounds[path]

    async def start(self) -> None:
        """Begin to read, or go on where the last process stopped."""
        if self._interval_ms > 0:
            self._tasks = [asyncio.create_task(self._run(path)) for path in self._directories]

    async def stop(self) -> None:
        """Read no more."""
        self._ending.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._threads.shutdown)

    async def _run(self, path: Path) -> None:
        progress = _load(path) or Progress(self._wall_clock_ms(), _START)
        self._rounds[path] = Round(progress.began_ms, float(progress.partition is None))
        while True:
            if progress.partition is not None:
                progress = await self.scrub(path, progress)
                await self._save(path, progress)
            # A clock that was set back must not put the next round off for longer than one.
            left_ms = progress.began_ms + self._interval_ms - self._wall_clock_ms()
            await asyncio.sleep(max(0, min(left_ms, self._interval_ms)) / 1000)
            progress = Progress(self._wall_clock_ms(), _START)

    async def scrub(self, path: Path, progress: Progress) -> Progress:
        """Read the rest of a round; the progress at its end."""
        loop = asyncio.get_running_loop()
        saved_s = loop.time()
        first = progress.partition or _START
        keys = sorted(self._logs.held_in(path))
        for number, key in enumerate(keys):
            if key < first:
                continue
            self._rounds[path] = Round(progress.began_ms, number / len(keys))
            await self._see_whose(key)
            at = progress.segment if key == first else 0
            while (due := self._next_segment(key, at)) is not None:
                log, segment = due
                await self._examine(log, segment)
                at = segment.base_offset + 1
                progress = Progress(progress.began_ms, key, at)
                if loop.time() - saved_s >= _SAVE_EVERY_S:
                    await self._save(path, progress)
                    saved_s = loop.time()
            await asyncio.sleep(0)
        self._rounds[path] = Round(progress.began_ms, 1.0)
        return Progress(progress.began_ms)

    async def _see_whose(self, key: TopicIdPartition) -> None:
        """A start could not tell whose log it is once the file that says so is damaged."""
        log = self._logs.get(key)
        if log is None or log.home.failure is not None:
            return
        loop = asyncio.get_running_loop()
        if await loop.run_in_executor(self._threads, why_wrong, log, self._cluster_id) is None:
            return
        # Looked at once more: meanwhile the log may have gone, and the name be another's.
        reason = None if log.is_closed else why_wrong(log, self._cluster_id)
        if reason is None:
            return
        logger.warning("partition.metadata written anew", partition=log.name, reason=reason)
        try:
            write_anew(log, self._cluster_id)
        except PenstockError as error:
            logger.warning(
                "partition.metadata not written", partition=log.name, reason=error.message
            )

    def _next_segment(self, key: TopicIdPartition, at: int) -> tuple[PartitionLog, Segment] | None:
        log = self._logs.get(key)
        if log is None or log.home.failure is not None:
            return None
        return next(((log, one) for one in _closed(log) if one.base_offset >= at), None)

    async def _examine(self, log: PartitionLog, segment: Segment) -> None:
        loop = asyncio.get_running_loop()
        try:
            rewrites = -1
            while rewrites != log.rewrites:  # Cut under it, a sound segment may seem damaged.
                rewrites, examination = log.rewrites, Examination(log, segment)
                findings = await loop.run_in_executor(self._threads, examination.run, self._pace)
                if segment not in log.files.segments or self._ending.is_set():
                    return
            if findings.error is not None:
                raise log.home.translate(findings.error, f"reading {segment.path}")
            if findings.damages:
                self._counts.segment_damaged()
                self._found(log, findings.damages[0].offset)
            elif findings.index_is_damaged:
                await mend_index(log, segment)
                self._counts.segment_damaged()
        except PenstockError as error:
            logger.warning("segment not scrubbed", segment=str(segment.path), reason=error.message)

    async def _save(self, path: Path, progress: Progress) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._threads, _save, path, progress)

    def _pace(self, size_bytes: int) -> None:
        self._counts.scrubbed(size_bytes)
        self._ending.wait(size_bytes / self._bytes_per_second)


def _closed(log: PartitionLog) -> Iterator[Segment]:
    """The segments that nothing is appended to and that are on the disk."""
    return (one for one in tuple(log.files.segments[:-1]) if one.index is None)


def _load(path: Path) -> Progress | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return Progress.decode((path / PROGRESS_FILE).read_bytes())
    return None


def _save(path: Path, progress: Progress) -> None:
    with contextlib.suppress(OSError):  # A restart then reads again what was read.
        write_atomically(Disk(), path / PROGRESS_FILE, progress.encode())
