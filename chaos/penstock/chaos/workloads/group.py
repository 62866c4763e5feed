"""The workload ``group``: members that come, go, crash, stall and freeze, and commit too late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

from penstock.chaos.checkers import Checker
from penstock.chaos.workloads import Client, ClientSpec, Plan, Surroundings, casting
from penstock.chaos.workloads.casting import PAUSE_S, Choices, Producer
from penstock.chaos.workloads.membership import (
    MAX_POLL_INTERVAL_MS,
    SESSION_TIMEOUT_MS,
    Member,
    freeze,
    last_committed,
)
from penstock.chaos.workloads.reader import Reader
from penstock.client import AdminClient

TOPIC: Final = "work"
GROUP: Final = "workers"
_OPTIONS: Final[Choices] = {
    "partitions": (6, 1, 200),
    "producers": (3, 1, 100),
    "members": (4, 1, 32),
    "workers": (1, 1, 16),
}

Break = Literal["", "stall", "freeze"]


class Group:
    """Producers fill a topic, of which a group reads and commits what it has read.

    Each member has a worker of its own, since it may freeze it.
    """

    name = "group"
    summary = "members of a group that join, leave, crash, stall, and commit too late"

    def prepare(self, admin: AdminClient, plan: Plan) -> None:
        """Make the topic."""
        casting.make_topic(admin, plan, TOPIC, _option(plan, "partitions"))

    def clients(self, plan: Plan) -> Sequence[ClientSpec]:
        """Producers, members, and one who looks at it all in the end."""
        workers = _option(plan, "workers")
        partitions = _option(plan, "partitions")
        specs = casting.careful_producers(
            _option(plan, "producers"),
            topic=TOPIC,
            partitions=partitions,
            workers=workers,
            rate=plan.rate or 2_000,
        )
        for number in range(_option(plan, "members")):
            specs.append(ClientSpec(f"member-{number}", "member", workers + number))
        parameters = {"topic": TOPIC, "partitions": partitions}
        return [*specs, ClientSpec("auditor", "auditor", 0, parameters)]

    def client(self, surroundings: Surroundings) -> Client:
        """One of them."""
        kind = surroundings.spec.kind
        if kind == "producer":
            return Producer(surroundings)
        return _Member(surroundings) if kind == "member" else _Auditor(surroundings)

    def checkers(self, plan: Plan) -> Sequence[Checker]:
        """Those of logs and of groups."""
        # Imported here: only who judges needs them, and what they stand on.
        from penstock.chaos.checkers.registry import appends, groups  # noqa: PLC0415 - see above.

        return [*appends(), *groups()]


def _option(plan: Plan, name: str) -> int:
    return casting.option(plan, Group.name, _OPTIONS, name)


@dataclass(frozen=True, slots=True)
class Life:
    """What a member does from joining to its end."""

    lasts_s: float
    crashes: bool
    """Whether it ends without leaving."""
    rests_s: float
    """So long after its end the next one joins."""

    @classmethod
    def drawn(cls, random: Random) -> Life:
        """By chance."""
        return cls(random.uniform(4, 16), random.random() < 0.4, random.uniform(0, 1.5))


@dataclass(frozen=True, slots=True)
class Turn:
    """What a member does with what a poll gave."""

    pause: Break
    """Before it commits: for longer than it may be without a poll, or its heartbeats."""
    pause_s: float
    commits: bool

    @classmethod
    def drawn(cls, random: Random) -> Turn:
        """By chance; the pauses are seldom."""
        chance, over, commits = random.random(), random.uniform(1.2, 1.6), random.random() < 0.8
        if chance < 0.01:
            return cls("stall", over * MAX_POLL_INTERVAL_MS / 1000, commits=True)
        if chance < 0.02:
            return cls("freeze", over * SESSION_TIMEOUT_MS / 1000, commits=True)
        return cls("", 0.0, commits)


class _Member:
    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings: Final = surroundings

    async def run(self) -> None:
        random, lives = self._surroundings.random, 0
        while True:
            lives += 1
            life = Life.drawn(random)
            member = Member(
                self._surroundings, group=GROUP, topic=TOPIC, life=lives, crashes=life.crashes
            )
            try:
                await self._live(member, random, life)
                if not life.crashes:
                    await member.commit()
                    await member.leave()
            finally:
                await member.vanish()
            await asyncio.sleep(life.rests_s)

    @staticmethod
    async def _live(member: Member, random: Random, life: Life) -> None:
        member.join()
        until = time.monotonic() + life.lasts_s
        while time.monotonic() < until:
            if not await member.poll():
                await asyncio.sleep(PAUSE_S)
                continue
            turn = Turn.drawn(random)
            if turn.pause == "stall":
                await asyncio.sleep(turn.pause_s)
            elif turn.pause == "freeze":
                freeze(turn.pause_s)
            if turn.commits:
                await member.commit()

    async def finish(self) -> None:
        """Nothing: the auditor looks at it all."""


class _Auditor:
    """Reads along; in the end the group's last member, who leaves nothing undone."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings: Final = surroundings
        self._reader: Final = Reader(surroundings)

    async def run(self) -> None:
        await self._reader.run()

    async def finish(self) -> None:
        """Read all there is, and then as the group, to the same ends; what it has committed."""
        ends = await self._reader.read_all()
        member = Member(self._surroundings, group=GROUP, topic=TOPIC, life=1, crashes=False)
        try:
            member.join()
            done: dict[str, int] = {}
            while any(done.get(name, 0) < end for name, end in ends.items()):
                await member.poll()
                if await member.commit():
                    done |= member.positions
            await member.leave()
        finally:
            await member.vanish()
        await last_committed(self._surroundings, GROUP)
