from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.client.core.backoff import Backoff
from penstock.client.core.member import (
    Closed,
    DropStream,
    Effect,
    Failed,
    Leaving,
    Member,
    MemberSettings,
    MemberState,
    Opened,
    OpenStream,
    Polled,
    RebalancePending,
    Received,
    Reconciled,
    Send,
    StoodStill,
    Subscribed,
    Ticked,
)
from penstock.client.core.subscription import Subscription
from penstock.v1 import groups_pb2
from penstock.wire.errors import (
    CoordinatorLoadInProgressError,
    FencedMemberEpochError,
    LeaderHint,
    NetworkError,
    NotCoordinatorError,
    PenstockError,
    UnknownMemberIdError,
    UnreleasedInstanceIdError,
    UnsupportedAssignorError,
)
from penstock.wire.ids import TopicPartition

ORDERS = Subscription(topics=("orders",))


def parts(*numbers: int) -> frozenset[TopicPartition]:
    return frozenset(TopicPartition("orders", number) for number in numbers)


def make(instance: str = "", session_ms: int = 45_000, poll_ms: int = 300_000) -> Member:
    return Member(
        MemberSettings(
            group_id="g",
            member_id="m",
            client_id="c",
            group_instance_id=instance,
            assignor="range",
            rack_id="r",
            session_timeout_ms=session_ms,
            max_poll_interval_ms=poll_ms,
        ),
        Backoff(20, 1_000, lambda: 0.5),
    )


def answer(
    epoch: int = 1, assigned: frozenset[TopicPartition] | None = None, interval_ms: int = 1_000
) -> Received:
    response = groups_pb2.GroupHeartbeatResponse(
        member_id="m", member_epoch=epoch, heartbeat_interval_ms=interval_ms
    )
    if assigned is not None:
        response.assignment.SetInParent()
        if assigned:
            response.assignment.partitions.add(
                topic="orders", topic_id=b"o" * 16, partitions=[p.partition for p in assigned]
            )
    return Received(response)


def refused(error: PenstockError) -> Received:
    return Received(groups_pb2.GroupHeartbeatResponse(error=error.to_proto()))


def sent(effects: list[Effect]) -> list[groups_pb2.GroupHeartbeatRequest]:
    return [effect.request for effect in effects if isinstance(effect, Send)]


def joined(*numbers: int, member: Member | None = None) -> Member:
    member = member or make()
    member.handle(Subscribed(ORDERS), 0)
    member.handle(Opened(), 0)
    member.handle(answer(1, parts(*numbers)), 0)
    change = member.pending_rebalance
    if change is not None:
        member.handle(Reconciled(change), 0)
    assert member.state is MemberState.STABLE
    return member


def test_joining_says_everything_once_and_then_only_that_it_lives() -> None:
    member = make()
    assert member.handle(Subscribed(ORDERS), 0) == [OpenStream(None)]
    [first] = sent(member.handle(Opened(), 5))
    assert (first.group_id, first.member_id, first.member_epoch) == ("g", "m", 0)
    assert list(first.subscription.topics) == ["orders"]
    assert first.HasField("owned")
    assert (first.server_assignor, first.rack_id, first.client_id) == ("range", "r", "c")
    assert (first.session_timeout_ms, first.rebalance_timeout_ms) == (45_000, 300_000)
    member.handle(answer(1), 6)
    assert member.state is MemberState.STABLE
    assert member.next_deadline_ms() == 1_006
    assert sent(member.handle(Ticked(), 1_005)) == []
    [beat] = sent(member.handle(Ticked(), 1_006))
    assert beat.member_epoch == 1
    assert not beat.HasField("subscription")
    assert not beat.HasField("owned")


def test_a_join_without_an_answer_is_not_said_twice_on_one_stream() -> None:
    member = make()
    member.handle(Subscribed(ORDERS), 0)
    assert len(sent(member.handle(Opened(), 0))) == 1
    # Neither when a heartbeat would be due nor when there is something new to say.
    assert sent(member.handle(Ticked(), 4_000)) == []
    assert sent(member.handle(Subscribed(Subscription(topics=("orders", "more"))), 4_100)) == []
    assert 4_100 < member.next_deadline_ms() <= 5_000
    (news,) = sent(member.handle(answer(assigned=parts(0)), 4_200))
    assert news.member_epoch == 1
    assert news.subscription.topics == ["orders", "more"]


def test_answers_to_what_was_said_before_a_join_do_not_make_it_join_twice() -> None:
    member = joined(0)
    assert len(sent(member.handle(Ticked(), 2_000))) == 1
    assert len(sent(member.handle(Ticked(), 3_000))) == 1
    (join,) = sent(member.handle(refused(FencedMemberEpochError("")), 3_001))
    assert join.member_epoch == 0
    assert sent(member.handle(refused(FencedMemberEpochError("")), 3_002)) == []


