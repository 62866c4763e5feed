"""What a producer does with its batches: when and where to send them, and what answers mean.

One state machine for all partitions of a producer. The shell feeds it events and carries out
the effects; records enter beside it, through the accumulator. Stands on the sequencer for the
order within a partition and on the metadata cache for who leads.

Records are sent to a topic's name. When the topic is deleted, what is queued fails as soon as
brokers agree that there is none. When it is made anew before that, what was surely not written goes
to the new topic; but not if that has another number of partitions (the partitions were chosen among
the old ones), and not what may be in the deleted topic's log. Both fail with UnknownTopicIdError.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from penstock.client.core import verdicts
from penstock.client.core.accumulator import Accumulator, Batch, Splittable
from penstock.client.core.backoff import Backoff
from penstock.client.core.metadata_cache import MetadataCache, PartitionLeader
from penstock.client.core.send_events import (
    Aborted,
    Acknowledge,
    AcquireIdentity,
    Answered,
    Dropped,
    Effect,
    Entry,
    Event,
    Fail,
    IdentityGiven,
    IdentityRefused,
    PartitionAnswer,
    RefreshMetadata,
    ResetStream,
    RoomFreed,
    SendRequest,
    Spoil,
    StreamBroken,
    TransactionEnded,
)
from penstock.client.core.sequencer import Sequencer
from penstock.client.core.too_large import RequestTooLargeError, next_size, not_read, refusal
from penstock.wire.errors import (
    BrokerFencedError,
    DuplicateSequenceError,
    FencedLeaderEpochError,
    InvalidProducerEpochError,
    LeaderNotAvailableError,
    NetworkError,
    NotLeaderError,
    PenstockError,
    RecordTooLargeError,
    RequestTimedOutError,
    UnknownLeaderEpochError,
)
from penstock.wire.ids import TopicPartition
from penstock.wire.wording import counted

D = TypeVar("D", bound=Splittable)

_SLOW_MS: Final = 1_000.0
"""A request unanswered for so long has us ask another broker who leads: the leader may hang."""
_LEADERSHIP: Final = (
    NotLeaderError,
    FencedLeaderEpochError,
    UnknownLeaderEpochError,
    LeaderNotAvailableError,
    BrokerFencedError,
    NetworkError,
)


_Turn = tuple[TopicPartition, PartitionLeader]
"""A partition whose next batch is ready, and who leads it."""


@dataclass(slots=True)
class _Request(Generic[D]):
    """An unanswered request. An entry is None once its batch was given up on this broker."""

    sent_ms: float
    entries: list[Entry[D] | None]
    probed_ms: float
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderSettings:
    """What the sender needs of the producer's configuration."""

    max_request_bytes: int
    max_in_flight: int
    request_timeout_ms: float
    delivery_timeout_ms: float
    retries: int


