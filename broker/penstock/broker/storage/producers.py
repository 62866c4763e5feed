"""Producer state from a snapshot and the batches that follow it in the log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import structlog

from penstock.broker.core.epoch_history import EpochHistory
from penstock.broker.core.producer_state import (
    ANY_PRODUCER,
    NEVER_FORGOT,
    RESTART_GRACE_MS,
    ProducerState,
)
from penstock.broker.storage.checkpoints import newest_snapshot
from penstock.broker.storage.data_directory import DataDirectory
from penstock.broker.storage.disk import Disk
from penstock.broker.storage.log_files import Batch, LogFiles
from penstock.broker.storage.placing import Placed
from penstock.broker.storage.segment import Segment
from penstock.broker.storage.walking import ChangedError, Source, headers_between
from penstock.wire.errors import CorruptRecordError, ErrorCode, RequestTimedOutError
from penstock.wire.records import verify_batch

_log = structlog.get_logger()
_EXPIRY_INTERVAL_MS: Final = 600_000
_INLINE_BYTES: Final = 256 * 1024
"""So much of a log is read for a cut at once: some milliseconds, also where batches are small."""


class CutDelayedError(RequestTimedOutError, code=ErrorCode.REQUEST_TIMED_OUT, retriable=True):
    """What a cut needs is being read in the background: it is to be tried again."""


def load_producers(
    files: LogFiles, end_offset: int, epochs: EpochHistory, now_ms: int
) -> tuple[ProducerState, tuple[int, ...]]:
    """What the producers wrote below ``end_offset``; and the damaged batches that were left out.

    The clock of an append is not in the log, so those found there count as seen at ``now_ms``:
    they are remembered rather too long than too short. Without the log's beginning and a snapshot
    of it, any producer may have been forgotten. A batch that is not what its producer was to send
    next is believed only if its checksum holds: one bit of a header would let in what is there
    already, or refuse all that comes. Raises CorruptRecordError where a header can't be.
    """
    state, offset = _known(files, end_offset, epochs)
    damaged = _replay(files, state, offset, end_offset, now_ms)
    if damaged:
        _log.error(
            "log_has_damaged_batches",
            directory=str(files.directory),
            first_offset=damaged[0],
            batches=len(damaged),
            reason="their checksums do not hold, so nobody knows who wrote them",
            next_step="they are not served, and mended once another replica is in sync; look at "
            "the disk",
        )
    return state, tuple(damaged)


def _known(files: LogFiles, end_offset: int, epochs: EpochHistory) -> tuple[ProducerState, int]:
    """The newest state that is known at or below ``end_offset``, and of which offset."""
    first = files.segments[0].base_offset
    found = newest_snapshot(files.directory, end_offset, epochs)
    if found is None or found[1] < first:
        return ProducerState(forgotten_up_to=ANY_PRODUCER if first else NEVER_FORGOT), first
    return found


def _replay(files: LogFiles, state: ProducerState, offset: int, end: int, now_ms: int) -> list[int]:
    damaged = []
    for segment, placed in files.walk(offset, end):
        header = placed.header
        if state.expects(header) or _is_sound(segment, placed):
            state.record(header, header.base_offset, now_ms)
        else:
            damaged.append(header.base_offset)
    return damaged


def _is_sound(segment: Segment, placed: Placed) -> bool:
    try:
        verify_batch(segment.read_at(placed.header.size_bytes, placed.position))
    except CorruptRecordError:
        return False
    return True


def bounded(producers: ProducerState, home: DataDirectory) -> ProducerState:
    """What was found on the disk, with the times that this process can trust."""
    now_ms, expiration_ms = home.clock_ms(), home.settings.producer_expiration_ms
    oldest_ms = now_ms - expiration_ms + min(RESTART_GRACE_MS, expiration_ms)
    producers.bound_ages(oldest_ms, now_ms)
    return producers


class Expiry:
    """Forgets the producers of one log that have long been silent, now and then."""

    def __init__(self, home: DataDirectory) -> None:
        self._home = home
        self._next_ms = home.clock_ms() + _EXPIRY_INTERVAL_MS

    def run(self, producers: ProducerState) -> int:
        """Forget who is to be forgotten; the time by which that is judged.

        Not the time that records are stamped with: that may jump, and then a retry of what was
        written a moment ago would be written again.
        """
        now_ms = self._home.clock_ms()
        if now_ms >= self._next_ms:
            self._next_ms = now_ms + _EXPIRY_INTERVAL_MS
            producers.expire(now_ms, self._home.settings.producer_expiration_ms)
        return now_ms


def states_at(
    offsets: Sequence[int], before: ProducerState, batches: Sequence[Batch], seen_ms: int
) -> Iterator[tuple[int, ProducerState]]:
    """The state ``before`` an append of ``batches`` as it is at each of the rising ``offsets``
    where one of them begins, a copy for each.
    """
    if not offsets:
        return
    state, at = before.copy(), 0
    for offset in offsets:
        while batches[at].header.base_offset < offset:
            header = batches[at].header
            state.record(header, header.base_offset, seen_ms)
            at += 1
        yield offset, state.copy()


class Rewinding:
    """The producer state as it was at an earlier end of the log, for a cut. On the log's thread.

    Where more than a little must be read for it, that is done in the background, and before
    anything is cut: what lies below the cut stays as it is meanwhile, so whatever else happens to
    the log, what was read is true of any cut to the same offset of the same epoch.
    """

    def __init__(
        self, home: DataDirectory, files: LogFiles, epochs: EpochHistory, *, name: str
    ) -> None:
        self._home = home
        self._files = files
        self._epochs = epochs
        self._name = name
        self._replay: _Replay | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether something is being read for a cut."""
        return self._replay is not None and not self._replay.is_done

    def state_at(self, end: int) -> ProducerState:
        """The state at offset ``end``, where a batch begins.

        Raises CutDelayedError until it was read, CorruptRecordError for a damaged header, or
        StorageError.
        """
        place = end, self._epochs.epoch_at(end - 1)
        if self._replay is None or self._replay.place != place:
            state, offset = _known(self._files, end, self._epochs)
            if self._files.size_between(offset, end) <= _INLINE_BYTES:
                _replay(self._files, state, offset, end, self._home.clock_ms())
                return bounded(state, self._home)
            self._begin(_Replay(self._home.disk, place, state, offset, self._home.clock_ms()))
        return self._finished()

    def _begin(self, replay: _Replay) -> None:
        end, _ = replay.place
        replay.sources = [
            Source(segment.path, segment.base_offset, segment.size_bytes)
            for segment in self._files.segments_between(replay.offset, end)
        ]
        self._replay = replay
        self._home.run_in_background(replay.run)

    def _finished(self) -> ProducerState:
        replay = self._replay
        assert replay is not None
        error = replay.error
        if replay.is_done:
            self._replay = None
            if error is None:
                return bounded(replay.state, self._home)
            if isinstance(error, CorruptRecordError):
                raise CorruptRecordError(f"{self._name}: {error.message}") from error
            if not isinstance(error, ChangedError):
                doing = f"reading {self._name} before a cut"
                raise self._home.translate(error, doing) from error
        raise CutDelayedError(
            f"{self._name}: what producers wrote below offset {replay.place[0]} is being read, "
            "after which the log is cut there; it goes on by itself"
        )


class _Replay:
    """Reads the headers of the batches between two offsets; ``run`` in any thread, once."""

    def __init__(
        self, disk: Disk, place: tuple[int, int], state: ProducerState, offset: int, now_ms: int
    ) -> None:
        self.place = place  # The offset to end at, and the epoch that wrote before it.
        self.state = state
        self.offset = offset
        self.sources: list[Source] = []
        self.error: Exception | None = None
        self.is_done = False  # What else there is may be looked at then.
        self._disk = disk
        self._now_ms = now_ms

    def run(self) -> None:
        """Bring ``state`` up to the place. Raises nothing: what failed is in ``error``."""
        end, _ = self.place
        try:
            for header in headers_between(
                self._disk, self.sources, self.offset, end, believes=self.state.expects
            ):
                self.state.record(header, header.base_offset, self._now_ms)
        except Exception as error:  # Whatever it is: the state is not that of the place.
            self.error = error
        finally:
            self.is_done = True