def test_an_assignment_waits_for_the_application_and_is_acknowledged() -> None:
    member = joined()
    assert RebalancePending() in member.handle(answer(2, parts(0, 1)), 10)
    assert member.owned == frozenset()
    change = member.pending_rebalance
    assert change is not None
    assert change.assigned == tuple(sorted(parts(0, 1)))
    [acknowledged] = sent(member.handle(Reconciled(change), 20))
    assert acknowledged.member_epoch == 2
    assert [list(entry.partitions) for entry in acknowledged.owned.partitions] == [[0, 1]]
    assert acknowledged.owned.partitions[0].topic_id == b"o" * 16
    assert member.pending_rebalance is None


def test_only_what_moved_is_revoked() -> None:
    member = joined(0, 1, 2)
    member.handle(answer(2, parts(1, 2, 3)), 10)
    change = member.pending_rebalance
    assert change is not None
    assert (change.revoked, change.assigned) == (tuple(parts(0)), tuple(parts(3)))


def test_an_assignment_overtaken_by_a_newer_one_is_not_taken_over() -> None:
    member = joined(0)
    member.handle(answer(2, parts(1)), 10)
    old = member.pending_rebalance
    assert old is not None
    member.handle(answer(3, parts(2)), 11)
    assert not member.is_current(old)
    assert sent(member.handle(Reconciled(old), 12)) == []
    assert member.owned == frozenset()  # Given back is given back.
    new = member.pending_rebalance
    assert new is not None
    assert (new.revoked, new.assigned) == ((), tuple(parts(2)))


def test_giving_back_may_be_all_that_a_newer_assignment_wanted() -> None:
    member = joined(0, 1)
    member.handle(answer(2, parts(1, 2)), 10)
    old = member.pending_rebalance
    assert old is not None
    member.handle(answer(3, parts(1)), 11)
    [acknowledged] = sent(member.handle(Reconciled(old), 12))
    assert acknowledged.member_epoch == 3
    assert member.owned == parts(1)
    assert member.pending_rebalance is None


def test_a_broken_stream_keeps_epoch_and_partitions() -> None:
    member = joined(0, 1)
    effects = member.handle(Closed(NetworkError("broke")), 10)
    assert effects == []
    assert 10 < member.next_deadline_ms() <= 40
    assert member.handle(Ticked(), 40) == [OpenStream(None)]
    [hello] = sent(member.handle(Opened(), 50))
    assert hello.member_epoch == 1
    assert list(hello.subscription.topics) == ["orders"]
    assert [list(entry.partitions) for entry in hello.owned.partitions] == [[0, 1]]
    assert member.owned == parts(0, 1)


def test_a_moved_coordinator_is_looked_for_where_the_hint_says() -> None:
    member = joined(0)
    hint = LeaderHint(2, 7, "h", 1)
    effects = member.handle(refused(NotCoordinatorError("moved", leader=hint)), 10)
    assert effects == [DropStream(), OpenStream(hint)]
    assert member.owned == parts(0)


def test_silence_makes_it_look_elsewhere() -> None:
    member = joined(0)
    now = member.next_deadline_ms()
    assert len(sent(member.handle(Ticked(), now))) == 1
    effects: list[Effect] = []
    while DropStream() not in effects:
        effects = member.handle(Ticked(), member.next_deadline_ms())
        assert member.next_deadline_ms() < now + 5_100
    later = member.next_deadline_ms()
    assert later < now + 5_100
    assert member.handle(Ticked(), later) == [OpenStream(None)]
    assert member.owned == parts(0)


def test_an_event_loop_that_stood_still_is_no_silent_coordinator() -> None:
    member = joined(0, member=make(session_ms=20_000))
    now = member.next_deadline_ms()
    member.handle(Ticked(), now)
    now = member.next_deadline_ms() + 9_000  # Late by less than half of the session.
    assert len(sent(member.handle(Ticked(), now))) == 1
    effects = member.handle(answer(interval_ms=1_000), now + 1)
    assert effects == []


def test_a_heartbeat_that_is_late_by_half_a_session_is_told_of() -> None:
    member = joined(0, member=make(session_ms=20_000))
    due = member.next_deadline_ms()
    effects = member.handle(Polled(), due + 10_001)
    assert effects[0] == StoodStill(10_001)
    assert len(sent(effects)) == 1, "and goes out now"
    assert member.handle(Polled(), due + 10_002) == [], "once"


