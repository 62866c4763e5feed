"""Order and exactly-once delivery within a partition (KIP-98's idempotent producer).

A partition's batches get consecutive sequence numbers when they are first sent and keep them:
every retry sends the same bytes. Brokers take a batch only right after the one before it and
know the last five, so that a retry can neither duplicate nor reorder. At most
``max_in_flight`` batches of a partition are outstanding (sent, without a verdict).

A batch's fate after an answer::

    appended, or known already       acknowledged
    retriable, or no answer          sent again with the same bytes (the outcome is unknown)
    out of order, an older one open  sent again after that one
    out of order, none older open    a gap that no retry closes: the partition goes on in a new
                                     producer epoch, and what is open is numbered from 0 again,
                                     but for what is in doubt (below), which fails
    refused for good, or timed out   failed; what follows finds the gap as above

After a refusal for good the gap is known before any leader finds it. Nothing new is sent that could
only be refused as well, and what was in flight behind it is sent again in the new epoch as soon as
it has its answers. Where every attempt at what is open was refused, none of it is in the log, and
the new epoch needs no more answers. Else what is open is sent again under its old number, for the
leader to say. Until something is acknowledged one batch at a time goes: the next may be refused
likewise.

To be numbered again, a batch must not be in the log and never get there under its old number, or
it would be written twice. Nothing after a gap was appended when the leader found it. But the same
leader may have an older stream of ours still unread, with what was missing and the batch itself,
and read it before the first batch of the new epoch fences it. So a batch is in doubt when some
attempt at it was left without any answer and was made for the leader epoch that found the gap, or a
newer one; who leads in that epoch refuses what was made for an older one.

A topic that was deleted and made anew under its name has another id and an empty log. Its
partitions start over: under a newer epoch, numbered from 0, once what is in flight to the old topic
has its answers. What was not written then goes to the new topic, in its order; what may be in the
old topic's log fails, for readers may have had it from there.

An idempotent producer raises its epoch by itself, as Java's does (KIP-360): nobody else uses its
producer id. The partition takes the new epoch only when nothing of it is in flight, so that no
answer under the old one is still to come.

A transactional producer never does: its epoch is its transaction's name, and only the coordinator
raises it. A gap there spoils the transaction; with the next one all begins anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, TypeVar

from penstock.client.core.accumulator import Batch, Splittable
from penstock.wire.compression import Compression
from penstock.wire.errors import PenstockError
from penstock.wire.ids import TopicPartition

D = TypeVar("D", bound=Splittable)

SEQUENCE_LIMIT = 2**31
MAX_EPOCH = 2**15 - 1
ORDER_SPAN = 2**32
"""The distance between batches' order numbers: room for the parts of a split batch."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A producer id with an epoch; both -1 for a producer without idempotence."""

    producer_id: int = -1
    epoch: int = -1

    @property
    def real(self) -> bool:
        """Whether it is one."""
        return self.producer_id >= 0


@dataclass(slots=True)
class Lane(Generic[D]):
    """One partition's outstanding batches, each list in the order of first sending."""

    identity: Identity = field(default_factory=Identity)
    next_sequence: int = 0
    in_flight: list[Batch[D]] = field(default_factory=list)
    resend: list[Batch[D]] = field(default_factory=list)
    needs_epoch: bool = False  # Goes on under a newer identity, once nothing is in flight.
    gap_epoch: int = -1  # The newest leader epoch that found the gap, while needs_epoch.
    has_hole: bool = False  # A batch was refused for good: what is numbered after it can't follow.
    refusal: PenstockError | None = None  # Why; until something is acknowledged.
    starts_over: bool = False  # Its topic was made anew; then needs_epoch, too.
    keeps: bool = True  # What was not written goes to the new topic, when it starts over.
    sent: int = 0

    @property
    def outstanding(self) -> int:
        """Batches sent and not judged."""
        return len(self.in_flight) + len(self.resend)


