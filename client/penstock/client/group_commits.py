"""Commits of engines: many writers whose work one driver commits as a whole, once."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar, Unpack

from penstock.client import arguments
from penstock.client.aio_group_commits import AsyncGroupCommits
from penstock.client.background import ForkGuard, LoopThread
from penstock.client.bulk import BulkDeliveryFuture
from penstock.client.config import AttemptConfig, AttemptSettings, CommitSettings
from penstock.client.core.transaction_events import Wish
from penstock.client.model import GroupCommit, Header, RecordMetadata
from penstock.client.producer import Producer
from penstock.wire.transactional_ids import Attempt, AttemptHandle

T = TypeVar("T")
P = ParamSpec("P")


class AttemptProducer(Producer):
    """The producer of an attempt: its transaction is the attempt's, and it can't commit."""

    _config_type = AttemptConfig


class AttemptWriter:
    """Writes what one attempt at a task produces. Made by ``GroupCommits.begin_attempt``.

    Nothing that it writes is seen by readers of committed records before the driver has committed
    with its handle. Use it as a context manager: at the end of the block it is closed, and aborted
    where it was not prepared. Thread-safe as a Producer is.
    """

    def __init__(self, producer: Producer, attempt: Attempt) -> None:
        self._producer = producer
        producer_id = producer._engine.transactions.identity.producer_id
        self.handle = AttemptHandle(attempt, producer_id).text
        """What ``prepare`` returns, and ``GroupCommits.commit`` is given: not before that, since a
        commit takes what is there. It names this writer: one that begins the same attempt again
        has another."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._producer.__exit__(kind, error, traceback)

    def send(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        headers: Sequence[Header] | Mapping[str, bytes | None] = (),
        *,
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> concurrent.futures.Future[RecordMetadata]:
        """Queue one record. See ``Producer.send`` for what it returns and raises."""
        return self._producer.send(
            topic, value, key, headers, partition=partition, timestamp_ms=timestamp_ms
        )

    def send_many(
        self,
        topic: str,
        values: Iterable[Any],
        keys: Iterable[Any] | None = None,
        *,
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> BulkDeliveryFuture:
        """Queue many records, in order. See ``Producer.send_many``."""
        return self._producer.send_many(
            topic, values, keys, partition=partition, timestamp_ms=timestamp_ms
        )

    def send_arrow(
        self, topic: str, data: Any, *, partition: int | None = None
    ) -> BulkDeliveryFuture:
        """Queue the rows of a table, in order. See ``Producer.send_arrow``."""
        return self._producer.send_arrow(topic, data, partition=partition)

    def flush(self, timeout_ms: float | None = None) -> None:
        """Send everything queued so far and wait for the verdicts. See ``Producer.flush``."""
        self._producer.flush(timeout_ms)

    def prepare(self, timeout_ms: float | None = None) -> str:
        """Have everything acknowledged, and take nothing more; the handle, for the driver.

        What it wrote is safe then, and the group's commit decides; this process may end. Raises
        TransactionAbortableError when a record failed: have the task attempted again. Raises
        RequestTimedOutError after ``timeout_ms`` (None: as long as ``delivery_timeout_ms`` lets
        records live); ProducerFencedError where another writer has begun the same attempt;
        InvalidTxnStateError when it is over. May be called again, whether it returned or not.
        """
        self._end(Wish.PREPARE, timeout_ms)
        return self.handle

    def abort(self, timeout_ms: float | None = None) -> None:
        """Abort the attempt, prepared or not. Optional: what no commit names is aborted with the
        next one, or when its ``transaction_timeout_ms`` is over.

        Raises InvalidTxnStateError where its group has committed it, ProducerFencedError where
        another writer has begun the same attempt.
        """
        self._end(Wish.ABORT, timeout_ms)

    def close(self, timeout_ms: float | None = None) -> None:
        """Free everything, and abort what is not prepared. Idempotent."""
        self._producer.close(timeout_ms)

    def _end(self, wish: Wish, timeout_ms: float | None) -> None:
        self._producer._check_open()
        bound_ms = arguments.timeout_ms(timeout_ms)
        self._producer._thread.run(self._producer._engine.transactions.end, wish, bound_ms)


class GroupCommits:
    """The commits of one group: one writer of one query, over all its restarts. Thread-safe.

    A driver makes one to commit, and each task one to write. The group's commits have epoch
    numbers, which only rise; the work for a number is split in tasks, each of which may be
    attempted any number of times, by several at once. The driver gathers one handle of each task
    (strings, which it may send and store as it likes) and commits them. ``settings`` are those
    of administration, and what attempts take of them.

    Raises InvalidTransactionalIdError for a group that can't have this name, ConfigurationError.
    """

    def __init__(
        self,
        bootstrap_servers: str | Iterable[str] = "localhost:9092",
        group: str = "",
        **settings: Unpack[CommitSettings],
    ) -> None:
        self._commits = AsyncGroupCommits(bootstrap_servers, group, **settings)
        self.config = self._commits.config
        self.group = self._commits.group
        self._guard = ForkGuard("GroupCommits")
        self._thread = LoopThread.shared()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def last_committed(self) -> GroupCommit:
        """The epoch number that was committed last, with its winners; -1 and none before the first.

        Where an engine finds here that the number of its last checkpoint, or the one after it, is
        committed, it has no need to do that work again.
        """
        return self._run(self._commits.last_committed)

    def commit(
        self,
        epoch_number: int,
        winners: Iterable[str],
        *,
        ends_group: bool = False,
        metadata: bytes = b"",
    ) -> bool:
        """Decide about all attempts of the group up to this number, at once and for ever: the
        winners commit, every other one aborts.

        Returns whether the same was decided before: nothing was done then. ``winners`` may be
        empty, and come in any order. What is retriable, a lost answer as well, is tried again for
        ``default_api_timeout_ms``; then the last reason is raised, and the outcome may be asked for
        by calling it again. Raises UnknownAttemptError where a winner timed out, was aborted, is of
        another group or number, or another writer has begun the same attempt since: nothing was
        decided. Raises GroupCommitConflictError where the number is committed with other winners,
        StaleGroupCommitError where a higher one is, InvalidRequestError for what is no handle.

        What a group committed last is remembered for ever, since its engine may come back with an
        old checkpoint. ``ends_group`` says of a job that runs once that no commit follows: the
        brokers forget the group after ``transactional.id.expiration.ms``. ``metadata``, at most
        4,096 bytes, is found again by ``last_committed``; a replay leaves what was there.
        """
        return self._run(
            self._commits.commit, epoch_number, winners, ends_group=ends_group, metadata=metadata
        )

    def begin_attempt(
        self, epoch_number: int, task: int, attempt: int, **settings: Unpack[AttemptSettings]
    ) -> AttemptWriter:
        """Begin one attempt at a task's part of an epoch number.

        Numbers are whole and not below 0. One that begins again under the same numbers fences the
        writer before it. ``settings`` are a producer's; ``transaction_timeout_ms`` (15 minutes)
        has to last from now until the driver's commit. Raises StaleGroupCommitError where this
        number is committed, or a higher one: the task is a zombie's. Raises as
        ``Producer.init_transactions`` besides.
        """
        self._guard.check()
        commits = self._commits
        named = commits.name_attempt(epoch_number, task, attempt)
        producer = AttemptProducer(commits.addresses, **commits.attempt_settings(settings, named))
        try:
            producer.begin_transaction()
        except BaseException:
            producer.close(0)
            raise
        return AttemptWriter(producer, named)

    def close(self) -> None:
        """Free the connections; writers that were begun go on. Idempotent."""
        if not self._guard.foreign:
            self._thread.run(self._commits.close)

    def _run(
        self, work: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        self._guard.check()
        return self._thread.run(work, *args, **kwargs)
