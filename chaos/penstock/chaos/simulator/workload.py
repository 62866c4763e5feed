"""Clients of the simulated cluster: idempotent producers that retry, and readers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from penstock.chaos.simulator.broker import Answer, FetchRequest, ProduceRequest
from penstock.chaos.simulator.checkers import Checkers, check
from penstock.chaos.simulator.network import End, Network
from penstock.chaos.simulator.scheduler import Scheduler
from penstock.wire.errors import ErrorCode
from penstock.wire.ids import TopicIdPartition
from penstock.wire.records import RecordData, encode_batch, iter_batches

_TIMEOUT_MS: Final = 600
_IN_FLIGHT: Final = 4  # Batches from the first unacknowledged one on: brokers remember five.
_PATIENCE: Final = 5
_LOST_PLACE: Final = (
    ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
    ErrorCode.DUPLICATE_SEQUENCE_NUMBER,
)


@dataclass(slots=True)
class ClientPlace:
    """What clients stand on."""

    scheduler: Scheduler
    network: Network
    rng: Random
    checkers: Checkers
    brokers: tuple[int, ...]
    new_producer_id: Callable[[], int]


class Client:
    """Finds the leader of a partition and talks to it."""

    def __init__(self, address: int, key: TopicIdPartition, place: ClientPlace) -> None:
        self.address = address
        self.alive = True
        self.key = key
        self.place = place
        self.leader = -1
        self.leader_epoch = -1

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

    def find_leader(self) -> None:
        """Ask some broker who leads."""
        target = self.place.rng.choice(self.place.brokers)

        def answered(answer: Answer | None) -> None:
            if answer is not None:
                self.take_hint(answer)

        self.place.network.call(
            self, target, "metadata", self.key, answered, timeout_ms=_TIMEOUT_MS
        )

    def after(self, low_ms: int, high_ms: int, action: Callable[[], None]) -> None:
        """Do something in a while."""
        self.place.scheduler.after(self.place.rng.randint(low_ms, high_ms), action)


@dataclass(slots=True)
class _Pending:
    """A batch on its way."""

    number: int
    values: list[bytes]
    records: bytes
    sent: bool = False


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
    lost, and with acks=all when records are deleted with what is known of their producers: the
    producer then goes on under another id, as a new one would.
    """

    def __init__(
        self, address: int, key: TopicIdPartition, place: ClientPlace, *, acks_all: bool
    ) -> None:
        super().__init__(address, key, place)
        self.acks_all = acks_all
        self.acknowledged = 0
        self._count = 0
        self._stopped = False
        self._identity = _Identity(place.new_producer_id())
        self.after(0, 100, self._produce)

    @property
    def is_done(self) -> bool:
        """Nothing is on its way any more."""
        return self._stopped and not self._identity.pending

    def stop(self) -> None:
        """Make no new records."""
        self._stopped = True

    def _produce(self) -> None:
        if self._stopped:
            return
        pending = self._identity.pending
        if not pending or self._identity.batches - pending[0].number < _IN_FLIGHT:
            self._new_batch()
            self._send_all()
        self.after(5, 60, self._produce)

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
        identity.pending.append(_Pending(identity.batches, values, records))
        identity.batches += 1
        identity.next_sequence += len(values)

    def _send_all(self) -> None:
        for pending in self._identity.pending:
            if not pending.sent:
                self._send(self._identity, pending)

    def _send(self, identity: _Identity, pending: _Pending) -> None:
        pending.sent = True
        request = ProduceRequest(self.key, pending.records, self.acks_all)
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
            if self.acks_all:
                self.place.checkers.acknowledged_all(self.key, answer.base_offset, pending.values)
            return
        if answer is not None:
            self.take_hint(answer)
        if answer is not None and answer.error in _LOST_PLACE and was_first:
            identity.lost_place += 1
            deleted = self.place.checkers.log_of(self.key).deleted
            if identity.lost_place >= _PATIENCE and (deleted or not self.acks_all):
                self._identity = _Identity(self.place.new_producer_id())
                return
        self.after(0, 30, self.find_leader)
        self.after(20, 100, lambda: self._again(identity, pending))

    def _again(self, identity: _Identity, pending: _Pending) -> None:
        if identity is self._identity and pending in identity.pending:
            self._send(identity, pending)


class Reader(Client):
    """Reads one partition from its beginning on and checks what it is given."""

    def __init__(self, address: int, key: TopicIdPartition, place: ClientPlace) -> None:
        super().__init__(address, key, place)
        self.offset = 0
        self.after(0, 100, self._fetch)

    def _fetch(self) -> None:
        request = FetchRequest(self.key, self.offset, self.leader_epoch)
        self.ask("fetch", request, self._answered)

    def _answered(self, answer: Answer | None) -> None:
        if answer is None or answer.error is not None:
            if answer is not None:
                if answer.error is ErrorCode.OFFSET_OUT_OF_RANGE:
                    self._skip_deleted()
                self.take_hint(answer)
            self.find_leader()
            self.after(20, 100, self._fetch)
            return
        for header, view in iter_batches(answer.records):
            if header.next_offset > self.offset:
                self.place.checkers.consumed(self.key, header.base_offset, bytes(view))
                self.offset = header.next_offset
        self.after(10, 60, self._fetch)

    def _skip_deleted(self) -> None:
        deleted = self.place.checkers.log_of(self.key).deleted
        check(
            self.offset < deleted,
            f"a reader of {self.key.partition} stands at {self.offset}, which is gone, but only "
            f"what lies below {deleted} was deleted",
        )
        self.offset = deleted
