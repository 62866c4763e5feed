"""Who writes transactions in the simulated cluster: the protocol's messages, driven directly.

It does what clients may do, and what they should not: it sends an end again long after it was
answered, asks for the other one, goes on as a zombie. Whatever it does, it may do no harm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from penstock.chaos.simulator.history import check
from penstock.chaos.simulator.serving import ACKS_ALL, ProduceRequest
from penstock.chaos.simulator.transactions.history import (
    Acknowledged,
    Attempt,
    Began,
    Consumed,
    EndAsked,
    Ended,
    Given,
    Identity,
    Sent,
)
from penstock.chaos.simulator.transactions.scripts import (
    Script,
    ScriptedProcess,
    Sleep,
    error_of,
)
from penstock.v1 import transactions_pb2
from penstock.wire.errors import ErrorCode
from penstock.wire.ids import TopicIdPartition
from penstock.wire.records import RecordData, encode_batch

_ENDED: Final = frozenset(
    {
        ErrorCode.INVALID_PRODUCER_EPOCH,
        ErrorCode.INVALID_TXN_STATE,
        ErrorCode.PRODUCER_FENCED,
        ErrorCode.TRANSACTION_ABORTABLE,
        ErrorCode.INVALID_PRODUCER_ID_MAPPING,
        ErrorCode.DUPLICATE_SEQUENCE_NUMBER,
    }
)
"""What a produce request is told whose transaction is over, or is to be."""

_FINAL: Final = frozenset({ErrorCode.PRODUCER_FENCED, ErrorCode.STALE_GROUP_COMMIT})
_FORGOTTEN: Final = frozenset(
    {ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.INVALID_PRODUCER_ID_MAPPING}
)
"""A coordinator knows nothing of an identity: of one that was given it never says so."""

_NOT_FOR_LONG: Final = (
    ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
)
_PATIENCE: Final = 12


class Fenced(Exception):  # noqa: N818 - it is what happens to a producer, and no mistake.
    """Another producer has the transactional id: this one can do nothing any more."""


class MustAbort(Exception):  # noqa: N818 - as above.
    """The transaction can't be committed."""


