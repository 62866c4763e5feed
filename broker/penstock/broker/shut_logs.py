"""Copies anew the logs that do not open, once another replica can stand in for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import structlog

from penstock.broker.core.log_copy import CannotCopyError, Leadership, LogCopy
from penstock.broker.core.ports import DamagedLogError, Log
from penstock.broker.leader_reads import LeaderReads
from penstock.broker.replication.fetch import next_offset_after
from penstock.broker.stand_ins import StandIns
from penstock.wire.errors import CorruptRecordError, NetworkError, PenstockError
from penstock.wire.ids import TopicIdPartition, TopicPartition

logger = structlog.get_logger()

ASK_AGAIN_S: Final = 60.0
"""So often it is looked again whether another replica can stand in, at the latest."""

GIVEN_UP_S: Final = 3600.0
"""After so long what could not be copied is tried again, or as soon as another one leads."""

_MIN_BACKOFF_S: Final = 0.1
_MAX_BACKOFF_S: Final = 10.0
_LOOK_AGAIN_S: Final = 0.5  # So often it is seen how far a copy has come.


class Replicas(Protocol):
    """What is asked of the replica manager."""

    def why_shut(self, key: TopicIdPartition) -> DamagedLogError | None:
        """Why the log of a replica that is here does not open; None where it does."""
        ...

    def may_mend(self, key: TopicIdPartition) -> bool:
        """Whether the replica is out of the in-sync set, and another leads."""
        ...

    def begin_anew(self, key: TopicIdPartition) -> Path | None:
        """Have the leader send the log; where the files of the old one are kept, or None."""
        ...

    def was_copied(self, key: TopicIdPartition) -> None:
        """The new log has gone as far as it has to."""
        ...


class ShutLogs:
    """One task a log that does not open, from when that is known until it was copied anew.

    Such a log is never taken for a shorter one, nor for an empty one. It stays as it is, and its
    replica is offline to the controllers: out of the in-sync set, not eligible, and not elected.
    Another log takes its place only when the controllers have it so and another replica leads, and
    after what was on the disk here was read there, as far as the leader's log goes, and is sound.
    Its files are kept even then, under another name: they may be all there is of some records, as
    after an unclean election, and nothing here can tell. Until the copy has gone as far the replica
    is damaged to the controllers; then it comes into the in-sync set as any other one does.

    The last one in the in-sync set stays there and does not lead; nobody does then. It is told,
    and looked at again whenever the metadata change. Used on one event loop.
    """

    def __init__(
        self,
        stand_ins: StandIns,
        replicas: Replicas,
        get_log: Callable[[TopicIdPartition], Log | None],
        *,
        count_damaged: Callable[[], None],
        count_mended: Callable[[], None],
    ) -> None:
        self._stand_ins = stand_ins
        self._replicas = replicas
        self._get_log = get_log
        self._count_damaged = count_damaged
        self._count_mended = count_mended
        self._tasks: dict[TopicIdPartition, asyncio.Task[None]] = {}
        self._stuck: set[TopicIdPartition] = set()  # Nobody can stand in for these now.
        self._moved = asyncio.Event()  # Set, and replaced, when the metadata moved on.
        self._stopped = False

    @property
    def damaged_count(self) -> int:
        """How many logs do not open or are not copied yet. Safe on any thread."""
        return len(self._tasks)

    @property
    def unmendable_count(self) -> int:
        """Of how many nobody has a copy now. Safe on any thread."""
        return len(self._stuck)

    def found(self, key: TopicIdPartition, name: TopicPartition, error: DamagedLogError) -> None:
        """A log does not open."""
        if self._stopped or key in self._tasks:
            return
        self._count_damaged()
        logger.error(
            "damaged log found",
            partition=str(name),
            reason=error.message,
            next_step="it is copied anew by itself while another replica is in sync; check the "
            "disk and its cables, for this should not happen",
        )
        self._tasks[key] = asyncio.create_task(self._run(self._stand_ins.copy_of(key, error), name))

    def on_metadata(self) -> None:
        """The metadata have moved on: another may lead by now."""
        if self._tasks:
            self._moved.set()
            self._moved = asyncio.Event()

    async def stop(self) -> None:
        """Copy nothing more."""
        self._stopped = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- one partition ---------------------------------------------------------------------------

    async def _run(self, copy: LogCopy, name: TopicPartition) -> None:
        reads, backoff_s, told = self._stand_ins.reads(), _MIN_BACKOFF_S, ""
        try:
            while (why := self._replicas.why_shut(copy.key)) is not None:
                if why is not copy.error:  # What was copied is damaged as well.
                    copy.shut_again(why)
                    await asyncio.sleep(backoff_s)
                    backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
                leader = copy.leader
                try:
                    await self._copy(copy, name, reads)
                except CannotCopyError as error:
                    if told != str(error):
                        told = self._say_stuck(copy, name, error)
                    await reads.close()
                    if not await self._is_worth_another_try(copy, leader):
                        told = ""  # It is so for long: people are told again.
                except PenstockError as error:
                    if error.message != told:
                        told = error.message
                        logger.warning("log not copied yet", partition=str(name), reason=told)
                    await asyncio.sleep(backoff_s)
                    backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
                except Exception:
                    logger.exception("copying a log anew failed", partition=str(name))
                    await asyncio.sleep(ASK_AGAIN_S)
        finally:
            del self._tasks[copy.key]
            self._stuck.discard(copy.key)
            await reads.close()

    async def _copy(self, copy: LogCopy, name: TopicPartition, reads: LeaderReads) -> None:
        """Copy it, or return because it is here no more, or shut once more."""
        key = copy.key
        if not await self._until_it_may_be_read(copy):
            return
        if not copy.is_read:
            await self._read_at_leader(copy, reads)
        # The metadata may have moved on meanwhile: it is another leader's log that counts then.
        kept = self._replicas.begin_anew(key) if copy.may_begin() else None
        if kept is None:
            raise NetworkError("the partition has another leader now, or none")
        copy.begun()
        self._stuck.discard(key)
        self._say_begun(copy, name, kept)
        while not copy.is_over(self._end_of_copy(key)):
            if self._replicas.why_shut(key) is not None:
                return
            await asyncio.sleep(_LOOK_AGAIN_S)
        if copy.is_copied(self._end_of_copy(key)):
            self._count_mended()
            logger.info("damaged log was copied anew", partition=str(name))
        self._replicas.was_copied(key)

    def _say_begun(self, copy: LogCopy, name: TopicPartition, kept: Path) -> None:
        logger.warning(
            "damaged log is copied anew",
            partition=str(name),
            leader=copy.leader.node_id,
            end_offset=copy.end_offset,
            had_end_offset=copy.error.end_offset,
            kept=str(kept),
            reason=copy.error.message,
            next_step="remove the directory that is kept once the partition is in sync again; "
            "where had_end_offset is more than end_offset, or the leader was elected uncleanly, "
            "look first with `penstock log dump` for records that the leader lacks",
        )

    async def _until_it_may_be_read(self, copy: LogCopy) -> bool:
        """Until the controllers have the replica out of the in-sync set, and another one lead.

        False when there is nothing to be copied any more.
        """
        while self._replicas.why_shut(copy.key) is not None:
            if copy.may_read():
                return True
            await self._until_moved(ASK_AGAIN_S)
        return False

    async def _read_at_leader(self, copy: LogCopy, reads: LeaderReads) -> None:
        """Read everything that was on the disk here at the leader, where it must be sound."""
        copy.begin_reading()
        copy.read_from(await reads.log_start(copy.key))
        try:
            while (offset := copy.next_offset()) is not None:
                records = await reads.read(copy.key, offset)
                if records:
                    copy.was_read(next_offset_after(records))
                else:
                    copy.leader_ends()
        except CorruptRecordError as damage:
            raise copy.leader_is_damaged(damage.message) from None

    def _say_stuck(self, copy: LogCopy, name: TopicPartition, error: CannotCopyError) -> str:
        self._stuck.add(copy.key)
        logger.error(
            "damaged log can't be copied anew",
            partition=str(name),
            damage=copy.error.message,
            reason=str(error),
            next_step=error.next_step,
        )
        return str(error)

    async def _is_worth_another_try(self, copy: LogCopy, leader: Leadership) -> bool:
        """Wait for another leadership; False when none came for long."""
        clock_s = asyncio.get_running_loop().time
        until_s = clock_s() + GIVEN_UP_S
        while (
            (left_s := until_s - clock_s()) > 0
            and self._replicas.why_shut(copy.key) is not None
            and copy.leader == leader
        ):
            await self._until_moved(min(left_s, ASK_AGAIN_S))
        return left_s > 0

    async def _until_moved(self, timeout_s: float) -> None:
        moved = self._moved
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await moved.wait()

    def _end_of_copy(self, key: TopicIdPartition) -> int:
        """How far the new log goes. There is none as long as its disk has no room for it."""
        log = self._get_log(key)
        return -1 if log is None else log.log_end_offset
