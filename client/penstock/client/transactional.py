"""The transactions of one producer: what its state machine wants asked, asked."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, Final, Protocol

from penstock.client import admin_values
from penstock.client.cluster import Cluster
from penstock.client.config import ProducerConfig
from penstock.client.coordinator import Coordinators, Kind
from penstock.client.core.sequencer import Identity
from penstock.client.core.transaction import Phase, Transactions
from penstock.client.core.transaction_events import (
    AskEnd,
    AskIdentity,
    AwaitVerdicts,
    BeginWanted,
    Done,
    DropRecords,
    Effect,
    EndAnswered,
    EndRefused,
    EndUnanswered,
    EndWanted,
    Event,
    Failed,
    Flushed,
    IdentityGiven,
    IdentityRefused,
    InitWanted,
    Interrupted,
    Sent,
    TakeIdentity,
    Wish,
)
from penstock.client.deadline import Deadline
from penstock.client.model import GroupMetadata, OffsetAndMetadata
from penstock.client.offsets import judge_commit
from penstock.v1 import (
    groups_pb2,
    groups_pb2_grpc,
    transactions_pb2,
    transactions_pb2_grpc,
)
from penstock.wire.errors import (
    ClientClosedError,
    PenstockError,
    ProducerFencedError,
    RequestTimedOutError,
    TransactionAbortableError,
    error_from_proto,
)
from penstock.wire.ids import TopicPartition
from penstock.wire.transactional_ids import coordinating_key, parse_attempt

_LOG: Final = logging.getLogger("penstock.client")


class Records(Protocol):
    """The records of the producer whose transactions these are."""

    async def settle(self, timeout_ms: float | None) -> None:
        """Wait for the verdict on everything queued. Raises RequestTimedOutError."""

    def drop(self, error: PenstockError) -> None:
        """Have everything without a verdict fail now."""

    def take_identity(self, identity: Identity) -> None:
        """Go on under this identity, numbered from 0; nothing waits for a verdict."""

    def forget_failures(self) -> None:
        """What failed is told by the end of its transaction."""


class TransactionDriver:
    """Belongs to one event loop, but for ``check_sending``, which is called under the guard.

    Wishes are carried out one after the other. Each is bounded by its time, and raises what its
    method of ``Producer`` promises.
    """

    def __init__(
        self,
        cluster: Cluster,
        config: ProducerConfig,
        *,
        records: Records,
        guard: AbstractContextManager[Any],
    ) -> None:
        assert config.transactional_id is not None
        self.transactional_id = config.transactional_id
        self._attempt = parse_attempt(self.transactional_id)
        self._cluster = cluster
        self._config = config
        self._records = records
        self._guard = guard
        self._coordinators = Coordinators(cluster, Kind.TRANSACTION)
        self._groups = Coordinators(cluster)
        # By which the coordinator knows repeated questions for an identity from another producer's.
        self._instance_id = uuid.uuid4().bytes
        what = "attempt" if self._attempt else "transactional producer"
        self._machine = Transactions(
            f"{what} {self.transactional_id!r}", is_attempt=self._attempt is not None
        )
        self._turn = asyncio.Lock()

    # --- the engine's side ------------------------------------------------------------------

    def check_sending(self) -> None:
        """Raise why nothing can be sent now, if so."""
        self._machine.check_sending()

    @property
    def is_open(self) -> bool:
        """Whether there is a transaction that an abort would end."""
        return self._machine.is_open

    def sent(self) -> None:
        """Records go to a broker."""
        self._machine.handle(Sent())

    def failed(self, error: PenstockError) -> None:
        """A record has failed, or its transaction has otherwise."""
        for effect in self._machine.handle(Failed(error)):
            assert isinstance(effect, DropRecords)
            self._records.drop(effect.error)

    # --- wishes -----------------------------------------------------------------------------

    async def init(self, timeout_ms: float | None = None) -> None:
        """Have an identity."""
        deadline = self._deadline(timeout_ms)
        async with self._in_turn(deadline):
            await self._carry_out(InitWanted(), deadline)

    async def begin(self, timeout_ms: float | None = None) -> None:
        """Begin a transaction; with an identity, asked for where there is none yet."""
        deadline = self._deadline(timeout_ms)
        async with self._in_turn(deadline):
            if self._machine.phase is Phase.NO_IDENTITY:
                await self._carry_out(InitWanted(), deadline)
            await self._carry_out(BeginWanted(), Deadline.never())

    async def end(self, wish: Wish, timeout_ms: float | None = None) -> None:
        """End the transaction so."""
        deadline = Deadline.after_ms(timeout_ms)
        async with self._in_turn(deadline):
            await self._carry_out(EndWanted(wish), deadline)

    async def send_offsets(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
        group: GroupMetadata,
        timeout_ms: float | None = None,
    ) -> None:
        """Have the group's coordinator take positions into the transaction."""
        deadline = self._deadline(timeout_ms)
        async with self._in_turn(deadline):
            self._machine.check_sending()
            if not offsets:
                return
            self._machine.handle(Sent())
            try:
                await self._ask_group(offsets, group, max(1.0, deadline.remaining_ms))
            except PenstockError as error:
                self.failed(error)
                self._machine.check_sending()  # Raises what it means for the transaction.
                raise
            except BaseException:
                self.failed(
                    RequestTimedOutError(
                        "the positions may be in it or not: who waited for the answer was "
                        "interrupted"
                    )
                )
                raise

    async def close(self, timeout_ms: float | None) -> None:
        """Abort what is open, in so much time; where that fails its timeout will."""
        if not self._machine.is_open:
            return
        if self._attempt is None:
            _LOG.warning(
                "transactional id %s: the producer is closed with a transaction open, which is "
                "aborted",
                self.transactional_id,
            )
        most_ms = self._config.request_timeout_ms
        try:
            await self.end(Wish.ABORT, most_ms if timeout_ms is None else min(timeout_ms, most_ms))
        except PenstockError as error:
            _LOG.warning(
                "transactional id %s: the open transaction could not be aborted, and will be when "
                "its transaction_timeout_ms=%d is over: %s",
                self.transactional_id,
                self._config.transaction_timeout_ms,
                error,
            )

    # --- carrying out -----------------------------------------------------------------------

    def _deadline(self, timeout_ms: float | None) -> Deadline:
        return Deadline.after_ms(self._config.max_block_ms if timeout_ms is None else timeout_ms)

    @asynccontextmanager
    async def _in_turn(self, deadline: Deadline) -> AsyncIterator[None]:
        """Carry out one wish; raises RequestTimedOutError where another one takes all its time."""
        left_ms = deadline.remaining_ms
        try:
            async with asyncio.timeout(None if left_ms == float("inf") else left_ms / 1000):
                await self._turn.acquire()
        except TimeoutError:
            raise RequestTimedOutError(
                f"another call about the transactions of {self.transactional_id!r} was still under "
                "way, in another thread or task; nothing was done; next: wait for it, call again"
            ) from None
        try:
            yield
        finally:
            self._turn.release()

    async def _carry_out(self, wish: Event, deadline: Deadline) -> None:
        outcome: Done | None = None
        with self._guard:  # Who opens a batch has looked under it, so that a flush finds the batch.
            effects = deque(self._machine.handle(wish))
        try:
            while effects:
                effect = effects.popleft()
                if isinstance(effect, Done):
                    outcome = effect
                else:
                    effects += await self._do(effect, deadline)
        except BaseException:
            self._machine.handle(Interrupted())
            raise
        if outcome is not None and outcome.error is not None:
            if isinstance(outcome.error, TransactionAbortableError | ProducerFencedError):
                self._records.forget_failures()
            raise outcome.error

    async def _do(self, effect: Effect, deadline: Deadline) -> list[Effect]:
        if isinstance(effect, DropRecords):
            self._records.drop(effect.error)
        elif isinstance(effect, TakeIdentity):
            self._records.take_identity(effect.identity)
        elif isinstance(effect, AwaitVerdicts):
            bound_ms = deadline.remaining_ms
            await self._records.settle(None if bound_ms == float("inf") else bound_ms)
            return self._machine.handle(Flushed())
        elif isinstance(effect, AskEnd):
            return self._machine.handle(await self._ask_end(effect, deadline))
        elif isinstance(effect, AskIdentity):
            return self._machine.handle(await self._ask_identity(deadline))
        return []

    async def _ask_identity(self, deadline: Deadline) -> Event:
        timeout_ms = self._config.transaction_timeout_ms
        request: Any
        if self._attempt is None:
            method = "InitProducerId"
            request = transactions_pb2.InitProducerIdRequest(
                transactional_id=self.transactional_id,
                transaction_timeout_ms=timeout_ms,
                producer_id=-1,
                producer_epoch=-1,
                instance_id=self._instance_id,
            )
        else:
            method = "BeginAttempt"
            request = transactions_pb2.BeginAttemptRequest(
                **self._attempt._asdict(),
                transaction_timeout_ms=timeout_ms,
                instance_id=self._instance_id,
            )
        try:
            return IdentityGiven(await self._ask(method, request, deadline.remaining_ms))
        except PenstockError as error:
            return IdentityRefused(error)

    async def _ask_end(self, effect: AskEnd, deadline: Deadline) -> Event:
        request = transactions_pb2.EndTransactionRequest(
            transactional_id=self.transactional_id,
            producer_id=effect.identity.producer_id,
            producer_epoch=effect.identity.epoch,
            commit=effect.commit,
        )
        remaining_ms = min(deadline.remaining_ms, self._config.delivery_timeout_ms)
        try:
            return EndAnswered(await self._ask("EndTransaction", request, remaining_ms))
        except PenstockError as error:
            unheard = error.retriable or isinstance(error, ClientClosedError)
            return EndUnanswered(error) if unheard else EndRefused(error)

    async def _ask(self, method: str, request: Any, timeout_ms: float) -> Identity:
        """Ask the coordinator until it answers, for so long."""
        await self._cluster.start()
        identity: Identity = await self._coordinators.call(
            coordinating_key(self.transactional_id),
            lambda channel: getattr(transactions_pb2_grpc.TransactionsStub(channel), method),
            request,
            _identity,
            what=f"Transactions.{method}",
            timeout_ms=max(1.0, timeout_ms),
        )
        return identity

    async def _ask_group(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
        group: GroupMetadata,
        timeout_ms: float,
    ) -> None:
        identity = self._machine.identity
        request = groups_pb2.CommitTransactionOffsetsRequest(
            commit=groups_pb2.CommitOffsetsRequest(
                group_id=group.group_id,
                member_id=group.member_id,
                member_epoch=group.member_epoch,
                offsets=[
                    admin_values.offset_proto(
                        partition,
                        position,
                        position.topic_id or self._cluster.metadata.topic_id(partition.topic),
                    )
                    for partition, position in offsets.items()
                ],
            ),
            transactional_id=self.transactional_id,
            producer_id=identity.producer_id,
            producer_epoch=identity.epoch,
        )
        await self._groups.call(
            group.group_id,
            lambda channel: groups_pb2_grpc.GroupsStub(channel).CommitTransactionOffsets,
            request,
            lambda response: judge_commit(response.commit),
            what="Groups.CommitTransactionOffsets",
            timeout_ms=timeout_ms,
        )


def _identity(response: Any) -> Identity:
    if response.HasField("error"):
        raise error_from_proto(response.error)
    return Identity(response.producer_id, response.producer_epoch)
