"""The transactions of one producer: what its state machine wants asked, asked."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from penstock.client import admin_values
from penstock.client.cluster import Cluster, now_ms
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
    KeptUntil,
    Renew,
    RenewalRefused,
    Renewed,
    Sent,
    SwapIdentity,
    TakeIdentity,
    Wish,
)
from penstock.client.deadline import Deadline
from penstock.client.model import GroupMetadata, OffsetAndMetadata
from penstock.client.offsets import judge_commit
from penstock.v1 import (
    common_pb2,
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
_STALL_MS: Final = 10_000.0


_LET_GO_MS: Final = 2_000.0
"""So long a close waits at most for what is kept to be given up."""

T = TypeVar("T")


class _Ended(NamedTuple):
    """What the coordinator says of an end: who writes the next one, and how long it is kept."""

    identity: Identity
    kept_ms: int


class Records(Protocol):
    """The records of the producer whose transactions these are."""

    async def settle(self, timeout_ms: float | None) -> None:
        """Wait for the verdict on everything queued. Raises RequestTimedOutError."""

    def drop(self, error: PenstockError) -> None:
        """Have everything without a verdict fail now."""

    def take_identity(self, identity: Identity) -> None:
        """Go on under this identity, numbered from 0; nothing waits for a verdict."""

    def swap_identity(self, identity: Identity) -> None:
        """As ``take_identity``, in the same transaction; without one, records wait for the next."""

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
        self._stall_watch: asyncio.TimerHandle | None = None
        self._closed_open = False  # Closed, with a transaction open.
        self._first_asked: tuple[Identity, float] | None = None  # For an end, and when.
        self._kept_timer: asyncio.TimerHandle | None = None
        self._renewal: asyncio.Task[None] | None = None

    # --- the engine's side ------------------------------------------------------------------

    def check_sending(self) -> None:
        """Raise why nothing can be sent now, if so."""
        self._machine.check_sending()

    @property
    def identity(self) -> Identity:
        """What the open transaction is written under."""
        return self._machine.identity

    @property
    def is_open(self) -> bool:
        """Whether there is a transaction that an abort would end."""
        return self._machine.is_open

    def check_block(self) -> bool:
        """Whether a block that is over has to commit, rather than that it ended the transaction.

        Raises ClientClosedError where the end was that the producer was closed.
        """
        if self._closed_open:
            raise ClientClosedError(
                "the producer was closed in the block, so that its transaction was not committed "
                "but aborted; next: close it after the block, and do the work again"
            )
        return self._machine.is_unsettled

    def sent(self, partitions: frozenset[TopicPartition]) -> None:
        """Records for these partitions go to a broker."""
        self._machine.handle(Sent(partitions))

    def failed(self, error: PenstockError) -> None:
        """A record has failed, or its transaction has otherwise."""
        for effect in self._machine.handle(Failed(error)):
            assert isinstance(effect, DropRecords)
            self._records.drop(effect.error)

    def trouble(self) -> PenstockError | None:
        """Why a wish is not carried out yet, as far as coordinators are in its way."""
        return self._coordinators.trouble() or self._groups.trouble()

    def _watch_for_stalls(self) -> None:
        self._stall_watch = asyncio.get_running_loop().call_later(
            _STALL_MS / 1000, self._tell_of_stall
        )

    def _tell_of_stall(self) -> None:
        trouble = self.trouble()
        if trouble is not None:
            _LOG.warning("transactional id %s: %s", self.transactional_id, trouble.message)
        self._watch_for_stalls()

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
            await self._carry_out(BeginWanted(now_ms()), Deadline.never())

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
            await self._await_renewal(deadline)
            self._machine.check_sending()
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
        if self._machine.is_open:
            await self._close_open(timeout_ms)
        await self._let_go(timeout_ms)

    async def _close_open(self, timeout_ms: float | None) -> None:
        self._closed_open = True
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

    # --- what was kept ----------------------------------------------------------------------

    def _watch_kept(self) -> None:
        """Give up what is kept when its time is over."""
        until_ms = self._machine.kept_until_ms
        if until_ms is not None and self._kept_timer is None:
            delay_s = max(0.0, until_ms - now_ms()) / 1000
            self._kept_timer = asyncio.get_running_loop().call_later(delay_s, self._kept_for_long)

    def _kept_for_long(self) -> None:
        self._kept_timer = None
        self._give_up_kept(now_ms())
        self._watch_kept()  # It was another one's time.

    def _give_up_kept(self, at_ms: float) -> None:
        with self._guard:
            effects = self._machine.handle(KeptUntil(at_ms))
        for effect in effects:
            self._do_at_once(effect)

    def _do_at_once(self, effect: Effect) -> None:
        if isinstance(effect, SwapIdentity):
            self._records.swap_identity(effect.identity)
        elif isinstance(effect, Renew):
            self._renewal = asyncio.ensure_future(self._renew(effect.identity))
        elif isinstance(effect, DropRecords):
            self._records.drop(effect.error)

    async def _renew(self, identity: Identity) -> None:
        request = transactions_pb2.EndTransactionRequest(
            transactional_id=self.transactional_id,
            producer_id=identity.producer_id,
            producer_epoch=identity.epoch,
        )
        event: Event | None = None
        while event is None:
            try:
                answer = await self._ask(
                    "EndTransaction", request, _ended, self._config.request_timeout_ms
                )
                event = Renewed(answer.identity)
            except PenstockError as error:
                if isinstance(error, ClientClosedError):
                    return
                if not error.retriable:
                    event = RenewalRefused(error)
                else:
                    _LOG.info(
                        "transactional id %s: what was kept for the next transaction is not given "
                        "up yet; trying again: %s",
                        self.transactional_id,
                        error,
                    )
                    await asyncio.sleep(self._config.retry_backoff_max_ms / 1000)
        with self._guard:
            effects = self._machine.handle(event)
        for effect in effects:
            self._do_at_once(effect)

    async def _await_renewal(self, deadline: Deadline) -> None:
        """Wait for an identity under which something may be sent. Raises RequestTimedOutError."""
        if self._renewal is None or not self._machine.is_renewing:
            return
        left_ms = deadline.remaining_ms
        _, late = await asyncio.wait(
            [self._renewal], timeout=None if left_ms == float("inf") else left_ms / 1000
        )
        if late:
            raise RequestTimedOutError(
                f"the coordinator of {self.transactional_id!r} has not said in time under which "
                "identity the transaction goes on; nothing was done; next: call it again"
            )

    async def _let_go(self, timeout_ms: float | None) -> None:
        """Leave nothing open that was kept, if that can be had soon; else its timeout will."""
        if self._kept_timer is not None:
            self._kept_timer.cancel()
        self._give_up_kept(float("inf"))
        if self._renewal is None:
            return
        most_ms = _LET_GO_MS if timeout_ms is None else min(timeout_ms, _LET_GO_MS)
        try:
            await asyncio.wait([self._renewal], timeout=most_ms / 1000)
        finally:
            self._renewal.cancel()

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
        self._watch_for_stalls()
        try:
            yield
        finally:
            self._turn.release()
            assert self._stall_watch is not None
            self._stall_watch.cancel()

    async def _carry_out(self, wish: Event, deadline: Deadline) -> None:
        outcome: Done | None = None
        try:
            # Who opens a batch has looked under it, so that a flush finds the batch.
            with self._guard:
                effects = deque(self._machine.handle(wish))
        except ProducerFencedError:
            self._records.forget_failures()
            raise
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
        if isinstance(effect, TakeIdentity):
            self._records.take_identity(effect.identity)
        elif isinstance(effect, AwaitVerdicts):
            bound_ms = deadline.remaining_ms
            try:
                await self._records.settle(None if bound_ms == float("inf") else bound_ms)
            except RequestTimedOutError as error:
                raise RequestTimedOutError(
                    f"nothing is decided about the transaction of {self.transactional_id!r}, since "
                    f"{error.message}; next: make the same call again, or abort it"
                ) from error
            return self._machine.handle(Flushed())
        elif isinstance(effect, AskEnd):
            effects = self._machine.handle(await self._ask_end(effect, deadline))
            self._watch_kept()
            return effects
        elif isinstance(effect, AskIdentity):
            return self._machine.handle(await self._ask_identity(deadline))
        else:
            self._do_at_once(effect)
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
            given = await self._ask(method, request, _identity, deadline.remaining_ms)
            return IdentityGiven(given)
        except PenstockError as error:
            return IdentityRefused(error)

    async def _ask_end(self, effect: AskEnd, deadline: Deadline) -> Event:
        request = transactions_pb2.EndTransactionRequest(
            transactional_id=self.transactional_id,
            producer_id=effect.identity.producer_id,
            producer_epoch=effect.identity.epoch,
            commit=effect.commit,
            keep=[
                common_pb2.TopicPartition(topic=name.topic, partition=name.partition)
                for name in effect.keep
            ],
        )
        if self._first_asked is None or self._first_asked[0] != effect.identity:
            self._first_asked = effect.identity, now_ms()
        asked_ms = self._first_asked[1]
        remaining_ms = min(deadline.remaining_ms, self._config.delivery_timeout_ms)
        try:
            answer = await self._ask("EndTransaction", request, _ended, remaining_ms)
            return EndAnswered(answer.identity, asked_ms, answer.kept_ms)
        except PenstockError as error:
            unheard = error.retriable or isinstance(error, ClientClosedError)
            return EndUnanswered(error) if unheard else EndRefused(error)

    async def _ask(
        self, method: str, request: Any, judge: Callable[[Any], T], timeout_ms: float
    ) -> T:
        """Ask the coordinator until it answers, for so long."""
        await self._cluster.start()
        answer: T = await self._coordinators.call(
            coordinating_key(self.transactional_id),
            lambda channel: getattr(transactions_pb2_grpc.TransactionsStub(channel), method),
            request,
            judge,
            what=f"Transactions.{method}",
            timeout_ms=max(1.0, timeout_ms),
        )
        return answer

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


def _ended(response: Any) -> _Ended:
    return _Ended(_identity(response), response.kept_ms)
