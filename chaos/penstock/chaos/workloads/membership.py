"""One life of a member of a consumer group, and the events of what it does and is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from penstock.chaos.recorder import Recorder
from penstock.chaos.workloads import Surroundings
from penstock.chaos.workloads.casting import API_TIMEOUT_MS, PAUSE_S, REQUEST_TIMEOUT_MS, shut
from penstock.chaos.workloads.outcomes import words_of
from penstock.chaos.workloads.reader import Runs, poll_once, seek_to
from penstock.client import AsyncAdminClient, AsyncConsumer, PenstockError, TopicPartition
from penstock.client.config import IsolationLevel
from penstock.client.model import GroupMetadata

SESSION_TIMEOUT_MS: Final = 3_000
MAX_POLL_INTERVAL_MS: Final = 4_000
_CLOSE_MS: Final = 2_000


def freeze(seconds: float) -> None:
    """Stop this whole process in its tracks, as a machine does that swaps: no heartbeat is sent.

    Who does so has a worker of its own.
    """
    time.sleep(seconds)


class Member:
    """A consumer in a group, which records as it goes. For one task; ``join`` comes first.

    With ``crashes`` its end is not told to the group: it has a ``group_instance_id`` that nobody
    has ever again, so closing it leaves its place taken until its session is over.
    """

    def __init__(
        self,
        surroundings: Surroundings,
        *,
        group: str,
        topic: str,
        life: int,
        crashes: bool,
        isolation: IsolationLevel = "read_uncommitted",
        most: int = 500,
        commits_revoked: bool = True,
    ) -> None:
        self.name: Final = f"{surroundings.spec.process}.{life}"
        self.positions: Final[dict[str, int]] = {}
        """By partition that it has where it has read to, as far as it has begun."""
        self.begun: dict[str, int] = {}
        """The positions before its last poll."""
        self._recorder: Final[Recorder] = surroundings.recorder
        self._changes: Final = surroundings.recorder.beside("changes")
        self._commits: Final = surroundings.recorder.beside("commits")
        self._group: Final = group
        self._topic: Final = topic
        self._isolation: Final[IsolationLevel] = isolation
        self._commits_revoked: Final = commits_revoked
        self._is_over = False
        self._is_leaving = False
        instance: dict[str, Any] = {"group_instance_id": self.name} if crashes else {}
        self._consumer: Final = AsyncConsumer(
            surroundings.bootstrap,
            client_id=self.name,
            group_id=group,
            isolation_level=isolation,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            max_poll_records=most,
            session_timeout_ms=SESSION_TIMEOUT_MS,
            max_poll_interval_ms=MAX_POLL_INTERVAL_MS,
            default_api_timeout_ms=API_TIMEOUT_MS,
            request_timeout_ms=REQUEST_TIMEOUT_MS,
            metadata_max_age_ms=30_000,
            **instance,
        )

    # --- the group

    def join(self) -> None:
        """Ask for a place in the group; the polls that follow get it."""
        self._recorder.invoke("join", self._who())
        self._consumer.subscribe([self._topic], self)
        self._recorder.ok(self._who())

    async def leave(self) -> None:
        """Leave the group, and tell it so."""
        self._is_leaving = True
        self._recorder.invoke("leave", self._who())
        try:
            await self._consumer.close(timeout_ms=API_TIMEOUT_MS)
        except PenstockError as error:
            self._recorder.info(words_of(error))
        else:
            self._recorder.ok(self._who())

    async def vanish(self) -> None:
        """End without a word in the history: it crashed, or the run is over."""
        self._is_over = True
        await shut(self._consumer, _CLOSE_MS)

    async def metadata(self) -> GroupMetadata:
        """Who it is at this moment. Raises what ``group_metadata`` raises."""
        return await self._consumer.group_metadata()

    def _who(self) -> dict[str, Any]:
        return {"group": self._group, "member": self.name}

    # --- what it is told of, within polls

    async def on_partitions_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """They are new to it."""
        if not self._is_over:
            await self._changed("assigned", partitions)
            self._forget(partitions)

    async def on_partitions_revoked(self, partitions: Sequence[TopicPartition]) -> None:
        """They are about to be given back: what was read of them is committed before."""
        if self._is_over:
            return
        asked = await self._changing("revoked", partitions)
        its = {str(one) for one in partitions}
        if self._commits_revoked and not self._is_leaving:
            await self.commit({name: at for name, at in self.positions.items() if name in its})
        self._forget(partitions)
        self._changes.ok(asked)

    async def on_partitions_lost(self, partitions: Sequence[TopicPartition]) -> None:
        """They are gone already."""
        if not self._is_over:
            await self._changed("lost", partitions)
            self._forget(partitions)

    async def _changing(self, f: str, partitions: Sequence[TopicPartition]) -> dict[str, Any]:
        names = sorted(str(one) for one in partitions)
        asked = {**self._who(), "generation": await self._generation(), "partitions": names}
        self._changes.invoke(f, asked)
        return asked

    async def _changed(self, f: str, partitions: Sequence[TopicPartition]) -> None:
        self._changes.ok(await self._changing(f, partitions))

    def _forget(self, partitions: Iterable[TopicPartition]) -> None:
        for one in partitions:
            self.positions.pop(str(one), None)
            # It may be given it again within one poll, behind what others have committed: where
            # that poll began is no place to go back to.
            self.begun.pop(str(one), None)

    async def _generation(self) -> int | None:
        """None where it has not heard yet of what it has lost."""
        try:
            found = await self.metadata()
        except PenstockError:
            return None
        return found.member_epoch if found.member_id else None

    # --- records

    async def poll(self, timeout_ms: float = 500) -> Runs:
        """One operation; what it brought."""
        self.begun = dict(self.positions)
        asked = {
            "topic": self._topic,
            "positions": dict(self.begun),
            "isolation": self._isolation,
            "member": self.name,
        }
        self._recorder.invoke("poll", asked)
        try:
            runs = await poll_once(self._consumer, timeout_ms)
            # Asked before anything is waited for: another generation may come meanwhile.
            generation = await self._generation()
        except PenstockError as error:
            self._recorder.info(words_of(error))
            return []
        for partition, after in self._consumer.positions().items():
            self.positions[str(partition)] = after.offset
        answer: dict[str, Any] = {**asked, "runs": runs, "positions": dict(self.positions)}
        if generation is not None:
            answer["generation"] = generation
        self._recorder.ok(answer)
        return runs

    async def commit(self, offsets: Mapping[str, int] | None = None) -> bool:
        """One operation, of its positions or these; whether they were accepted.

        It fails for certain only where the client refuses to send it. What the coordinator refuses
        may be half of a commit, or the second attempt at one that was heard.
        """
        wanted = dict(self.positions if offsets is None else offsets)
        if not wanted:
            return True
        asked = {**self._who(), "offsets": wanted}
        try:
            found = await self.metadata()
        except PenstockError as error:
            self._commits.invoke("commit-offsets", asked)
            self._commits.fail(words_of(error))
            return False
        if found.member_id:
            asked["generation"] = found.member_epoch
        self._commits.invoke("commit-offsets", asked)
        try:
            await self._consumer.commit({place(name): at for name, at in wanted.items()})
        except PenstockError as error:
            self._commits.info(words_of(error))
            return False
        self._commits.ok(asked)
        return True

    async def rewind(self) -> bool:
        """Go back to where its last poll began; whether it is there."""
        done = True
        for name in [one for one in self.positions if one in self.begun]:
            wanted = {"offset": self.begun[name]}
            offset = await seek_to(
                self._recorder, self._consumer, place(name), wanted, member=self.name
            )
            done = done and offset is not None
            if offset is not None:
                self.positions[name] = offset
        return done and self.begun.keys() >= self.positions.keys()


def place(name: str) -> TopicPartition:
    """The partition of that name."""
    topic, _, number = name.rpartition("-")
    return TopicPartition(topic, int(number))


async def last_committed(surroundings: Surroundings, group: str) -> None:
    """What the group has committed in the end, asked until somebody says it."""
    async with AsyncAdminClient(
        surroundings.bootstrap,
        client_id=surroundings.spec.process,
        default_api_timeout_ms=API_TIMEOUT_MS,
        request_timeout_ms=REQUEST_TIMEOUT_MS,
    ) as admin:
        while True:
            if await committed_offsets(surroundings.recorder, admin, group) is not None:
                return
            await asyncio.sleep(PAUSE_S)


async def committed_offsets(
    recorder: Recorder, admin: AsyncAdminClient, group: str
) -> dict[str, int] | None:
    """One operation: what the group has committed; None where nobody said."""
    recorder.invoke("committed-offsets", {"group": group})
    try:
        found = await admin.list_group_offsets(group)
    except PenstockError as error:
        recorder.info(words_of(error))
        return None
    offsets = {str(one): entry.offset for one, entry in found.items()}
    recorder.ok({"group": group, "offsets": offsets})
    return offsets
