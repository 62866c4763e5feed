"""The fake brokers' coordinator of transactions: one for all, whose markers are there at once.

It decides as docs/adr/0012-transactions.md says, and can be told to misbehave.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.v1 import groups_pb2, transactions_pb2
from penstock.wire.errors import (
    GroupCommitConflictError,
    InvalidProducerEpochError,
    InvalidTxnStateError,
    PenstockError,
    ProducerFencedError,
    StaleGroupCommitError,
    TransactionAbortableError,
    TransactionalIdNotFoundError,
    UnknownAttemptError,
)
from penstock.wire.ids import TopicPartition
from penstock.wire.records import decode_batch, parse_header
from penstock.wire.transactional_ids import ATTEMPT_PREFIX, Attempt

if TYPE_CHECKING:
    from tests.unit.client.fake_broker import FakeCluster, FakePartition


@dataclass
class FakeTransaction:
    """What is kept of one transactional id."""

    producer_id: int
    epoch: int
    instance: bytes
    timeout_ms: int = 0
    partitions: list[FakePartition] = field(default_factory=list)
    offsets: dict[tuple[str, TopicPartition], Any] = field(default_factory=dict)
    last: tuple[int, bool, str] | None = None  # An epoch, its outcome, who decided.
    kept_ms: int = 0


class Winner(NamedTuple):
    """An attempt that a commit of its group is for."""

    task: int
    attempt: int
    producer_id: int


class FakeTransactions:
    """The coordinator's state, whichever node is asked."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.ids: dict[str, FakeTransaction] = {}
        self.outcomes: dict[tuple[int, int], bool] = {}
        self.groups: dict[str, tuple[int, list[Winner]]] = {}
        self.asked: list[Any] = []
        self.kept_ms = 0  # So long what is named is kept; 0 as coordinators that keep nothing.
        # Tests replace these; an error is the answer. After all is done "lose" breaks the call, and
        # "hang" leaves it without an answer.
        self.on_ask: Callable[[str, Any], PenstockError | str | None] | None = None

    def init(self, request: Any) -> FakeTransaction:
        known = self.ids.get(request.transactional_id)
        is_attempt = request.transactional_id.startswith(ATTEMPT_PREFIX)
        if known is not None and is_attempt and known.instance != request.instance_id:
            if known.last is None:
                self.decide(known, commit=False, who="other")
            known = None
        if known is None:
            self.cluster.next_producer_id += 1
            known = FakeTransaction(
                self.cluster.next_producer_id,
                0,
                request.instance_id,
                request.transaction_timeout_ms,
            )
            self.ids[request.transactional_id] = known
        elif known.instance != request.instance_id:
            self.decide(known, commit=False, who="other")
            known.epoch += 1
            known.instance = request.instance_id
        return known

    def decide(self, entry: FakeTransaction, *, commit: bool, who: str) -> None:
        self.outcomes[entry.producer_id, entry.epoch] = commit
        for partition in entry.partitions:
            partition.producers[entry.producer_id] = (entry.epoch + 1, [])
        if commit:
            for (group, name), position in entry.offsets.items():
                self.cluster.groups[group].offsets[name] = position
        entry.partitions, entry.offsets, entry.kept_ms = [], {}, 0
        entry.last = (entry.epoch, commit, who)
        entry.epoch += 1

    def time_out(self, transactional_id: str) -> None:
        self.decide(self.ids[transactional_id], commit=False, who="timeout")

    def end(self, request: Any) -> FakeTransaction:
        entry = self.ids.get(request.transactional_id)
        if entry is None:
            raise TransactionalIdNotFoundError(f"no id {request.transactional_id}")
        if request.producer_id != entry.producer_id:
            raise ProducerFencedError("another producer has the attempt")
        if request.producer_epoch == entry.epoch:
            self.decide(entry, commit=request.commit, who="producer")
            if self.kept_ms and request.keep:
                name = self.cluster.partition
                entry.partitions = [name(one.topic, one.partition) for one in request.keep]
                entry.kept_ms = self.kept_ms
        elif entry.last is None or entry.last[0] != request.producer_epoch:
            raise ProducerFencedError(f"epoch {request.producer_epoch} after {entry.epoch}")
        elif entry.last[2] == "other":
            raise ProducerFencedError("another producer has the id")
        elif entry.last[1] != request.commit:
            if entry.last[2] == "timeout":
                raise TransactionAbortableError("it timed out")
            raise InvalidTxnStateError("it was ended the other way")
        return entry

    def admit(self, transactional_id: str, partition: FakePartition, data: bytes) -> None:
        """Have the batch's partition in its transaction, or raise why not."""
        header = parse_header(data)
        if not header.is_transactional:
            raise InvalidTxnStateError("not a transactional batch")
        entry = self.ids.get(transactional_id)
        who = (header.producer_id, header.producer_epoch)
        if entry is None or who != (entry.producer_id, entry.epoch):
            raise InvalidProducerEpochError(f"epoch {header.producer_epoch}")
        if all(partition is not known for known in entry.partitions):
            entry.partitions.append(partition)

    def committed(self, name: str, number: int = 0) -> list[bytes | None]:
        """What a reader of committed records sees."""
        values: list[bytes | None] = []
        for _, _, data in self.cluster.partition(name, number).batches:
            header = parse_header(data)
            who = (header.producer_id, header.producer_epoch)
            if not header.is_transactional or self.outcomes.get(who):
                values += [record.value for record in decode_batch(data)]
        return values

    def begin_attempt(self, request: Any) -> tuple[str, FakeTransaction]:
        last, _ = self.groups.get(request.group, (-1, []))
        if request.epoch_number <= last:
            raise StaleGroupCommitError(f"{request.group} has committed {last}")
        attempt = Attempt(request.group, request.epoch_number, request.task, request.attempt)
        name = attempt.transactional_id
        return name, self.init(
            transactions_pb2.InitProducerIdRequest(
                transactional_id=name,
                transaction_timeout_ms=request.transaction_timeout_ms,
                instance_id=request.instance_id,
            )
        )

    def commit_group(self, request: Any) -> bool:
        last, winners = self.groups.get(request.group, (-1, []))
        wanted = sorted(Winner(one.task, one.attempt, one.producer_id) for one in request.winners)
        if request.epoch_number < last:
            raise StaleGroupCommitError(f"{request.group} has committed {last}")
        if request.epoch_number == last:
            if wanted != winners:
                raise GroupCommitConflictError(f"the winners are {winners}")
            return True
        for one in wanted:
            named = Attempt(request.group, request.epoch_number, one.task, one.attempt)
            entry = self.ids.get(named.transactional_id)
            if entry is None or entry.last is not None or entry.producer_id != one.producer_id:
                raise UnknownAttemptError(f"{named} is not open, or another producer's")
        self.groups[request.group] = (request.epoch_number, wanted)
        won = {one.producer_id for one in wanted}
        for name, entry in self.ids.items():
            if name.startswith(ATTEMPT_PREFIX) and entry.last is None:
                self.decide(entry, commit=entry.producer_id in won, who="group")
        return False


