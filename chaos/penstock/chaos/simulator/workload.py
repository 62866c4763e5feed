"""Clients of the simulated cluster: producers, most of them idempotent, and readers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Final

from penstock.chaos.simulator.checkers import Checkers, check
from penstock.chaos.simulator.network import End, Network
from penstock.chaos.simulator.pace import Pace
from penstock.chaos.simulator.recording import Append, Poll, Recording, refusal
from penstock.chaos.simulator.scheduler import Scheduler
from penstock.chaos.simulator.serving import ACKS_ALL, Answer, FetchRequest, ProduceRequest
from penstock.wire.errors import ErrorCode
from penstock.wire.ids import TopicIdPartition
from penstock.wire.records import RecordData, decode_batch, encode_batch, iter_batches

_TIMEOUT_MS: Final = 600
_IN_FLIGHT: Final = 5  # Batches from the first unacknowledged one on: brokers remember as many.
_PATIENCE: Final = 5
_MISPLACED_MS: Final = 3_500  # More than twice the time of a lease.
NEVER_MS: Final = 10**12
_LOST_PLACE: Final = (
    ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
    ErrorCode.DUPLICATE_SEQUENCE_NUMBER,
)
_OF_THE_LEADER: Final = (
    *_LOST_PLACE,
    ErrorCode.NOT_ENOUGH_REPLICAS,
    ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
)
"""Who refuses with these leads: to look for another leader is of no use."""
_HASTY_RETRIES: Final = 0.1
"""Of the batches that came before their turn: these are sent again before it has come."""


@dataclass(slots=True)
class ClientPlace:
    """What clients stand on. ``patience_ms``: how long a producer tries to have a batch taken."""

    scheduler: Scheduler
    network: Network
    rng: Random
    checkers: Checkers
    recording: Recording
    brokers: tuple[int, ...]
    new_producer_id: Callable[[], int]
    pace: Pace
    patience_ms: int = NEVER_MS


class Client:
    """Finds the leader of a partition and talks to it."""

    def __init__(self, address: int, key: TopicIdPartition, place: ClientPlace) -> None:
        self.address = address
        self.alive = True
        self.key = key
        self.place = place
        self.leader = -1
        self.leader_epoch = -1
        self.stopped = False
        self._looks = False  # For the leader, or will in a moment.

    def stop(self) -> None:
        """Begin nothing new."""
        self.stopped = True

    def retire(self) -> None:
        """The partition is gone for good: do nothing any more."""
        self.alive = False

    def end(self) -> None:
        """The process ends without a word."""
        self.alive = False
        self.place.network.ended(self, silently=False)

    def serve(self, method: str, request: Any, reply: Callable[[Any], None]) -> None:
        """Nobody asks a client."""
        raise AssertionError(f"a client serves nobody, but was asked for {method}")

    def accept(self, service: str, end: End) -> None:
        """Nobody opens a stream to a client."""
        raise AssertionError(f"a client serves nobody, but was to stream {service}")

    def ask(self, method: str, request: Any, on_answer: Callable[[Answer | None], None]) -> None:
        """Ask the broker that is thought to lead, or any."""
        target = self.leader if self.leader > 0 else self.place.rng.choice(self.place.brokers)
        self.place.network.call(self, target, method, request, on_answer, timeout_ms=_TIMEOUT_MS)

    def take_hint(self, answer: Answer) -> None:
        """An answer may know a newer leader; an older one is no news (KIP-320)."""
        if answer.leader_epoch > self.leader_epoch:
            self.leader, self.leader_epoch = answer.leader, answer.leader_epoch

    def find_leader(self, within_ms: int = 0) -> None:
        """Ask some broker who leads, now or within some time. Once, however many want to know."""
        if self._looks:
            return
        self._looks = True
        if within_ms:
            self.after(0, within_ms, self._ask_who_leads)
        else:
            self._ask_who_leads()

    def _ask_who_leads(self) -> None:
        target = self.place.rng.choice(self.place.brokers)

        def answered(answer: Answer | None) -> None:
            self._looks = False
            if answer is not None:
                self.take_hint(answer)

        self.place.network.call(
            self, target, "metadata", self.key, answered, timeout_ms=_TIMEOUT_MS
        )

    def after(self, low_ms: int, high_ms: int, action: Callable[[], None]) -> None:
        """Do something in a while."""
        self._later(self.place.rng.randint(low_ms, high_ms), action)

    def rest(self, low_ms: int, high_ms: int, action: Callable[[], None]) -> None:
        """Do something new after a while, as long as it is quiet after a longer one."""
        self._later(self.place.pace.rest_ms(self.place.rng, low_ms, high_ms), action)

    def again(self, low_ms: int, high_ms: int, action: Callable[[], None]) -> None:
        """Try something again after a while, as long as it is quiet after a longer one."""
        self._later(self.place.pace.again_ms(self.place.rng, low_ms, high_ms), action)

    def _later(self, delay_ms: int, action: Callable[[], None]) -> None:
        self.place.scheduler.after(delay_ms, lambda: action() if self.alive else None)


@dataclass(slots=True)
class _Pending:
    """A batch on its way."""

    number: int
    values: list[bytes]
    records: bytes
    recorded: Append
    until_ms: int  # Then it is given up.
    misplaced_ms: int = -1  # Since when all that is said of it is that it is not the next.
    sent: bool = False  # And not to be sent again as soon as those before it are there.


@dataclass(slots=True)
class _Identity:
    """A producer id and its next sequence."""

    producer_id: int
    next_sequence: int = 0
    batches: int = 0
    lost_place: int = 0  # How often the first batch on its way was said not to be the next.
    pending: deque[_Pending] = field(default_factory=deque)


class Producer(Client):
    """Sends numbered records to one partition, several batches at a time, until ``stop``.

    Every batch is retried until it is acknowledged. With acks=1 a gap may arise when a leader is
    lost, and with acks=all when records are lost that nobody had to keep, or deleted with what is
    known of their producers: the producer then goes on under another id, as a new one would.
    """

    def __init__(
        self, address: int, key: TopicIdPartition, place: ClientPlace, *, acks: int
    ) -> None:
        super().__init__(address, key, place)
        self.acks = acks
        self.acknowledged = 0
        self._count = 0
        self._identity = _Identity(place.new_producer_id())
        self.after(0, 100, self._produce)

    def successor(self, address: int) -> Producer:
        """Who writes in its place: another process, with another producer id."""
        return Producer(address, self.key, self.place, acks=self.acks)

    @property
    def is_done(self) -> bool:
        """Nothing is on its way any more."""
        return self.stopped and not self._identity.pending

    def _produce(self) -> None:
        if self.stopped:
            return
        pending = self._identity.pending
        if not pending or self._identity.batches - pending[0].number < _IN_FLIGHT:
            self._new_batch()
            self._send_all()
        self.rest(10, 90, self._produce)

    def _new_batch(self) -> None:
        identity = self._identity
        values = []
        for _ in range(self.place.rng.randint(1, 3)):
            self._count += 1
            values.append(b"%d-%d" % (self.address, self._count))
        records = encode_batch(
            [RecordData(self.place.scheduler.now_ms, None, value) for value in values],
            producer_id=identity.producer_id,
            producer_epoch=0,
            base_sequence=identity.next_sequence,
        )
        who = f"producer-{self.address}"
        recorded = self.place.recording.append(
            f"{who}.{identity.producer_id}",
            self.key,
            values,
            process=who,
            acks="all" if self.acks == ACKS_ALL else str(self.acks),
        )
        until_ms = self.place.scheduler.now_ms + self.place.patience_ms
        identity.pending.append(_Pending(identity.batches, values, records, recorded, until_ms))
        identity.batches += 1
        identity.next_sequence += len(values)

    def _send_all(self) -> None:
        for pending in self._identity.pending:
            if not pending.sent:
                self._send(self._identity, pending)

    def _send(self, identity: _Identity, pending: _Pending) -> None:
        pending.sent = True
        request = ProduceRequest(self.key, pending.records, self.acks)
        was_first = identity.pending[0] is pending
        self.ask(
            "produce", request, lambda answer: self._answered(identity, pending, answer, was_first)
        )

    def _answered(
        self, identity: _Identity, pending: _Pending, answer: Answer | None, was_first: bool
    ) -> None:
        if identity is not self._identity or pending not in identity.pending:
            return
        if answer is not None and answer.error is None:
            identity.pending.remove(pending)
            self.acknowledged += 1
            pending.recorded.acknowledged(answer.base_offset)
            if self.acks == ACKS_ALL:
                self.place.checkers.acknowledged_all(self.key, answer.base_offset, pending.values)
            self._send_all()
            return
        if answer is not None:
            self.take_hint(answer)
        now_ms = self.place.scheduler.now_ms
        if answer is None or answer.error not in _LOST_PLACE or not was_first:
            pending.misplaced_ms = -1
        elif pending.misplaced_ms < 0:
            pending.misplaced_ms = now_ms
        if answer is not None and answer.error in _LOST_PLACE and was_first:
            identity.lost_place += 1
            may_be = self.acks != ACKS_ALL or self.place.checkers.may_have_lost(self.key)
            if identity.lost_place >= _PATIENCE and may_be:
                self._identity = _Identity(self.place.new_producer_id())
                return
        if now_ms >= pending.until_ms:
            self._check_place(pending)
            # As a producer of production does it: whether it is there nobody knows, so what comes
            # next is not to be compared with it.
            self._identity = _Identity(self.place.new_producer_id())
            return
        if answer is None or answer.error not in _OF_THE_LEADER:
            self.find_leader(30)
        is_early = answer is not None and answer.error in _LOST_PLACE
        waits = is_early and identity.pending[0] is not pending
        if waits and self.place.rng.random() >= _HASTY_RETRIES:
            pending.sent = False  # It is sent again once one of those before it is there.
        else:
            self.again(20, 100, lambda: self._again(identity, pending))

    def _check_place(self, pending: _Pending) -> None:
        """Who has lost nothing is not refused for longer than a former leader may answer."""
        since_ms = pending.misplaced_ms
        check(
            self.acks != ACKS_ALL
            or self.place.checkers.may_have_lost(self.key)
            or not 0 <= since_ms < self.place.scheduler.now_ms - _MISPLACED_MS,
            f"{self.key.partition}: producer {self.address} is told since {since_ms} ms that the "
            "first batch that it was not told is there is not the next one",
        )

    def _again(self, identity: _Identity, pending: _Pending) -> None:
        if identity is self._identity and pending in identity.pending:
            self._send(identity, pending)


class HastyProducer(Client):
    """Sends to one partition with acks=0: over a stream, once, and never learns what came of it.

    What of it is in the log is there in the order in which it was sent on one stream.
    """

    def __init__(self, address: int, key: TopicIdPartition, place: ClientPlace) -> None:
        super().__init__(address, key, place)
        self._count = 0
        self._streams = 0
        self._stream: End | None = None
        self.after(0, 100, self._produce)

    def successor(self, address: int) -> HastyProducer:
        """Who writes in its place."""
        return HastyProducer(address, self.key, self.place)

    def _produce(self) -> None:
        if self.stopped:
            return
        if self._stream is None and self.leader > 0:
            self._streams += 1
            self._stream = self.place.network.connect(self, self.leader, "produce")
            self._stream.on_broken = self._broken
        if self._stream is None or self.place.rng.random() < 0.1:
            self.find_leader()  # Nobody tells it that another leads.
        if self._stream is not None and self._stream.target == self.leader:
            self._count += 1
            value = b"%d.%d-%d" % (self.address, self._streams, self._count)
            record = RecordData(self.place.scheduler.now_ms, None, value)
            who = f"producer-{self.address}"
            recorded = self.place.recording.append(
                f"{who}.{self._streams}", self.key, [value], process=who, acks="0"
            )
            recorded.sent()
            self._stream.send(ProduceRequest(self.key, encode_batch([record]), 0))
        elif self._stream is not None:
            self._stream.close()
            self._broken()
        self.rest(10, 130, self._produce)

    def _broken(self) -> None:
        self._stream = None
        self.leader = -1
        self.leader_epoch = -1


class Reader(Client):
    """Reads one partition from its beginning on and checks what it is given."""

    def __init__(self, address: int, key: TopicIdPartition, place: ClientPlace) -> None:
        super().__init__(address, key, place)
        self.offset = 0
        self._high_watermarks: dict[int, int] = {}  # By leader epoch.
        self._branches = 1
        self.after(0, 100, self._fetch)

    def _fetch(self) -> None:
        branches = self.place.checkers.branches(self.key)
        for lost in branches[self._branches :]:  # As a consumer finds out by KIP-320.
            self.offset = min(self.offset, lost.forked_at)
        self._branches = len(branches)
        request = FetchRequest(self.key, self.offset, self.leader_epoch)
        recorded = self.place.recording.poll(
            f"reader-{self.address}", self.key, self.offset, committed=False
        )
        self.ask(
            "fetch",
            request,
            partial(self._answered, self.leader_epoch, self._branches, recorded),
        )

    def _answered(
        self, leader_epoch: int, branches: int, recorded: Poll, answer: Answer | None
    ) -> None:
        if answer is None or answer.error is not None:
            recorded.refused(refusal(answer))
            if answer is not None:
                if answer.error is ErrorCode.OFFSET_OUT_OF_RANGE:
                    self._skip_deleted()
                self.take_hint(answer)
            self.find_leader()
            self.again(20, 100, self._fetch)
            return
        before = self._high_watermarks.get(leader_epoch, 0)
        check(
            answer.high_watermark >= before,
            f"{self.key.partition}: a reader was told of high watermark {before} in leader epoch "
            f"{leader_epoch}, and then of {answer.high_watermark}",
        )
        self._high_watermarks[leader_epoch] = answer.high_watermark
        began = self.offset
        given: list[tuple[int, bytes]] = []
        for header, view in iter_batches(answer.records):
            if header.next_offset > self.offset:
                self.place.checkers.consumed(self.key, header.base_offset, bytes(view))
                if branches == len(self.place.checkers.branches(self.key)):
                    self.offset = header.next_offset
                if self.place.recording.kept and not header.is_control:
                    given += [
                        (record.offset, bytes(record.value or b""))
                        for record in decode_batch(view)
                        if record.offset >= began
                    ]
        recorded.given(given, self.offset, answer.high_watermark)
        self.rest(10, 60, self._fetch)

    def _skip_deleted(self) -> None:
        committed = self.place.checkers.log_of(self.key)
        check(
            self.offset < committed.deleted or len(self.place.checkers.branches(self.key)) > 1,
            f"a reader of {self.key.partition} stands at {self.offset}, which is gone, but only "
            f"what lies below {committed.deleted} was deleted",
        )
        self.offset = min(max(self.offset, committed.deleted), committed.end)
        self.place.recording.moved(f"reader-{self.address}", self.key, self.offset)
