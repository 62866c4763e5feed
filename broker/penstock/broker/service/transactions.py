"""The Transactions service: producers' identities, and the ends of transactions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import grpc

from penstock.broker.coordinator.hanging import Judgement
from penstock.broker.coordinator.transaction_coordinator import (
    DEFAULT_WAIT_MS,
    TransactionCoordinator,
)
from penstock.broker.replication.led_transactions import LedTransactions, OpenPlace
from penstock.v1 import common_pb2, transactions_pb2
from penstock.v1.transactions_pb2_grpc import TransactionsServicer as TransactionsServicerBase
from penstock.wire.errors import InvalidRequestError, PenstockError

_MAX_IDS_ASKED: Final = 1_000
_MAX_PARTITIONS_ASKED: Final = 1_000
_ANSWERS_BEFORE: Final = 0.9
"""A request that waits is answered before its sender gives up: who hears why asks better."""

Judge = Callable[[Sequence[OpenPlace]], Awaitable[Judgement]]
"""Whether no coordinator knows of transactions; see HangingJudge."""


class TransactionsServicer(TransactionsServicerBase):
    """Answers producers, engines and tools. Refusals are typed errors in the answers.

    ``take_producer_id`` is for producers without a transactional id. One of these that asks again
    gets another id, which fences nobody; that is what "epoch bump" means for it.
    """

    def __init__(
        self,
        take_producer_id: Callable[[], Awaitable[int]],
        coordinator: TransactionCoordinator,
        led: LedTransactions,
        judge: Judge,
    ) -> None:
        self._take_producer_id = take_producer_id
        self._coordinator = coordinator
        self._led = led
        self._judge = judge

    async def InitProducerId(
        self, request: transactions_pb2.InitProducerIdRequest, context: Any
    ) -> transactions_pb2.InitProducerIdResponse:
        """A fresh producer id with epoch 0, or the identity of a transactional id."""
        try:
            if request.transactional_id:
                return await self._coordinator.init_producer_id(request, _wait_ms(context))
            producer_id = await self._take_producer_id()
        except PenstockError as error:
            return transactions_pb2.InitProducerIdResponse(error=error.to_proto())
        return transactions_pb2.InitProducerIdResponse(producer_id=producer_id, producer_epoch=0)

    async def EndTransaction(
        self, request: transactions_pb2.EndTransactionRequest, context: Any
    ) -> transactions_pb2.EndTransactionResponse:
        """Decide about a transaction."""
        try:
            return await self._coordinator.end_transaction(request, _wait_ms(context))
        except PenstockError as error:
            return transactions_pb2.EndTransactionResponse(error=error.to_proto())

    async def BeginAttempt(
        self, request: transactions_pb2.BeginAttemptRequest, context: Any
    ) -> transactions_pb2.BeginAttemptResponse:
        """Open the transaction of a task attempt."""
        try:
            return await self._coordinator.begin_attempt(request, _wait_ms(context))
        except PenstockError as error:
            return transactions_pb2.BeginAttemptResponse(error=error.to_proto())

    async def CommitGroup(
        self, request: transactions_pb2.CommitGroupRequest, context: Any
    ) -> transactions_pb2.CommitGroupResponse:
        """Decide about all attempts of a group."""
        try:
            return await self._coordinator.commit_group(request, _wait_ms(context))
        except PenstockError as error:
            return transactions_pb2.CommitGroupResponse(error=error.to_proto())

    async def LastCommitted(
        self, request: transactions_pb2.LastCommittedRequest, context: Any
    ) -> transactions_pb2.LastCommittedResponse:
        """What of a group was committed last."""
        try:
            return await self._coordinator.last_committed(request.group)
        except PenstockError as error:
            return transactions_pb2.LastCommittedResponse(error=error.to_proto())

    async def ListTransactions(
        self, request: transactions_pb2.ListTransactionsRequest, context: Any
    ) -> transactions_pb2.ListTransactionsResponse:
        """A page of the ids that this broker coordinates. UNAVAILABLE while some are being read."""
        try:
            return await self._coordinator.list_transactions(request)
        except InvalidRequestError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
            raise AssertionError("abort raises") from None
        except PenstockError as error:
            # The answer has no place for a refusal, and half a list would be taken for all of it.
            await context.abort(grpc.StatusCode.UNAVAILABLE, error.message)
            raise AssertionError("abort raises") from None

    async def DescribeTransactions(
        self, request: transactions_pb2.DescribeTransactionsRequest, context: Any
    ) -> transactions_pb2.DescribeTransactionsResponse:
        """Ids whole, each with its own refusal."""

        async def describe(transactional_id: str) -> transactions_pb2.TransactionDescription:
            try:
                return await self._coordinator.describe_transaction(transactional_id)
            except PenstockError as error:
                return transactions_pb2.TransactionDescription(
                    transactional_id=transactional_id, error=error.to_proto()
                )

        names = request.transactional_ids
        if len(names) > _MAX_IDS_ASKED:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"{len(names)} transactional ids are asked about; {_MAX_IDS_ASKED} are allowed at "
                "once",
            )
        return transactions_pb2.DescribeTransactionsResponse(
            transactions=await asyncio.gather(*map(describe, names))
        )

    async def AbortTransaction(
        self, request: transactions_pb2.AbortTransactionRequest, context: Any
    ) -> transactions_pb2.AbortTransactionResponse:
        """End the open transaction of an id from outside."""
        try:
            return await self._coordinator.abort_transaction(request)
        except PenstockError as error:
            return transactions_pb2.AbortTransactionResponse(error=error.to_proto())

    async def DescribeProducers(
        self, request: transactions_pb2.DescribeProducersRequest, context: Any
    ) -> transactions_pb2.DescribeProducersResponse:
        """What the logs of partitions led here know of producers."""
        count = len(request.partitions)
        if count > _MAX_PARTITIONS_ASKED:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"{count} partitions are asked about; {_MAX_PARTITIONS_ASKED} are allowed at once",
            )
        return await self._led.describe_producers(request)

    async def CheckHanging(
        self, request: transactions_pb2.CheckHangingRequest, context: Any
    ) -> transactions_pb2.CheckHangingResponse:
        """Which transactions, of those that are open in logs led here, no coordinator knows of."""
        count = len(request.transactions)
        if count > _MAX_PARTITIONS_ASKED:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"{count} transactions are asked about; {_MAX_PARTITIONS_ASKED} are allowed",
            )
        outcomes, sure_in_ms = await self._check_hanging(request.transactions)
        response = transactions_pb2.CheckHangingResponse(sure_in_ms=sure_in_ms)
        for outcome in outcomes:
            response.results.append(
                outcome.to_proto() if isinstance(outcome, PenstockError) else common_pb2.Error()
            )
        return response

    async def AbortHanging(
        self, request: transactions_pb2.AbortHangingRequest, context: Any
    ) -> transactions_pb2.AbortHangingResponse:
        """End a transaction that no coordinator knows of."""
        if request.force:
            return await self._led.abort_hanging(request)
        [outcome], _ = await self._check_hanging([request])
        if isinstance(outcome, PenstockError):
            return transactions_pb2.AbortHangingResponse(error=outcome.to_proto())
        return await self._led.abort_hanging(request, outcome)

    async def _check_hanging(
        self, requests: Sequence[transactions_pb2.AbortHangingRequest]
    ) -> tuple[list[OpenPlace | PenstockError], int]:
        """What hangs, still open after all coordinators were asked; or why not. And in how many
        milliseconds it is sure of those where only time is wanting.

        Of one that is open there now, and was another one when they were asked, nothing is known:
        ``abort_hanging`` refuses it, as it is given the one that was judged.
        """
        outcomes = [self._led.look_at(request) for request in requests]
        places = [one for one in outcomes if isinstance(one, OpenPlace)]
        judged = await self._judge(places) if places else Judgement([])
        verdicts = dict(zip(places, judged.verdicts, strict=True))
        hanging = [
            outcome
            if isinstance(outcome, PenstockError)
            else verdicts[outcome] or (now if isinstance(now, PenstockError) else outcome)
            for outcome, now in zip(outcomes, map(self._led.look_at, requests), strict=True)
        ]
        return hanging, judged.sure_in_ms


def _wait_ms(context: Any) -> int:
    """How long a request may wait: as long as its sender does."""
    left_s = context.time_remaining()
    if left_s is None:
        return DEFAULT_WAIT_MS
    return min(int(left_s * 1_000 * _ANSWERS_BEFORE), DEFAULT_WAIT_MS)
