"""Which batches wait for which question to a coordinator: by example, and for any history."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.broker.core.producer_state import ProducerState
from penstock.broker.core.transactions import Marker
from penstock.broker.core.verification import (
    MARK_PATIENCE_MS,
    Answered,
    Append,
    Arrived,
    Ask,
    Effect,
    LeadershipEnded,
    Marked,
    Question,
    Refuse,
    Stopped,
    Tick,
    Verification,
    is_behind,
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
from penstock.wire.markers import MarkerType, encode_marker
from penstock.wire.records import BatchBuilder, parse_header

PARTITION = TopicIdPartition(TopicId(b"0123456789abcdef"), 0)
OTHER = TopicIdPartition(TopicId(b"0123456789abcdef"), 1)


def question(
    partition: TopicIdPartition = PARTITION, producer_id: int = 7, epoch: int = 3
) -> Question:
    return Question(partition, f"id-{producer_id}", producer_id, epoch)


def arrived(
    item: str, *, of: Question | None = None, is_open: bool = False, **more: Any
) -> Arrived[str]:
    more = {"size_bytes": 10, "deadline_ms": 1_000, **more}
    return Arrived(of or question(), item, is_open, **more)


def marked(epoch: int = 3, *, kept: bool, producer_id: int = 7, newest: int = -1) -> Marked:
    return Marked(PARTITION, producer_id, epoch, kept, max(epoch, newest))


def appended(*items: str) -> list[Append[str]]:
    return [Append(item, verified=True) for item in items]


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


# ---------------------------------------------------------------------- marks and their word


def test_a_batch_that_overtakes_the_mark_goes_in_behind_it() -> None:
    verification: Verification[str] = Verification()
    assert verification.handle(arrived("a", is_behind=True), 0) == []
    assert verification.handle(arrived("b", is_behind=True), 1) == []
    assert verification.next_deadline_ms == MARK_PATIENCE_MS
    assert verification.handle(marked(kept=True), 2) == appended("a", "b")
    assert verification.handle(arrived("c", is_open=True), 3) == [Append("c", verified=False)]
    verification.validate()


def test_a_word_lets_in_what_comes_after_the_mark_of_its_epoch_alone() -> None:
    verification: Verification[str] = Verification()
    assert verification.handle(marked(kept=True), 0) == []
    assert verification.handle(arrived("a"), 1) == appended("a")
    for other in (question(epoch=4), question(epoch=2), question(producer_id=8), question(OTHER)):
        assert asked(verification.handle(arrived("b", of=other), 2)).question == other


def test_a_mark_that_says_nothing_has_the_coordinator_asked() -> None:
    verification: Verification[str] = Verification()
    verification.handle(arrived("a", is_behind=True), 0)
    verification.handle(arrived("b", is_behind=True), 0)
    ask = asked(verification.handle(marked(kept=False), 1))
    assert verification.handle(Answered(ask.question, ask.attempt, None), 2) == appended("a", "b")
    verification.validate()


def test_nobody_waits_for_a_mark_for_ever() -> None:
    verification: Verification[str] = Verification()
    verification.handle(arrived("a", is_behind=True), 5)
    assert verification.handle(Tick(), 4 + MARK_PATIENCE_MS) == []
    ask = asked(verification.handle(Tick(), 5 + MARK_PATIENCE_MS))
    # The mark may come first now, and what the coordinator answers is nothing to anybody.
    assert verification.handle(marked(kept=True), 200) == appended("a")
    assert verification.handle(Answered(ask.question, ask.attempt, None), 201) == []
    verification.validate()


@pytest.mark.parametrize("kept", [True, False])
def test_what_was_allowed_waits_for_the_mark_all_the_same(kept: bool) -> None:
    verification: Verification[str] = Verification()
    ask = asked(verification.handle(arrived("a"), 0))
    allowed = Answered(ask.question, ask.attempt, None, is_behind=True)
    assert verification.handle(allowed, 1) == []
    assert verification.handle(allowed, 2) == []
    assert verification.handle(arrived("b", is_behind=True), 3) == []
    assert verification.handle(Tick(), 999) == []
    assert verification.handle(marked(kept=kept), 999) == appended("a", "b")
    verification.validate()


def test_a_mark_that_never_comes_is_named_when_the_time_is_over() -> None:
    verification: Verification[str] = Verification()
    ask = asked(verification.handle(arrived("a"), 0))
    verification.handle(Answered(ask.question, ask.attempt, None, is_behind=True), 1)
    (refusal,) = verification.handle(Tick(), 1_000)
    assert isinstance(refusal, Refuse)
    assert isinstance(refusal.error, RequestTimedOutError)
    assert "transactions hanging" in refusal.error.message


@pytest.mark.parametrize(
    "after", [marked(4, kept=False), marked(4, kept=True), marked(3, kept=False)]
)
def test_a_word_is_what_the_newest_mark_says(after: Marked) -> None:
    verification: Verification[str] = Verification()
    verification.handle(marked(kept=True), 0)
    verification.handle(after, 1)
    assert asked(verification.handle(arrived("a"), 2)).question == question()
    if after.kept:
        assert verification.handle(arrived("b", of=question(epoch=4)), 3) == appended("b")


def test_a_mark_that_comes_late_neither_gives_a_word_nor_takes_one() -> None:
    verification: Verification[str] = Verification()
    verification.handle(marked(2, kept=True, newest=3), 0)
    assert asked(verification.handle(arrived("a", of=question(epoch=2)), 1))
    verification.handle(arrived("b", is_behind=True), 1)
    assert verification.handle(marked(2, kept=False, newest=3), 2) == []
    verification.handle(marked(3, kept=True), 3)
    verification.handle(marked(2, kept=False, newest=3), 4)
    assert verification.handle(arrived("c"), 5) == appended("c")


def test_a_word_is_of_one_leadership() -> None:
    for ended in (
        LeadershipEnded(PARTITION, NotLeaderError("it leads in the next epoch")),
        Stopped(NotLeaderError("it stops")),
    ):
        verification: Verification[str] = Verification()
        verification.handle(marked(kept=True), 0)
        verification.handle(marked(kept=True, producer_id=8), 0)
        verification.handle(ended, 1)
        assert asked(verification.handle(arrived("a"), 2)).question == question()
        verification.validate()
    verification = Verification()
    verification.handle(marked(kept=True), 0)
    verification.handle(LeadershipEnded(OTHER, NotLeaderError("broker 2 leads")), 1)
    assert verification.handle(arrived("a"), 2) == appended("a")


def test_words_are_bounded_and_the_first_goes_first() -> None:
    verification: Verification[str] = Verification(max_words=2)
    for producer_id in (7, 8, 7, 9):
        verification.handle(marked(kept=True, producer_id=producer_id), 0)
        verification.validate()
    assert len(verification.words) == 2
    for producer_id in (7, 9):
        batch = arrived(str(producer_id), of=question(producer_id=producer_id))
        assert verification.handle(batch, 1) == appended(str(producer_id))
    assert asked(verification.handle(arrived("8", of=question(producer_id=8)), 1))


def test_what_waits_for_a_mark_is_over_with_the_leadership() -> None:
    verification: Verification[str] = Verification()
    verification.handle(arrived("a", is_behind=True), 0)
    ended = LeadershipEnded(PARTITION, NotLeaderError("broker 2 leads"))
    assert refused(verification.handle(ended, 1)) == [("a", NotLeaderError)]
    assert verification.handle(marked(kept=True), 2) == []
    assert verification.next_deadline_ms is None


def test_who_is_behind_is_read_from_the_log() -> None:
    state = ProducerState()
    builder = BatchBuilder()
    builder.append(0, None, b"a")
    of_epoch_2 = builder.build(
        producer_id=7, producer_epoch=2, base_sequence=0, is_transactional=True
    )
    marker = Marker(7, 3, True, 0)
    assert not is_behind(state, 7, 3)
    assert Marked.of(state, PARTITION, marker, kept=True).newest_epoch == 3
    state.record(parse_header(of_epoch_2), 0, now_ms=0)
    assert is_behind(state, 7, 3)
    assert not is_behind(state, 7, 2)  # It is open itself.
    assert not is_behind(state, 7, 1)
    assert not is_behind(state, 8, 3)
    assert Marked.of(state, PARTITION, marker, kept=True).newest_epoch == 2
    mark = encode_marker(
        MarkerType.COMMIT, producer_id=7, producer_epoch=3, coordinator_epoch=0, timestamp_ms=0
    )
    state.record(parse_header(mark), 1, now_ms=0)
    assert not is_behind(state, 7, 3)
    assert not is_behind(state, 7, 4)


# ---------------------------------------------------------------------- for any history


@dataclass
class _World:
    """What the coordinator has let in, what the log has, and what each batch has come to."""

    given: dict[int, tuple[Question, int, bool]] = field(default_factory=dict)
    # By partition and producer id: the newest epoch in the log, and whether it is open there.
    log: dict[tuple[TopicIdPartition, int], tuple[int, bool]] = field(default_factory=dict)
    # What marks of the present leadership have said, of transactions that no mark has ended.
    words: set[Question] = field(default_factory=set)
    outcomes: dict[int, Effect[int]] = field(default_factory=dict)
    asks: list[Ask] = field(default_factory=list)


class VerificationMachine(RuleBasedStateMachine):
    """Batches, marks, answers (late, double, of any kind), moves of the leadership, and time."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0
        self.core: Verification[int] = Verification(
            max_waiting=8, max_waiting_bytes=100, max_words=3
        )
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
        place = of.partition, of.producer_id
        newest, has_open = self.world.log.get(place, (-1, False))
        if effect.verified:
            allowed = {ask.question for ask in self.world.asks if ask.attempt in self.answered}
            assert of in allowed or of in self.world.words, "nobody let it in"
            assert not (has_open and newest < of.producer_epoch), "the mark before it is missing"
            if newest <= of.producer_epoch:  # Else the log refuses it.
                self.world.log[place] = of.producer_epoch, True
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
        epoch=st.integers(0, 4),
        size_bytes=st.integers(1, 120),
        wait_ms=st.integers(0, 400),
    )
    def arrive(
        self, producer_id: int, number: int, epoch: int, size_bytes: int, wait_ms: int
    ) -> None:
        item = len(self.world.given)
        of = question((PARTITION, OTHER)[number], producer_id, epoch)
        is_open = self.world.log.get((of.partition, producer_id)) == (epoch, True)
        self.world.given[item] = (of, self.now_ms + wait_ms, is_open)
        event = Arrived(of, item, is_open, size_bytes, self.now_ms + wait_ms, self.is_behind(of))
        self.take(self.core.handle(event, self.now_ms))

    def is_behind(self, of: Question) -> bool:
        newest, has_open = self.world.log.get((of.partition, of.producer_id), (-1, False))
        return has_open and newest < of.producer_epoch

    @rule(
        producer_id=st.integers(1, 2),
        number=st.integers(0, 1),
        epoch=st.integers(1, 4),
        kept=st.booleans(),
    )
    def mark(self, producer_id: int, number: int, epoch: int, kept: bool) -> None:
        """Also late ones, and those that are there."""
        partition = (PARTITION, OTHER)[number]
        place = partition, producer_id
        newest, has_open = self.world.log.get(place, (-1, False))
        if epoch > newest:
            newest, has_open = epoch, False
            self.world.log[place] = newest, has_open
        self.world.words = {
            one
            for one in self.world.words
            if (one.partition, one.producer_id) != place or one.producer_epoch >= newest
        }
        if kept and epoch == newest:
            self.world.words.add(question(partition, producer_id, epoch))
        event = Marked(partition, producer_id, epoch, kept, newest)
        self.take(self.core.handle(event, self.now_ms))
        if epoch == newest:
            # Who waits still, waits for an answer.
            for item in self.waiting():
                of = self.world.given[item][0]
                if (of.partition, of.producer_id) == place:
                    assert not (kept and of.producer_epoch == epoch)
                    assert of in {ask.question for ask in self.world.asks}

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
        event = Answered(ask.question, ask.attempt, error, self.is_behind(ask.question))
        self.take(self.core.handle(event, self.now_ms))

    @rule(number=st.integers(0, 1))
    def move(self, number: int) -> None:
        partition = (PARTITION, OTHER)[number]
        event = LeadershipEnded(partition, NotLeaderError("elsewhere"))
        self.world.words = {one for one in self.world.words if one.partition != partition}
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