def test_a_loading_coordinator_is_told_again_on_the_same_stream() -> None:
    member = make()
    member.handle(Subscribed(ORDERS), 0)
    member.handle(Opened(), 0)
    assert member.handle(refused(CoordinatorLoadInProgressError("wait")), 1) == []
    [again] = sent(member.handle(Ticked(), 1_000))
    assert list(again.subscription.topics) == ["orders"]


def test_fencing_loses_everything_and_joins_anew() -> None:
    for error in (UnknownMemberIdError("who?"), FencedMemberEpochError("old")):
        member = joined(0, 1)
        effects = member.handle(refused(error), 10)
        assert RebalancePending() in effects
        [hello] = sent(effects)
        assert (hello.member_epoch, hello.member_id) == (0, "m")
        assert not hello.owned.partitions
        change = member.pending_rebalance
        assert change is not None
        assert change.lost == tuple(sorted(parts(0, 1)))
        member.handle(answer(5, parts(1)), 11)
        told = member.pending_rebalance
        assert told is not None
        assert (told.lost, told.assigned) == (change.lost, ())  # The loss is told first.
        member.handle(Reconciled(change), 12)
        change = member.pending_rebalance
        assert change is not None
        assert (change.lost, change.assigned) == ((), tuple(parts(1)))


def test_fencing_in_the_middle_of_a_rebalance_takes_nothing_over() -> None:
    member = joined(0)
    member.handle(answer(2, parts(0, 1)), 10)
    change = member.pending_rebalance
    assert change is not None
    member.handle(refused(FencedMemberEpochError("old")), 11)
    assert not member.is_current(change)
    member.handle(Reconciled(change), 12)
    assert member.owned == frozenset()


def test_a_final_refusal_ends_it_and_subscribing_anew_tries_again() -> None:
    member = joined(0)
    error = UnsupportedAssignorError("no such assignor")
    effects = member.handle(refused(error), 10)
    failures = [effect for effect in effects if isinstance(effect, Failed)]
    assert len(failures) == 1
    assert DropStream() in effects
    assert member.next_deadline_ms() == float("inf")
    assert member.handle(Subscribed(ORDERS), 20) == [OpenStream(None)]


def test_an_instance_still_held_is_waited_for_one_session() -> None:
    member = make(instance="i", session_ms=10_000)
    member.handle(Subscribed(ORDERS), 0)
    member.handle(Opened(), 0)
    held = refused(UnreleasedInstanceIdError("held"))
    now = 0.0
    for now in (1, 5_000, 9_999):
        assert not any(isinstance(effect, Failed) for effect in member.handle(held, now))
    assert any(isinstance(effect, Failed) for effect in member.handle(held, 10_002))


def test_who_is_given_up_joins_once_and_leaves_all_the_same() -> None:
    member = joined(0)
    sent(member.handle(Ticked(), 1_000))
    given_up = refused(UnknownMemberIdError("not heard in time"))
    [join] = sent(member.handle(given_up, 1_001))
    assert join.member_epoch == 0
    # The answer to the heartbeat that was on its way is none to the join.
    assert member.handle(given_up, 1_002) == []
    [bye] = sent(member.handle(Leaving(), 1_003))
    assert bye.member_epoch == -1


def test_a_coordinator_that_took_over_gives_the_one_before_us_its_whole_time() -> None:
    member = make(instance="i", session_ms=10_000)
    member.handle(Subscribed(ORDERS), 0)
    member.handle(Opened(), 0)
    held = refused(UnreleasedInstanceIdError("held"))
    member.handle(held, 1)
    member.handle(Closed(NetworkError("it died")), 8_000)
    member.handle(Opened(), 9_000)
    for now in (9_001, 19_000):
        assert not any(isinstance(effect, Failed) for effect in member.handle(held, now))
    assert any(isinstance(effect, Failed) for effect in member.handle(held, 19_002))


def test_who_does_not_poll_leaves_and_polling_joins_again() -> None:
    member = joined(0, member=make(poll_ms=100))
    member.handle(Polled(), 50)
    assert sent(member.handle(Ticked(), 149)) == []
    [bye] = sent(member.handle(Ticked(), 150))
    assert bye.member_epoch == -1
    assert member.state is MemberState.STALE
    change = member.pending_rebalance
    assert change is not None
    assert change.lost == tuple(parts(0))
    [hello] = sent(member.handle(Polled(), 400))
    assert hello.member_epoch == 0


def test_leaving() -> None:
    [bye] = sent(joined(0).handle(Leaving(), 10))
    assert bye.member_epoch == -1
    member = joined(0, member=make(instance="i"))
    [bye] = sent(member.handle(Leaving(), 10))
    assert (bye.member_epoch, bye.group_instance_id) == (-2, "i")
    assert member.owned == frozenset()
    assert member.next_deadline_ms() == float("inf")


