"""Which batches wait for which question to a coordinator: by example, and for any history."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.broker.core.verification import (
    Answered,
    Append,
    Arrived,
    Ask,
    Effect,
    LeadershipEnded,
    Question,
    Refuse,
    Stopped,
    Tick,
    Verification,
)
from penstock.wire.errors import (
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    NotLeaderError,
    PenstockError,
    ProducerFencedError,
    RequestTimedOutError,
)
from penstock.wire.ids import TopicId, TopicIdPartition

PARTITION = TopicIdPartition(TopicId(b"0123456789abcdef"), 0)
OTHER = TopicIdPartition(TopicId(b"0123456789abcdef"), 1)


def question(partition: TopicIdPartition = PARTITION, producer_id: int = 7) -> Question:
    return Question(partition, f"id-{producer_id}", producer_id, 3)


def arrived(
    item: str, *, of: Question | None = None, is_open: bool = False, **more: Any
) -> Arrived[str]:
    more = {"size_bytes": 10, "deadline_ms": 1_000, **more}
    return Arrived(of or question(), item, is_open, **more)


def asked(effects: list[Effect[str]]) -> Ask:
    (ask,) = effects
    assert isinstance(ask, Ask)
    return ask


def refused(effects: list[Effect[str]]) -> list[tuple[str, type[PenstockError]]]:
    told = []
    for effect in effects:
        assert isinstance(effect, Refuse)
        told.append((effect.item, type(effect.error)))
    return told


def test_a_batch_of_an_open_transaction_is_appended_without_a_question() -> None:
    verification: Verification[str] = Verification()
    assert verification.handle(arrived("a", is_open=True), 0) == [Append("a", verified=False)]
    assert verification.next_deadline_ms is None


def test_batches_wait_behind_one_question_in_their_order() -> None:
    verification: Verification[str] = Verification()
    ask = asked(verification.handle(arrived("a"), 0))
    assert verification.handle(arrived("b"), 1) == []
    # Whatever the log says by now: what came before has not been appended.
    assert verification.handle(arrived("c", is_open=True), 2) == []
    effects = verification.handle(Answered(ask.question, ask.attempt, None), 3)
    assert effects == [Append(item, verified=True) for item in "abc"]
    assert verification.handle(arrived("d", is_open=True), 4) == [Append("d", verified=False)]
    verification.validate()


def test_other_producers_and_partitions_go_on() -> None:
    verification: Verification[str] = Verification()
    asked(verification.handle(arrived("a"), 0))
    free = question(producer_id=8)
    assert verification.handle(arrived("b", of=free, is_open=True), 0) == [
        Append("b", verified=False)
    ]
    assert asked(verification.handle(arrived("c", of=question(OTHER)), 0)).question == question(
        OTHER
    )


def test_deadlines_of_what_was_answered_are_not_kept() -> None:
    verification: Verification[str] = Verification()
    asks = [
        asked(verification.handle(arrived("a", of=question(producer_id=number)), 0))
        for number in range(300)
    ]
    for ask in asks:
        assert len(verification.handle(Answered(ask.question, ask.attempt, None), 1)) == 1
        verification.validate()


def test_a_refusal_is_that_of_all_that_waited() -> None:
    verification: Verification[str] = Verification()
    ask = asked(verification.handle(arrived("a"), 0))
    verification.handle(arrived("b"), 0)
    fenced = Answered(ask.question, ask.attempt, ProducerFencedError("another has the id"))
    assert refused(verification.handle(fenced, 1)) == [
        ("a", ProducerFencedError),
        ("b", ProducerFencedError),
    ]
    assert verification.waiting_count == verification.waiting_bytes == 0


def test_what_is_refused_for_now_is_asked_again_less_and_less_often() -> None:
    verification: Verification[str] = Verification()
    ask = asked(verification.handle(arrived("a", deadline_ms=100_000), 0))
    now_ms, waits = 0, []
    for _ in range(8):
        again = Answered(ask.question, ask.attempt, CoordinatorLoadInProgressError("it loads"))
        assert verification.handle(again, now_ms) == []
        at_ms = verification.next_deadline_ms
        assert at_ms is not None
        assert verification.handle(Tick(), at_ms - 1) == []
        ask = asked(verification.handle(Tick(), at_ms))
        waits.append(at_ms - now_ms)
        now_ms = at_ms
    assert waits == [20, 40, 80, 160, 320, 500, 500, 500]
    assert verification.handle(Answered(ask.question, ask.attempt, None), now_ms) == [
        Append("a", verified=True)
    ]


def test_an_overdue_batch_takes_those_behind_it_with_it() -> None:
    verification: Verification[str] = Verification()
    ask = asked(verification.handle(arrived("a", deadline_ms=300), 0))
    verification.handle(arrived("b", deadline_ms=100), 0)
    verification.handle(arrived("c", deadline_ms=900), 0)
    verification.handle(
        Answered(ask.question, ask.attempt, CoordinatorLoadInProgressError("it loads")), 90
    )
    assert verification.next_deadline_ms == 100
    effects = verification.handle(Tick(), 100)
    # Were c let in now, b would be out of order when it is sent again.
    assert refused(effects) == [("b", RequestTimedOutError), ("c", RequestTimedOutError)]
    assert isinstance(effects[0], Refuse)
    assert "COORDINATOR_LOAD_IN_PROGRESS: it loads" in effects[0].error.message
    ask = asked(verification.handle(Tick(), 110))
    assert verification.handle(Answered(ask.question, ask.attempt, None), 120) == [
        Append("a", verified=True)
    ]


def test_a_batch_that_comes_too_late_is_not_asked_for() -> None:
    verification: Verification[str] = Verification()
    assert refused(verification.handle(arrived("a", deadline_ms=5), 5)) == [
        ("a", RequestTimedOutError)
    ]


def test_the_end_of_the_leadership_is_the_end_of_the_wait() -> None:
    verification: Verification[str] = Verification()
    ask = asked(verification.handle(arrived("a"), 0))
    elsewhere = asked(verification.handle(arrived("b", of=question(OTHER)), 0))
    ended = LeadershipEnded(PARTITION, NotLeaderError("broker 2 leads"))
    assert refused(verification.handle(ended, 1)) == [("a", NotLeaderError)]
    # It leads again, and asks anew: the answer to the first question is not that to the second.
    again = asked(verification.handle(arrived("c"), 2))
    assert verification.handle(Answered(ask.question, ask.attempt, None), 3) == []
    assert verification.handle(Answered(again.question, again.attempt, None), 3) == [
        Append("c", verified=True)
    ]
    assert verification.handle(Answered(elsewhere.question, elsewhere.attempt, None), 3) == [
        Append("b", verified=True)
    ]
    assert refused(verification.handle(Stopped(NotLeaderError("it stops")), 4)) == []


def test_nothing_waits_for_a_broker_that_stops() -> None:
    verification: Verification[str] = Verification()
    for at, partition in enumerate((PARTITION, OTHER)):
        verification.handle(arrived(str(at), of=question(partition)), 0)
    effects = verification.handle(Stopped(NotLeaderError("it stops")), 1)
    assert refused(effects) == [("0", NotLeaderError), ("1", NotLeaderError)]
    verification.validate()


@pytest.mark.parametrize("bounds", [{"max_waiting": 2}, {"max_waiting_bytes": 20}])
def test_what_waits_is_bounded(bounds: dict[str, int]) -> None:
    verification: Verification[str] = Verification(**bounds)
    ask = asked(verification.handle(arrived("a"), 0))
    verification.handle(arrived("b"), 0)
    assert refused(verification.handle(arrived("c"), 0)) == [("c", CoordinatorNotAvailableError)]
    # What needs not wait is not counted.
    assert verification.handle(arrived("d", of=question(OTHER), is_open=True), 0)
    verification.handle(Answered(ask.question, ask.attempt, None), 0)
    assert asked(verification.handle(arrived("e"), 0))
    verification.validate()


def test_a_batch_larger_than_all_that_may_wait_can_wait_alone() -> None:
    verification: Verification[str] = Verification(max_waiting_bytes=20)
    assert asked(verification.handle(arrived("a", size_bytes=21), 0))
    assert refused(verification.handle(arrived("b", size_bytes=1), 0)) == [
        ("b", CoordinatorNotAvailableError)
    ]


# ---------------------------------------------------------------------- for any history


@dataclass
class _World:
    """What the coordinator has let in, and what each batch has come to."""

    given: dict[int, tuple[Question, int, bool]] = field(default_factory=dict)
    outcomes: dict[int, Effect[int]] = field(default_factory=dict)
    asks: list[Ask] = field(default_factory=list)


class VerificationMachine(RuleBasedStateMachine):
    """Batches, answers (late, double, of any kind), moves of the leadership, and time."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0
        self.core: Verification[int] = Verification(max_waiting=8, max_waiting_bytes=100)
        self.world = _World()
        self.answered: set[int] = set()  # Attempts that were let in.

    def take(self, effects: list[Effect[int]]) -> None:
        for effect in effects:
            if isinstance(effect, Ask):
                assert effect.attempt not in {ask.attempt for ask in self.world.asks}
                self.world.asks.append(effect)
                continue
            assert effect.item not in self.world.outcomes, "a batch has two outcomes"
            if isinstance(effect, Append):
                self.check_append(effect)
            self.world.outcomes[effect.item] = effect

    def check_append(self, effect: Append[int]) -> None:
        of, _, is_open = self.world.given[effect.item]
        if effect.verified:
            allowed = {ask.question for ask in self.world.asks if ask.attempt in self.answered}
            assert of in allowed, "nobody let it in"
        else:
            assert is_open
        # Nothing of the same transaction and partition that came before waits still.
        earlier = [
            item
            for item, (its, _, _) in self.world.given.items()
            if its == of and item < effect.item
        ]
        assert all(item in self.world.outcomes for item in earlier), "a batch overtook another"

    @rule(
        producer_id=st.integers(1, 2),
        number=st.integers(0, 1),
        is_open=st.booleans(),
        size_bytes=st.integers(1, 120),
        wait_ms=st.integers(0, 400),
    )
    def arrive(
        self, producer_id: int, number: int, is_open: bool, size_bytes: int, wait_ms: int
    ) -> None:
        item = len(self.world.given)
        of = question((PARTITION, OTHER)[number], producer_id)
        self.world.given[item] = (of, self.now_ms + wait_ms, is_open)
        event = Arrived(of, item, is_open, size_bytes, self.now_ms + wait_ms)
        self.take(self.core.handle(event, self.now_ms))

    @precondition(lambda self: self.world.asks)
    @rule(data=st.data(), kind=st.sampled_from(["allowed", "fenced", "later"]))
    def answer(self, data: st.DataObject, kind: str) -> None:
        ask = data.draw(st.sampled_from(self.world.asks))
        error = {
            "allowed": None,
            "fenced": ProducerFencedError("fenced"),
            "later": CoordinatorLoadInProgressError("later"),
        }[kind]
        if error is None:
            self.answered.add(ask.attempt)
        self.take(self.core.handle(Answered(ask.question, ask.attempt, error), self.now_ms))

    @rule(number=st.integers(0, 1))
    def move(self, number: int) -> None:
        partition = (PARTITION, OTHER)[number]
        event = LeadershipEnded(partition, NotLeaderError("elsewhere"))
        self.take(self.core.handle(event, self.now_ms))
        waiting = self.waiting()
        assert not [item for item in waiting if self.world.given[item][0].partition == partition]

    @rule(ms=st.integers(1, 300))
    def pass_time(self, ms: int) -> None:
        self.now_ms += ms
        self.take(self.core.handle(Tick(), self.now_ms))
        assert all(self.world.given[item][1] > self.now_ms for item in self.waiting())

    def waiting(self) -> list[int]:
        return [item for item in self.world.given if item not in self.world.outcomes]

    @invariant()
    def holds(self) -> None:
        self.core.validate()
        assert self.core.waiting_count == len(self.waiting())
        due_ms = self.core.next_deadline_ms
        assert (due_ms is None) == (not self.waiting())
        assert due_ms is None or due_ms > self.now_ms

    def teardown(self) -> None:
        self.take(self.core.handle(Stopped(NotLeaderError("it stops")), self.now_ms))
        assert not self.waiting()


TestVerificationMachine = VerificationMachine.TestCase
TestVerificationMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
