"""A shard of transactions driven by hand, over a log whose writes a test commits or fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.broker.core import transaction_codec
from penstock.broker.core.transaction_events import (
    AbortTransaction,
    AddPartitions,
    BeginAttempt,
    Change,
    CommitGroup,
    DescribeTransaction,
    Effect,
    EndTransaction,
    Event,
    InitProducerId,
    LastCommitted,
    ListTransactions,
    Loaded,
    Mark,
    MarkDone,
    MarksCommitted,
    Persist,
    ProducerIdGiven,
    ProducerIdRefused,
    Respond,
    SendMarks,
    TakeProducerId,
    Tick,
    TopicsRemoved,
    TransactionSettings,
)
from penstock.broker.core.transaction_shard import TransactionShard
from penstock.broker.core.transaction_values import Identity, Participant, Winner
from penstock.v1 import common_pb2, coordination_pb2, transactions_pb2
from penstock.wire.errors import CoordinatorNotAvailableError, ErrorCode
from penstock.wire.ids import TopicId
from penstock.wire.transactional_ids import Attempt, parse_attempt

ID = "orders-writer"
GROUP = "query-1"
TIMEOUT_MS = 60_000
WAIT_MS = 10_000
A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


class Topics:
    """The topics that exist: those named by default, until they are removed."""

    def __init__(self, *names: str) -> None:
        self.ids = {name: topic_id_of(name) for name in names}

    def knows(self, topic_id: TopicId) -> bool:
        return topic_id in self.ids.values()


def topic_id_of(name: str) -> TopicId:
    return TopicId(name.encode().ljust(16, b"."))


def participant(name: str) -> Participant:
    """As ``orders-3``."""
    topic, _, number = name.rpartition("-")
    return Participant(topic_id_of(topic), int(number), topic)


@dataclass
class Held:
    """What waits until ``upto`` records of the log are committed."""

    upto: int
    effect: Respond | SendMarks


class Driver:
    """A shard with its log and clocks. Checks the invariants after every event.

    What is appended is committed at once, unless ``commits_at_once`` is False.
    """

    def __init__(self, settings: TransactionSettings | None = None) -> None:
        self.topics = Topics("orders", "sales", "stock")
        self.settings = settings or TransactionSettings()
        self.log: list[Change] = []
        self.committed = 0
        self.held: list[Held] = []
        self.answers: dict[int, Any] = {}
        self.marks: list[Mark] = []
        self.written: set[tuple[Identity, Participant]] = set()  # What is marked, under what.
        self.told: list[Mark | int] = []  # Marks and the requests answered, in order.
        self.now_ms = 1_000
        self.wall_offset_ms = 1_700_000_000_000
        self.commits_at_once = True
        self.gives_ids = True
        self.next_producer_id = 100
        self.ids_asked = 0
        self.began: dict[str, int] = {}  # By attempt the producer id that was told last.
        self._request_id = 0
        self.load()

    # ------------------------------------------------------------------ the world

    def load(self) -> None:
        """A coordinator takes over what the log says; whoever waited hears nothing any more."""
        self.held = []
        self.shard = TransactionShard(self.topics, self.settings)
        for change in self.log:
            assert self.shard.replay(change.key, change.value)
        self.committed = len(self.log)
        self.handle(Loaded(self.wall_ms))

    def crash(self, keep: int | None = None) -> None:
        """The coordinator is lost, with what was not committed, but for the first of it."""
        del self.log[self.committed if keep is None else max(keep, self.committed) :]
        self.load()

    @property
    def wall_ms(self) -> int:
        return self.now_ms + self.wall_offset_ms

    def handle(self, event: Event) -> None:
        self._carry_out(self.shard.handle(event, self.now_ms))
        self.shard.validate()
        if self.commits_at_once:
            self.commit()

    def _carry_out(self, effects: list[Effect]) -> None:
        asked = 0
        for effect in effects:
            match effect:
                case Persist():
                    self.log.append(effect.change)
                case TakeProducerId():
                    asked += 1
                case Respond() | SendMarks():
                    self._hold(effect)
        self.ids_asked += asked
        if self.gives_ids:
            for _ in range(asked):
                self.give_id()

    def _hold(self, effect: Respond | SendMarks) -> None:
        for index in range(len(self.log), self.committed, -1):
            if effect.subject in (None, self.log[index - 1].subject):
                self.held.append(Held(index, effect))
                return
        self._deliver(effect)

    def _deliver(self, effect: Respond | SendMarks) -> None:
        if isinstance(effect, SendMarks):
            self.marks += effect.marks
            self.told += effect.marks
        else:
            assert effect.request_id not in self.answers
            self.answers[effect.request_id] = effect.response
            if isinstance(effect.response, transactions_pb2.BeginAttemptResponse):
                self.began[effect.response.attempt_id] = effect.response.producer_id
            self.told.append(effect.request_id)

    def commit(self, upto: int | None = None) -> None:
        """What was appended is committed, up to here."""
        self.committed = len(self.log) if upto is None else upto
        ready = [held for held in self.held if held.upto <= self.committed]
        self.held = [held for held in self.held if held.upto > self.committed]
        for held in ready:
            self._deliver(held.effect)

    def fail_writes(self, subject: str | None = None) -> None:
        """What was not committed could not be written: of one subject, or all of it."""
        places = [
            at
            for at in range(self.committed, len(self.log))
            if subject in (None, self.log[at].subject)
        ]
        changes = [self.log[at] for at in places]
        self.held = [
            Held(held.upto - sum(at < held.upto for at in places), held.effect)
            for held in self.held
            if subject is not None and held.effect.subject not in (None, subject)
        ]
        self.log = [change for at, change in enumerate(self.log) if at not in places]
        self.shard.revert(changes, self.now_ms)
        self.shard.validate()

    def give_id(self) -> None:
        self.ids_asked -= 1
        self.next_producer_id += 1
        self.handle(ProducerIdGiven(self.next_producer_id))

    def refuse_id(self) -> None:
        self.ids_asked -= 1
        self.handle(ProducerIdRefused(CoordinatorNotAvailableError("no controller")))

    def pass_ms(self, ms: int) -> None:
        """Time passes; every deadline is acted on when it comes."""
        end_ms = self.now_ms + ms
        while (deadline_ms := self.shard.next_deadline_ms) is not None and deadline_ms <= end_ms:
            self.now_ms = max(self.now_ms, deadline_ms)
            self.handle(Tick(self.wall_ms))
        self.now_ms = end_ms

    def remove_topic(self, name: str) -> None:
        topic_id = self.topics.ids.pop(name)
        self.handle(TopicsRemoved(frozenset({topic_id})))

    def write_marks(self, count: int | None = None) -> list[Mark]:
        """The marks that were sent are committed, all or the first of them."""
        marks = self.marks[:count]
        del self.marks[:count]
        for mark in marks:
            self.mark_there(mark)
        return marks

    def mark_there(self, mark: Mark, *names: str) -> None:
        partitions = frozenset(map(participant, names)) if names else mark.partitions
        under = Identity(mark.producer_id, mark.producer_epoch)
        self.written |= {(under, one) for one in partitions}
        done = MarkDone(mark.transactional_id, mark.producer_id, mark.producer_epoch, partitions)
        self.handle(MarksCommitted((done,)))

    # ------------------------------------------------------------------ requests

    def _next(self) -> int:
        self._request_id += 1
        return self._request_id

    @property
    def last_request(self) -> int:
        return self._request_id

    def answer(self, request_id: int | None = None) -> Any:
        """The answer to a request, or None while it waits."""
        return self.answers.get(self._request_id if request_id is None else request_id)

    def init(self, instance: bytes = A, *, name: str = ID, timeout_ms: int = TIMEOUT_MS) -> Any:
        request = transactions_pb2.InitProducerIdRequest(
            transactional_id=name, transaction_timeout_ms=timeout_ms, instance_id=instance
        )
        self.handle(InitProducerId(self._next(), request, self.now_ms + WAIT_MS))
        return self.answer()

    def add(self, identity: Identity, *partitions: str, name: str = ID) -> Any:
        request = coordination_pb2.AddPartitionsEntry(
            transactional_id=name,
            producer_id=identity.producer_id,
            producer_epoch=identity.epoch,
            partitions=[
                common_pb2.TopicPartition(
                    topic=one.topic, partition=one.partition, topic_id=one.topic_id
                )
                for one in map(participant, partitions)
            ],
        )
        self.handle(AddPartitions(self._next(), request, self.now_ms + WAIT_MS))
        return self.answer()

    def end(
        self, identity: Identity, *, commit: bool, name: str = ID, keep: Sequence[str] = ()
    ) -> Any:
        request = transactions_pb2.EndTransactionRequest(
            transactional_id=name,
            producer_id=identity.producer_id,
            producer_epoch=identity.epoch,
            commit=commit,
            keep=[
                common_pb2.TopicPartition(topic=one.topic, partition=one.partition)
                for one in map(participant, keep)
            ],
        )
        self.handle(EndTransaction(self._next(), request, self.now_ms + WAIT_MS))
        return self.answer()

    def abort(self, name: str = ID) -> Any:
        request = transactions_pb2.AbortTransactionRequest(transactional_id=name)
        self.handle(AbortTransaction(self._next(), request, self.now_ms + WAIT_MS))
        return self.answer()

    def begin(
        self,
        epoch_number: int,
        task: int = 0,
        attempt: int = 0,
        instance: bytes = A,
        timeout_ms: int = TIMEOUT_MS,
    ) -> Any:
        request = transactions_pb2.BeginAttemptRequest(
            group=GROUP,
            epoch_number=epoch_number,
            task=task,
            attempt=attempt,
            transaction_timeout_ms=timeout_ms,
            instance_id=instance,
        )
        self.handle(BeginAttempt(self._next(), request, self.now_ms + WAIT_MS))
        return self.answer()

    def commit_group(
        self,
        epoch_number: int,
        *winners: str | Winner,
        ends_group: bool = False,
        metadata: bytes = b"",
    ) -> Any:
        """By ids of attempts, as they began last, or by winners."""
        request = transactions_pb2.CommitGroupRequest(
            group=GROUP,
            epoch_number=epoch_number,
            winners=[
                transaction_codec.winner_proto(self.winner(one) if isinstance(one, str) else one)
                for one in winners
            ],
            ends_group=ends_group,
            metadata=metadata,
        )
        self.handle(CommitGroup(self._next(), request, self.now_ms + WAIT_MS))
        return self.answer()

    def winner(self, name: str) -> Winner:
        """What stands for the attempt of this id, as it began last."""
        attempt = parse_attempt(name)
        assert attempt is not None
        return Winner(attempt.task, attempt.attempt, self.began.get(name, 0))

    def last_committed(self) -> Any:
        self.handle(LastCommitted(self._next(), GROUP))
        return self.answer()

    def list(self, *states: int, min_duration_ms: int = 0) -> dict[str, int]:
        request = transactions_pb2.ListTransactionsRequest(
            states=states, min_duration_ms=min_duration_ms
        )
        answer = self.list_page(request, "", 1_000)
        assert not answer.next_page_token
        return {one.transactional_id: one.state for one in answer.transactions}

    def list_page(
        self, request: transactions_pb2.ListTransactionsRequest, after: str, limit: int
    ) -> Any:
        self.handle(ListTransactions(self._next(), request, after, limit))
        return self.answer()

    def since(self, name: str = ID) -> tuple[int, int]:
        """The id's state, and for how long it has been in it."""
        answer = self.list_page(transactions_pb2.ListTransactionsRequest(), "", 1_000)
        [found] = [one for one in answer.transactions if one.transactional_id == name]
        return found.state, self.wall_ms - found.since_ms

    def last_end(self, name: str = ID) -> tuple[int, bool]:
        """Who decided about its last transaction, and whether to commit it."""
        described = self.describe(name)
        return described.last_cause, described.last_committed

    def describe(self, name: str = ID) -> Any:
        self.handle(DescribeTransaction(self._next(), name))
        return self.answer()

    # ------------------------------------------------------------------ shorter

    def open(self, *partitions: str, name: str = ID) -> Identity:
        """A producer that has opened a transaction."""
        identity = identity_of(self.init(name=name))
        assert code(self.add(identity, *(partitions or ("orders-0",)), name=name)) is None
        return identity


def attempt_id(epoch_number: int, task: int = 0, attempt: int = 0) -> str:
    return Attempt(GROUP, epoch_number, task, attempt).transactional_id


def code(answer: Any) -> ErrorCode | None:
    """The error code of an answer; None for success."""
    assert answer is not None, "not answered"
    return ErrorCode(answer.error.code) if answer.HasField("error") else None


def identity_of(answer: Any) -> Identity:
    assert code(answer) is None, answer.error
    return Identity(answer.producer_id, answer.producer_epoch)


def begun(d: Driver, number: int, task: int = 0, attempt: int = 0, *partitions: str) -> Identity:
    """An attempt that has written."""
    answer = d.begin(number, task, attempt)
    assert answer.attempt_id == attempt_id(number, task, attempt)
    identity = identity_of(answer)
    for partition in partitions or (f"orders-{task}",):
        assert code(d.add(identity, partition, name=answer.attempt_id)) is None
    return identity


def marks(d: Driver) -> dict[str, bool]:
    """What became of the attempts whose marks are sent, after they are written."""
    return {mark.transactional_id: mark.commit for mark in d.write_marks()}
