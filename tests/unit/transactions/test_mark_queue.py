"""Marks on their way to leaders: gathered, one request a leader, sent until they are there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.broker.core import transaction_marks
from penstock.broker.core.transaction_events import Mark, MarkDone
from penstock.broker.core.transaction_marks import MarkQueue, MarkRequest, Owner
from penstock.broker.core.transaction_values import Participant
from tests.unit.transactions.transaction_harness import participant

OWNER = Owner(3, 7)
NAMES = ("orders-0", "orders-1", "sales-0", "stock-0")


class Leaders:
    """Who leads what: 1 for orders-0 and sales-0, 2 for orders-1, nobody for the rest."""

    def __init__(self) -> None:
        self.nodes: dict[Participant, int] = {
            participant("orders-0"): 1,
            participant("sales-0"): 1,
            participant("orders-1"): 2,
        }
        self.gone: set[Participant] = set()

    def exists(self, one: Participant) -> bool:
        return one not in self.gone

    def leader_of(self, one: Participant) -> int | None:
        return self.nodes.get(one)


def mark(name: str, *partitions: str, epoch: int = 5, commit: bool = True) -> Mark:
    return Mark(name, 100, epoch, commit, frozenset(map(participant, partitions)))


def sent(requests: list[MarkRequest]) -> dict[int, list[tuple[str, list[str]]]]:
    return {
        request.node_id: [
            (
                piece.mark.transactional_id,
                [f"{one.topic}-{one.partition}" for one in piece.partitions],
            )
            for piece in request.pieces
        ]
        for request in requests
    }


def all_written(request: MarkRequest) -> list[list[bool]]:
    return [[True] * len(piece.partitions) for piece in request.pieces]


def none_written(request: MarkRequest) -> list[list[bool]]:
    return [[False] * len(piece.partitions) for piece in request.pieces]


def test_marks_go_to_their_leaders_together() -> None:
    queue = MarkQueue(Leaders())
    queue.add(OWNER, [mark("a", "orders-0", "orders-1"), mark("b", "sales-0")])
    requests = queue.next_requests(1_000)
    assert sent(requests) == {
        1: [("a", ["orders-0"]), ("b", ["sales-0"])],
        2: [("a", ["orders-1"])],
    }
    assert [piece.coordinator_epoch for piece in requests[0].pieces] == [7, 7]
    assert not queue.next_requests(1_000)
    done = queue.answered(requests[0], all_written(requests[0]), 1_010)
    assert done == {
        OWNER: [
            MarkDone("a", 100, 5, frozenset({participant("orders-0")})),
            MarkDone("b", 100, 5, frozenset({participant("sales-0")})),
        ]
    }
    assert queue.count == 1
    queue.answered(requests[1], all_written(requests[1]), 1_010)
    assert queue.count == 0
    assert queue.next_deadline_ms(1_010) is None


def test_what_comes_while_a_request_is_under_way_goes_with_the_next() -> None:
    queue = MarkQueue(Leaders())
    queue.add(OWNER, [mark("a", "orders-0")])
    (first,) = queue.next_requests(1_000)
    queue.add(OWNER, [mark("b", "sales-0")])
    queue.add(OWNER, [mark("c", "orders-0")])
    assert not queue.next_requests(1_001)
    queue.answered(first, all_written(first), 1_002)
    assert sent(queue.next_requests(1_002)) == {1: [("b", ["sales-0"]), ("c", ["orders-0"])]}


def test_a_leader_that_takes_long_is_sent_marks_of_its_other_partitions() -> None:
    queue = MarkQueue(Leaders())
    queue.add(OWNER, [mark("a", "orders-0")])
    (stuck,) = queue.next_requests(1_000)
    queue.add(OWNER, [mark("b", "sales-0"), mark("c", "orders-0")])
    at_ms = queue.next_deadline_ms(1_000)
    assert at_ms == 1_100
    assert not queue.next_requests(at_ms - 1)
    (second,) = queue.next_requests(at_ms)
    assert sent([second]) == {1: [("b", ["sales-0"])]}, "orders-0 is what it waits for"
    assert queue.next_deadline_ms(at_ms) is None
    queue.answered(second, all_written(second), at_ms)
    queue.answered(stuck, all_written(stuck), at_ms)
    assert sent(queue.next_requests(at_ms)) == {1: [("c", ["orders-0"])]}


def test_no_more_than_some_requests_are_under_way_to_a_leader() -> None:
    leaders = Leaders()
    many = [f"orders-{number}" for number in range(10, 30)]
    leaders.nodes |= {participant(name): 1 for name in many}
    queue = MarkQueue(leaders)
    under_way = []
    for at, name in enumerate(many):
        queue.add(OWNER, [mark(name, name)])
        under_way += queue.next_requests(1_000 + 1_000 * at)
    assert len(under_way) == transaction_marks.MAX_UNDER_WAY


def test_a_request_is_about_so_many_partitions_that_its_answer_fits_in_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leaders = Leaders()
    many = [f"orders-{number}" for number in range(10, 17)]
    leaders.nodes |= {participant(name): 1 for name in many}
    queue = MarkQueue(leaders)
    assert transaction_marks._MAX_PARTITIONS == 10_000
    monkeypatch.setattr(transaction_marks, "_MAX_PARTITIONS", 4)
    queue.add(OWNER, [mark("a", *many[:3]), mark("b", *many[3:])])
    (first,) = queue.next_requests(1_000)
    assert sent([first]) == {1: [("a", many[:3]), ("b", many[3:4])]}
    queue.answered(first, all_written(first), 1_000)
    (second,) = queue.next_requests(1_000)
    assert sent([second]) == {1: [("b", many[4:])]}
    queue.answered(second, all_written(second), 1_000)
    assert queue.count == 0


def test_a_partition_that_refuses_holds_up_no_other_one() -> None:
    queue = MarkQueue(Leaders())
    queue.add(OWNER, [mark("a", "orders-0", "sales-0")])
    (first,) = queue.next_requests(1_000)
    done = queue.answered(first, [[False, True]], 1_000)
    assert done[OWNER][0].partitions == {participant("sales-0")}
    queue.add(OWNER, [mark("b", "sales-0")])
    assert sent(queue.next_requests(1_000)) == {1: [("b", ["sales-0"])]}
    assert queue.next_deadline_ms(1_000) == 1_050


def test_what_is_refused_is_tried_again_less_and_less_often() -> None:
    queue = MarkQueue(Leaders())
    queue.add(OWNER, [mark("a", "orders-0")])
    now_ms, pauses = 1_000, []
    for _ in range(9):
        (request,) = queue.next_requests(now_ms)
        queue.answered(request, none_written(request), now_ms)
        at_ms = queue.next_deadline_ms(now_ms)
        assert at_ms is not None
        assert not queue.next_requests(at_ms - 1)
        pauses.append(at_ms - now_ms)
        now_ms = at_ms
    assert pauses == [50, 100, 200, 400, 800, 1_600, 2_000, 2_000, 2_000]


def test_a_leader_that_cannot_be_reached_is_tried_again_less_and_less_often() -> None:
    queue = MarkQueue(Leaders())
    queue.add(OWNER, [mark("a", "orders-0")])
    (request,) = queue.next_requests(1_000)
    assert not queue.answered(request, None, 1_000)
    assert queue.next_deadline_ms(1_000) == 1_050
    (request,) = queue.next_requests(1_050)
    queue.answered(request, None, 1_050)
    assert queue.next_deadline_ms(1_050) == 1_150
    (request,) = queue.next_requests(1_150)
    queue.answered(request, all_written(request), 1_150)
    queue.add(OWNER, [mark("b", "orders-0")])
    assert queue.next_requests(1_150), "it answers again"


def test_marks_follow_the_leader() -> None:
    leaders = Leaders()
    queue = MarkQueue(leaders)
    queue.add(OWNER, [mark("a", "orders-0", "stock-0")])
    (first,) = queue.next_requests(1_000)
    queue.add(OWNER, [mark("b", "orders-0")])
    leaders.nodes[participant("orders-0")] = 2
    leaders.nodes[participant("stock-0")] = 4
    queue.rerouted()
    moved = queue.next_requests(1_000)
    assert sent(moved) == {2: [("b", ["orders-0"]), ("a", ["orders-0"])], 4: [("a", ["stock-0"])]}
    for request in moved:
        queue.answered(request, all_written(request), 1_000)
    assert queue.count == 0, "whatever becomes of the first"
    queue.answered(first, none_written(first), 1_000)
    assert not queue.next_requests(60_000)
    assert queue.next_deadline_ms(60_000) is None


@pytest.mark.parametrize("answer", ["written", "refused", "unknown"])
def test_a_leader_before_may_still_answer(answer: str) -> None:
    leaders = Leaders()
    queue = MarkQueue(leaders)
    queue.add(OWNER, [mark("a", "orders-0", "sales-0")])
    (first,) = queue.next_requests(1_000)
    leaders.nodes[participant("orders-0")] = 2
    queue.rerouted()
    (second,) = queue.next_requests(1_000)
    assert sent([second]) == {2: [("a", ["orders-0"])]}
    of_both = {"written": all_written(first), "refused": none_written(first), "unknown": None}
    done = queue.answered(first, of_both[answer], 1_000)
    told = {participant("orders-0"), participant("sales-0")} if answer == "written" else set()
    assert {one for marks in done.values() for each in marks for one in each.partitions} == told
    assert not queue.next_requests(1_049), "it has a rest"
    # What it still leads it is sent again, and the rest to who leads that.
    again = {} if answer == "written" else {1: [("a", ["sales-0"])]}
    assert sent(queue.next_requests(5_000)) == again
    queue.answered(second, all_written(second), 5_000)
    assert queue.count == len(again)
    assert not queue.next_requests(60_000)


@pytest.mark.parametrize("answer", ["refused", "unknown"])
def test_a_mark_that_has_moved_is_in_one_place(answer: str) -> None:
    leaders = Leaders()
    queue = MarkQueue(leaders)
    queue.add(OWNER, [mark("a", "orders-0")])
    (first,) = queue.next_requests(1_000)
    leaders.nodes[participant("orders-0")] = 2
    queue.rerouted()
    (second,) = queue.next_requests(1_000)
    queue.answered(second, none_written(second), 1_000)
    queue.rerouted()
    queue.answered(first, none_written(first) if answer == "refused" else None, 1_000)
    assert not queue.next_requests(1_049), "the new leader is to be tried again then"
    (again,) = queue.next_requests(1_050)
    queue.answered(again, none_written(again), 1_050)
    assert not queue.next_requests(1_149)


def test_a_mark_has_no_leader_for_a_while() -> None:
    leaders = Leaders()
    queue = MarkQueue(leaders)
    queue.add(OWNER, [mark("a", "orders-0")])
    assert queue.next_requests(1_000)
    del leaders.nodes[participant("orders-0")]
    queue.rerouted()
    assert not queue.next_requests(2_000)
    leaders.nodes[participant("orders-0")] = 2
    queue.rerouted()
    assert sent(queue.next_requests(2_000)) == {2: [("a", ["orders-0"])]}


def test_a_topic_that_is_gone_needs_no_mark() -> None:
    leaders = Leaders()
    queue = MarkQueue(leaders)
    queue.add(OWNER, [mark("a", "stock-0"), mark("b", "orders-0", "stock-0")])
    leaders.gone.add(participant("stock-0"))
    queue.rerouted()
    (request,) = queue.next_requests(1_000)
    queue.answered(request, all_written(request), 1_000)
    assert queue.count == 0


def test_marks_that_are_on_their_way_are_not_begun_anew() -> None:
    queue = MarkQueue(Leaders())
    queue.add(OWNER, [mark("a", "orders-0")])
    (request,) = queue.next_requests(1_000)
    queue.add(OWNER, [mark("a", "orders-0")])
    queue.answered(request, none_written(request), 1_000)
    assert not queue.next_requests(1_000), "nor before it is tried again"
    (request,) = queue.next_requests(1_050)
    queue.answered(request, all_written(request), 1_050)
    assert not queue.next_requests(1_050)
    assert queue.count == 0


def test_an_owner_that_is_gone_has_nothing_sent_any_more() -> None:
    queue = MarkQueue(Leaders())
    other = Owner(4, 1)
    queue.add(OWNER, [mark("a", "orders-0")])
    (request,) = queue.next_requests(1_000)
    queue.add(OWNER, [mark("b", "orders-0")])
    queue.add(other, [mark("c", "orders-0")])
    queue.drop(OWNER)
    assert queue.count == 1
    queue.answered(request, None, 1_000)
    assert sent(queue.next_requests(2_000)) == {1: [("c", ["orders-0"])]}


def test_the_same_marks_of_a_later_leadership_are_sent() -> None:
    queue = MarkQueue(Leaders())
    queue.add(OWNER, [mark("a", "orders-0")])
    (old,) = queue.next_requests(1_000)
    queue.drop(OWNER)
    queue.add(Owner(3, 8), [mark("a", "orders-0")])
    queue.answered(old, all_written(old), 1_000)
    (new,) = queue.next_requests(1_000)
    assert new.pieces[0].coordinator_epoch == 8


class World:
    """A queue whose requests a test answers when it likes."""

    def __init__(self) -> None:
        self.leaders = Leaders()
        self.queue = MarkQueue(self.leaders)
        self.wanted: dict[str, set[Participant]] = {}
        self.written: dict[str, set[Participant]] = {}
        self.under_way: list[MarkRequest] = []
        self.now_ms = 1_000

    def add(self, name: str, partitions: list[str]) -> None:
        self.queue.add(OWNER, [mark(name, *partitions)])
        self.wanted[name] = set(map(participant, partitions))

    def send(self) -> None:
        self.under_way += self.queue.next_requests(self.now_ms)
        busy = [
            (request.node_id, one)
            for request in self.under_way
            for one in {one for piece in request.pieces for one in piece.partitions}
        ]
        assert len(busy) == len(set(busy)), "two requests at a time to a leader for one partition"

    def answer(self, index: int, how: str) -> None:
        request = self.under_way.pop(index % len(self.under_way))
        outcome = {"all": all_written, "none": none_written}.get(how, lambda _: None)(request)
        for marks in self.queue.answered(request, outcome, self.now_ms).values():
            for one in marks:
                self.written.setdefault(one.transactional_id, set()).update(one.partitions)

    def leads(self, request: MarkRequest) -> bool:
        partitions = {one for piece in request.pieces for one in piece.partitions}
        return any(self.leaders.leader_of(one) == request.node_id for one in partitions)

    def finish(self) -> None:
        self.leaders.nodes.setdefault(participant("stock-0"), 1)
        self.queue.rerouted()
        # Who leads nothing any more never answers.
        self.under_way = [request for request in self.under_way if self.leads(request)]
        for _ in range(100):
            self.send()
            while self.under_way:
                self.answer(0, "all")
            at_ms = self.queue.next_deadline_ms(self.now_ms)
            if at_ms is None:
                return
            self.now_ms = max(self.now_ms, at_ms)


@given(st.data())
def test_every_mark_is_written_once_the_leaders_let_it(data: st.DataObject) -> None:
    world = World()
    for step in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["add", "send", "answer", "move", "time"])):
            case "add":
                partitions = st.lists(st.sampled_from(NAMES), min_size=1, unique=True)
                world.add(f"t{step}", data.draw(partitions))
            case "send":
                world.send()
            case "answer" if world.under_way:
                how = data.draw(st.sampled_from(["all", "none", "unknown"]))
                world.answer(data.draw(st.integers(0, 9)), how)
            case "move":
                name = participant(data.draw(st.sampled_from(NAMES)))
                world.leaders.nodes[name] = data.draw(st.integers(1, 3))
                world.queue.rerouted()
            case "time":
                world.now_ms += data.draw(st.integers(1, 3_000))
    world.finish()
    assert world.written == world.wanted
    assert world.queue.count == 0


def test_many_partitions_that_refuse_at_once_wait_no_longer_than_one() -> None:
    leaders = Leaders()
    names = [f"orders-{number}" for number in range(30)]
    leaders.nodes = {participant(name): 1 for name in names}
    queue = MarkQueue(leaders)
    queue.add(OWNER, [mark("a", *names)])
    for now_ms, next_ms in ((0, 50), (50, 150), (150, 350)):
        [request] = queue.next_requests(now_ms)
        assert len(request.pieces[0].partitions) == 30
        queue.answered(request, none_written(request), now_ms)
        assert not queue.next_requests(next_ms - 1)
        assert queue.next_deadline_ms(next_ms - 1) == next_ms


def test_many_marks_are_looked_at_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction_marks, "_ROUTED_AT_ONCE", 2)
    leaders = Leaders()
    queue = MarkQueue(leaders)
    other = Owner(4, 1)
    queue.add(OWNER, [mark(name, "orders-0") for name in "abc"])
    queue.add(other, [mark("d", "orders-1")])
    queue.add(OWNER, [mark("e", "orders-1"), mark("a", "orders-0")])
    assert queue.count == 5
    assert queue.next_deadline_ms(1_000) == 1_000
    requests = queue.next_requests(1_000)
    assert sent(requests) == {
        1: [("a", ["orders-0"]), ("b", ["orders-0"]), ("c", ["orders-0"])],
        2: [("d", ["orders-1"])],
    }
    assert queue.next_deadline_ms(1_000) == 1_000, "one is left"
    leaders.nodes[participant("orders-1")] = 5
    assert sent(queue.next_requests(1_000)) == {5: [("e", ["orders-1"])]}
    assert queue.next_deadline_ms(1_000) is None
    # What is dropped before it was looked at goes nowhere.
    queue.add(other, [mark(name, "sales-0") for name in "fgh"])
    queue.drop(other)
    for now_ms in (2_000, 2_001):
        assert sent(queue.next_requests(now_ms)) == {}
    queue.add(other, [mark("h", "sales-0")])
    assert sent(queue.next_requests(2_200)) == {1: [("h", ["sales-0"])]}
