"""Mends damaged logs with what other replicas have (a bit that flipped on a disk)."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

import structlog

from penstock.broker.leader_reads import LeaderReads
from penstock.broker.stand_ins import StandIns, read_through
from penstock.broker.storage.damage import Damage, Examination, Findings, mend, patch_of
from penstock.broker.storage.damage_notes import noted_damage, noting
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.lost_ranges import LostRange, way_on
from penstock.broker.storage.segment import Segment
from penstock.wire.errors import (
    CorruptRecordError,
    NetworkError,
    OffsetOutOfRangeError,
    PenstockError,
)
from penstock.wire.ids import TopicIdPartition

logger = structlog.get_logger()

ASK_AGAIN_S: Final = 60.0
"""So often a damaged replica that nobody can stand in for is looked at again, and a note written
that found no room; and after no longer a fault of this module's own is got over."""

GIVEN_UP_S: Final = 3600.0
"""After so long what could not be mended is tried again, or as soon as another one leads."""

_ATTEMPTS: Final = 3
_MIN_BACKOFF_S: Final = 0.1
_MAX_BACKOFF_S: Final = 10.0
_LOOK_AGAIN_S: Final = 0.5  # So often it is seen how far a copy has come.


class Replicas(Protocol):
    """What is asked of the replica manager."""

    def set_damaged(self, key: TopicIdPartition, reason: PenstockError) -> None:
        """A part of the log can't be read: others are to lead, and it is to be mended."""
        ...

    def set_sound(self, key: TopicIdPartition) -> None:
        """The log was mended, or is here no more."""
        ...

    def may_mend(self, key: TopicIdPartition) -> bool:
        """Whether the replica is out of the in-sync set, and another leads."""
        ...

    def copy_anew(self, key: TopicIdPartition) -> bool:
        """Drop the log, and have the leader send it again; False when nothing was dropped."""
        ...


class CannotBeMendedError(Exception):
    """No replica in sync has what is missing here, as far as can be told. Says why, and what."""

    def __init__(self, reason: str, *damages: Damage, next_step: str = "") -> None:
        super().__init__(reason)
        self._damages = damages
        self.next_step = next_step  # Where it is another one than to give these records up.

    def lost_of(self, path: Path) -> list[LostRange]:
        """What is lost of the segment ``path``."""
        return [
            LostRange(
                one.offset,
                one.end_offset,
                str(self),
                f"{one.what}; segment {path}, byte {one.position}",
            )
            for one in self._damages
        ]


