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
from penstock.chaos.simulator.transactions.positions import keeper_of
from penstock.chaos.simulator.transactions.scripts import (
    Script,
    ScriptedProcess,
    Sleep,
    error_of,
)
from penstock.v1 import common_pb2, groups_pb2, transactions_pb2
from penstock.wire import transactional_ids
from penstock.wire.errors import ErrorCode
from penstock.wire.ids import TopicIdPartition
from penstock.wire.records import Record, RecordData, encode_batch

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

Consumable = Sequence[tuple[TopicIdPartition, Record]]
"""Records that were read, and where."""

_FINAL: Final = frozenset({ErrorCode.PRODUCER_FENCED, ErrorCode.STALE_GROUP_COMMIT})
_FORGOTTEN: Final = frozenset(
    {ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.INVALID_PRODUCER_ID_MAPPING}
)
"""A coordinator knows nothing of an identity: of one that was given it never says so."""

_NO_MEMBER: Final = frozenset(
    {
        ErrorCode.UNKNOWN_MEMBER_ID,
        ErrorCode.FENCED_MEMBER_EPOCH,
        ErrorCode.STALE_MEMBER_EPOCH,
    }
)
"""What positions are refused with of who is not, or not any more, the one to send them."""

_NOT_FOR_LONG: Final = (
    ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
)
_PATIENCE: Final = 12
_KEEPS: Final = 0.85  # Of the ends: they name partitions for the next transaction.
_TOO_LATE: Final = 0.15  # Of the pauses that are too long: the producer goes on all the same.


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
        attempt: transactional_ids.Attempt | None = None,
    ) -> None:
        self.process = process
        self.transactional_id = transactional_id
        self.attempt: Attempt | None = None
        self._named = attempt
        self.identity = Identity(-1, -1)
        self.txn = -1
        self._new_txn = new_txn
        self._timeout_ms = timeout_ms
        self._instance = process.place.rng.randbytes(16)
        self._coordinator = process.place.coordinator_of(transactional_id)
        self._sequences: dict[TopicIdPartition, int] = {}
        self._kept_until_ms: int | None = None  # What was kept is to be begun until then.
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

    def start_attempt(self) -> Script:
        """Get an identity for an attempt at a task, which has a handle then."""
        named = self._named
        assert named is not None
        request = transactions_pb2.BeginAttemptRequest(
            **named._asdict(),
            transaction_timeout_ms=self._timeout_ms,
            instance_id=self._instance,
        )
        answer = yield from self._insist("begin attempt", request)
        if error_of(answer) is not None:
            raise Fenced
        assert answer.attempt_id == self.transactional_id, answer
        self._take(answer)
        handle = transactional_ids.AttemptHandle(named, answer.producer_id)
        self.attempt = Attempt(handle.text, named.group, named.epoch_number, named.task)

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

    def renew(self) -> Script:
        """After a pause that was too long for what was kept: have that aborted, and go on anew."""
        process = self.process
        kept_until_ms, self._kept_until_ms = self._kept_until_ms, None
        if kept_until_ms is None or process.place.scheduler.now_ms < kept_until_ms:
            return
        if process.place.rng.random() < _TOO_LATE:
            return  # As one that stood still after it had looked at its clock.
        yield from self._give_up_kept()

    def _give_up_kept(self) -> Script:
        request = transactions_pb2.EndTransactionRequest(
            transactional_id=self.transactional_id,
            producer_id=self.identity.producer_id,
            producer_epoch=self.identity.producer_epoch,
        )
        while True:
            answer = yield from self.process.ask(self._coordinator, "end transaction", request)
            code = error_of(answer)
            if code is None:
                self._take(answer)
                return
            if code is ErrorCode.PRODUCER_FENCED:
                raise Fenced
            check(
                code not in _ENDED,
                f"{self.transactional_id} has {self.identity}, and can't give it up: {code!r}",
            )
            yield Sleep(20, 120)

    # A transaction.

    def begin(self, consumed: Consumable = (), group: str = "") -> None:
        """Write under the identity from now on, what is made out of records that were read, maybe
        by a member of a group.
        """
        self.txn = self._new_txn()
        self._sequences.clear()
        self._failed = False
        self._on_the_way = 0
        self._asked.clear()
        self.process.note(Began(self.txn, self.transactional_id, self.identity, self.attempt))
        if consumed:
            values = tuple(bytes(record.value or b"") for _, record in consumed)
            places = tuple((key, record.offset) for key, record in consumed)
            self.process.note(Consumed(self.txn, values, group, places))

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
                self.process.note(Acknowledged(txn, values, answer.base_offset))
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

    def send_positions(self, commit: groups_pb2.CommitOffsetsRequest) -> Script:
        """Have the transaction move positions of a group. Raises MustAbort if that is refused."""
        request = groups_pb2.CommitTransactionOffsetsRequest(
            commit=commit,
            transactional_id=self.transactional_id,
            producer_id=self.identity.producer_id,
            producer_epoch=self.identity.producer_epoch,
        )
        keeper = keeper_of(commit.group_id)
        while not self._failed:
            answer = yield from self.process.ask(keeper, "commit transaction offsets", request)
            code = error_of(answer)
            if code is None and not any(one.HasField("error") for one in answer.results):
                self._sequences.setdefault(keeper, 0)  # Which it may be kept for, too.
                return
            if code is None or code in _ENDED or code in _NO_MEMBER:
                break
            yield Sleep(20, 100)
        raise MustAbort

    # Its end.

    def end(self, *, commit: bool) -> Script:
        """Have the transaction decided; whether it is committed. There is a next identity then."""
        while True:
            asked_ms = self.process.place.scheduler.now_ms
            answer = yield from self._ask_end(self.txn, self.identity, commit=commit)
            code = error_of(answer)
            if code is None:
                self.process.note(Ended(self.txn, commit))
                self._take(answer)
                self._kept_until_ms = asked_ms + answer.kept_ms if answer.kept_ms else None
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

    def _ask_end(
        self,
        txn: int,
        identity: Identity,
        *,
        commit: bool,
        noted: bool = True,
        keep: Sequence[common_pb2.TopicPartition] | None = None,
    ) -> Script:
        if noted:
            self._asked.add(commit)
            self.process.note(EndAsked(txn, commit))
        request = transactions_pb2.EndTransactionRequest(
            transactional_id=self.transactional_id,
            producer_id=identity.producer_id,
            producer_epoch=identity.producer_epoch,
            commit=commit,
            keep=self._keep() if keep is None else keep,
        )
        answer = yield from self.process.ask(self._coordinator, "end transaction", request)
        return answer

    def _keep(self) -> list[common_pb2.TopicPartition]:
        """What the next transaction is to have: mostly what this one has, or some of it."""
        place = self.process.place
        if place.rng.random() >= _KEEPS:
            return []
        written = sorted(self._sequences)
        some = written if place.rng.random() < _KEEPS else written[1:]
        return [
            common_pb2.TopicPartition(topic=place.topic_of(key), partition=key.partition)
            for key in some
        ]
