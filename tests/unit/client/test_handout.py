"""What a Handout hands out, and what of it counts as processed, whatever comes between."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client.core.subscription import Handout, Position, Run
from penstock.client.model import ConsumerRecord
from penstock.wire.ids import TopicPartition

T0 = TopicPartition("t", 0)
T1 = TopicPartition("t", 1)


def record(offset: int, partition: TopicPartition = T0) -> ConsumerRecord:
    return ConsumerRecord(*partition, offset, 1, None, b"%d" % offset, (), 3, b"id")


def run(start: int, stop: int, partition: TopicPartition = T0) -> Run:
    records = [record(offset, partition) for offset in range(start, stop)]
    return Run(partition, records, 0, Position(stop, 3))


def step(handout: Handout) -> ConsumerRecord | None:
    """The next by iteration, as consumers go about it; None where the engine is to be asked."""
    while True:
        if not handout.interrupted:
            for taken in handout.current:
                return taken
        if not handout.begin_run(7.0, 3):
            return None


def one(handout: Handout) -> int | None:
    taken = step(handout)
    return None if taken is None else taken.offset


def test_by_iteration_a_record_is_processed_when_the_next_is_asked_for() -> None:
    handout = Handout()
    handout.keep([run(0, 3), run(10, 12)])
    assert one(handout) == 0
    assert (handout.processed(), handout.delivered()) == ({}, {T0: Position(1, 3)})
    assert one(handout) == 1
    assert (handout.processed(), handout.delivered()) == (
        {T0: Position(1, 3)},
        {T0: Position(2, 3)},
    )
    assert one(handout) == 2
    assert handout.processed() == {T0: Position(2, 3)}
    assert one(handout) == 10, "in the next run"
    assert (handout.processed(), handout.delivered()) == (
        {T0: Position(3, 3)},
        {T0: Position(11, 3)},
    )
    assert one(handout) == 11
    assert one(handout) is None
    assert handout.processed() == {T0: Position(12, 3)}


def test_a_poll_takes_what_iteration_left() -> None:
    handout = Handout()
    handout.keep([run(0, 3), run(3, 9)])
    assert one(handout) == 0
    assert handout.first_kept(T0) == 1
    handout.settle()
    assert handout.processed() == {T0: Position(1, 3)}
    assert [taken.offset for taken in handout.take(4, 9.0)] == [1, 2, 3, 4]
    assert (handout.processed(), handout.delivered()) == (
        {T0: Position(1, 3)},
        {T0: Position(5, 3)},
    )
    assert one(handout) == 5
    assert handout.processed() == {T0: Position(5, 3)}
    assert [taken.offset for taken in handout.take(99, 9.0)] == [6, 7, 8]


def test_batches_are_by_partition() -> None:
    handout = Handout()
    handout.keep([run(0, 3), run(0, 2, T1), run(3, 6)])
    batches = handout.take_batches(7, 1.0)
    assert {name: [taken.offset for taken in records] for name, records in batches.items()} == {
        T0: [0, 1, 2, 3, 4],
        T1: [0, 1],
    }
    handout.settle()
    assert handout.processed() == {T0: Position(5, 3), T1: Position(2, 3)}
    assert [taken.offset for taken in handout.take(9, 1.0)] == [5]


def test_what_is_interrupted_hands_out_nothing_and_loses_nothing() -> None:
    handout = Handout()
    handout.keep([run(0, 3)])
    assert one(handout) == 0
    handout.interrupted = True
    assert one(handout) is None
    assert handout.processed() == {T0: Position(1, 3)}
    assert handout.take(9, 1.0) == []
    assert handout.first_kept(T0) == 1
    handout.interrupted = False
    assert [one(handout), one(handout), one(handout)] == [1, 2, None]


def test_what_is_dropped_in_the_middle_of_a_run_is_gone() -> None:
    handout = Handout()
    handout.keep([run(0, 3), run(0, 2, T1), run(3, 5)])
    assert [one(handout), one(handout)] == [0, 1]
    handout.drop([T0])
    assert (handout.processed(), handout.delivered()) == ({}, {})
    assert [one(handout), one(handout), one(handout)] == [0, 1, None]
    assert handout.processed() == {T1: Position(2, 3)}


def test_what_is_held_comes_when_it_is_released_and_in_order() -> None:
    handout = Handout()
    handout.keep([run(0, 3), run(0, 2, T1), run(3, 5)])
    assert [one(handout)] == [0]
    handout.hold([T0])
    assert handout.processed() == {}, "the application may not be done with it"
    assert handout.first_kept(T0) == 1
    assert one(handout) == 0
    assert handout.processed() == {T0: Position(1, 3)}
    handout.release([T0])
    assert [one(handout) for _ in range(6)] == [1, 2, 3, 4, 1, None]
    assert handout.processed() == {T0: Position(5, 3), T1: Position(2, 3)}
    handout.keep([run(5, 6)])
    handout.hold([T0])
    handout.drop([T0])
    handout.release([T0])
    assert one(handout) is None


def refuse(taken: ConsumerRecord) -> ConsumerRecord:
    if taken.offset == 2:
        raise ValueError("no 2")
    return taken._replace(value=taken.offset)


def test_a_record_that_cannot_be_converted_raises_at_it_again_and_again() -> None:
    handout = Handout(refuse)
    handout.keep([run(0, 4)])
    assert [taken.value for taken in handout.take(9, 1.0)] == [0, 1]
    for _ in range(2):
        handout.settle()
        with pytest.raises(ValueError, match="no 2"):
            handout.take(9, 1.0)
        assert handout.first_kept(T0) == 2
        assert handout.processed() == {T0: Position(2, 3)}


def test_by_iteration_it_does_so_too() -> None:
    handout = Handout(refuse)
    handout.keep([run(0, 4)])
    assert [one(handout), one(handout)] == [0, 1]
    assert handout.processed() == {T0: Position(1, 3)}
    for _ in range(2):
        with pytest.raises(ValueError, match="no 2"):
            one(handout)
        assert handout.first_kept(T0) == 2
        assert handout.processed() == {T0: Position(2, 3)}


def test_iteration_is_a_sign_of_life_without_looking_at_the_clock() -> None:
    handout = Handout()
    handout.keep([run(0, 3)])
    assert handout.taken_ms(1.0) == float("-inf")
    assert one(handout) == 0
    assert handout.taken_ms(100.0) == 100.0
    assert handout.taken_ms(200.0) == 100.0, "nothing was taken since"
    one(handout)
    assert handout.taken_ms(300.0) == 300.0


class Application:
    """It iterates, polls and pauses as it likes, while runs of two partitions come."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.handout = Handout(None if self.chance.random() < 0.5 else lambda taken: taken)
        self.ends = {T0: 0, T1: 0}
        self.had: dict[TopicPartition, list[int]] = {T0: [], T1: []}
        self.paused: set[TopicPartition] = set()

    def take(self, records: list[ConsumerRecord]) -> None:
        for taken in records:
            self.had[taken.topic_partition].append(taken.offset)

    def act(self) -> None:
        handout, name = self.handout, self.chance.choice((T0, T1))
        match self.chance.randrange(7):
            case 0 if name not in self.paused:  # Of a paused partition nothing is fetched.
                end = self.ends[name] + self.chance.randint(1, 5)
                handout.keep([run(self.ends[name], end, name)])
                self.ends[name] = end
            case 1:
                handout.settle()
                self.take(handout.take(self.chance.randint(1, 7), 1.0))
            case 2:
                handout.settle()
                for records in handout.take_batches(self.chance.randint(1, 7), 1.0).values():
                    self.take(records)
            case 3:
                (handout.release if name in self.paused else handout.hold)([name])
                self.paused ^= {name}
            case 4:
                handout.interrupted = not handout.interrupted
            case _:
                self.iterate(self.chance.randint(1, 4))

    def iterate(self, limit: int) -> None:
        for _ in range(limit):
            if (taken := step(self.handout)) is not None:
                self.take([taken])