class Repairs:
    """One task a damaged partition, from when the damage is found until it is mended.

    A replica is mended only while it is out of the in-sync set, by the controllers' word, so that
    it is never elected with a hole; and it stays out until all of it is sound. The only one in sync
    goes on as it is: it serves what is sound, and refuses the rest with CorruptRecordError. Used on
    one event loop; files are read, and synced, in other threads.

    Where the leader's batches do not fit in the place of the damaged ones, since replicas are
    compacted each for itself, the whole log is dropped and copied anew, once the leader was seen to
    have all of it sound. Nothing less would do: a record that compaction took away here, with the
    tombstone that deleted it, could come back with a part of the leader's log.

    What can't be mended now (the leader has it not either, or nobody else is in sync) is told, and
    tried again after an hour, or as soon as another replica leads or is in sync, or the records up
    to behind it were deleted.

    What is known to be damaged is kept until it was seen to be whole, whatever goes wrong: the note
    beside the segments goes, and the replica is called sound, only when all that was found, and all
    that the note named, is.
    """

    def __init__(
        self,
        stand_ins: StandIns,
        replicas: Replicas,
        get_log: Callable[[TopicIdPartition], PartitionLog | None],
        *,
        count_damaged: Callable[[], None],
        count_mended: Callable[[], None],
    ) -> None:
        self._stand_ins = stand_ins
        self._replicas = replicas
        self._get_log = get_log
        self._count_damaged = count_damaged
        self._count_mended = count_mended
        self._segments: dict[TopicIdPartition, set[int]] = {}  # Base offsets, still to be mended.
        self._reported: set[TopicIdPartition] = set()  # Of these the controllers are to know.
        self._tasks: dict[TopicIdPartition, asyncio.Task[None]] = {}
        # Of those that can't be mended now: what is lost, by segment.
        self._lost: dict[TopicIdPartition, dict[int, list[LostRange]]] = {}
        self._noted: dict[TopicIdPartition, frozenset[int]] = {}  # Segments, as it is on the disk.
        # What there was no room to note, and when to try that again, by the event loop's clock.
        self._not_noted: dict[TopicIdPartition, tuple[frozenset[int], float]] = {}
        self._told: set[tuple[TopicIdPartition, int]] = set()
        self._moved = asyncio.Event()  # Set, and replaced, when the metadata moved on.
        self._stopped = False

    @property
    def damaged_count(self) -> int:
        """How many replicas are damaged. Safe on any thread."""
        return len(self._segments)

    @property
    def unmendable_count(self) -> int:
        """How many of them nobody can mend now. Safe on any thread."""
        return len(self._lost)

    def found(self, log: PartitionLog, offset: int) -> None:
        """A batch in the segment that holds ``offset`` is not sound. Called again and again.

        What a start knew of is reported at once: the broker is to be let in only after that, so
        that nobody takes the replica for whole meanwhile.
        """
        key = log.key
        base_offset = log.files.segment_of(offset).base_offset
        if self._stopped:
            return
        waiting = self._segments.setdefault(key, set())
        if base_offset in waiting:
            return
        waiting.add(base_offset)
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._run(key))
        else:
            self._look_again()  # It is noted at once, whatever the task waits for.
        if offset in log.holes or offset in log.noted_damage:
            what = f"{log.name}: it was damaged at its start, at or after offset {offset}"
            self._replicas.set_damaged(key, CorruptRecordError(what))

    def on_metadata(self) -> None:
        """The metadata have moved on: another may lead what is damaged here."""
        if self._segments:
            self._look_again()

    def on_log_moved(self, log: PartitionLog) -> None:
        """What is lost of the log may have been deleted. Called often."""
        if log.key in self._lost:
            self._look_again()

    def _look_again(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    async def stop(self) -> None:
        """Mend nothing more."""
        self._stopped = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- one partition ---------------------------------------------------------------------------

    async def _run(self, key: TopicIdPartition) -> None:
        reads, backoff_s = self._stand_ins.reads(), _MIN_BACKOFF_S
        try:
            while not await self._mend_unless_at_fault(key, reads):
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, ASK_AGAIN_S)
        finally:
            del self._segments[key], self._tasks[key]
            self._lost.pop(key, None)
            self._noted.pop(key, None)
            self._not_noted.pop(key, None)
            await reads.close()

    async def _mend_unless_at_fault(self, key: TopicIdPartition, reads: LeaderReads) -> bool:
        """Mend all of it, and say so; False after an error that nobody has thought of.

        It may be of one segment only, or of one answer. What is damaged is known all the same.
        """
        try:
            await self._mend_all(key, self._segments[key], reads)
            self._reported.discard(key)
            self._replicas.set_sound(key)
        except Exception:
            logger.exception("mending failed", topic_partition_id=str(key))
            return False
        return True

    async def _mend_all(self, key: TopicIdPartition, waiting: set[int], reads: LeaderReads) -> None:
        """Mend these segments, and those that come in meanwhile; or until the log is gone.

        And those that the note names: it is about to be written anew.
        """
        backoff_s, told = _MIN_BACKOFF_S, ""
        given_up: set[int] = set()  # For now.
        if (log := self._get_log(key)) is not None:
            for offset in await asyncio.to_thread(noted_damage, log):
                waiting.add(log.files.segment_of(offset).base_offset)
        while (log := self._get_log(key)) is not None:
            await self._note(log)
            if not (waiting or log.known_producers.are_in_doubt):
                log.holes = log.noted_damage = ()
                return
            base_offset = min(waiting - given_up, default=-1)
            if waiting and base_offset < 0:
                await reads.close()
                await self._until_worth_another_try(log, waiting)
                given_up.clear()
                continue
            try:
                if not waiting:
                    await self._learn_producers(log, waiting)
                    continue
                await self._mend_segment(log, base_offset, reads)
            except CannotBeMendedError as error:
                lost = error.lost_of(log.files.segment_of(base_offset).path)
                _say_given_up(log, lost, error.next_step)
                given_up.add(base_offset)
                self._note_lost(log, base_offset, lost)
                continue
            except PenstockError as error:
                if error.message != told:
                    told = error.message
                    logger.warning("log not mended yet", partition=log.name, reason=told)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
                continue
            waiting.discard(base_offset)
            self._note_lost(log, base_offset, [])
            backoff_s = _MIN_BACKOFF_S

    async def _learn_producers(self, log: PartitionLog, waiting: set[int]) -> None:
        """Have the log know what producers wrote in the batches that were mended.

        Raises CorruptRecordError where there is more damage, which is waiting then.
        """
        known, replay = log.known_producers, None
        while known.are_in_doubt and self._get_log(log.key) is log:
            rewrites = log.rewrites
            replay = known.learn(log.log_end_offset, replay)
            await asyncio.to_thread(replay.run)
            if log.rewrites != rewrites:
                replay = None  # It may have read what was cut since.
            elif known.learned(replay, log.log_end_offset):
                break
        for offset in known.doubted_offsets:
            waiting.add(log.files.segment_of(offset).base_offset)
        if waiting:
            raise CorruptRecordError(f"{log.name}: it is not known who wrote all of it")

    def _note_lost(self, log: PartitionLog, base_offset: int, ranges: list[LostRange]) -> None:
        """Have readers and operators told what of a segment nobody can mend now."""
        lost = {**self._lost.pop(log.key, {}), base_offset: ranges}
        log.lost = [one for some in lost.values() for one in some]
        if log.lost:
            self._lost[log.key] = lost

    async def _note(self, log: PartitionLog) -> None:
        """Have a restart know what is damaged. For want of room it is tried again before long."""
        key, now_s = log.key, asyncio.get_running_loop().time()
        waiting = frozenset(self._segments[key])
        refused, again_at_s = self._not_noted.get(key, (None, now_s))
        if self._noted.get(key) == waiting or (refused == waiting and now_s < again_at_s):
            return
        try:
            await asyncio.to_thread(noting(log, waiting))
        except OSError as error:
            self._not_noted[key] = waiting, now_s + ASK_AGAIN_S
            if log.is_closed:
                return  # Its directory has another name by now.
            failure = log.home.translate(error, f"noting what is damaged of {log.name}")
            logger.warning("damage not noted", partition=log.name, reason=failure.message)
        else:
            self._noted[key] = waiting
            self._not_noted.pop(key, None)

    async def _until_worth_another_try(self, log: PartitionLog, waiting: set[int]) -> None:
        known = self._what_may_help(log, waiting)
        clock_s = asyncio.get_running_loop().time
        until_s = clock_s() + GIVEN_UP_S
        while (
            (left_s := until_s - clock_s()) > 0
            and self._get_log(log.key) is log
            and self._what_may_help(log, waiting) == known
            and all(one.end_offset > log.log_start_offset for one in log.lost)
        ):
            await self._until_moved(log, min(left_s, ASK_AGAIN_S))

    async def _until_moved(self, log: PartitionLog, timeout_s: float) -> None:
        """Until something has moved, or so long. What is damaged is noted first.

        Not to be given up while it notes that in a thread: there must not be two.
        """
        moved = self._moved
        await self._note(log)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await moved.wait()

    def _what_may_help(self, log: PartitionLog, waiting: set[int]) -> tuple[object, ...]:
        """What is another when it is worth while to try again what could not be mended."""
        leader, alone = self._stand_ins.leader_of(log.key), self._stand_ins.none_is_in_sync(log.key)
        return leader, alone, log.log_start_offset, sorted(waiting)

    async def _mend_segment(self, log: PartitionLog, base_offset: int, reads: LeaderReads) -> None:
        """Look at the segment, and mend it, until all of it is sound."""
        mended: Counter[int] = Counter()
        while True:
            segment = _segment_at(log, base_offset)
            if segment is None:
                return  # It was deleted, or cut away.
            rewrites = log.rewrites
            findings = await self._examine(log, segment)
            if _segment_at(log, base_offset) is not segment or log.rewrites != rewrites:
                continue  # It was cut, and may have grown again: it may be sound.
            if not findings.damages:
                if findings.index_is_damaged:
                    await mend_index(log, segment)
                return
            self._tell(log, segment, findings)
            await self._until_out_of_sync(log, findings.damages)
            for damage in findings.damages:
                if _segment_at(log, base_offset) is not segment or log.rewrites != rewrites:
                    break  # It was cut, or all of it was copied anew.
                mended[damage.offset] += 1
                if mended[damage.offset] > _ATTEMPTS:
                    raise CannotBeMendedError(
                        f"offset {damage.offset} was mended {_ATTEMPTS} times and is read as "
                        "damaged all the same: the disk or the memory is at fault",
                        damage,
                    )
                rewrites += await self._mend(log, segment, damage, reads)

    async def _examine(self, log: PartitionLog, segment: Segment) -> Findings:
        examination = Examination(log, segment)
        findings = await asyncio.to_thread(examination.run)
        if findings.error is not None:
            raise log.home.translate(findings.error, f"reading {segment.path}")
        return findings

    def _tell(self, log: PartitionLog, segment: Segment, findings: Findings) -> None:
        for damage in findings.damages:
            place = log.key, damage.offset
            if place in self._told:
                continue
            self._told.add(place)
            self._count_damaged()
            logger.error(
                "damaged batch found",
                partition=log.name,
                offset=damage.offset,
                end_offset=damage.end_offset,
                segment=str(segment.path),
                position=damage.position,
                reason=damage.what,
                next_step="it is not served, and mended from another replica in sync if there is "
                "one; check the disk and its cables, for this should not happen",
            )

    async def _until_out_of_sync(self, log: PartitionLog, damages: Sequence[Damage]) -> None:
        """Have the controllers take the replica out of the in-sync set, and another one lead.

        Raises CannotBeMendedError while there is no other one.
        """
        key, damage = log.key, damages[0]
        while True:
            if self._get_log(key) is not log:
                raise CorruptRecordError("the log is no longer here")
            if key not in self._reported or not self._replicas.may_mend(key):
                # Whoever is out of the in-sync set for something else must not come in before.
                self._reported.add(key)
                self._replicas.set_damaged(key, CorruptRecordError(f"{log.name}: {damage.what}"))
            if self._replicas.may_mend(key):
                return
            if self._stand_ins.none_is_in_sync(key):
                raise CannotBeMendedError("no other replica is in sync", *damages)
            await self._until_moved(log, ASK_AGAIN_S)

    async def _mend(
        self, log: PartitionLog, segment: Segment, damage: Damage, reads: LeaderReads
    ) -> int:
        """Mend it; how often the segment was written for that: not at all if it was cut meanwhile,
        or all was copied anew.
        """
        rewrites = log.rewrites
        if damage.is_hole:
            what = "there is no place for what is missing between two segments"
            await self._copy_anew(log, reads, damage, what)
            return 0
        try:
            sound = await reads.read(log.key, damage.offset)
        except CorruptRecordError as error:
            raise CannotBeMendedError(
                f"the leader has not got it either: {error.message}", damage
            ) from None
        except OffsetOutOfRangeError:
            if damage.offset >= log.log_start_offset:
                raise  # The leader's log begins later, or ends before: this one follows soon.
            sound = b""  # Nobody has what was deleted, but it is in the way of a sound segment.
        if log.rewrites != rewrites or _segment_at(log, segment.base_offset) is not segment:
            return 0  # It is looked at again.
        patch = patch_of(log, segment, damage, sound)
        if patch is None:
            what = "the leader's batches do not fit in the place of the damaged ones"
            await self._copy_anew(log, reads, damage, what)
            return 0
        sync = mend(log, segment, damage, patch)
        try:
            await asyncio.to_thread(sync)
        except OSError as error:
            raise log.home.fail(error, f"flushing {segment.path}") from error
        self._told.discard((log.key, damage.offset))
        self._count_mended()
        logger.info(
            "damaged batch mended",
            partition=log.name,
            offset=damage.offset,
            segment=str(segment.path),
            bytes=len(patch),
        )
        return 1

    async def _copy_anew(
        self, log: PartitionLog, reads: LeaderReads, damage: Damage, reason: str
    ) -> None:
        """Have all of the log sent again, as far as it went; returns when that is done."""
        key = log.key
        leader = self._stand_ins.leader_of(key)
        end_offset = await _end_of_what_the_leader_has(log, reads, damage, reason)
        if self._stand_ins.leader_of(key) != leader:  # Nobody has read what this one has.
            raise NetworkError("the partition has another leader now, or none")
        if not self._replicas.copy_anew(key):
            raise NetworkError("it can't be copied anew now: it is in sync, leads or has no room")
        logger.warning(
            "damaged log is copied anew",
            partition=log.name,
            path=str(log.directory),
            leader=leader[0],
            end_offset=end_offset,
            reason=reason,
        )
        # Before that the leader may still believe that the log goes as far as it did.
        while log.log_end_offset < end_offset and self._stand_ins.leader_of(key) == leader:
            if self._get_log(key) is not log:
                return
            await asyncio.sleep(_LOOK_AGAIN_S)
        for place in [place for place in self._told if place[0] == key]:
            self._told.discard(place)
            self._count_mended()
        logger.info("damaged log was copied anew", partition=log.name)