@dataclass(slots=True)
class Sender(Generic[D]):
    """The state machine. ``handle`` is its only mutator; call it on one thread."""

    settings: SenderSettings
    accumulator: Accumulator[D]
    sequencer: Sequencer[D]
    metadata: MetadataCache
    backoff: Backoff
    leader_backoff: Backoff
    hurry: int = 0  # Flushes under way: nothing lingers.
    _requests: dict[int, dict[int, _Request[D]]] = field(default_factory=dict)
    _answered_ms: dict[int, float] = field(default_factory=dict)  # When each broker did last.
    _correlation_id: int = 0
    _acquiring: bool = False
    _turn: int = 0
    _most_bytes: float = float("inf")  # Of a request, as a broker that refused one has it.
    _wait_ms: float = float("inf")  # The earliest time that a drain found worth waiting for.
    _need_news: bool = False  # Some partition waits for a (new) leader.
    _seen_updates: int = 0
    _checked_updates: int = 0
    _topics: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    _effects: list[Effect[D]] = field(default_factory=list)

    def handle(self, event: Event, now_ms: float) -> list[Effect[D]]:
        """Take one event and say what to do."""
        self._notice_new_topics()
        if isinstance(event, Answered):
            self._answered(event, now_ms)
        elif isinstance(event, StreamBroken):
            self._broken(event, now_ms)
        elif isinstance(event, IdentityGiven):
            self._acquiring = False
            self.sequencer.set_identity(event.identity)
        elif isinstance(event, IdentityRefused):
            self._acquiring = False
            self._fail_everything(event.error)
        elif isinstance(event, Aborted):
            self._fail_everything(event.error)
        elif isinstance(event, Dropped):
            self._drop_everything(event.error)
        elif isinstance(event, TransactionEnded):
            self.sequencer.begin_anew(event.identity)
        self._expire(now_ms)
        self._abandon_deposed(now_ms)
        self._watch_requests(now_ms)
        self._drop_missing_topics()
        self._give_up_doubtful()
        self._give_up_stranded()
        self._acquire_identity()
        self._drain(now_ms)
        effects, self._effects = self._effects, []
        return effects

    def next_deadline_ms(self) -> float:
        """When to wake the sender if nothing happens before; infinity for never."""
        deadline = min(self._wait_ms, self.accumulator.earliest_deadline_ms())
        for batch in self.sequencer.outstanding():
            if not batch.done:
                deadline = min(deadline, batch.deadline_ms)
        for requests in self._requests.values():
            for request in requests.values():
                deadline = min(
                    deadline,
                    request.sent_ms + self.settings.request_timeout_ms,
                    request.probed_ms + _SLOW_MS,
                )
        return deadline

    def open_batches(self) -> list[Batch[D]]:
        """Every batch without a verdict."""
        sent = [batch for batch in self.sequencer.outstanding() if not batch.done]
        return [*self.accumulator.waiting(), *sent]

    # --- answers ----------------------------------------------------------------------------

    def _answered(self, event: Answered, now_ms: float) -> None:
        request = self._requests.get(event.node_id, {}).pop(event.correlation_id, None)
        if request is None:
            return  # Given up before; its batches went elsewhere.
        self._answered_ms[event.node_id] = now_ms
        answers = list(event.answers)
        if len(answers) != len(request.entries):
            wrong = NetworkError(
                f"broker {event.node_id} answered for {len(answers)} of "
                f"{counted(len(request.entries), 'partition')}"
            )
            answers = [PartitionAnswer(wrong)] * len(request.entries)
        for entry, answer in zip(request.entries, answers, strict=True):
            if entry is not None:
                self._judge(entry.batch, answer, event.node_id, now_ms)

    def _judge(self, batch: Batch[D], answer: PartitionAnswer, node_id: int, now_ms: float) -> None:
        error = answer.error
        if error is not None:
            batch.maybe_written |= not isinstance(error, verdicts.NOT_WRITTEN)
            self._judge_error(batch, error, node_id, now_ms)
        elif batch.done:
            self.sequencer.acknowledge(batch)  # Timed out before; only its place was kept.
        else:
            self._acknowledge(batch, answer.base_offset, answer.log_append_time_ms)

    def _judge_error(
        self, batch: Batch[D], error: PenstockError, node_id: int, now_ms: float
    ) -> None:
        if batch.done:
            self.sequencer.finish(batch)
        elif isinstance(error, DuplicateSequenceError):
            self._acknowledge(batch, -1, -1)
        elif isinstance(error, verdicts.SEQUENCE) and self.sequencer.idempotent:
            self._out_of_sequence(batch, error, now_ms)
        elif isinstance(error, RecordTooLargeError) and batch.record_count > 1:
            batch.last_error = error
            self.sequencer.split(batch, batch.split())
        elif error.retriable and batch.attempts <= self.settings.retries:
            self._retry(batch, error, node_id, now_ms)
        else:
            self._learn(batch, error, node_id)  # What is sent next would be refused as well.
            self.sequencer.refuse(batch, error)
            self._fail(batch, verdicts.for_good(batch, error))

    def _retry(self, batch: Batch[D], error: PenstockError, node_id: int, now_ms: float) -> None:
        batch.last_error = error
        backoff = self.leader_backoff if isinstance(error, _LEADERSHIP) else self.backoff
        batch.retry_at_ms = now_ms + backoff.delay_ms(max(batch.attempts - 1, 0))
        self._learn(batch, error, node_id)
        self.sequencer.requeue(batch)

    def _learn(self, batch: Batch[D], error: PenstockError, node_id: int) -> None:
        """Take what a refusal says of who leads, or have somebody else asked."""
        news = (
            error.leader is not None
            and not self.sequencer.is_starting_over(batch.partition)
            and self.metadata.apply_hint(batch.partition, error.leader)
        )
        if error.refresh_metadata and not news:
            lost = isinstance(error, NetworkError)
            self._effects.append(RefreshMetadata(avoid=node_id if lost else -1))

    def _out_of_sequence(self, batch: Batch[D], error: PenstockError, now_ms: float) -> None:
        batch.last_error = error
        batch.retry_at_ms = now_ms
        fenced = isinstance(error, InvalidProducerEpochError)
        if self.sequencer.transactional and (fenced or self.sequencer.is_oldest(batch)):
            self._fail(batch, error)  # Only the end of the transaction brings another epoch.
            return
        if not self.sequencer.follows_refused(batch):
            batch.retry_at_ms += self.leader_backoff.delay_ms(max(batch.attempts - 1, 0))
        if self.sequencer.is_oldest(batch):
            self.sequencer.gap(batch, fenced=fenced)
        else:
            self.sequencer.requeue(batch)

    def _broken(self, event: StreamBroken, now_ms: float) -> None:
        requests = self._requests.pop(event.node_id, {})
        error, unread = event.error, set(event.unsent)
        if isinstance(error, RequestTooLargeError):
            sent = {
                key: (request.size_bytes, len(request.entries))
                for key, request in requests.items()
                if key not in unread
            }
            too_large, behind = not_read(sent, error)
            unread |= behind
            for key in too_large:
                self._refuse_size(requests.pop(key), error, event.node_id, now_ms)
            error = NetworkError(error.message)  # Of the others it says nothing.
        for correlation_id, request in requests.items():
            for entry in request.entries:
                if entry is None:
                    continue
                if correlation_id not in unread:
                    entry.batch.went_unheard(entry.leader_epoch)
                self._judge_error(entry.batch, error, event.node_id, now_ms)
        self._effects.append(RefreshMetadata(avoid=event.node_id))

    def _refuse_size(
        self, request: _Request[D], error: RequestTooLargeError, node_id: int, now_ms: float
    ) -> None:
        """Send several batches with less beside them; one that was alone fits into none."""
        alone = len(request.entries) == 1
        if not alone:
            less = next_size(request.size_bytes, error.limit_bytes)
            self._most_bytes = min(self._most_bytes, less)
        for entry in filter(None, request.entries):
            refused: PenstockError = refusal(entry.batch.partition, request.size_bytes, error)
            if not alone:
                entry.batch.attempts -= 1  # It may not have been its fault.
                refused = NetworkError(error.message)
            self._judge_error(entry.batch, refused, node_id, now_ms)

    def _acknowledge(self, batch: Batch[D], base_offset: int, log_append_time_ms: int) -> None:
        self.sequencer.acknowledge(batch)
        self._effects.append(Acknowledge(batch, base_offset, log_append_time_ms))
        self._settle(batch)

    def _fail(self, batch: Batch[D], error: PenstockError) -> None:
        if batch.order >= 0:
            self.sequencer.finish(batch)
        self._effects.append(Fail(batch, error))
        self._settle(batch)

    def _settle(self, batch: Batch[D]) -> None:
        batch.done = True
        if self.accumulator.release(batch):
            self._effects.append(RoomFreed())

    # --- giving up --------------------------------------------------------------------------

    def _expire(self, now_ms: float) -> None:
        for batch in self.accumulator.pop_expired(now_ms):
            self._fail(batch, self._timed_out(batch))
        for batch in list(self.sequencer.outstanding()):
            if batch.done or batch.deadline_ms > now_ms:
                continue
            in_flight = batch in self.sequencer.lane(batch.partition).in_flight
            batch.maybe_written |= in_flight
            self._effects.append(Fail(batch, self._timed_out(batch)))
            self._settle(batch)
            if not in_flight:
                self.sequencer.finish(batch)

    def _give_up_doubtful(self) -> None:
        for batch in self.sequencer.take_doubtful():
            if not batch.done:
                self._fail(batch, verdicts.doubtful(batch))

    def _give_up_stranded(self) -> None:
        for batch in self.sequencer.take_stranded():
            if not batch.done:
                self._fail(batch, self._stranded(batch))

    def _stranded(self, batch: Batch[D]) -> PenstockError:
        count = self.metadata.partition_count(batch.partition.topic)
        return verdicts.stranded(batch, count)

    def _timed_out(self, batch: Batch[D]) -> PenstockError:
        hindrance = verdicts.hindrance(batch, self.sequencer, self.metadata)
        return verdicts.timed_out(batch, hindrance, self.settings.delivery_timeout_ms)

    def trouble(self, now_ms: float, *, lasting_ms: float = 0) -> PenstockError | None:
        """Why what has waited longest, and at least so long, is not acknowledged; its ``reason``
        is set. None where nothing is in the way.
        """
        oldest = self._oldest()
        if oldest is None or now_ms - oldest.created_ms < lasting_ms:
            return None
        hindrance = verdicts.hindrance(oldest, self.sequencer, self.metadata)
        return verdicts.trouble(oldest, hindrance, now_ms)

    def oldest_ms(self) -> float:
        """When the first record of those without a verdict was sent; infinity without any."""
        oldest = self._oldest()
        return float("inf") if oldest is None else oldest.created_ms

    def _oldest(self) -> Batch[D] | None:
        return min(self.open_batches(), key=lambda batch: batch.created_ms, default=None)

    def _fail_everything(self, error: PenstockError) -> None:
        for batch in self.accumulator.pop_all():
            self._fail(batch, error)
        for batch in list(self.sequencer.outstanding()):
            if not batch.done:
                self._fail(batch, error)

    def _drop_everything(self, error: PenstockError) -> None:
        self._fail_everything(error)
        for requests in self._requests.values():
            for request in requests.values():
                request.entries = [None] * len(request.entries)
        self.sequencer.give_up_in_flight()

    def _drop_missing_topics(self) -> None:
        for topic in list(self.metadata.missing):
            error = self.metadata.verdict(topic)
            if error is None:
                continue
            sent = [
                batch
                for batch in self.sequencer.outstanding()
                if batch.partition.topic == topic and not batch.done
            ]
            for batch in [*self.accumulator.pop_topic(topic), *sent]:
                self._fail(batch, type(error)(error.message))

    def _notice_new_topics(self) -> None:
        """Start over where a topic was deleted and made anew under its name."""
        if self._checked_updates == self.metadata.updates:
            return
        self._checked_updates = self.metadata.updates
        for name, info in self.metadata.topics.items():
            known_id, known_count = self._topics.get(name, (info.topic_id, 0))
            count = len(info.partitions)
            self._topics[name] = (info.topic_id, count)
            if known_id != info.topic_id:
                self._start_over(name, keep=known_count == count)

    def _start_over(self, topic: str, *, keep: bool) -> None:
        if not keep:
            for batch in self.accumulator.pop_topic(topic):
                self._fail(batch, self._stranded(batch))
        old = [name for name in self.sequencer.lanes if name.topic == topic]
        if old and self.sequencer.transactional:
            self._effects.append(Spoil(verdicts.torn(topic)))
            return
        for partition in old:
            self.sequencer.start_over(partition, keep=keep)

    def _abandon_deposed(self, now_ms: float) -> None:
        """Take back batches whose broker leads no longer, without waiting for its answer.

        Only with idempotence: the old leader may have appended them, and then the new one knows.
        """
        if not self.sequencer.idempotent or self._seen_updates == self.metadata.updates:
            return
        self._seen_updates = self.metadata.updates
        for node_id, requests in self._requests.items():
            for request in requests.values():
                for index, entry in enumerate(request.entries):
                    if entry is None or entry.batch.done:
                        continue
                    if self.sequencer.is_starting_over(entry.batch.partition):
                        continue  # Who led the topic that was deleted is not known any more.
                    leader = self.metadata.leader(entry.batch.partition)
                    if (
                        leader is not None
                        and leader.leader_epoch > entry.leader_epoch
                        and leader.node_id not in (node_id, -1)
                    ):
                        request.entries[index] = None
                        entry.batch.last_error = NotLeaderError(
                            f"broker {node_id} lost the leadership of {entry.batch.partition}"
                        )
                        entry.batch.went_unheard(entry.leader_epoch)
                        entry.batch.retry_at_ms = now_ms
                        self.sequencer.requeue(entry.batch)

    def _watch_requests(self, now_ms: float) -> None:
        for node_id, requests in list(self._requests.items()):
            oldest = min((request.sent_ms for request in requests.values()), default=now_ms)
            if now_ms - oldest >= self.settings.request_timeout_ms:
                self._effects.append(ResetStream(node_id))
                late = RequestTimedOutError(
                    f"broker {node_id} did not answer within request_timeout_ms="
                    f"{self.settings.request_timeout_ms:.0f}"
                )
                self._broken(StreamBroken(node_id, late), now_ms)
                continue
            slow = [
                request for request in requests.values() if now_ms - request.probed_ms >= _SLOW_MS
            ]
            for request in slow:
                request.probed_ms = now_ms
            if slow:
                self._effects.append(RefreshMetadata(avoid=node_id))

    # --- sending ----------------------------------------------------------------------------

    def _acquire_identity(self) -> None:
        if self.sequencer.wants_identity and not self._acquiring:
            self._acquiring = True
            self._effects.append(AcquireIdentity())

    def _drain(self, now_ms: float) -> None:
        self._wait_ms = float("inf")
        self._need_news = False
        while True:
            by_node: dict[int, list[_Turn]] = defaultdict(list)
            for partition in self._partitions_with_work():
                leader = self._sendable(partition, now_ms)
                if leader is None:
                    continue
                if leader.node_id < 0:
                    self._need_news = True
                elif len(self._requests.get(leader.node_id, ())) < self.settings.max_in_flight:
                    by_node[leader.node_id].append((partition, leader))
            going = {node_id: self._going(node_id, ready) for node_id, ready in by_node.items()}
            if not any(going.values()):
                break
            for node_id, turns in going.items():
                self._send(node_id, turns, now_ms)
        if self._need_news:
            self._effects.append(RefreshMetadata(avoid=-1))

    def _partitions_with_work(self) -> Iterator[TopicPartition]:
        """In a rotating order, so that no partition starves behind a request's size limit."""
        work = dict.fromkeys(self.accumulator.partitions())
        for partition, lane in self.sequencer.lanes.items():
            if lane.resend:
                work[partition] = None
        order = list(work)
        self._turn += 1
        start = self._turn % len(order) if order else 0
        yield from order[start:]
        yield from order[:start]

    def _sendable(self, partition: TopicPartition, now_ms: float) -> PartitionLeader | None:
        """The leader to send the partition's next batch to now; None when nothing may go."""
        leader = self.metadata.leader(partition) or PartitionLeader(-1, -1)
        again = self.sequencer.next_resend(partition)
        if again is not None:
            if leader.leader_epoch > again.last_epoch or again.retry_at_ms <= now_ms:
                return leader
            self._wait_ms = min(self._wait_ms, again.retry_at_ms)
            self._need_news |= isinstance(again.last_error, _LEADERSHIP)
            return None
        if not self.sequencer.may_send_new(partition):
            return None
        ready_ms = self.accumulator.ready_at_ms(partition, hurry=self.hurry > 0)
        if ready_ms > now_ms:
            self._wait_ms = min(self._wait_ms, ready_ms)
            return None
        return leader

    def _going(self, node_id: int, ready: list[_Turn]) -> list[_Turn]:
        """Of what is ready for the broker, in its turn, what goes now; the first ones first.

        While a whole request's worth is under way to it, a batch that may still grow is no reason
        for a request: it would only wait there, and be smaller (as Nagle's algorithm has it, RFC
        896). An answer, or its timeout, is an event, so there is no time to wait for.

        But one that has waited for an answer goes with a request that is made anyway, and before
        all of that but one batch: it would wait for as long as others send more than the broker
        takes, since what they have more of can grow no more, and fills every request.
        """
        under_way = self._requests.get(node_id, {}).values()
        size_bytes = sum(request.size_bytes for request in under_way)
        if self.hurry or size_bytes < self.settings.max_request_bytes:
            return ready
        growing = {turn for turn in ready if self._can_grow(turn[0])}
        full = [turn for turn in ready if turn not in growing]
        if not full:
            return []
        answered_ms = self._answered_ms.get(node_id, float("-inf"))
        begun_ms = self.accumulator.first_created_ms
        late = [turn for turn in ready if turn in growing and begun_ms(turn[0]) <= answered_ms]
        first = next(turn for turn in ready if turn not in growing or turn in late)
        return list(dict.fromkeys([first, full[0], *late, *full]))

    def _can_grow(self, partition: TopicPartition) -> bool:
        again = self.sequencer.next_resend(partition)
        return again is None and self.accumulator.can_grow(partition)

    def _send(self, node_id: int, turns: Iterable[_Turn], now_ms: float) -> None:
        entries: list[Entry[D]] = []
        size_bytes = 0
        for partition, leader in turns:
            again = self.sequencer.next_resend(partition)
            more_bytes = again.size_bytes if again else self.accumulator.first_size(partition)
            most_bytes = min(self.settings.max_request_bytes, self._most_bytes)
            if entries and size_bytes + more_bytes > most_bytes:
                continue  # A smaller one may fit; who is first in a later turn goes in any case.
            size_bytes += more_bytes
            if again is not None:
                batch = again
                self.sequencer.restart(batch)
            else:
                batch = self.accumulator.pop(partition)
                try:
                    self.sequencer.start(batch)
                except Exception as error:
                    # Most likely there is no memory: its records must not wait for ever.
                    self._fail(batch, verdicts.unmade(batch, error))
                    continue
            batch.attempts += 1
            batch.last_epoch = leader.leader_epoch
            entries.append(Entry(batch, leader.leader_epoch))
        if not entries:
            return
        self._correlation_id += 1
        request: _Request[D] = _Request(now_ms, list(entries), now_ms, size_bytes)
        self._requests.setdefault(node_id, {})[self._correlation_id] = request
        self._effects.append(SendRequest(node_id, self._correlation_id, tuple(entries)))

    def validate(self) -> None:
        """Assert what always holds (for tests)."""
        self.sequencer.validate()
        self.accumulator.validate(batch for batch in self.sequencer.outstanding() if not batch.done)
        on_the_wire = {
            id(entry.batch)
            for requests in self._requests.values()
            for request in requests.values()
            for entry in request.entries
            if entry is not None
        }
        for lane in self.sequencer.lanes.values():
            for batch in lane.in_flight:
                assert id(batch) in on_the_wire
            for batch in lane.resend:
                assert id(batch) not in on_the_wire
                assert not batch.done
        for requests in self._requests.values():
            assert len(requests) <= self.settings.max_in_flight
