"""Commits of engines for asyncio: many writers whose work one driver commits as a whole, once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar, Unpack

from penstock.client import arguments
from penstock.client.aio_producer import AsyncProducer
from penstock.client.background import LoopGuard
from penstock.client.bulk import AsyncBulkDeliveryFuture
from penstock.client.cluster import Cluster
from penstock.client.config import AttemptConfig, AttemptSettings, CommitConfig, CommitSettings
from penstock.client.coordinator import Coordinators, Kind
from penstock.client.core.transaction_events import Wish
from penstock.client.model import GroupCommit, Header, RecordMetadata
from penstock.v1 import transactions_pb2, transactions_pb2_grpc
from penstock.wire.errors import (
    ClientClosedError,
    ConfigurationError,
    UnknownAttemptError,
    error_from_proto,
)
from penstock.wire.transactional_ids import (
    Attempt,
    AttemptHandle,
    check_commit_group,
    parse_handle,
)
from penstock.wire.transport import format_address

T = TypeVar("T")

_HANDLES: Final = "handles, as prepare() returns them"
_API_TIMEOUT: Final = "default_api_timeout_ms"  # Which producers have not.


class AttemptProducer(AsyncProducer):
    """The producer of an attempt: its transaction is the attempt's, and it can't commit."""

    _config_type = AttemptConfig


class AsyncAttemptWriter:
    """``AttemptWriter`` for asyncio: the same promises and errors. Made by ``begin_attempt``."""

    def __init__(self, producer: AsyncProducer, attempt: Attempt) -> None:
        self._producer = producer
        producer_id = producer._engine.transactions.identity.producer_id
        self.handle = AttemptHandle(attempt, producer_id).text

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._producer.__aexit__(kind, error, traceback)

    async def send(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        headers: Sequence[Header] | Mapping[str, bytes | None] = (),
        *,
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> asyncio.Future[RecordMetadata]:
        """Queue one record. See ``Producer.send``."""
        return await self._producer.send(
            topic, value, key, headers, partition=partition, timestamp_ms=timestamp_ms
        )

    async def send_many(
        self,
        topic: str,
        values: Iterable[Any],
        keys: Iterable[Any] | None = None,
        *,
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> AsyncBulkDeliveryFuture:
        """Queue many records, in order. See ``Producer.send_many``."""
        return await self._producer.send_many(
            topic, values, keys, partition=partition, timestamp_ms=timestamp_ms
        )

    async def send_arrow(
        self, topic: str, data: Any, *, partition: int | None = None
    ) -> AsyncBulkDeliveryFuture:
        """Queue the rows of a table, in order. See ``Producer.send_arrow``."""
        return await self._producer.send_arrow(topic, data, partition=partition)

    async def flush(self, timeout_ms: float | None = None) -> None:
        """Send everything queued so far and wait for the verdicts. See ``Producer.flush``."""
        await self._producer.flush(timeout_ms)

    async def prepare(self, timeout_ms: float | None = None) -> str:
        """Have everything acknowledged. See ``AttemptWriter.prepare``."""
        await self._end(Wish.PREPARE, timeout_ms)
        return self.handle

    async def abort(self, timeout_ms: float | None = None) -> None:
        """Abort the attempt. See ``AttemptWriter.abort``."""
        await self._end(Wish.ABORT, timeout_ms)

    async def close(self, timeout_ms: float | None = None) -> None:
        """Free everything, and abort what is not prepared. Idempotent."""
        await self._producer.close(timeout_ms)

    async def _end(self, wish: Wish, timeout_ms: float | None) -> None:
        self._producer._check_open()
        await self._producer._engine.transactions.end(wish, arguments.timeout_ms(timeout_ms))


class AsyncGroupCommits:
    """``GroupCommits`` for asyncio: the same settings, promises and errors.

    Belongs to the event loop on which it is first used; safe for any number of its tasks.
    """

    def __init__(
        self,
        bootstrap_servers: str | Iterable[str] = "localhost:9092",
        group: str = "",
        **settings: Unpack[CommitSettings],
    ) -> None:
        self.config = CommitConfig.load(bootstrap_servers, settings)
        self.group = arguments.text("group", group, "the name of a group of commits")
        check_commit_group(self.group)
        self._settings = settings
        self._guard = LoopGuard("GroupCommits")
        self._cluster = Cluster(self.config)
        self._coordinators = Coordinators(self._cluster, Kind.TRANSACTION)
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def last_committed(self) -> GroupCommit:
        """What was committed last. See ``GroupCommits.last_committed``."""
        request = transactions_pb2.LastCommittedRequest(group=self.group)
        return await self._ask("LastCommitted", request, self._group_commit)

    async def commit(
        self,
        epoch_number: int,
        winners: Iterable[str],
        *,
        ends_group: bool = False,
        metadata: bytes = b"",
    ) -> bool:
        """Decide about an epoch number. See ``GroupCommits.commit``."""
        number = arguments.whole_number("epoch_number", epoch_number, 0)
        handles = arguments.texts("winners", winners, _HANDLES)
        request = transactions_pb2.CommitGroupRequest(
            group=self.group,
            epoch_number=number,
            winners=[self._winner(number, handle) for handle in handles],
            ends_group=arguments.flag("ends_group", ends_group),
            metadata=arguments.data("metadata", metadata),
        )
        return await self._ask("CommitGroup", request, lambda answer: bool(answer.is_replay))

    async def begin_attempt(
        self, epoch_number: int, task: int, attempt: int, **settings: Unpack[AttemptSettings]
    ) -> AsyncAttemptWriter:
        """Begin one attempt at a task. See ``GroupCommits.begin_attempt``."""
        self._check_open()
        named = self.name_attempt(epoch_number, task, attempt)
        producer = AttemptProducer(self.addresses, **self.attempt_settings(settings, named))
        try:
            await producer.begin_transaction()
        except BaseException:
            await producer.close(0)
            raise
        return AsyncAttemptWriter(producer, named)

    async def close(self) -> None:
        """Free the connections; writers that were begun go on. Idempotent."""
        if self._closed or self._guard.foreign:
            return
        self._guard.check()
        self._closed = True
        await self._cluster.close()

    # --- what the synchronous form shares ---------------------------------------------------

    @property
    def addresses(self) -> list[str]:
        """Where attempts' producers begin, as this does."""
        return [format_address(*address) for address in self.config.bootstrap]

    def name_attempt(self, epoch_number: int, task: int, attempt: int) -> Attempt:
        """The attempt of these numbers. Raises InvalidRequestError for what no number can be."""
        self.check_open()
        return Attempt(
            self.group,
            arguments.whole_number("epoch_number", epoch_number, 0),
            arguments.whole_number("task", task, 0, arguments.MAX_INT32),
            arguments.whole_number("attempt", attempt, 0),
        )

    def attempt_settings(self, own: AttemptSettings, attempt: Attempt) -> dict[str, Any]:
        """What the attempt's producer is made with: its own settings go before the group's."""
        if "transactional_id" in own:
            raise ConfigurationError(
                "attempt setting transactional_id: an attempt's is made of its group and numbers; "
                "leave it out"
            )
        shared = {name: value for name, value in self._settings.items() if name != _API_TIMEOUT}
        return {**shared, **own, "transactional_id": attempt.transactional_id}

    def check_open(self) -> None:
        """Raise ClientClosedError once it is closed."""
        if self._closed:
            raise ClientClosedError("the group commits are closed")

    # --- inside -----------------------------------------------------------------------------

    def _winner(self, epoch_number: int, text: str) -> transactions_pb2.Winner:
        handle = parse_handle(text)
        if handle is None:
            raise arguments.refusal("an entry of winners", text, _HANDLES + ",")
        attempt = handle.attempt
        if (attempt.group, attempt.epoch_number) != (self.group, epoch_number):
            raise UnknownAttemptError(
                f"the commit of epoch number {epoch_number} of group {self.group!r} names "
                f"{text!r}, which is of another group or epoch number"
            )
        return transactions_pb2.Winner(
            task=attempt.task, attempt=attempt.attempt, producer_id=handle.producer_id
        )

    def _group_commit(self, answer: transactions_pb2.LastCommittedResponse) -> GroupCommit:
        number = answer.epoch_number
        handles = (
            AttemptHandle(Attempt(self.group, number, one.task, one.attempt), one.producer_id)
            for one in answer.winners
        )
        return GroupCommit(number, tuple(handle.text for handle in handles), answer.metadata)

    async def _ask(self, method: str, request: Any, read: Callable[[Any], T]) -> T:
        self._check_open()

        def judge(answer: Any) -> T:
            if answer.HasField("error"):
                raise error_from_proto(answer.error)
            return read(answer)

        await self._cluster.start()
        found: T = await self._coordinators.call(
            self.group,
            lambda channel: getattr(transactions_pb2_grpc.TransactionsStub(channel), method),
            request,
            judge,
            what=f"Transactions.{method}",
            timeout_ms=self.config.default_api_timeout_ms,
        )
        return found

    def _check_open(self) -> None:
        self._guard.check()
        self.check_open()