class TransactionalProducer:
    """One instance of a transactional id, or with ``attempt`` an engine's attempt at a task.

    ``begin``, ``write``, ``end`` and so on, once ``start`` has an identity. ``new_txn`` numbers the
    transactions of the run. Its parts of scripts raise Fenced and MustAbort.
    """

    def __init__(
        self,
        process: ScriptedProcess,
        transactional_id: str,
        new_txn: Callable[[], int],
        *,
        timeout_ms: int,
        attempt: Attempt | None = None,
    ) -> None:
        self.process = process
        self.transactional_id = transactional_id
        self.attempt = attempt
        self.identity = Identity(-1, -1)
        self.txn = -1
        self._new_txn = new_txn
        self._timeout_ms = timeout_ms
        self._instance = process.place.rng.randbytes(16)
        self._coordinator = process.place.coordinator_of(transactional_id)
        self._sequences: dict[TopicIdPartition, int] = {}
        self._on_the_way = 0
        self._failed = False
        self._asked: set[bool] = set()

    # The identity.

    def start(self) -> Script:
        """Get an identity, which fences who had the id before."""
        answer = yield from self._init_answer()
        if error_of(answer) is not None:
            raise Fenced
        self._take(answer)

    def _init_answer(self) -> Script:
        request = transactions_pb2.InitProducerIdRequest(
            transactional_id=self.transactional_id,
            transaction_timeout_ms=self._timeout_ms,
            instance_id=self._instance,
        )
        answer = yield from self._insist("init producer id", request)
        return answer

    def start_attempt(self, number: int) -> Script:
        """Get an identity for attempt ``number`` at a task."""
        assert self.attempt is not None
        request = transactions_pb2.BeginAttemptRequest(
            group=self.attempt.group,
            epoch_number=self.attempt.epoch_number,
            task=self.attempt.task,
            attempt=number,
            transaction_timeout_ms=self._timeout_ms,
            instance_id=self._instance,
        )
        answer = yield from self._insist("begin attempt", request)
        if error_of(answer) is not None:
            raise Fenced
        assert answer.attempt_id == self.attempt.attempt_id, answer
        self._take(answer)

    def _insist(self, method: str, request: Any) -> Script:
        """Ask until there is an answer that asking again would not change."""
        while True:
            answer = yield from self.process.ask(self._coordinator, method, request)
            code = error_of(answer)
            if code is None or code in _FINAL:
                return answer
            yield Sleep(20, 120)

    def _take(self, answer: Any) -> None:
        if answer.producer_id < 0:
            return  # An attempt has one transaction.
        self.identity = Identity(answer.producer_id, answer.producer_epoch)
        self.process.note(Given(self.transactional_id, self._instance, self.identity))

    # A transaction.

    def begin(self, consumed: Sequence[bytes] = ()) -> None:
        """Write under the identity from now on, what is made out of records that were read."""
        self.txn = self._new_txn()
        self._sequences.clear()
        self._failed = False
        self._on_the_way = 0
        self._asked.clear()
        self.process.note(Began(self.txn, self.transactional_id, self.identity, self.attempt))
        if consumed:
            self.process.note(Consumed(self.txn, tuple(consumed)))

    def write(
        self,
        key: TopicIdPartition,
        count: int = 1,
        *,
        amounts: Sequence[int] = (),
        record_key: bytes | None = None,
    ) -> None:
        """Send a batch to a partition, and have it sent again until it is acknowledged."""
        values = tuple(self.process.next_value() for _ in range(count))
        self.process.note(Sent(self.txn, key, values, tuple(amounts)))
        now_ms = self.process.place.scheduler.now_ms
        sequence = self._sequences.get(key, 0)
        self._sequences[key] = sequence + count
        records = encode_batch(
            [RecordData(now_ms, record_key, value) for value in values],
            producer_id=self.identity.producer_id,
            producer_epoch=self.identity.producer_epoch,
            base_sequence=sequence,
            is_transactional=True,
        )
        request = ProduceRequest(key, records, ACKS_ALL, self.transactional_id)
        self._on_the_way += 1
        self.process.run(self._deliver(self.txn, request, values))

    def _deliver(self, txn: int, request: ProduceRequest, values: tuple[bytes, ...]) -> Script:
        refused: Counter[ErrorCode] = Counter()
        while self.txn == txn and not self._failed:
            answer = yield from self.process.ask(request.key, "produce", request)
            code = error_of(answer)
            if code is None:
                self.process.note(Acknowledged(txn, values))
                checkers = self.process.place.checkers
                checkers.acknowledged_all(request.key, answer.base_offset, list(values))
                if self.txn == txn:
                    self._on_the_way -= 1
                return
            refused[code] += 1
            if code in _ENDED or any(refused[one] > _PATIENCE for one in _NOT_FOR_LONG):
                if self.txn == txn:
                    self._give_up(code)
                return
            yield Sleep(20, 100)

    def _give_up(self, code: ErrorCode) -> None:
        """The transaction can't be committed: a leader says so, or for too long what passes."""
        self._failed = True

    def flush(self) -> Script:
        """Wait until all that was written is acknowledged."""
        while self._on_the_way and not self._failed:
            yield Sleep(3, 15)
        if self._failed:
            raise MustAbort

    # Its end.

    def end(self, *, commit: bool) -> Script:
        """Have the transaction decided; whether it is committed. There is a next identity then."""
        while True:
            answer = yield from self._ask_end(self.txn, self.identity, commit=commit)
            code = error_of(answer)
            if code is None:
                self.process.note(Ended(self.txn, commit))
                self._take(answer)
                self._failed = True  # Nothing is sent again.
                return commit
            if code is ErrorCode.TRANSACTION_ABORTABLE:
                self.process.note(Ended(self.txn, commit=False))
                commit = False
            elif code is ErrorCode.INVALID_TXN_STATE and self.attempt is not None:
                return None  # Its group has decided, maybe long ago.
            elif code is ErrorCode.INVALID_TXN_STATE:
                check(
                    (not commit) in self._asked,
                    f"transaction {self.txn} of {self.transactional_id} is said to have ended "
                    f"otherwise than by commit={commit}, which its producer never asked for",
                )
                self.process.note(Ended(self.txn, not commit))
                commit = not commit
            elif code is ErrorCode.PRODUCER_FENCED:
                raise Fenced
            else:
                check(
                    code not in _FORGOTTEN,
                    f"{self.transactional_id} was given {self.identity}, and its coordinator knows "
                    f"nothing of it",
                )
                yield Sleep(20, 120)

    def ask_once(self, *, commit: bool) -> Script:
        """Ask for an end, and do not listen."""
        yield from self._ask_end(self.txn, self.identity, commit=commit)

    def ask_again(
        self, txn: int, identity: Identity, *, commit: bool, after_ms: tuple[int, int]
    ) -> Script:
        """Ask for the end of a transaction that is over, as a request does that comes late."""
        yield Sleep(*after_ms)
        answer = yield from self._ask_end(txn, identity, commit=commit, noted=False)
        if error_of(answer) is None:
            self.process.note(Ended(txn, commit))

    def _ask_end(self, txn: int, identity: Identity, *, commit: bool, noted: bool = True) -> Script:
        if noted:
            self._asked.add(commit)
            self.process.note(EndAsked(txn, commit))
        request = transactions_pb2.EndTransactionRequest(
            transactional_id=self.transactional_id,
            producer_id=identity.producer_id,
            producer_epoch=identity.producer_epoch,
            commit=commit,
        )
        answer = yield from self.process.ask(self._coordinator, "end transaction", request)
        return answer
