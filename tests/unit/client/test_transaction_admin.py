"""Which transactions hang: open in a log, quiet for long, and known to nobody who ends them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from penstock.client import (
    AsyncAdminClient,
    InvalidRequestError,
    InvalidTxnStateError,
    aio_transaction_admin,
)
from penstock.client.descriptions import (
    BrokerDescription,
    ClusterDescription,
    HangingSearch,
    HangingTransaction,
    PartitionProducers,
    ProducerState,
)
from penstock.client.leader_calls import HangingVerdicts
from penstock.v1 import transactions_pb2
from penstock.wire.errors import (
    CoordinatorNotAvailableError,
    PenstockError,
    RequestTimedOutError,
    UnknownTopicOrPartitionError,
)
from penstock.wire.ids import TopicPartition

A0, A1 = TopicPartition("a", 0), TopicPartition("a", 1)
NOW_MS = int(time.time() * 1000)


def writer(producer_id: int, start_offset: int, ago_ms: int = 7_200_000) -> ProducerState:
    return ProducerState(producer_id, 3, 0, NOW_MS - ago_ms, start_offset)


KNOWN = InvalidTxnStateError("a transactional id has it")
LATE = RequestTimedOutError("the leader of a-0 did not answer in time")
AWAY = CoordinatorNotAvailableError("__transaction_state-4 did not answer")


class Admin(AsyncAdminClient):
    """What brokers say stands here; the last verdict they say again and again."""

    def __init__(self, *verdicts: PenstockError | None) -> None:
        super().__init__("localhost:9092")
        self.open = {A0: (writer(1, 5), writer(2, -1)), A1: (writer(3, 9, ago_ms=0),)}
        self.verdicts = list(verdicts)
        self._leaders.describe_producers = self.describe  # type: ignore[method-assign]

    async def describe(
        self, partitions: Any, _timeout_ms: float, give_up: Any = None
    ) -> dict[TopicPartition, PartitionProducers]:
        return {name: PartitionProducers(0, self.open.get(name, ())) for name in partitions}

    async def _check_hanging(self, candidates: Any, timeout_ms: float) -> HangingVerdicts:
        assert candidates == [OLD]
        verdict = self.verdicts.pop(0) if len(self.verdicts) > 1 else self.verdicts[0]
        return HangingVerdicts(dict.fromkeys(candidates, verdict))


OLD = HangingTransaction(A0, 1, 3, 5, NOW_MS - 7_200_000)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio_transaction_admin, "_ASKED_EVERY_MS", 0)


async def search(admin: Admin) -> HangingSearch:
    return await admin.find_hanging([A0, A1], older_than_ms=3_600_000)


async def test_what_no_coordinator_knows_hangs() -> None:
    assert await search(Admin(None)) == HangingSearch((OLD,))


async def test_what_is_refused_for_good_is_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio_transaction_admin, "_JUDGED_WITHIN_MS", 50)
    refusal = UnknownTopicOrPartitionError("the topic is gone")
    assert await search(Admin(refusal)) == HangingSearch((), ((OLD, "the topic is gone"),))


async def test_what_a_coordinator_will_end_does_not() -> None:
    assert await search(Admin(KNOWN)) == HangingSearch()


@pytest.mark.parametrize(
    ("verdict", "found"), [(None, HangingSearch((OLD,))), (KNOWN, HangingSearch())]
)
async def test_who_can_not_tell_yet_is_asked_again(
    verdict: PenstockError | None, found: HangingSearch
) -> None:
    assert await search(Admin(AWAY, AWAY, verdict)) == found


async def test_what_can_not_be_told_is_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio_transaction_admin, "_JUDGED_WITHIN_MS", 50)
    assert await search(Admin(AWAY)) == HangingSearch(in_doubt=((OLD, AWAY.message),))


async def test_a_leaders_reason_is_told_though_there_was_no_time_to_hear_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aio_transaction_admin, "_JUDGED_WITHIN_MS", 50)
    assert await search(Admin(AWAY, LATE)) == HangingSearch(in_doubt=((OLD, AWAY.message),))
    assert await search(Admin(LATE)) == HangingSearch(in_doubt=((OLD, LATE.message),))
    assert await search(Admin(LATE, None)) == HangingSearch((OLD,))


async def test_nobody_is_asked_where_nothing_is_open_for_long() -> None:
    assert await Admin(KNOWN).find_hanging([A1], older_than_ms=3_600_000) == HangingSearch()


async def test_what_is_not_open_is_not_aborted() -> None:
    admin = Admin(None)
    with pytest.raises(InvalidTxnStateError, match="of producer id 2 is open in a-0"):
        await admin.abort_hanging(A0, 2)


async def test_all_pages_of_all_brokers_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = AsyncAdminClient("localhost:9092")
    asked: list[tuple[int, str]] = []

    async def page(node_id: int, request: Any) -> Any:
        asked.append((node_id, request.page_token))
        assert list(request.states) == [transactions_pb2.TRANSACTION_STATE_ONGOING]
        number = int(request.page_token or 0)
        listing = transactions_pb2.TransactionListing(
            transactional_id=f"{node_id}{number}", since_ms=number
        )
        # The second has nothing that was asked for, and is not the last.
        return transactions_pb2.ListTransactionsResponse(
            transactions=[] if number == 1 else [listing],
            next_page_token="" if number == 2 else str(number + 1),
        )

    async def described() -> ClusterDescription:
        brokers = tuple(BrokerDescription(one, "h", 1, "", one == 3, False, 1) for one in (1, 2, 3))
        return ClusterDescription("c", 1, 1, 1, brokers, 1)

    monkeypatch.setattr(admin, "_list_page", page)
    monkeypatch.setattr(admin, "describe_cluster", described)
    found = await admin.list_transactions(["ongoing"])
    assert [(one.transactional_id, one.since_ms) for one in found] == [
        ("10", 0), ("12", 2), ("20", 0), ("22", 2),
    ]  # fmt: skip
    assert sorted(asked) == [(node, token) for node in (1, 2) for token in ("", "1", "2")]


async def test_states_are_looked_at_before_anybody_is_asked() -> None:
    admin = AsyncAdminClient("localhost:9092")
    with pytest.raises(InvalidRequestError, match="one of empty, ongoing"):
        await admin.list_transactions(["open"])