class Sequencer(Generic[D]):
    """All lanes of one producer. The only place where sequence numbers are given."""

    def __init__(
        self,
        *,
        idempotent: bool,
        max_in_flight: int,
        compression: Compression,
        transactional: bool = False,
    ) -> None:
        self.idempotent = idempotent
        self.transactional = transactional
        self._max_in_flight = max_in_flight
        self._compression = compression
        self.identity = Identity()
        self._doubtful: list[Batch[D]] = []
        self._stranded: list[Batch[D]] = []
        self.lanes: dict[TopicPartition, Lane[D]] = {}

    @property
    def wants_identity(self) -> bool:
        """Whether a producer id must be asked for before anything (more) can be sent.

        Not by the sender where there are transactions: they bring their own.
        """
        return self.idempotent and not self.transactional and not self.identity.real

    def set_identity(self, identity: Identity) -> None:
        """Take a new identity; lanes that wait for one adopt it when they are quiet."""
        self.identity = identity
        for lane in self.lanes.values():
            self._adopt(lane)

    def begin_anew(self, identity: Identity) -> None:
        """The next transaction: every lane is numbered from 0. Nothing may be outstanding."""
        assert not any(lane.outstanding for lane in self.lanes.values())
        self.lanes.clear()
        self.identity = identity

    def give_up_in_flight(self) -> None:
        """What is in flight will have no answer that counts; it must have its verdict."""
        for lane in self.lanes.values():
            assert all(batch.done for batch in lane.in_flight)
            lane.in_flight.clear()

    def lane(self, partition: TopicPartition) -> Lane[D]:
        """The partition's lane."""
        found = self.lanes.get(partition)
        if found is None:
            found = self.lanes[partition] = Lane(identity=self.identity)
        return found

    def may_send_new(self, partition: TopicPartition) -> bool:
        """Whether a batch that was never sent may go now."""
        if self.idempotent and not self.identity.real:
            return False
        lane = self.lanes.get(partition)
        return lane is None or (
            not lane.needs_epoch and not lane.resend and len(lane.in_flight) < self._limit(lane)
        )

    def next_resend(self, partition: TopicPartition) -> Batch[D] | None:
        """The batch to be sent again first, if that is allowed now."""
        lane = self.lanes.get(partition)
        if lane is None or lane.needs_epoch or not lane.resend:
            return None
        return lane.resend[0] if len(lane.in_flight) < self._limit(lane) else None

    def _limit(self, lane: Lane[D]) -> int:
        # Behind a hole another one could only be refused as well, and again, until it is closed.
        return 1 if lane.has_hole or lane.refusal is not None else self._max_in_flight

    def start(self, batch: Batch[D]) -> None:
        """A new batch is being sent: number it and make its bytes.

        Where that fails (MemoryError) nothing is changed, and the batch is none of the lane's.
        """
        lane = self.lane(batch.partition)
        next_sequence = lane.next_sequence
        if self.idempotent:
            if not lane.identity.real:
                lane.identity = self.identity
            self._number(lane, batch)
        try:
            self._encode(batch)
        except Exception:
            lane.next_sequence = next_sequence
            raise
        batch.order = lane.sent * ORDER_SPAN
        batch.order_span = ORDER_SPAN
        lane.sent += 1
        lane.in_flight.append(batch)

    def restart(self, batch: Batch[D]) -> None:
        """The first batch of ``resend`` is being sent again."""
        lane = self.lanes[batch.partition]
        assert lane.resend[0] is batch
        lane.resend.pop(0)
        _insert(lane.in_flight, batch)

    def requeue(self, batch: Batch[D]) -> None:
        """The batch is to be sent again."""
        lane = self.lanes[batch.partition]
        if batch in lane.in_flight:
            lane.in_flight.remove(batch)
            if not batch.done:
                _insert(lane.resend, batch)
        self._adopt(lane)

    def finish(self, batch: Batch[D]) -> None:
        """The batch has its verdict, and is off the wire."""
        lane = self.lanes[batch.partition]
        if batch in lane.in_flight:
            lane.in_flight.remove(batch)
        elif batch in lane.resend:
            lane.resend.remove(batch)
        self._adopt(lane)

    def acknowledge(self, batch: Batch[D]) -> None:
        """The batch is in the log, and off the wire."""
        self.lanes[batch.partition].refusal = None
        self.finish(batch)

    def refuse(self, batch: Batch[D], error: PenstockError) -> None:
        """The batch was refused for good, and is off the wire."""
        lane = self.lanes[batch.partition]
        # One that may be in the log leaves no gap, perhaps.
        if self.idempotent and not self.transactional and not batch.maybe_written:
            lane.refusal = error
            if Identity(batch.producer_id, batch.producer_epoch) == lane.identity:
                lane.has_hole = True
        self.finish(batch)

    def refusal(self, partition: TopicPartition) -> PenstockError | None:
        """Why a batch was refused for good, unless something was acknowledged since."""
        lane = self.lanes.get(partition)
        return None if lane is None else lane.refusal

    def follows_refused(self, batch: Batch[D]) -> bool:
        """Whether no answer but out of order was to be expected, as one before it was refused."""
        return self.lanes[batch.partition].has_hole

    def is_oldest(self, batch: Batch[D]) -> bool:
        """Whether no older batch of its partition is still open."""
        lane = self.lanes[batch.partition]
        return all(
            other.order >= batch.order or other.done for other in (*lane.in_flight, *lane.resend)
        )

    def gap(self, batch: Batch[D], *, fenced: bool = False) -> None:
        """The batch can never follow what the broker has: its partition needs a new epoch.

        ``fenced``: the broker knows a newer epoch than ours, so that only a new id will do.
        """
        lane = self.lanes[batch.partition]
        if Identity(batch.producer_id, batch.producer_epoch) == lane.identity:
            lane.gap_epoch = max(lane.gap_epoch, batch.last_epoch)
            self._renew(lane, fenced=fenced)
        self.requeue(batch)

    def take_doubtful(self) -> list[Batch[D]]:
        """The batches that must not be sent again, for they may be written yet; they are out of
        their lanes and want their verdict.
        """
        doubtful, self._doubtful = self._doubtful, []
        return doubtful

    def start_over(self, partition: TopicPartition, *, keep: bool) -> None:
        """The partition's topic was deleted and made anew: number from 0, once all is quiet.

        Without ``keep`` nothing that was sent before goes to the new topic.
        """
        lane = self.lanes.get(partition)
        if lane is None:
            return
        lane.starts_over = True
        lane.keeps = lane.keeps and keep
        if self.idempotent:
            self._renew(lane)
        lane.needs_epoch = True
        self._adopt(lane)

    def is_starting_over(self, partition: TopicPartition) -> bool:
        """Whether answers about an older topic of this name are still to come."""
        lane = self.lanes.get(partition)
        return lane is not None and lane.starts_over

    def take_stranded(self) -> list[Batch[D]]:
        """The batches that stay behind with a deleted topic; they are out of their lanes and want
        their verdict.
        """
        stranded, self._stranded = self._stranded, []
        return stranded

    def _renew(self, lane: Lane[D], *, fenced: bool = False) -> None:
        """Have the lane go on under a newer identity than its own."""
        lane.needs_epoch = True
        if lane.identity != self.identity:
            return
        if fenced or self.identity.epoch >= MAX_EPOCH:
            self.identity = Identity()
        else:
            self.identity = Identity(self.identity.producer_id, self.identity.epoch + 1)

    def split(self, batch: Batch[D], parts: tuple[Batch[D], Batch[D]]) -> None:
        """The batch, refused as too large and so surely not appended, goes on as two.

        They share its sequence numbers between them, so that what is before and after keeps its
        own: batches before it may have been appended without our knowing.
        """
        lane = self.lanes[batch.partition]
        lane.in_flight.remove(batch)
        span = batch.order_span // 2
        sequence = batch.base_sequence
        for number, part in enumerate(parts):
            part.order = batch.order + number * span
            part.order_span = span
            part.producer_id, part.producer_epoch = batch.producer_id, batch.producer_epoch
            part.base_sequence = sequence
            part.attempts = batch.attempts
            if self.idempotent:
                sequence = (sequence + part.record_count) % SEQUENCE_LIMIT
            self._encode(part)
            _insert(lane.resend, part)
        self._adopt(lane)

    def outstanding(self) -> Iterable[Batch[D]]:
        """Every batch that was sent and is not judged."""
        for lane in self.lanes.values():
            yield from lane.in_flight
            yield from lane.resend

    def _adopt(self, lane: Lane[D]) -> None:
        if lane.has_hole and not lane.in_flight and not any(b.maybe_written for b in lane.resend):
            self._renew(lane)
        if not lane.needs_epoch or lane.in_flight:
            return
        if self.idempotent and not self.identity.real:
            return
        if lane.starts_over:
            self._leave_behind(lane)
        elif self.idempotent:
            self._doubtful += [b for b in lane.resend if b.unheard_epoch >= lane.gap_epoch]
            lane.resend = [b for b in lane.resend if b.unheard_epoch < lane.gap_epoch]
        lane.identity = self.identity
        lane.next_sequence = 0
        lane.needs_epoch = False
        lane.has_hole = False
        lane.gap_epoch = -1
        if self.idempotent:
            for batch in lane.resend:
                self._number(lane, batch)
                self._encode(batch)

    def _leave_behind(self, lane: Lane[D]) -> None:
        self._stranded += [b for b in lane.resend if b.maybe_written or not lane.keeps]
        lane.resend = [b for b in lane.resend if not b.maybe_written and lane.keeps]
        lane.starts_over = False
        lane.keeps = True
        for batch in lane.resend:
            # Leader epochs of the old topic mean nothing in the new one.
            batch.last_epoch = -1
            batch.retry_at_ms = float("-inf")

    def _number(self, lane: Lane[D], batch: Batch[D]) -> None:
        batch.producer_id = lane.identity.producer_id
        batch.producer_epoch = lane.identity.epoch
        batch.base_sequence = lane.next_sequence
        lane.next_sequence = (lane.next_sequence + batch.record_count) % SEQUENCE_LIMIT

    def _encode(self, batch: Batch[D]) -> None:
        # What was sent before may still be on its way, and must stay as it is.
        make = batch.builder.seal if batch.encoded is None else batch.builder.build
        batch.encoded = make(
            compression=self._compression,
            producer_id=batch.producer_id,
            producer_epoch=batch.producer_epoch,
            base_sequence=batch.base_sequence,
            is_transactional=self.transactional,
        )

    def validate(self) -> None:
        """Assert what always holds (for tests)."""
        for lane in self.lanes.values():
            assert len(lane.in_flight) <= self._max_in_flight
            for queue in (lane.in_flight, lane.resend):
                orders = [batch.order for batch in queue]
                assert orders == sorted(orders)
            if not self.idempotent or lane.needs_epoch:
                continue
            batches = sorted([*lane.in_flight, *lane.resend], key=_order)
            for before, after in pairwise(batches):
                if before.producer_epoch == after.producer_epoch:
                    gap = after.base_sequence - before.base_sequence
                    assert gap % SEQUENCE_LIMIT >= before.record_count


def _order(batch: Batch[D]) -> int:
    return batch.order


def _insert(queue: list[Batch[D]], batch: Batch[D]) -> None:
    position = len(queue)
    while position and queue[position - 1].order > batch.order:
        position -= 1
    queue.insert(position, batch)
