"""The workload ``offsets``: positions that are sought, committed, reset, and gone on from."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from penstock.chaos.checkers import Checker
from penstock.chaos.workloads import Client, ClientSpec, Plan, Surroundings, casting
from penstock.chaos.workloads.casting import (
    API_TIMEOUT_MS,
    PAUSE_S,
    REQUEST_TIMEOUT_MS,
    Choices,
    Producer,
    shut,
)
from penstock.chaos.workloads.membership import committed_offsets, last_committed, place
from penstock.chaos.workloads.outcomes import words_of
from penstock.chaos.workloads.reader import Reader, dated, draw_seek, find, poll_once, seek_to
from penstock.client import (
    AdminClient,
    AsyncAdminClient,
    AsyncConsumer,
    PenstockError,
    TopicPartition,
)

TOPIC: Final = "positions"
_OPTIONS: Final[Choices] = {
    "partitions": (4, 1, 200),
    "producers": (3, 1, 100),
    "readers": (3, 1, 32),
    "workers": (2, 1, 16),
}


class Offsets:
    """Each reader has a group for itself, of which it is no member: it takes partitions by hand.

    So an operator may reset what it has committed, while it is away; then it goes on from there.
    """

    name = "offsets"
    summary = "readers that seek, commit, and go on from what they or an operator committed"

    def prepare(self, admin: AdminClient, plan: Plan) -> None:
        """Make the topic."""
        casting.make_topic(admin, plan, TOPIC, _option(plan, "partitions"))

    def clients(self, plan: Plan) -> Sequence[ClientSpec]:
        """Producers that date their records, readers, and one that reads all in the end."""
        workers, partitions = _option(plan, "workers"), _option(plan, "partitions")
        specs = casting.careful_producers(
            _option(plan, "producers"),
            topic=TOPIC,
            partitions=partitions,
            workers=workers,
            rate=plan.rate or 2_000,
            dated=True,
        )
        reads = {"topic": TOPIC, "partitions": partitions}
        for number in range(_option(plan, "readers")):
            specs.append(ClientSpec(f"reader-{number}", "reader", number % workers, reads))
        return [*specs, ClientSpec("auditor", "auditor", 0, {**reads, "seeks": True})]

    def client(self, surroundings: Surroundings) -> Client:
        """One of them."""
        kind = surroundings.spec.kind
        if kind == "producer":
            return Producer(surroundings)
        return Reader(surroundings) if kind == "auditor" else _Reader(surroundings)

    def checkers(self, plan: Plan) -> Sequence[Checker]:
        """Those of logs, of seeks and of what is committed."""
        # Imported here: only who judges needs them, and what they stand on.
        from penstock.chaos.checkers.commits import CommittedForward  # noqa: PLC0415 - see above.
        from penstock.chaos.checkers.registry import appends  # noqa: PLC0415 - as above.
        from penstock.chaos.checkers.seeks import SeekHonoured  # noqa: PLC0415 - as above.

        return [*appends(), SeekHonoured(), CommittedForward()]


def _option(plan: Plan, name: str) -> int:
    return casting.option(plan, Offsets.name, _OPTIONS, name)


@dataclass(frozen=True, slots=True)
class Turn:
    """What a reader does after a poll."""

    asks: bool
    """Whether it asks what is committed, before it commits something else."""
    commits: bool
    seeks: bool
    goes_away: bool
    resets: bool
    """Whether the operator comes while it is away."""

    @classmethod
    def drawn(cls, random: Random) -> Turn:
        """By chance."""
        asks, commits, seeks, away, resets = (random.random() < chance for chance in _CHANCES)
        return cls(asks, commits, seeks, away, away and resets)


_CHANCES: Final = (0.7, 0.4, 0.1, 0.05, 0.5)


class _Reader:
    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings: Final = surroundings
        self._recorder: Final = surroundings.recorder
        self._operator: Final = surroundings.recorder.beside("operator")
        count = surroundings.spec.parameters["partitions"]
        self._partitions: Final = [TopicPartition(TOPIC, number) for number in range(count)]
        self._group: Final = f"{surroundings.spec.process.partition('/')[0]}-positions"
        self._positions: Final[dict[str, int]] = {}
        self._lives = 0
        self._member = ""
        """Who it is for the history until it goes away: another one each time."""

    async def run(self) -> None:
        random = self._surroundings.random
        async with self._admin() as admin:
            while True:
                consumer = self._consumer()
                try:
                    turn = await self._read(consumer, admin, random)
                    if turn.resets:
                        partition, wanted = draw_seek(random, self._partitions, self._positions)
                        await self._reset(admin, consumer, partition, dated(wanted))
                except PenstockError:
                    await asyncio.sleep(PAUSE_S)
                finally:
                    await shut(consumer)

    async def finish(self) -> None:
        """Commit once more, and then ask what is committed."""
        async with self._admin() as admin:
            while True:
                consumer = self._consumer()
                try:
                    await self._go_on(consumer, admin)
                    await self._poll(consumer)
                    if await self._commit(consumer):
                        break
                except PenstockError:
                    await asyncio.sleep(PAUSE_S)
                finally:
                    await shut(consumer)
        await last_committed(self._surroundings, self._group)

    def _admin(self) -> AsyncAdminClient:
        return AsyncAdminClient(
            self._surroundings.bootstrap,
            client_id=self._surroundings.spec.process,
            default_api_timeout_ms=API_TIMEOUT_MS,
            request_timeout_ms=REQUEST_TIMEOUT_MS,
        )

    def _consumer(self) -> AsyncConsumer:
        return AsyncConsumer(
            self._surroundings.bootstrap,
            client_id=self._surroundings.spec.process,
            group_id=self._group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            max_poll_records=500,
            default_api_timeout_ms=API_TIMEOUT_MS,
            request_timeout_ms=REQUEST_TIMEOUT_MS,
            metadata_max_age_ms=30_000,
        )

    async def _go_on(self, consumer: AsyncConsumer, admin: AsyncAdminClient) -> None:
        """Be where it was committed, under another name. Raises where it can't begin."""
        committed = await committed_offsets(self._recorder, admin, self._group)
        while committed is None:
            await asyncio.sleep(PAUSE_S)
            committed = await committed_offsets(self._recorder, admin, self._group)
        self._begin_at(committed)
        await consumer.assign(self._partitions)

    async def _read(self, consumer: AsyncConsumer, admin: AsyncAdminClient, random: Random) -> Turn:
        """Go on from what is committed, until it goes away. Raises where it can't begin."""
        await self._go_on(consumer, admin)
        while True:
            if not await self._poll(consumer):
                await asyncio.sleep(PAUSE_S)
            turn = Turn.drawn(random)
            if turn.seeks:
                await self._seek(consumer, random)
            if turn.asks:
                await committed_offsets(self._recorder, admin, self._group)
            if turn.commits:
                await self._commit(consumer)
            if turn.goes_away:
                return turn

    def _begin_at(self, committed: Mapping[str, int]) -> None:
        self._lives += 1
        self._member = f"{self._surroundings.spec.process}.{self._lives}"
        self._positions.clear()
        self._positions.update({str(one): committed.get(str(one), 0) for one in self._partitions})

    async def _poll(self, consumer: AsyncConsumer) -> bool:
        """One operation; whether it brought something."""
        asked: dict[str, Any] = {
            "topic": TOPIC,
            "positions": dict(self._positions),
            "isolation": "read_uncommitted",
            "member": self._member,
        }
        self._recorder.invoke("poll", asked)
        try:
            runs = await poll_once(consumer, 300)
        except PenstockError as error:
            self._recorder.info(words_of(error))
            return False
        for partition, after in consumer.positions().items():
            self._positions[str(partition)] = after.offset
        self._recorder.ok({**asked, "runs": runs, "positions": dict(self._positions)})
        return bool(runs)

    async def _seek(self, consumer: AsyncConsumer, random: Random) -> None:
        partition, wanted = draw_seek(random, self._partitions, self._positions)
        offset = await seek_to(
            self._recorder, consumer, partition, dated(wanted), member=self._member
        )
        if offset is not None:
            self._positions[str(partition)] = offset

    async def _commit(self, consumer: AsyncConsumer) -> bool:
        """One operation, of all positions; whether it was accepted."""
        asked = {
            "group": self._group,
            "member": self._member,
            "offsets": dict(self._positions),
        }
        self._recorder.invoke("commit-offsets", asked)
        try:
            await consumer.commit({place(name): at for name, at in self._positions.items()})
        except PenstockError as error:
            self._recorder.info(words_of(error))
            return False
        self._recorder.ok(asked)
        return True

    async def _reset(
        self,
        admin: AsyncAdminClient,
        consumer: AsyncConsumer,
        partition: TopicPartition,
        wanted: Mapping[str, Any],
    ) -> None:
        """One operation: the operator sets what is committed. Raises where the offset can't be
        found.
        """
        offset = await find(consumer, partition, wanted)
        asked = {"group": self._group, "offsets": {str(partition): offset}}
        self._operator.invoke("commit-offsets", asked)
        try:
            await admin.alter_group_offsets(self._group, {partition: offset})
        except PenstockError as error:
            self._operator.info(words_of(error))
        else:
            self._operator.ok(asked)
