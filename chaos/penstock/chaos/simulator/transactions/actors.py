"""Programs that use transactions: they move money, process records, and commit engines' work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from penstock.chaos.simulator.transactions.history import GroupAsked, GroupTold
from penstock.chaos.simulator.transactions.producer import (
    Fenced,
    MustAbort,
    TransactionalProducer,
)
from penstock.chaos.simulator.transactions.reading import WHOLE_LOG_BYTES, Cursor
from penstock.chaos.simulator.transactions.scripts import (
    Rest,
    Script,
    ScriptedProcess,
    ScriptPlace,
    Sleep,
    error_of,
)
from penstock.v1 import transactions_pb2
from penstock.wire import transactional_ids
from penstock.wire.errors import ErrorCode
from penstock.wire.ids import TopicIdPartition

_COMMITS = 0.8
_DAWDLES = 0.06  # Of the steps within a transaction.
_EMPTY = 0.05
_CONTRADICTS = 0.08  # Of the transactions: their producer asks for the other end as well.
_REPEATS = 0.15  # Of the ends: they are asked for again, after seconds.
_NOTHING_NEW = 0.2  # Of the commits of groups: the next one has no winners, and follows at once.
_FLEETING = 0.3  # Of the transfers: they write to a topic as well that may be deleted.
_RUN_ANEW = 0.2  # Of the attempts: the same numbers begin again, maybe when the first is done.
_TASKS = 2
_WINNERS_KNOWN = frozenset(
    {
        ErrorCode.STALE_GROUP_COMMIT,
        ErrorCode.GROUP_COMMIT_CONFLICT,
        ErrorCode.UNKNOWN_ATTEMPT,
    }
)


@dataclass(slots=True)
class Stage:
    """What all actors of a run have in common.

    ``topic``: what they write to, and ``partitions``: its partitions. ``fleeting``: others, which
    may be deleted. ``names``: the transactional ids that are in use.
    """

    place: ScriptPlace
    topic: str
    partitions: Callable[[], Sequence[TopicIdPartition]]
    fleeting: Callable[[], Sequence[TopicIdPartition]]
    txns: count[int]
    attempts: count[int]
    names: tuple[str, ...]


class Actor(ScriptedProcess, ABC):
    """One process in a role: as long as it lives, or until another one has taken its place.

    ``producer``: how it writes; ``contradicts``: it may ask for two ends of one transaction.
    """

    producer = TransactionalProducer
    contradicts = True

    def __init__(self, address: int, stage: Stage, name: str, timeout_ms: int) -> None:
        super().__init__(address, stage.place)
        self.stage = stage
        self.name = name
        self.timeout_ms = timeout_ms
        self.replaced = False
        self.rng = stage.place.rng
        self.run(self._live())

    @property
    def is_done(self) -> bool:
        """Nothing is under way any more."""
        return not self.alive or (self.stopped and not self.running)

    def successor(self, address: int) -> Actor:
        """Who takes its place under the same name, while it may still go on."""
        self.replaced = True
        return type(self)(address, self.stage, self.name, self.timeout_ms)

    def _live(self) -> Script:
        while not self.stopped:
            try:
                yield from self._session()
            except Fenced:
                if self.replaced:
                    return
            yield Sleep(20, 200)

    @abstractmethod
    def _session(self) -> Script:
        """Until it is stopped, or Fenced is raised."""

    def _producer(self) -> TransactionalProducer:
        return self.producer(
            self, self.name, lambda: next(self.stage.txns), timeout_ms=self.timeout_ms
        )

    def _dawdle(self) -> Script:
        """At times long enough for the transaction to be aborted by its timeout."""
        if self.rng.random() < _DAWDLES:
            yield Sleep(0, self.timeout_ms * 3 // 2)

    def _finish(self, producer: TransactionalProducer, *, commit: bool) -> Script:
        """End the transaction; whether it was committed. Ends may be asked for again, and both."""
        txn, identity = producer.txn, producer.identity
        try:
            yield from self._dawdle()
            contradicts = self.contradicts and self.rng.random() < _CONTRADICTS
            if commit or contradicts:
                yield from producer.flush()
            if contradicts:
                self.run(producer.ask_once(commit=not commit))
                yield Sleep(0, 5)
        except MustAbort:
            commit = False
        committed = yield from producer.end(commit=commit)
        if self.rng.random() < _REPEATS:
            wish = self.rng.random() < 0.5
            self.run(producer.ask_again(txn, identity, commit=wish, after_ms=(20, 2500)))
        return committed


class Transfers(Actor):
    """Moves money between partitions: what one transaction takes in one it puts into another."""

    def _session(self) -> Script:
        producer = self._producer()
        yield from producer.start()
        while not self.stopped:
            yield Rest(5, 80)
            yield from producer.renew()
            producer.begin()
            if not self.contradicts or self.rng.random() >= _EMPTY:
                yield from self._move(producer)
            yield from self._finish(producer, commit=self.rng.random() < _COMMITS)

    def _move(self, producer: TransactionalProducer) -> Script:
        partitions = self.stage.partitions()
        amount = self.rng.randint(1, 100)
        source, target = self.rng.choice(partitions), self.rng.choice(partitions)
        producer.write(source, 1, amounts=(-amount,))
        yield from self._dawdle()
        parts = self.rng.randint(1, 3)
        producer.write(target, 1, amounts=(amount - parts,))
        for _ in range(parts):
            producer.write(self.rng.choice((source, target)), 1, amounts=(1,))
            yield Sleep(0, 10)
        fleeting = self.stage.fleeting()
        if fleeting and self.rng.random() < _FLEETING:
            producer.write(self.rng.choice(fleeting), 1)


class Processor(Actor):
    """Reads a partition, and writes what it makes of it to another one.

    How far it came stands in the keys of what it writes, so that both are committed or none: its
    successor looks there, once the identity that it has was given it, which is when all that was
    open before is ended.
    """

    def _session(self) -> Script:
        producer = self._producer()
        yield from producer.start()
        pair = self.stage.partitions()[:2]  # Partitions may be added meanwhile.
        number = int(self.name.rpartition("-")[2])
        source, target = Cursor(self, pair[number % 2]), pair[(number + 1) % 2]
        source.offset = yield from self._position(target)
        while not self.stopped:
            yield Rest(5, 60)
            at = source.offset
            records, _ = yield from source.fetch()
            taken = records[: self.rng.randint(1, 3)]
            if not taken:
                continue
            yield from producer.renew()
            producer.begin([(source.key, record) for record in taken])
            after = taken[-1].offset + 1
            producer.write(target, len(taken), record_key=b"%s:%d" % (self._mark, after))
            committed = yield from self._finish(producer, commit=self.rng.random() < _COMMITS)
            source.offset = after if committed else at

    @property
    def _mark(self) -> bytes:
        return self.name.encode()

    def _position(self, key: TopicIdPartition) -> Script:
        """Where the last committed transaction of its name has come to."""
        cursor = Cursor(self, key)
        position, end = 0, -1
        while end < 0 or cursor.offset < end:
            records, answer = yield from cursor.fetch(WHOLE_LOG_BYTES)
            if answer is not None and end < 0:
                # Not the high watermark: a new leader's may be behind what is committed.
                end = cursor.log_end_offset
            for record in records:
                name, _, after = bytes(record.key or b"").rpartition(b":")
                if name == self._mark:
                    position = int(after)
            yield Sleep(2, 20)
        return position


class Person(Actor):
    """Aborts what others have open, now and then, and does not care whether it was."""

    def _session(self) -> Script:
        while not self.stopped:
            yield Rest(50, 1500)
            name = self.rng.choice(self.stage.names)
            request = transactions_pb2.AbortTransactionRequest(transactional_id=name)
            yield from self.ask(self.place.coordinator_of(name), "abort transaction", request)


class Driver(Actor):
    """An engine: it has tasks done by attempts, some twice, and commits one of each at once."""

    _busy = 0  # Attempts under way; also those that nobody waits for any more.

    def _idle(self) -> None:
        self._busy -= 1

    def _session(self) -> Script:
        while not self.stopped:
            yield Rest(10, 150)
            last = yield from self._last_committed()
            winners = yield from self._have_done(last + 1)
            if winners:
                yield from self._commit(last + 1, winners)
                if self.rng.random() < _NOTHING_NEW:
                    yield from self._commit(last + 2, ())

    def _last_committed(self) -> Script:
        request = transactions_pb2.LastCommittedRequest(group=self.name)
        answer = yield from self._insist("last committed", request)
        return answer.epoch_number

    def _have_done(self, number: int) -> Script:
        """Have the tasks of an epoch number done; the winners, of those tasks that were."""
        done: dict[int, list[str]] = {task: [] for task in range(_TASKS)}
        for task, of_task in done.items():
            for _ in range(self.rng.choice((1, 1, 2))):
                attempt = next(self.stage.attempts)
                named = transactional_ids.Attempt(self.name, number, task, attempt)
                self._begin(named, of_task)
                if self.rng.random() < _RUN_ANEW:
                    self._begin(named, of_task, after_ms=200)
        while self._busy and not all(done.values()):
            yield Sleep(5, 20)
        return [self.rng.choice(handles) for handles in done.values() if handles]

    def _begin(
        self, named: transactional_ids.Attempt, done: list[str], *, after_ms: int = 0
    ) -> None:
        self._busy += 1
        self.run(self._attempt(named, done, after_ms), self._idle)

    def _attempt(self, named: transactional_ids.Attempt, done: list[str], after_ms: int) -> Script:
        producer = TransactionalProducer(
            self,
            named.transactional_id,
            lambda: next(self.stage.txns),
            timeout_ms=self.timeout_ms,
            attempt=named,
        )
        try:
            yield Sleep(0, after_ms)
            yield from producer.start_attempt()
            producer.begin()
            for _ in range(self.rng.randint(1, 3)):
                partitions = [*self.stage.partitions(), *self.stage.fleeting()]
                producer.write(self.rng.choice(partitions), self.rng.randint(1, 2))
            yield from self._dawdle()
            yield from producer.flush()
            if self.rng.random() < 0.9:
                assert producer.attempt is not None
                done.append(producer.attempt.handle)
                return
            # One that its driver never hears of: it gives up, or wants more than it may.
            if self.rng.random() < 0.3:
                yield from producer.ask_once(commit=True)
            yield from producer.end(commit=False)
        except (Fenced, MustAbort):
            return

    def _commit(self, number: int, winners: Sequence[str]) -> Script:
        request = transactions_pb2.CommitGroupRequest(
            group=self.name, epoch_number=number, winners=map(_winner, winners)
        )
        self.note(GroupAsked(self.name, number, tuple(winners)))
        answer = yield from self._insist("commit group", request)
        if error_of(answer) is None:
            self.note(GroupTold(self.name, number, tuple(winners), answer.is_replay))

    def _insist(self, method: str, request: object) -> Script:
        """Ask until the answer is one that asking again would not change."""
        while True:
            key = self.place.coordinator_of(self.name)
            answer = yield from self.ask(key, method, request)
            code = error_of(answer)
            if code is None or code in _WINNERS_KNOWN:
                return answer
            yield Sleep(20, 120)


def _winner(handle: str) -> transactions_pb2.Winner:
    found = transactional_ids.parse_handle(handle)
    assert found is not None
    return transactions_pb2.Winner(
        task=found.attempt.task, attempt=found.attempt.attempt, producer_id=found.producer_id
    )
