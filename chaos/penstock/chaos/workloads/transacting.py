"""A transactional producer that crashes and comes back, and the events of its transactions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

from penstock.chaos.recorder import Recorder
from penstock.chaos.workloads import Surroundings, casting
from penstock.chaos.workloads.casting import PAUSE_S, shut
from penstock.chaos.workloads.membership import place
from penstock.chaos.workloads.outcomes import words_of
from penstock.chaos.workloads.reader import Runs
from penstock.chaos.workloads.values import ValueMaker
from penstock.client import (
    AsyncProducer,
    PenstockError,
    ProducerFencedError,
    RequestTimedOutError,
    TransactionAbortableError,
)
from penstock.client.model import GroupMetadata

TRANSACTION_TIMEOUT_MS: Final = 6_000
_DELIVERY_TIMEOUT_MS: Final = 5_000
_INSIST_S: Final = 30.0
"""So long a coordinator is asked what became of a commit."""
_VALUE_BYTES: Final = 60


class Fate(StrEnum):
    """What a commit has come to."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


class Transactor:
    """Transactions of one transactional id, one after the other. For one task.

    What fails leaves it where only ``come_back`` helps: another producer takes the id over, and
    the one before never hears of it. Each is another producer by name, too.
    """

    def __init__(self, surroundings: Surroundings, *, topic: str, partitions: int) -> None:
        self._surroundings: Final = surroundings
        self._recorder: Final[Recorder] = surroundings.recorder
        self._zombies: Final = surroundings.recorder.beside("zombie")
        self._topic: Final = topic
        self._partitions: Final = partitions
        self._transactional_id: Final = surroundings.spec.process.partition("~")[0]
        self._lives = 0
        self._count = 0
        self._txn = ""
        self._zombie: tuple[str, AsyncProducer] | None = None
        self.has_committed = False
        """Whether the last transaction is committed for certain."""
        self._live()

    def _live(self) -> None:
        self._lives += 1
        self._name = f"{self._surroundings.spec.process}.{self._lives}"
        self._next = [0] * self._partitions
        self._maker = ValueMaker(self._name, _VALUE_BYTES)
        self._producer = AsyncProducer(
            self._surroundings.bootstrap,
            **casting.producer_settings(self._name, _DELIVERY_TIMEOUT_MS),
            transactional_id=self._transactional_id,
            transaction_timeout_ms=TRANSACTION_TIMEOUT_MS,
        )

    # --- one transaction

    async def begin(self) -> bool:
        """One operation; whether one has begun."""
        self._count += 1
        self.has_committed = False
        self._txn = f"{self._name}-{self._count}"
        asked = {"txn": self._txn, "transactional_id": self._transactional_id}
        self._recorder.invoke("begin", asked)
        try:
            await self._producer.begin_transaction()
        except PenstockError as error:
            self._recorder.info(words_of(error))
            return False
        self._recorder.ok(asked)
        return True

    async def append(self, partition: int, count: int = 1) -> bool:
        """One operation; whether all of it was acknowledged."""
        first = self._next[partition]
        self._next[partition] += count
        asked = {
            "topic": self._topic,
            "partition": partition,
            "producer": self._name,
            "acks": "all",
            "first": first,
            "count": count,
            "txn": self._txn,
        }
        return await casting.append(self._producer, self._recorder, asked, self._maker)

    async def send_offsets(
        self, group: GroupMetadata, member: str, offsets: Mapping[str, int]
    ) -> bool:
        """One operation; whether the group's coordinator took them."""
        asked = {
            "txn": self._txn,
            "group": group.group_id,
            "member": member,
            "generation": group.member_epoch,
            "offsets": dict(offsets),
        }
        self._recorder.invoke("send-offsets", asked)
        try:
            await self._producer.send_offsets_to_transaction(
                {place(name): offset for name, offset in offsets.items()}, group
            )
        except PenstockError as error:
            self._recorder.info(words_of(error))
            return False
        self._recorder.ok(asked)
        return True

    def read_from(self, topic: str, runs: Runs) -> None:
        """What the transaction is made of."""
        self._note("read-from", {"txn": self._txn, "topic": topic, "runs": runs})

    def transfer(self, source: str, target: str, amount: int) -> None:
        """What its last two appends mean."""
        self._note("transfer", {"txn": self._txn, "from": source, "to": target, "amount": amount})

    def _note(self, f: str, value: Mapping[str, Any]) -> None:
        self._recorder.invoke(f, value)
        self._recorder.ok(value)

    async def commit(self) -> Fate:
        """One operation: insist on an answer. Aborted is only said where that is promised."""
        asked = {"txn": self._txn}
        self._recorder.invoke("commit", asked)
        until = time.monotonic() + _INSIST_S
        while True:
            try:
                await self._producer.commit_transaction()
            except RequestTimedOutError as error:
                if time.monotonic() < until:
                    await asyncio.sleep(PAUSE_S)
                    continue
                self._recorder.info(words_of(error))
                return Fate.UNKNOWN
            except PenstockError as error:
                if is_aborted(error):
                    self._recorder.fail(words_of(error))
                    return Fate.ABORTED
                self._recorder.info(words_of(error))
                return Fate.UNKNOWN
            self._recorder.ok(asked)
            self.has_committed = True
            return Fate.COMMITTED

    async def abort(self) -> bool:
        """One operation; whether it is known to be aborted, and another can begin."""
        asked = {"txn": self._txn}
        self._recorder.invoke("abort", asked)
        try:
            await self._producer.abort_transaction()
        except PenstockError as error:
            self._recorder.info(words_of(error))
            return False
        self._recorder.ok(asked)
        return True

    # --- lives

    async def come_back(self, *, as_zombie: bool = False) -> None:
        """Be another producer of the same id.

        With ``as_zombie`` the one before is alive: when its successor has begun, ``haunt`` has it
        commit what it left open.
        """
        await self._lay_to_rest()
        before, txn = self._producer, self._txn
        self._live()
        self._zombie = (txn, before)
        if not as_zombie:
            await self._lay_to_rest()

    async def haunt(self) -> None:
        """The zombie, if there is one, asks to commit what its successor has ended by beginning.

        It had not asked before, so that one that is fenced is certainly not committed.
        """
        if self._zombie is None:
            return
        txn, producer = self._zombie
        self._zombies.invoke("commit", {"txn": txn})
        try:
            await producer.commit_transaction()
        except PenstockError as error:
            if is_aborted(error) or isinstance(error, ProducerFencedError):
                self._zombies.fail(words_of(error))
            else:
                self._zombies.info(words_of(error))
        else:
            self._zombies.ok({"txn": txn})
        await self._lay_to_rest()

    async def _lay_to_rest(self) -> None:
        """Close the zombie. What it left open is aborted by whoever comes first."""
        zombie, self._zombie = self._zombie, None
        if zombie is not None:
            await shut(zombie[1])

    async def close(self) -> None:
        """Free everything."""
        await self._lay_to_rest()
        await shut(self._producer)


def is_aborted(error: PenstockError) -> bool:
    """Whether the error of a commit promises that nothing of it is committed, nor will be.

    One that is fenced may have been: by an attempt of which the answer was lost.
    """
    return isinstance(error, TransactionAbortableError)