async def _end_of_what_the_leader_has(
    log: PartitionLog, reads: LeaderReads, damage: Damage, reason: str
) -> int:
    """Read everything that is here at the leader, where it must be sound; up to where it is.

    What is sound here may be all there is of it: nothing is dropped that the leader has not.
    """
    try:
        return await read_through(reads, log.key, log.log_start_offset, log.log_end_offset)
    except CorruptRecordError as error:
        raise CannotBeMendedError(
            f"{reason}, and the leader's log is damaged as well, so that this one is not "
            f"copied anew: {error.message}",
            damage,
            next_step="what the leader lacks has to be mended or deleted first: see its log",
        ) from None


def _say_given_up(log: PartitionLog, lost: Sequence[LostRange], next_step: str) -> None:
    for one in lost:
        logger.error(
            "log can't be mended",
            partition=log.name,
            path=str(log.directory),
            offset=one.offset,
            end_offset=one.end_offset,
            damage=one.place,
            reason=one.reason,
            next_step=next_step or way_on(log.partition, one.end_offset),
        )


async def mend_index(log: PartitionLog, segment: Segment) -> None:
    """Make the index of a closed, sound segment anew. Raises what reading raises."""
    # Of a disk that was unmounted nothing is there by name, and what is open can still be read.
    if await asyncio.to_thread(log.home.is_another):
        moved = OSError("it is not the directory that was opened: unmounted, or moved away")
        raise log.home.fail(moved, f"reading {segment.index_path}")
    logger.warning("damaged index made anew", partition=log.name, segment=str(segment.path))
    await asyncio.to_thread(segment.preparation())
    if not log.is_closed and segment in log.files.segments and segment.index is None:
        segment.mend_index()


def _segment_at(log: PartitionLog, base_offset: int) -> Segment | None:
    segment = log.files.segment_of(base_offset)
    return segment if segment.base_offset == base_offset else None
