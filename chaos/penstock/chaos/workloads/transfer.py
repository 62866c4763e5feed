"""The workload ``transfer``: money goes from account to account in transactions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final, Literal

from penstock.chaos.checkers import Checker
from penstock.chaos.workloads import Client, ClientSpec, Plan, Surroundings, casting
from penstock.chaos.workloads.casting import PAUSE_S, Choices, Pace, shut
from penstock.chaos.workloads.reader import Reader
from penstock.chaos.workloads.transacting import TRANSACTION_TIMEOUT_MS, Fate, Transactor
from penstock.client import AdminClient, AsyncConsumer
from penstock.client.config import IsolationLevel

TOPIC: Final = "accounts"
_OPTIONS: Final[Choices] = {
    "partitions": (4, 1, 200),
    "accounts": (12, 2, 10_000),
    "tellers": (4, 1, 100),
    "workers": (2, 1, 16),
}
_MOST_RATE: Final = 100.0
"""Transactions a second at most: each has several answers to wait for."""

_LAST_TRANSACTIONS: Final = 5

Ending = Literal["commit", "abort", "timeout", "crash", "zombie"]


class Transfer:
    """An account's changes are records of one partition; each transfer is two of them.

    Tellers also read along what is committed, and a transaction says what it was made of.
    """

    name = "transfer"
    summary = "money between accounts, in transactions that commit, abort, time out and crash"

    def prepare(self, admin: AdminClient, plan: Plan) -> None:
        """Make the topic."""
        casting.make_topic(admin, plan, TOPIC, _option(plan, "partitions"))

    def clients(self, plan: Plan) -> Sequence[ClientSpec]:
        """Tellers, a reader of everything, and one of what is committed."""
        workers, tellers = _option(plan, "workers"), _option(plan, "tellers")
        reads = {"topic": TOPIC, "partitions": _option(plan, "partitions")}
        parameters = {
            **reads,
            "accounts": _option(plan, "accounts"),
            "rate": min(plan.rate or _MOST_RATE, _MOST_RATE) / tellers,
            "isolation": "read_committed",
        }
        specs = [
            ClientSpec(f"teller-{number}", "teller", number % workers, parameters)
            for number in range(tellers)
        ]
        return [
            *specs,
            ClientSpec("reader", "reader", 0, {**reads, "seeks": True}),
            ClientSpec("auditor", "auditor", workers - 1, parameters),
        ]

    def client(self, surroundings: Surroundings) -> Client:
        """One of them."""
        kind = surroundings.spec.kind
        if kind == "teller":
            return _Teller(surroundings)
        return _Auditor(surroundings) if kind == "auditor" else Bystander(surroundings)

    def checkers(self, plan: Plan) -> Sequence[Checker]:
        """Those of logs and of transactions, and that the sum stays."""
        # Imported here: only who judges needs them, and what they stand on.
        from penstock.chaos.checkers.cycles import CircularRead  # noqa: PLC0415 - see above.
        from penstock.chaos.checkers.exactly_once import TransferTotal  # noqa: PLC0415 - as above.
        from penstock.chaos.checkers.registry import appends, transactional  # noqa: PLC0415 - as above.

        return [*appends(), *transactional(), CircularRead(), TransferTotal()]


def _option(plan: Plan, name: str) -> int:
    return casting.option(plan, Transfer.name, _OPTIONS, name)


class Bystander(Reader):
    """Reads while the load lasts."""

    async def finish(self) -> None:
        """Nothing: the auditor reads it all."""


class Auditor:
    """Reads along what is committed. In the end it reads everything, and then what is committed.

    In this order: transactions that were left open have ended when the second reader is at the
    end that the first was told, or they never do.
    """

    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings: Final = surroundings

    async def run(self) -> None:
        """Read along."""
        await Reader(self._surroundings).run()

    async def read(self, topic: str) -> Mapping[str, int]:
        """The final reads of a topic, by both isolations; where it ends."""
        everything, committed = (
            Reader(
                self._surroundings,
                recorder=self._surroundings.recorder.beside(f"{isolation}-{topic}"),
                topic=topic,
                isolation=isolation,
            )
            for isolation in _ISOLATIONS
        )
        ends = await everything.read_all()
        await committed.read_all(at_least=ends)
        return ends


_ISOLATIONS: Final[Sequence[IsolationLevel]] = ("read_uncommitted", "read_committed")


@dataclass(frozen=True, slots=True)
class Deed:
    """One transaction, as it is meant."""

    transfers: Sequence[tuple[int, int, int]]
    """From, to, amount."""
    ending: Ending

    @classmethod
    def drawn(cls, random: Random, accounts: int) -> Deed:
        """By chance."""
        transfers = []
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            source, target = random.sample(range(accounts), 2)
            transfers.append((source, target, random.randint(1, 100)))
        return cls(transfers, drawn_ending(random))


def drawn_ending(random: Random) -> Ending:
    """Most commit; one that times out takes its time, and is seldom."""
    chance = random.random()
    for bound, ending in _ENDINGS:
        if chance < bound:
            return ending
    return "commit"


_ENDINGS: Final[Sequence[tuple[float, Ending]]] = (
    (0.01, "timeout"),
    (0.03, "crash"),
    (0.05, "zombie"),
    (0.15, "abort"),
)


class _Teller:
    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings: Final = surroundings
        self._parameters: Final = surroundings.spec.parameters
        self._reader: Final = Reader(surroundings)

    async def run(self) -> None:
        random = self._surroundings.random
        pace = Pace(self._parameters["rate"])
        partitions = self._parameters["partitions"]
        transactor = Transactor(self._surroundings, topic=TOPIC, partitions=partitions)
        try:
            consumer = await self._reader.begin()
            try:
                while True:
                    await pace.wait(1)
                    deed = Deed.drawn(random, self._parameters["accounts"])
                    if not await self._do(transactor, consumer, deed):
                        await transactor.come_back()
                        await asyncio.sleep(PAUSE_S)
            finally:
                await shut(consumer)
        finally:
            await transactor.close()

    async def finish(self) -> None:
        """Nothing: the auditor reads it all."""

    async def transact(self, count: int) -> None:
        """So many transactions that are committed, whatever it takes."""
        transactor = Transactor(
            self._surroundings, topic=TOPIC, partitions=self._parameters["partitions"]
        )
        try:
            consumer = await self._reader.begin()
            try:
                while count > 0:
                    deed = Deed.drawn(self._surroundings.random, self._parameters["accounts"])
                    deed = replace(deed, ending="commit")
                    if not await self._do(transactor, consumer, deed):
                        await transactor.come_back()
                        await asyncio.sleep(PAUSE_S)
                    count -= transactor.has_committed
            finally:
                await shut(consumer)
        finally:
            await transactor.close()

    async def _do(self, transactor: Transactor, consumer: AsyncConsumer, deed: Deed) -> bool:
        """One transaction; whether the same producer can go on."""
        if not await transactor.begin():
            return False
        await transactor.haunt()
        runs = await self._reader.poll(consumer, timeout_ms=0)
        if runs:
            transactor.read_from(TOPIC, runs)
        for source, target, amount in deed.transfers:
            done = await transactor.append(self._home(source))
            if not done or not await transactor.append(self._home(target)):
                return await transactor.abort()
            transactor.transfer(f"account-{source}", f"account-{target}", amount)
        return await end(transactor, deed.ending)

    def _home(self, account: int) -> int:
        partitions: int = self._parameters["partitions"]
        return account % partitions


class _Auditor(Auditor):
    async def finish(self) -> None:
        """See that transactions are possible again, and then read everything."""
        await _Teller(self._surroundings).transact(_LAST_TRANSACTIONS)
        await self.read(TOPIC)


async def end(transactor: Transactor, ending: Ending) -> bool:
    """End the open transaction as it is meant; whether the same producer can go on."""
    if ending == "abort":
        return await transactor.abort()
    if ending == "crash":
        return False
    if ending == "zombie":
        await transactor.come_back(as_zombie=True)
        return True
    if ending == "timeout":
        await asyncio.sleep(1.5 * TRANSACTION_TIMEOUT_MS / 1000)
    fate = await transactor.commit()
    if fate is Fate.ABORTED:
        return await transactor.abort()
    return fate is Fate.COMMITTED
