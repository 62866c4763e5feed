"""Which transactions hang: open in a log, quiet for long, and known to nobody who ends them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from penstock.client import AsyncAdminClient, InvalidRequestError, InvalidTxnStateError
from penstock.client.descriptions import (
    HangingTransaction,
    PartitionProducers,
    ProducerState,
    TransactionDescription,
    TransactionListing,
)
from penstock.wire.errors import TransactionalIdNotFoundError
from penstock.wire.ids import TopicPartition

A0, A1 = TopicPartition("a", 0), TopicPartition("a", 1)
NOW_MS = int(time.time() * 1000)


def writer(producer_id: int, start_offset: int, ago_ms: int = 7_200_000) -> ProducerState:
    return ProducerState(producer_id, 3, 0, NOW_MS - ago_ms, start_offset)


class Admin(AsyncAdminClient):
    """What brokers say stands here; the logs are looked at again and again."""

    def __init__(self, *looks: dict[TopicPartition, tuple[ProducerState, ...]]) -> None:
        super().__init__("localhost:9092")
        self.looks = list(looks)
        self.known: dict[str, TransactionDescription] = {}
        self.aborted: list[Any] = []

    async def describe_producers(self, partitions: Any) -> dict[TopicPartition, PartitionProducers]:
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        return {name: PartitionProducers(0, look.get(name, ())) for name in partitions}

    async def list_transactions(self, states: Any = (), **_: Any) -> list[TransactionListing]:
        return [
            TransactionListing(name, entry.producer_id, entry.state, 1)
            for name, entry in self.known.items()
        ]

    async def _describe_transaction(self, transactional_id: str) -> TransactionDescription:
        if transactional_id == "gone":
            raise TransactionalIdNotFoundError("forgotten meanwhile")
        return self.known[transactional_id]

    def knows(self, name: str, producer_id: int, state: str, *partitions: TopicPartition) -> None:
        self.known[name] = TransactionDescription(
            name, state, producer_id, 3, 60_000, 1, partitions
        )


async def test_what_no_coordinator_knows_hangs() -> None:
    admin = Admin({A0: (writer(1, 5), writer(2, -1)), A1: (writer(3, 9, ago_ms=0),)})
    admin.knows("other", 8, "ongoing", A0)
    admin.knows("gone", 1, "ongoing", A0)
    found = await admin.find_hanging([A0, A1], older_than_ms=3_600_000)
    assert found == [HangingTransaction(A0, 1, 3, 5, NOW_MS - 7_200_000)]


@pytest.mark.parametrize("state", ["ongoing", "prepare_commit", "prepare_abort"])
async def test_what_a_coordinator_will_end_does_not(state: str) -> None:
    admin = Admin({A0: (writer(1, 5),), A1: (writer(1, 6),)})
    admin.knows("t", 1, state, A0)
    [found] = await admin.find_hanging([A0, A1], older_than_ms=3_600_000)
    assert found.partition == A1  # It is not in the coordinator's transaction.


async def test_an_id_without_a_transaction_will_end_nothing() -> None:
    admin = Admin({A0: (writer(1, 5),)})
    admin.knows("t", 1, "empty")
    assert len(await admin.find_hanging([A0], older_than_ms=3_600_000)) == 1


async def test_what_ended_meanwhile_did_not_hang() -> None:
    for later in ({}, {A0: (writer(1, 77),)}):  # Another one of the producer is open by now.
        admin = Admin({A0: (writer(1, 5),)}, later)
        assert await admin.find_hanging([A0], older_than_ms=3_600_000) == []


async def test_what_is_not_open_is_not_aborted() -> None:
    admin = Admin({A0: (writer(1, -1),)})
    with pytest.raises(InvalidTxnStateError, match="of producer id 1 is open in a-0"):
        await admin.abort_hanging(A0, 1)


async def test_states_are_looked_at_before_anybody_is_asked() -> None:
    admin = AsyncAdminClient("localhost:9092")
    with pytest.raises(InvalidRequestError, match="one of empty, ongoing"):
        await admin.list_transactions(["open"])
