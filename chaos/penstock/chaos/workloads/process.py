"""The workload ``process``: what is read from one topic is written to another, exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from penstock.chaos.checkers import Checker
from penstock.chaos.workloads import Client, ClientSpec, Plan, Surroundings, casting
from penstock.chaos.workloads.casting import PAUSE_S, Choices, Producer
from penstock.chaos.workloads.membership import MAX_POLL_INTERVAL_MS, Member, last_committed
from penstock.chaos.workloads.reader import Runs
from penstock.chaos.workloads.transacting import Transactor
from penstock.chaos.workloads.transfer import Auditor, Bystander, Ending, drawn_ending, end
from penstock.client import AdminClient, PenstockError

SOURCE: Final = "orders"
TARGET: Final = "invoices"
GROUP: Final = "processors"
_OPTIONS: Final[Choices] = {
    "partitions": (4, 1, 200),
    "producers": (2, 1, 100),
    "processors": (3, 1, 32),
    "workers": (2, 1, 16),
}
_MOST_RATE: Final = 400.0
"""Records a second at most."""
_MOST_READ: Final = 100


class Process:
    """Processors are a group. Each transaction has the records that it made and its offsets."""

    name = "process"
    summary = "read, process and write in transactions, by processors that crash and come back"

    def prepare(self, admin: AdminClient, plan: Plan) -> None:
        """Make both topics."""
        for topic in (SOURCE, TARGET):
            casting.make_topic(admin, plan, topic, _option(plan, "partitions"))

    def clients(self, plan: Plan) -> Sequence[ClientSpec]:
        """Producers of the source, processors, and readers of what they made."""
        workers, partitions = _option(plan, "workers"), _option(plan, "partitions")
        specs = casting.careful_producers(
            _option(plan, "producers"),
            topic=SOURCE,
            partitions=partitions,
            workers=workers,
            rate=min(plan.rate or _MOST_RATE, _MOST_RATE),
        )
        reads = {"topic": TARGET, "partitions": partitions}
        for number in range(_option(plan, "processors")):
            name = f"processor-{number}"
            specs.append(ClientSpec(name, "processor", number % workers, reads))
        return [
            *specs,
            ClientSpec("reader", "reader", 0, {**reads, "seeks": True}),
            ClientSpec("auditor", "auditor", workers - 1, {**reads, "isolation": "read_committed"}),
        ]

    def client(self, surroundings: Surroundings) -> Client:
        """One of them."""
        kind = surroundings.spec.kind
        if kind == "producer":
            return Producer(surroundings)
        if kind == "processor":
            return _Processor(surroundings)
        return _Auditor(surroundings) if kind == "auditor" else Bystander(surroundings)

    def checkers(self, plan: Plan) -> Sequence[Checker]:
        """Those of logs, of transactions and their offsets, and of the group."""
        # Imported here: only who judges needs them, and what they stand on.
        from penstock.chaos.checkers.cycles import CircularRead  # noqa: PLC0415 - see above.
        from penstock.chaos.checkers.exactly_once import ProcessedOnce  # noqa: PLC0415 - as above.
        from penstock.chaos.checkers.registry import (  # noqa: PLC0415 - as above.
            appends,
            groups,
            transactional,
        )
        from penstock.chaos.checkers.transactions import TransactionOffsets  # noqa: PLC0415 - as above.

        return [
            *appends(),
            *transactional(),
            TransactionOffsets(),
            CircularRead(),
            ProcessedOnce(),
            *groups(),
        ]


def _option(plan: Plan, name: str) -> int:
    return casting.option(plan, Process.name, _OPTIONS, name)


@dataclass(frozen=True, slots=True)
class Job:
    """What a processor does with what a poll gave."""

    ending: Ending
    stall_s: float
    """So long it waits before it sends its offsets: it may not be a member any more then."""

    @classmethod
    def drawn(cls, random: Random) -> Job:
        """By chance; stalls are seldom."""
        ending, over = drawn_ending(random), random.uniform(1.1, 1.3)
        stalls = random.random() < 0.01
        return cls(ending, over * MAX_POLL_INTERVAL_MS / 1000 if stalls else 0.0)


class _Processor:
    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings: Final = surroundings
        self._partitions: Final[int] = surroundings.spec.parameters["partitions"]
        self._lives = 0

    async def run(self) -> None:
        """Process, crash, and come back."""
        random = self._surroundings.random
        transactor = Transactor(self._surroundings, topic=TARGET, partitions=self._partitions)
        try:
            while True:
                crashes = random.random() < 0.5
                member = self._member(crashes=crashes)
                try:
                    await self._live(member, transactor, random)
                    if not crashes:
                        await member.leave()
                finally:
                    await member.vanish()
                await transactor.come_back()
                await asyncio.sleep(PAUSE_S)
        finally:
            await transactor.close()

    async def finish(self) -> None:
        """Nothing: the auditor processes what is left."""

    async def drain(self, ends: Mapping[str, int]) -> None:
        """Process all up to there, whatever that takes, and then leave."""
        random = self._surroundings.random
        transactor = Transactor(self._surroundings, topic=TARGET, partitions=self._partitions)
        try:
            is_done = False
            while not is_done:
                member = self._member(crashes=False)
                try:
                    is_done = await self._live(member, transactor, random, ends)
                    await member.leave()
                finally:
                    await member.vanish()
                if not is_done:
                    await transactor.come_back()
                    await asyncio.sleep(PAUSE_S)
        finally:
            await transactor.close()

    def _member(self, *, crashes: bool) -> Member:
        self._lives += 1
        return Member(
            self._surroundings,
            group=GROUP,
            topic=SOURCE,
            life=self._lives,
            crashes=crashes,
            isolation="read_committed",
            most=_MOST_READ,
            commits_revoked=False,
        )

    async def _live(
        self,
        member: Member,
        transactor: Transactor,
        random: Random,
        until: Mapping[str, int] | None = None,
    ) -> bool:
        """Process until it crashes; or until it has all up to there: whether it has."""
        member.join()
        while True:
            runs = await member.poll()
            if runs:
                job = Job.drawn(random) if until is None else Job("commit", 0.0)
                committed = await self._do(member, transactor, runs, job, random)
                if committed is None or (not committed and not await member.rewind()):
                    return False
            else:
                await asyncio.sleep(PAUSE_S)
            if until is not None and all(
                member.positions.get(name, -1) >= end for name, end in until.items()
            ):
                return True

    async def _do(
        self, member: Member, transactor: Transactor, runs: Runs, job: Job, random: Random
    ) -> bool | None:
        """One transaction: whether it is committed, or None where its processor has crashed."""
        if not await transactor.begin():
            return None
        await transactor.haunt()
        if not await self._make(member, transactor, runs, job, random):
            return False if await transactor.abort() else None
        if not await end(transactor, job.ending):
            return None
        return transactor.has_committed

    async def _make(
        self, member: Member, transactor: Transactor, runs: Runs, job: Job, random: Random
    ) -> bool:
        """What the transaction is of: whether it can be committed."""
        for run in runs:
            if not await transactor.append(random.randrange(self._partitions), run[-1]):
                return False
        transactor.read_from(SOURCE, runs)
        await asyncio.sleep(job.stall_s)
        try:
            group = await member.metadata()
        except PenstockError:
            return False
        if not group.member_id:
            return False
        read = {f"{SOURCE}-{run[0]}" for run in runs}
        offsets = {name: at for name, at in member.positions.items() if name in read}
        return await transactor.send_offsets(group, member.name, offsets)


class _Auditor(Auditor):
    async def finish(self) -> None:
        """Read what there was to process, and process what is left of it; then read what was made
        of it, and what the group has committed: by now all transactions have ended.
        """
        await _Processor(self._surroundings).drain(await self.read(SOURCE))
        await self.read(TARGET)
        await last_committed(self._surroundings, GROUP)
