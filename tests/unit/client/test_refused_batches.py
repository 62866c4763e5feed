"""What follows a batch that was refused for good: it goes on at once, in order, and once each."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.client.core.send_events import Answered, PartitionAnswer, StreamBroken, Woken
from penstock.client.core.sequencer import Sequencer
from penstock.wire.compression import Compression
from penstock.wire.errors import (
    DeliveryTimeoutError,
    DiskFullError,
    NetworkError,
    NotLeaderError,
    OutOfOrderSequenceError,
    PenstockError,
    RecordTooLargeError,
    RequestTimedOutError,
)
from tests.unit.client.test_sender_simulation import World


class FullDisk(World):
    """A world whose leaders may be without room. They ask for it after the sequence, as brokers do.

    Nothing else goes wrong unless told.
    """

    def __init__(self, seed: int = 0, *, timeout_ms: float = 3_000, calm: bool = True) -> None:
        super().__init__(seed, timeout_ms=timeout_ms)
        self.is_full = False
        self.calm = calm

    def append(self, node: int, entry: object, data: bytes) -> PartitionAnswer:
        if self.calm:
            try:
                return PartitionAnswer(None, self.take(data))
            except PenstockError as error:
                return PartitionAnswer(error)
        if not self.is_full:
            return super().append(node, entry, data)
        log = self.logs[entry.batch.partition.partition]  # type: ignore[attr-defined]  # An Entry.
        before = log.end, list(log.batches), dict(log.producers)
        answer = super().append(node, entry, data)
        if answer.error is None and log.end != before[0]:
            log.end, log.batches, log.producers = before
            return PartitionAnswer(DiskFullError("no room"))
        return answer

    def take(self, data: bytes) -> int:
        log = self.logs[0]
        before = log.end, list(log.batches), dict(log.producers)
        offset = log.append(data)
        if self.is_full and log.end != before[0]:
            log.end, log.batches, log.producers = before
            raise DiskFullError("no room")
        return offset

    def send_batches(self, count: int) -> None:
        """So many, each of one record, in flight as far as they may."""
        for _ in range(count):
            self.send(0)
            self.now += 5
            self.feed(Woken())
        self.give_identity()

    def round_trip(self) -> None:
        """All that is on its way arrives, and is answered, in no time."""
        for node in self.requests:
            arrived = list(self.requests[node])
            self.requests[node].clear()
            self.answers[node].extend(self.arrive(node, request) for request in arrived)
            while self.answers[node]:
                self.feed(self.answers[node].popleft())

    def begin(self) -> None:
        """Have a producer id, and something in the log."""
        self.send(0)
        self.now += 5
        self.feed(Woken())
        self.give_identity()
        self.round_trip()
        assert self.verdicts == {1: 0}


def test_each_round_trip_has_a_verdict_while_the_disk_is_full() -> None:
    world = FullDisk()
    world.begin()
    world.is_full = True
    world.send_batches(5)
    began_ms = world.now
    for _ in range(10):
        world.round_trip()
    assert world.now == began_ms, "somebody waited"
    assert set(world.verdicts) == {1, 2, 3, 4, 5, 6}
    for value in range(2, 7):
        assert isinstance(world.verdicts[value], DiskFullError)


def test_only_one_is_tried_until_the_disk_takes_something() -> None:
    world = FullDisk()
    world.begin()
    world.is_full = True
    world.send_batches(5)
    world.round_trip()
    world.send_batches(5)
    assert [len(requests) for requests in world.requests.values()] == [1, 0]
    world.is_full = False
    world.round_trip()
    assert [len(requests) for requests in world.requests.values()] == [4, 0]  # All that is open.
    world.heal()
    world.check()
    assert [value for value, what in world.verdicts.items() if not isinstance(what, int)] == [2]


def test_what_comes_later_needs_no_answer_to_know_of_the_gap() -> None:
    world = FullDisk()
    world.begin()
    world.is_full = True
    world.send_batches(1)
    world.round_trip()
    world.is_full = False
    world.send_batches(1)
    world.round_trip()
    assert world.verdicts[3] == 1


def test_a_lost_answer_behind_a_refusal_is_asked_for_under_its_old_number() -> None:
    """It may be written, for all that is known: it is not numbered anew before a leader says no."""
    world = FullDisk()
    world.begin()
    world.is_full = True
    world.send_batches(2)
    world.answers[1].append(world.arrive(1, world.requests[1].popleft()))
    world.feed(world.answers[1].popleft())
    assert isinstance(world.verdicts[2], DiskFullError)
    [lost] = world.requests[1]
    number = lost.entries[0].batch.base_sequence
    world.requests[1].clear()
    world.feed(StreamBroken(1, NetworkError("broke")))
    world.now += 1_000
    world.feed(Woken())
    [again] = world.requests[1]
    assert again.entries[0].batch.base_sequence == number
    world.is_full = False
    world.round_trip()
    error = world.verdicts[3]
    assert isinstance(error, OutOfOrderSequenceError)
    assert "may have been written all the same" in error.message


def test_what_may_be_written_leaves_no_gap_when_it_is_refused() -> None:
    world = FullDisk()
    world.begin()
    world.send_batches(2)
    [first, _] = world.requests[1]
    first.entries[0].batch.maybe_written = True
    world.is_full = True
    world.round_trip()
    assert isinstance(world.verdicts[2], DiskFullError)
    assert not world.requests[1], "out of order was not to be expected, and has it wait"


def test_a_refusal_after_a_lost_answer_says_that_it_may_be_written() -> None:
    """The leader may still read the first attempt, and find room for it then."""
    world = FullDisk()
    world.begin()
    world.is_full = True
    world.send_batches(1)
    unread = world.requests[1].popleft()
    world.feed(StreamBroken(1, NetworkError("broke")))
    world.now += 1_000
    world.feed(Woken())
    world.round_trip()
    error = world.verdicts[2]
    assert isinstance(error, DiskFullError)
    assert "may have been written all the same" in error.message
    assert error.message.endswith("no room")
    world.is_full = False
    world.arrive(1, unread)
    assert len(world.logs[0].records()) == 2


def test_a_timeout_names_the_refusal_and_not_what_followed_from_it() -> None:
    world = FullDisk(timeout_ms=200)
    world.begin()
    world.is_full = True
    world.send_batches(3)
    world.answers[1].append(world.arrive(1, world.requests[1].popleft()))
    world.feed(world.answers[1].popleft())
    world.answers[1].append(world.arrive(1, world.requests[1].popleft()))
    world.feed(world.answers[1].popleft())
    world.send_batches(1)
    world.now += 1_000
    world.feed(Woken())
    for value in (3, 5):  # Refused as out of order; never sent.
        error = world.verdicts[value]
        assert isinstance(error, DeliveryTimeoutError)
        assert "an earlier batch of the partition was refused: no room" in error.message
        assert isinstance(error.__cause__, DiskFullError)


def test_another_answer_than_out_of_order_is_named_itself() -> None:
    world = FullDisk(timeout_ms=200)
    world.begin()
    world.is_full = True
    world.send_batches(2)
    world.round_trip()
    [request] = world.requests[1]
    entry = request.entries[0]
    world.sender._judge(entry.batch, PartitionAnswer(NotLeaderError("elsewhere")), 1, world.now)
    world.requests[1].clear()
    world.sender._requests.clear()
    world.now += 1_000
    world.feed(Woken())
    error = world.verdicts[3]
    assert isinstance(error, DeliveryTimeoutError)
    assert "last answer: elsewhere" in error.message


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32))
def test_order_and_exactly_once_while_disks_fill_and_have_room(seed: int) -> None:
    world = FullDisk(seed, calm=False)
    turns = random.Random(seed)
    for _ in range(200):
        if turns.random() < 0.1:
            world.is_full = not world.is_full
        world.step()
    world.is_full = False
    world.heal()
    world.check()
    written = {int(r.value or b"") for log in world.logs for r in log.records()}
    for value, what in world.verdicts.items():
        if isinstance(what, DiskFullError) and "may have been written" not in what.message:
            assert value not in written, "refused and written"


def test_nothing_goes_again_behind_a_hole_while_older_batches_wait_for_their_answers() -> None:
    """As where the followers are full as well: the leader has the older ones, and no answer yet."""
    world = FullDisk()
    world.begin()
    world.send_batches(4)
    [first, second, third, fourth] = world.requests[1]
    world.requests[1].clear()
    answers = [world.arrive(1, first), world.arrive(1, second)]
    world.is_full = True
    for refused in (third, fourth):
        world.feed(world.arrive(1, refused))
    world.feed(answers[0])
    assert not world.requests[1], "it could only be refused again"
    world.feed(answers[1])
    assert len(world.requests[1]) == 1
    world.is_full = False
    world.heal()
    world.check()


def test_a_verdict_says_that_a_later_leader_did_not_look_for_an_earlier_attempt() -> None:
    """Too large, says who leads now; the one before had taken it, and its answer was lost."""
    world = FullDisk()
    world.begin()
    world.send_batches(1)
    world.arrive(1, world.requests[1].popleft())
    world.feed(StreamBroken(1, NetworkError("broke")))
    world.logs[0].leader, world.logs[0].leader_epoch = 2, world.logs[0].leader_epoch + 1
    world.refresh()
    world.now += 1_000
    world.feed(Woken())
    [again] = world.requests[2]
    world.requests[2].clear()
    too_large = RecordTooLargeError("max.message.bytes is 10")
    world.feed(Answered(2, again.correlation_id, (PartitionAnswer(too_large),)))
    assert len(world.logs[0].records()) == 2
    assert "may have been written all the same" in str(world.verdicts[2])


def test_a_verdict_without_idempotence_says_that_an_earlier_attempt_was_appended() -> None:
    world = FullDisk()
    world.sender.sequencer = Sequencer(
        idempotent=False, max_in_flight=5, compression=Compression.NONE
    )
    world.send(0)
    world.now += 5
    world.feed(Woken())
    for answer in (RequestTimedOutError("appended, not acknowledged"), DiskFullError("no room")):
        [request] = world.requests[1]
        world.requests[1].clear()
        world.feed(Answered(1, request.correlation_id, (PartitionAnswer(answer),)))
        world.now += 1_000
        world.feed(Woken())
    assert isinstance(world.verdicts[1], DiskFullError)
    assert "may have been written all the same" in world.verdicts[1].message
