"""Administration of transactions: what goes on, and what to do about what never ends (KIP-664)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from penstock.client import admin_values, arguments
from penstock.client.admin_calls import AdminCalls, checked, only
from penstock.client.cluster import gather_all, now_ms
from penstock.client.descriptions import (
    HangingSearch,
    HangingTransaction,
    PartitionProducers,
    TransactionDescription,
    TransactionListing,
)
from penstock.client.leader_calls import HangingVerdicts
from penstock.v1 import transactions_pb2, transactions_pb2_grpc
from penstock.wire.errors import (
    InvalidTxnStateError,
    PenstockError,
    RequestTimedOutError,
)
from penstock.wire.ids import TopicPartition
from penstock.wire.transactional_ids import coordinating_key

_LISTED_AT_ONCE: Final = 1_000
_JUDGED_WITHIN_MS: Final = 30_000
"""So long a leader or coordinator that does not answer may take to come back."""
_ASKED_EVERY_MS: Final = 1_000
_GRACE_MS: Final = 2_000
"""For the answer that follows when leaders are sure."""
TRANSACTION_STATES: Final = admin_values.TRANSACTION_STATES


class TransactionAdmin(AdminCalls):
    """A part of AsyncAdminClient."""

    async def list_transactions(
        self, states: Iterable[str] = (), *, min_duration_ms: int = 0
    ) -> list[TransactionListing]:
        """The transactional ids. See ``AdminClient.list_transactions``."""
        request = transactions_pb2.ListTransactionsRequest(
            states=[admin_values.transaction_state_proto(name) for name in _states(states)],
            min_duration_ms=arguments.whole_number("min_duration_ms", min_duration_ms, 0),
            max_count=_LISTED_AT_ONCE,
        )
        self._check_open()
        cluster = await self.describe_cluster()
        self._cluster.metadata.replace_brokers(admin_values.broker_protos(cluster))

        async def ask(node_id: int) -> list[TransactionListing]:
            listed: list[TransactionListing] = []
            page = transactions_pb2.ListTransactionsRequest()
            page.CopyFrom(request)
            while True:
                response = await self._list_page(node_id, page)
                listed += [
                    admin_values.transaction_listing(entry, node_id)
                    for entry in response.transactions
                ]
                page.page_token = response.next_page_token
                if not page.page_token:
                    return listed

        living = [broker.node_id for broker in cluster.brokers if not broker.fenced]
        listings = await gather_all([ask(node_id) for node_id in living])
        # One that moved while we asked is listed by both; one listing is enough.
        by_id = {entry.transactional_id: entry for found in listings for entry in found}
        return [by_id[transactional_id] for transactional_id in sorted(by_id)]

    async def _list_page(
        self, node_id: int, request: transactions_pb2.ListTransactionsRequest
    ) -> transactions_pb2.ListTransactionsResponse:
        response: transactions_pb2.ListTransactionsResponse = await self._cluster.call(
            node_id,
            lambda channel: transactions_pb2_grpc.TransactionsStub(channel).ListTransactions,
            request,
            timeout_ms=self.config.default_api_timeout_ms,
            what="Transactions.ListTransactions",
        )
        return response

    async def describe_transactions(
        self, transactional_ids: Iterable[str]
    ) -> list[TransactionDescription]:
        """The ids named, in that order. See ``AdminClient.describe_transactions``."""
        wanted = arguments.texts("transactional_ids", transactional_ids, "transactional ids")
        return [await self._describe_transaction(entry) for entry in wanted]

    async def _describe_transaction(self, transactional_id: str) -> TransactionDescription:
        found = await self._ask_transactions(
            transactional_id,
            "DescribeTransactions",
            transactions_pb2.DescribeTransactionsRequest(transactional_ids=[transactional_id]),
            lambda response: only(response.transactions),
        )
        return admin_values.transaction(found)

    async def abort_transaction(self, transactional_id: str) -> None:
        """Abort the open transaction of an id. See ``AdminClient.abort_transaction``."""
        wanted = arguments.text("transactional_id", transactional_id, "a transactional id")
        await self._ask_transactions(
            wanted,
            "AbortTransaction",
            transactions_pb2.AbortTransactionRequest(transactional_id=wanted),
            checked,
        )

    async def describe_producers(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, PartitionProducers]:
        """What logs know of producers. See ``AdminClient.describe_producers``."""
        self._check_open()
        return await self._leaders.describe_producers(
            arguments.partitions(partitions), self.config.default_api_timeout_ms
        )

    async def abort_hanging(
        self,
        partition: TopicPartition,
        producer_id: int,
        start_offset: int | None = None,
        *,
        force: bool = False,
    ) -> int:
        """End a transaction that nobody else will. See ``AdminClient.abort_hanging``."""
        self._check_open()
        where = arguments.partition(partition)
        producer_id = arguments.whole_number("producer_id", producer_id, 0)
        if start_offset is None:
            start_offset = await self._open_at(where, producer_id)
        start_offset = arguments.whole_number("start_offset", start_offset, 0)
        await self._leaders.abort_hanging(
            where, producer_id, start_offset, self.config.default_api_timeout_ms, force=force
        )
        return start_offset

    async def _open_at(self, where: TopicPartition, producer_id: int) -> int:
        described = await self.describe_producers([where])
        for producer in described[where].producers:
            if producer.producer_id == producer_id and producer.is_open:
                return producer.transaction_start_offset
        raise InvalidTxnStateError(
            f"no transaction of producer id {producer_id} is open in {where}; next: see "
            "`penstock transactions hanging` for those that are"
        )

    async def find_hanging(
        self, partitions: Iterable[TopicPartition], *, older_than_ms: int
    ) -> HangingSearch:
        """Transactions that nobody will end. See ``AdminClient.find_hanging``."""
        older_than_ms = arguments.whole_number("older_than_ms", older_than_ms, 0)
        unasked: dict[TopicPartition, PenstockError] = {}
        candidates = await self._open_for_long(
            arguments.partitions(partitions), older_than_ms, unasked
        )
        most_ms = now_ms() + self.config.default_api_timeout_ms
        deadline_ms = min(now_ms() + _JUDGED_WITHIN_MS, most_ms)
        verdicts: dict[HangingTransaction, PenstockError | None] = {}
        left = candidates
        while left:
            judged = await self._check_hanging(left, max(1.0, deadline_ms - now_ms()))
            for one, why in judged.verdicts.items():
                # What a leader has said tells more than that the last time to ask again was short.
                if one not in verdicts or not isinstance(why, RequestTimedOutError):
                    verdicts[one] = why
            left = [one for one in left if (why := verdicts[one]) is not None and why.retriable]
            if judged.sure_in_ms:  # Only time is wanting, and it is known how much.
                sure_ms = now_ms() + judged.sure_in_ms + _GRACE_MS
                deadline_ms = max(deadline_ms, min(sure_ms, most_ms))
            left_ms = deadline_ms - now_ms()
            if not left or left_ms <= 0:
                break
            await asyncio.sleep(min(judged.sure_in_ms or _ASKED_EVERY_MS, left_ms) / 1000)
        return HangingSearch(
            tuple(one for one in candidates if verdicts[one] is None),
            tuple(
                (one, why.message)
                for one in candidates
                if (why := verdicts[one]) is not None and not isinstance(why, InvalidTxnStateError)
            ),
            tuple((partition, unasked[partition].message) for partition in sorted(unasked)),
        )

    async def _check_hanging(
        self, candidates: Sequence[HangingTransaction], timeout_ms: float
    ) -> HangingVerdicts:
        return await self._leaders.check_hanging(candidates, timeout_ms)

    async def _open_for_long(
        self,
        partitions: Sequence[TopicPartition],
        older_than_ms: int,
        unasked: dict[TopicPartition, PenstockError],
    ) -> list[HangingTransaction]:
        """Those of which it is to be found out whether they hang; why some are not known."""
        self._check_open()
        timeout_ms = min(_JUDGED_WITHIN_MS, self.config.default_api_timeout_ms)
        described = await self._leaders.describe_producers(
            partitions, timeout_ms, give_up=unasked.__setitem__
        )
        before_ms = time.time_ns() // 1_000_000 - older_than_ms
        return [
            HangingTransaction(
                partition,
                producer.producer_id,
                producer.producer_epoch,
                producer.transaction_start_offset,
                producer.last_timestamp_ms,
            )
            for partition, found in described.items()
            for producer in found.producers
            if producer.is_open and producer.last_timestamp_ms <= before_ms
        ]

    async def _ask_transactions(
        self, transactional_id: str, method: str, request: Any, judge: Callable[[Any], Any]
    ) -> Any:
        self._check_open()
        return await self._transactions.call(
            coordinating_key(transactional_id),
            lambda channel: getattr(transactions_pb2_grpc.TransactionsStub(channel), method),
            request,
            judge,
            what=f"Transactions.{method}",
            timeout_ms=self.config.default_api_timeout_ms,
        )


def _states(states: Iterable[str]) -> list[str]:
    found = arguments.texts("states", states, "states of transactions")
    for name in found:
        if name not in TRANSACTION_STATES:
            raise arguments.refusal("states", name, f"one of {', '.join(TRANSACTION_STATES)}")
    return found
