"""What a producer does on its event loop, for the sync and the asyncio front alike."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

from penstock.client.cluster import Cluster, now_ms
from penstock.client.config import ProducerConfig
from penstock.client.core.accumulator import Accumulator, Batch
from penstock.client.core.backoff import Backoff
from penstock.client.core.metadata_cache import MetadataCache
from penstock.client.core.partitioner import Chooser
from penstock.client.core.send_events import (
    Aborted,
    Acknowledge,
    AcquireIdentity,
    Dropped,
    Effect,
    Event,
    Fail,
    IdentityGiven,
    IdentityRefused,
    RefreshMetadata,
    ResetStream,
    RoomFreed,
    SendRequest,
    Spoil,
    TransactionEnded,
    Woken,
)
from penstock.client.core.sender import Sender, SenderSettings
from penstock.client.core.sequencer import Identity, Sequencer
from penstock.client.delivery import DeliveryFuture, FailureLedger, Receipt
from penstock.client.metadata_keeper import MetadataKeeper
from penstock.client.produce_stream import ProduceStream
from penstock.client.transactional import TransactionDriver
from penstock.v1 import common_pb2, transactions_pb2, transactions_pb2_grpc
from penstock.wire.codec import Intake
from penstock.wire.errors import (
    ClientClosedError,
    InvalidTxnStateError,
    PenstockError,
    RequestTimedOutError,
    error_from_proto,
)
from penstock.wire.wording import counted

_LOG: Final = logging.getLogger("penstock.client")
_LEADER_BACKOFF_FIRST_MS: Final = 20.0
_LAST_WORDS_S: Final = 2.0
_STALL_MS: Final = 10_000.0
_ACKS: Final = {
    -1: common_pb2.ACKS_ALL,
    0: common_pb2.ACKS_NONE,
    1: common_pb2.ACKS_LEADER,
}


_INTAKES: Final[weakref.WeakSet[Intake[Receipt, DeliveryFuture]]] = weakref.WeakSet()


def _decline_in_child() -> None:
    """In a forked child every send is to come to the check that refuses it."""
    for intake in list(_INTAKES):
        intake.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_decline_in_child)


class ProducerEngine:
    """Carries out what the Sender decides. Everything but ``accumulator``, ``chooser`` (under the
    guard), ``intake`` and ``metadata`` (read only) belongs to one event loop.

    ``guard`` is held around appends; ``on_room`` is called when memory was freed.
    """

    def __init__(
        self,
        config: ProducerConfig,
        *,
        guard: AbstractContextManager[Any],
        on_room: Callable[[], object],
    ) -> None:
        self._config = config
        self._on_room = on_room
        self.intake: Intake[Receipt, DeliveryFuture] = Intake(
            DeliveryFuture,
            buffer_memory_bytes=config.buffer_memory,
            max_record_bytes=config.max_request_size,
            hashes_keys=config.partitioner == "default",
        )
        _INTAKES.add(self.intake)
        self.accumulator: Accumulator[Receipt] = Accumulator(
            batch_size_bytes=config.batch_size,
            max_batch_bytes=config.max_batch_size,
            linger_ms=config.linger_ms,
            delivery_timeout_ms=config.delivery_timeout_ms,
            guard=guard,
            intake=self.intake,
            receipt_for=Receipt,
        )
        self.chooser = Chooser(
            config.partitioner, stick_bytes=self._stick_bytes, pick=random.randrange
        )
        self._cluster = Cluster(config)
        self._keeper = MetadataKeeper(self._cluster, self._on_metadata)
        self._sender = self._make_sender()
        self._ledger = FailureLedger()
        self._streams: dict[int, ProduceStream] = {}
        self._identity_task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = float("inf")
        self._stall_watch: asyncio.TimerHandle | None = None
        self._woken = False
        self._verdicts: asyncio.Event | None = None
        self._closed = False
        self._transactions: TransactionDriver | None = None
        if config.transactional_id is not None:
            self._transactions = TransactionDriver(self._cluster, config, records=self, guard=guard)

    def _stick_bytes(self) -> int:
        """A batch's worth; of a large one where more waits than one request can take."""
        config = self._config
        ahead = self.intake.used_bytes > config.max_request_size
        return max(config.batch_size, config.max_batch_size // 4) if ahead else config.batch_size

    @property
    def metadata(self) -> MetadataCache:
        """What is known of topics."""
        return self._cluster.metadata

    @property
    def transactions(self) -> TransactionDriver:
        """The producer's transactions. Raises InvalidTxnStateError where it has none."""
        if self._transactions is None:
            raise InvalidTxnStateError(
                "this producer has no transactions; next: make it with a transactional_id"
            )
        return self._transactions

    def check_sending(self) -> None:
        """Raise why records can't be sent now, if a transaction is needed and there is none.

        Called under the guard where the answer is to last until a record is added.
        """
        if self._transactions is not None:
            self._transactions.check_sending()

    async def start(self) -> None:
        """Find a broker. Raises BootstrapError."""
        await self._cluster.start()

    async def await_topic(self, topic: str) -> int:
        """The topic's partition count, within ``max_block_ms``."""
        return await self._keeper.await_topic(topic, self._config.max_block_ms)

    def wake(self) -> None:
        """Have the sender look at what is there. Cheap when it is about to anyway."""
        if not self._woken and not self._closed:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._run_woken)

    async def flush(self, timeout_ms: float | None) -> None:
        """Wait for the verdict on everything queued; then raise what nobody read."""
        await self._await_verdicts(timeout_ms)
        self._ledger.raise_unread()

    async def close(self, timeout_ms: float | None) -> None:
        """Flush, fail what is left, and free everything; also when it is cancelled."""
        if self._closed:
            return
        why = "closing was interrupted"
        try:
            if self._transactions is not None:
                await self._transactions.close(timeout_ms)
            await self._await_verdicts(timeout_ms)
        except RequestTimedOutError:
            why = f"timeout_ms={timeout_ms}"
        finally:
            try:
                self._abort(why)
            finally:
                await self._free()
        self._ledger.raise_unread()

    def _abort(self, why: str) -> None:
        """Give what is left its verdict: nothing more will be sent."""
        left = sum(batch.record_count for batch in self._sender.open_batches())
        if left:
            were = counted(left, "record", "was")
            message = f"the producer was closed before {were} acknowledged ({why})"
            self._handle(Aborted(ClientClosedError(message)))

    # --- what transactions ask for ----------------------------------------------------------

    async def settle(self, timeout_ms: float | None) -> None:
        """Wait for the verdict on everything queued."""
        await self._await_verdicts(timeout_ms)

    def drop(self, error: PenstockError) -> None:
        """Have everything without a verdict fail now."""
        self._handle(Dropped(error))

    def take_identity(self, identity: Identity) -> None:
        """Begin anew under this identity."""
        self.forget_failures()
        self._handle(TransactionEnded(identity))

    def swap_identity(self, identity: Identity) -> None:
        """Go on under this identity in the same transaction, of which nothing was sent."""
        self._handle(TransactionEnded(identity))

    def forget_failures(self) -> None:
        """What failed was told by the end of its transaction."""
        self._ledger.forget()

    # --- the loop ---------------------------------------------------------------------------

    def _on_metadata(self) -> None:
        self.intake.clear()  # What is sent next is to look at the topic anew.
        for topic in self.metadata.missing:
            if self.metadata.verdict(topic) is not None:
                self._keeper.forget((topic,))  # Its records fail now; the next send asks anew.
        self.wake()

    def _run_woken(self) -> None:
        self._woken = False
        if not self._closed:
            self._handle(Woken())

    def _handle(self, event: Event) -> None:
        failure: PenstockError | None = None
        for effect in self._sender.handle(event, now_ms()):
            self._carry_out(effect)
            if failure is None and isinstance(effect, Fail | Spoil):
                failure = effect.error
        if failure is not None and self._transactions is not None:
            self._transactions.failed(failure)
        self._set_timer()
        if self._stall_watch is None:
            self._watch_for_stalls()

    def _carry_out(self, effect: Effect[Receipt]) -> None:
        if isinstance(effect, SendRequest):
            self._send(effect)
        elif isinstance(effect, Acknowledge):
            self._acknowledge(effect)
        elif isinstance(effect, Fail):
            self._fail(effect)
        elif isinstance(effect, RefreshMetadata):
            self._keeper.request(effect.avoid)
        elif isinstance(effect, ResetStream):
            stream = self._streams.pop(effect.node_id, None)
            if stream is not None:
                stream.cancel()
        elif isinstance(effect, AcquireIdentity):
            self._identity_task = asyncio.ensure_future(self._acquire())
        elif isinstance(effect, RoomFreed):
            self._on_room()

    def _set_timer(self) -> None:
        deadline = self._sender.next_deadline_ms()
        if self._timer is not None:
            if deadline == self._timer_ms:
                return
            self._timer.cancel()
            self._timer = None
        self._timer_ms = deadline
        if deadline != float("inf") and not self._closed:
            delay_s = max(0.0, deadline - now_ms()) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._handle(Woken())

    # --- effects ----------------------------------------------------------------------------

    def _send(self, effect: SendRequest[Receipt]) -> None:
        if self._transactions is not None:
            self._transactions.sent(frozenset(entry.batch.partition for entry in effect.entries))
        stream = self._streams.get(effect.node_id)
        if stream is None or stream.ended:
            stream = ProduceStream(
                self._cluster,
                effect.node_id,
                acks=_ACKS[self._config.acks_number],
                timeout_ms=self._config.request_timeout_ms,
                transactional_id=self._config.transactional_id or "",
                on_event=self._handle_from_stream,
            )
            self._streams[effect.node_id] = stream
        stream.send(effect)

    def _handle_from_stream(self, stream: ProduceStream, event: Event) -> None:
        if self._closed or self._streams.get(stream.node_id) is not stream:
            return  # Given up before; the sender took its requests back.
        if stream.ended:
            del self._streams[stream.node_id]
        self._handle(event)

    def _acknowledge(self, effect: Acknowledge[Receipt]) -> None:
        batch = effect.batch
        self._ledger.delivered += batch.record_count
        batch.receipt.deliver(effect.base_offset, effect.log_append_time_ms)
        self._note_verdict()

    def _fail(self, effect: Fail[Receipt]) -> None:
        batch = effect.batch
        self._ledger.refuse(batch.receipt, effect.error, batch.record_count)
        self._note_verdict()

    def _note_verdict(self) -> None:
        if self._verdicts is not None:
            self._verdicts.set()

    async def _acquire(self) -> None:
        request = transactions_pb2.InitProducerIdRequest(producer_id=-1, producer_epoch=-1)
        attempt = 0
        warned: set[type[Exception]] = set()  # Once of each kind: it may go on for long.
        while True:
            try:
                response = await self._cluster.ask_any(
                    lambda channel: transactions_pb2_grpc.TransactionsStub(channel).InitProducerId,
                    request,
                    what="Transactions.InitProducerId",
                    timeout_ms=self._config.request_timeout_ms,
                )
                if response.HasField("error"):
                    raise error_from_proto(response.error)
            except Exception as error:
                # What nobody expected is tried again as well: the sender asks only once, and
                # delivery_timeout_ms bounds how long records wait for the answer.
                if isinstance(error, PenstockError) and not error.retriable:
                    self._handle(IdentityRefused(error))
                    return
                if type(error) not in warned:
                    warned.add(type(error))
                    unexpected = not isinstance(error, PenstockError)
                    _LOG.warning("no producer id yet: %s", error, exc_info=unexpected)
                await asyncio.sleep(self._cluster.backoff.delay_ms(attempt) / 1000)
                attempt += 1
                continue
            identity = Identity(response.producer_id, response.producer_epoch)
            self._handle(IdentityGiven(identity))
            return

    # --- stalls -----------------------------------------------------------------------------

    async def trouble(self) -> PenstockError | None:
        """Why records that were sent are not acknowledged, or a transaction does not begin or end;
        None when nothing is in the way.
        """
        found = self._sender.trouble(now_ms())
        if found is None and self._transactions is not None:
            found = self._transactions.trouble()
        return found

    def _watch_for_stalls(self) -> None:
        """Look when what waits longest will have waited too long; now and then from then on."""
        if self._stall_watch is not None or self._closed:
            return
        waited_ms = now_ms() - self._sender.oldest_ms()
        if waited_ms == float("-inf"):
            return  # Nothing waits.
        left_ms = _STALL_MS - waited_ms
        if left_ms <= 0:
            left_ms = _STALL_MS
        # Where all wait nearly so long it need not be known to the millisecond.
        delay_s = max(left_ms, _STALL_MS / 20) / 1000
        self._stall_watch = asyncio.get_running_loop().call_later(delay_s, self._tell_of_stall)

    def _tell_of_stall(self) -> None:
        self._stall_watch = None
        trouble = self._sender.trouble(now_ms(), lasting_ms=_STALL_MS)
        if trouble is not None:
            _LOG.warning("records are not acknowledged: %s", trouble.message)
        self._watch_for_stalls()

    # --- flush and close --------------------------------------------------------------------

    async def _await_verdicts(self, timeout_ms: float | None) -> None:
        pending: list[Batch[Receipt]] = self._sender.open_batches()
        deadline = None if timeout_ms is None else now_ms() + timeout_ms
        self._sender.hurry += 1
        try:
            if pending:
                self._handle(Woken())
            while pending := [batch for batch in pending if not batch.settled]:
                await self._next_verdict(deadline, len(pending), timeout_ms)
        finally:
            self._sender.hurry -= 1

    async def _next_verdict(
        self, deadline: float | None, left: int, timeout_ms: float | None
    ) -> None:
        if self._verdicts is None:
            self._verdicts = asyncio.Event()
        event = self._verdicts
        try:
            async with asyncio.timeout(
                None if deadline is None else max(0.0, deadline - now_ms()) / 1000
            ):
                await event.wait()
        except TimeoutError:
            raise RequestTimedOutError(
                f"{counted(left, 'batch', 'was')} not acknowledged within "
                f"timeout_ms={timeout_ms:.0f}; what is left stays queued"
            ) from None
        if self._verdicts is event:
            self._verdicts = None

    async def _free(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._stall_watch is not None:
            self._stall_watch.cancel()
        if self._identity_task is not None:
            self._identity_task.cancel()
        streams = list(self._streams.values())
        self._streams = {}
        if self._config.acks_number == 0 and streams:
            # No answer says that the last records were read; the stream's orderly end does.
            for stream in streams:
                stream.finish()
            endings = [asyncio.ensure_future(stream.finished()) for stream in streams]
            await asyncio.wait(endings, timeout=_LAST_WORDS_S)
            for ending in endings:
                ending.cancel()
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*(stream.finished() for stream in streams))
        await self._keeper.close()
        await self._cluster.close()

    def _make_sender(self) -> Sender[Receipt]:
        config = self._config
        return Sender(
            settings=SenderSettings(
                max_request_bytes=config.max_request_size,
                max_in_flight=config.max_in_flight_requests_per_connection,
                request_timeout_ms=config.request_timeout_ms,
                delivery_timeout_ms=config.delivery_timeout_ms,
                retries=config.retries,
            ),
            accumulator=self.accumulator,
            sequencer=Sequencer(
                idempotent=config.enable_idempotence,
                max_in_flight=config.max_in_flight_requests_per_connection,
                compression=config.compression_kind,
                transactional=config.transactional_id is not None,
            ),
            metadata=self._cluster.metadata,
            backoff=self._cluster.backoff,
            leader_backoff=Backoff(
                min(_LEADER_BACKOFF_FIRST_MS, config.retry_backoff_ms),
                config.retry_backoff_max_ms,
                random.random,
            ),
        )