def test_a_changed_subscription_is_said_at_once() -> None:
    member = joined(0)
    [said] = sent(member.handle(Subscribed(Subscription(pattern="a.*")), 10))
    assert said.subscription.topic_pattern == "a.*"
    assert said.member_epoch == 1
    assert sent(member.handle(Subscribed(Subscription(pattern="a.*")), 11)) == []


def test_an_assignment_that_returns_what_is_being_given_up_is_taken_over_again() -> None:
    member = joined(0, 1)
    member.handle(answer(2, parts(0)), 10)
    giving_up = member.pending_rebalance
    assert giving_up is not None
    assert giving_up.revoked == tuple(parts(1))
    member.handle(answer(3, parts(0, 1)), 20)  # While the application still gives 1 up.
    effects = member.handle(Reconciled(giving_up), 30)
    assert RebalancePending() in effects
    member.validate()
    again = member.pending_rebalance
    assert again is not None
    assert again.assigned == tuple(parts(1))
    member.handle(Reconciled(again), 40)
    assert member.state is MemberState.STABLE
    assert member.owned == parts(0, 1)


def test_the_answer_to_a_leave_is_not_taken_for_that_of_the_join_after_it() -> None:
    member = joined(0, member=make(poll_ms=1_000))
    [leave] = sent(member.handle(Ticked(), 1_000))
    assert leave.member_epoch == -1
    [join] = sent(member.handle(Polled(), 1_001))
    assert join.member_epoch == 0
    member.handle(answer(-1), 1_002)
    member.validate()
    assert member.state is MemberState.JOINING
    member.handle(answer(7, parts(0)), 1_003)
    assert member.epoch == 7


class Coordinated(RuleBasedStateMachine):
    """A member under any order of events: it never holds what it was not given."""

    def __init__(self) -> None:
        super().__init__()
        self.member = make(poll_ms=2_000)
        self.now = 0.0
        self.open = False
        self.opening = False
        self.epoch = 0
        self.given: frozenset[TopicPartition] = frozenset()
        self.allowed: frozenset[TopicPartition] = frozenset()

    def feed(self, event: object) -> None:
        for effect in self.member.handle(event, self.now):  # type: ignore[arg-type]
            if isinstance(effect, OpenStream):
                assert not self.open
                assert not self.opening
                self.opening = True
            elif isinstance(effect, DropStream):
                self.open = False
            elif isinstance(effect, Send):
                assert self.open
                assert effect.request.member_epoch <= self.epoch

    @rule()
    def subscribe(self) -> None:
        self.feed(Subscribed(ORDERS))

    @rule(step=st.sampled_from([1, 50, 1_000, 3_000]))
    def wait(self, step: int) -> None:
        self.now += step
        self.feed(Ticked())

    @rule()
    def poll(self) -> None:
        self.feed(Polled())

    @precondition(lambda self: self.opening)
    @rule(succeeds=st.booleans())
    def open_or_not(self, succeeds: bool) -> None:
        self.opening = False
        self.open = succeeds
        self.feed(Opened() if succeeds else Closed(NetworkError("no")))

    @precondition(lambda self: self.open)
    @rule()
    def break_stream(self) -> None:
        self.open = False
        self.feed(Closed(NetworkError("broke")))

    @precondition(lambda self: self.open and self.member.in_group)
    @rule(numbers=st.none() | st.frozensets(st.integers(0, 3)))
    def assign(self, numbers: frozenset[int] | None) -> None:
        self.epoch += 1
        assigned = None if numbers is None else parts(*numbers)
        if assigned is not None:
            self.allowed |= assigned
        self.feed(answer(self.epoch, assigned))

    @precondition(lambda self: self.open)
    @rule(
        error=st.sampled_from(
            [
                UnknownMemberIdError("who"),
                FencedMemberEpochError("old"),
                NotCoordinatorError("moved"),
                CoordinatorLoadInProgressError("wait"),
                UnsupportedAssignorError("no"),
            ]
        )
    )
    def refuse(self, error: PenstockError) -> None:
        self.feed(refused(error))

    @rule(late=st.booleans())
    def reconcile(self, late: bool) -> None:
        change = self.member.pending_rebalance
        if change is None:
            return
        if late:
            self.wait(1)
        self.feed(Reconciled(change))

    @rule()
    def leave(self) -> None:
        self.feed(Leaving())

    @invariant()
    def holds_only_what_it_was_given(self) -> None:
        self.member.validate()
        assert self.member.owned <= self.allowed
        if self.member.in_group:
            assert self.member.next_deadline_ms() < float("inf")


Coordinated.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestCoordinated = Coordinated.TestCase
