"""The Transactions service: producers' identities."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc

from penstock.broker.replication.led_transactions import LedTransactions
from penstock.v1 import cluster_pb2, transactions_pb2
from penstock.v1.transactions_pb2_grpc import TransactionsServicer as TransactionsServicerBase
from penstock.wire.errors import InvalidRequestError, PenstockError


class TransactionsServicer(TransactionsServicerBase):
    """Hands out producer ids from blocks that the controllers gave to this broker.

    An id is handed out once in the life of the cluster: what is left of a block when the
    process ends is never used. An idempotent producer that asks again gets another id, which
    fences nobody; that is what "epoch bump" means without a transactional id.
    """

    def __init__(
        self,
        allocate: Callable[[], Awaitable[cluster_pb2.AllocateProducerIdsResult]],
        led: LedTransactions,
    ) -> None:
        self._allocate = allocate
        self._led = led
        self._next = 0
        self._end = 0  # Ids from _next to below _end are ours to hand out.
        self._lock = asyncio.Lock()

    async def InitProducerId(
        self, request: transactions_pb2.InitProducerIdRequest, context: Any
    ) -> transactions_pb2.InitProducerIdResponse:
        """A fresh producer id with epoch 0."""
        try:
            if request.transactional_id:
                raise InvalidRequestError("this broker's version has no transactions")
            producer_id = await self._take()
        except PenstockError as error:
            return transactions_pb2.InitProducerIdResponse(error=error.to_proto())
        return transactions_pb2.InitProducerIdResponse(producer_id=producer_id, producer_epoch=0)

    async def EndTransaction(
        self, request: transactions_pb2.EndTransactionRequest, context: Any
    ) -> transactions_pb2.EndTransactionResponse:
        """Not known to this version."""
        return await _unknown(context)

    async def BeginAttempt(
        self, request: transactions_pb2.BeginAttemptRequest, context: Any
    ) -> transactions_pb2.BeginAttemptResponse:
        """Not known to this version."""
        return await _unknown(context)

    async def CommitGroup(
        self, request: transactions_pb2.CommitGroupRequest, context: Any
    ) -> transactions_pb2.CommitGroupResponse:
        """Not known to this version."""
        return await _unknown(context)

    async def LastCommitted(
        self, request: transactions_pb2.LastCommittedRequest, context: Any
    ) -> transactions_pb2.LastCommittedResponse:
        """Not known to this version."""
        return await _unknown(context)

    async def ListTransactions(
        self, request: transactions_pb2.ListTransactionsRequest, context: Any
    ) -> transactions_pb2.ListTransactionsResponse:
        """Not known to this version."""
        return await _unknown(context)

    async def DescribeTransactions(
        self, request: transactions_pb2.DescribeTransactionsRequest, context: Any
    ) -> transactions_pb2.DescribeTransactionsResponse:
        """Not known to this version."""
        return await _unknown(context)

    async def AbortTransaction(
        self, request: transactions_pb2.AbortTransactionRequest, context: Any
    ) -> transactions_pb2.AbortTransactionResponse:
        """Not known to this version."""
        return await _unknown(context)

    async def DescribeProducers(
        self, request: transactions_pb2.DescribeProducersRequest, context: Any
    ) -> transactions_pb2.DescribeProducersResponse:
        """What the logs of partitions led here know of producers."""
        return self._led.describe_producers(request)

    async def AbortHanging(
        self, request: transactions_pb2.AbortHangingRequest, context: Any
    ) -> transactions_pb2.AbortHangingResponse:
        """End a transaction that no coordinator knows of."""
        return await self._led.abort_hanging(request)

    async def _take(self) -> int:
        async with self._lock:
            if self._next >= self._end:
                block = await self._allocate()
                self._next = block.first_producer_id
                self._end = block.first_producer_id + block.count
            producer_id = self._next
            self._next += 1
            return producer_id


async def _unknown(context: Any) -> NoReturn:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this broker's version has no transactions")
    raise AssertionError("abort raises")