@given(st.integers(0, 2**32))
def test_each_record_is_handed_out_once_and_no_position_goes_back(seed: int) -> None:
    application = Application(seed)
    handout, had = application.handout, application.had
    before: dict[TopicPartition, int] = {}
    for _ in range(60):
        application.act()
        for name in (T0, T1):
            assert had[name] == list(range(len(had[name])))
            delivered = handout.delivered().get(name, Position(0)).offset
            processed = handout.processed().get(name, Position(0)).offset
            assert delivered == len(had[name])
            assert before.get(name, 0) <= processed <= delivered
            before[name] = processed
    handout.interrupted = False
    handout.release([T0, T1])
    application.iterate(1_000)
    assert had == {name: list(range(end)) for name, end in application.ends.items()}


def test_an_interrupted_conversion_leaves_all_of_the_poll_to_be_handed_out() -> None:
    interrupt = True

    def convert(record: ConsumerRecord) -> ConsumerRecord:
        if interrupt and record.partition == 1:
            raise KeyboardInterrupt
        return record

    handout = Handout(convert)
    handout.keep([run(0, 3), run(0, 3, T1)])
    with pytest.raises(KeyboardInterrupt):
        handout.take(10, 1.0)
    assert handout.delivered() == {}
    interrupt = False
    assert len(handout.take(10, 1.0)) == 6