class TransactionServices:
    """The RPCs of it, for FakeServices."""

    cluster: FakeCluster

    def _check_coordinator(self) -> None: ...

    async def _answer(self, what: str, request: Any, response: Any, context: Any) -> bool:
        """Whether the request is to be carried out. Its error is in the response else."""
        transactions = self.cluster.transactions
        transactions.asked.append(request)
        told = transactions.on_ask(what, request) if transactions.on_ask is not None else None
        try:
            self._check_coordinator()
            if isinstance(told, PenstockError):
                raise told
            self._carry_out(what, request, response)
        except PenstockError as error:
            response.error.CopyFrom(error.to_proto())
        if told == "lose":
            await context.abort(self.cluster.lost_as, "the connection broke")
        if told == "hang":
            await asyncio.Event().wait()
        return True

    def _carry_out(self, what: str, request: Any, response: Any) -> None:
        transactions = self.cluster.transactions
        if what == "CommitGroup":
            response.is_replay = transactions.commit_group(request)
            return
        if what == "LastCommitted":
            number, winners = transactions.groups.get(request.group, (-1, []))
            response.epoch_number = number
            response.winners.extend(
                transactions_pb2.Winner(**winner._asdict()) for winner in winners
            )
            return
        if what == "BeginAttempt":
            response.attempt_id, entry = transactions.begin_attempt(request)
        elif what == "EndTransaction":
            entry = transactions.end(request)
            response.kept_ms = entry.kept_ms
        else:
            entry = transactions.init(request)
        response.producer_id, response.producer_epoch = entry.producer_id, entry.epoch

    async def EndTransaction(self, request: Any, context: Any) -> Any:
        response = transactions_pb2.EndTransactionResponse()
        await self._answer("EndTransaction", request, response, context)
        return response

    async def BeginAttempt(self, request: Any, context: Any) -> Any:
        response = transactions_pb2.BeginAttemptResponse()
        await self._answer("BeginAttempt", request, response, context)
        return response

    async def CommitGroup(self, request: Any, context: Any) -> Any:
        response = transactions_pb2.CommitGroupResponse()
        await self._answer("CommitGroup", request, response, context)
        return response

    async def LastCommitted(self, request: Any, context: Any) -> Any:
        response = transactions_pb2.LastCommittedResponse()
        await self._answer("LastCommitted", request, response, context)
        return response

    async def CommitTransactionOffsets(self, request: Any, context: Any) -> Any:
        response = groups_pb2.CommitTransactionOffsetsResponse()
        transactions = self.cluster.transactions
        transactions.asked.append(request)
        told = (
            transactions.on_ask("CommitTransactionOffsets", request)
            if transactions.on_ask is not None
            else None
        )
        if isinstance(told, PenstockError):
            response.commit.error.CopyFrom(told.to_proto())
            return response
        entry = transactions.ids[request.transactional_id]
        if entry.epoch != request.producer_epoch:
            response.commit.error.CopyFrom(InvalidProducerEpochError("older").to_proto())
            return response
        for position in request.commit.offsets:
            name = TopicPartition(position.partition.topic, position.partition.partition)
            entry.offsets[request.commit.group_id, name] = position
        return response
