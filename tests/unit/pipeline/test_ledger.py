from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.connectors.messaging.ledger import Ledger


def filled(*bodies: str) -> Ledger[int]:
    ledger: Ledger[int] = Ledger()
    for tag, body in enumerate(bodies, 1):
        ledger.arrive((body,), tag, body)
    return ledger


def test_a_planned_batch_gives_the_same_rows_again() -> None:
    ledger = filled("a", "b", "c")
    assert ledger.plan(0, 2) == 2
    assert ledger.rows(0, 2) == ledger.rows(0, 2) == [("a",), ("b",)]
    ledger.arrive(("d",), 4)
    assert ledger.rows(0, 2) == [("a",), ("b",)]


def test_what_is_done_is_acknowledged_once() -> None:
    ledger = filled("a", "b", "c")
    ledger.plan(0, 2)
    assert ledger.done(2) == [1, 2]
    assert ledger.done(2) == []
    assert ledger.plan(2, None) == 3
    with pytest.raises(IndexError):
        ledger.rows(1, 3)


def test_what_was_not_planned_is_not_done() -> None:
    ledger = filled("a", "b")
    ledger.plan(0, 1)
    assert ledger.done(2) == [1]


def test_when_the_connection_is_lost_what_was_not_planned_comes_anew() -> None:
    ledger = filled("a", "b")
    ledger.plan(0, 1)
    ledger.lost(keep=False)
    assert ledger.end == 1
    assert ledger.arrive(("b",), 11, "b", again=True)
    assert ledger.rows(0, 2) == [("a",), ("b",)]


def test_a_planned_message_gets_its_new_tag_and_is_no_second_row() -> None:
    ledger = filled("a", "b")
    ledger.plan(0, 2)
    ledger.lost(keep=False)
    assert ledger.arrive(("b",), 11, "b", again=True)
    assert ledger.arrive(("a",), 12, "a", again=True)
    assert ledger.end == 2
    assert ledger.done(2) == [12, 11]


def test_one_that_was_done_meanwhile_is_only_acknowledged() -> None:
    ledger = filled("a")
    ledger.plan(0, 1)
    ledger.lost(keep=True)
    assert ledger.done(1) == []
    assert not ledger.arrive(("a",), 11, "a", again=True)
    assert ledger.arrive(("a",), 12, "a", again=True)  # The next one of the same looks.
    assert ledger.end == 2


def test_a_new_message_is_not_taken_for_an_old_one() -> None:
    ledger = filled("a")
    ledger.plan(0, 1)
    ledger.lost(keep=True)
    assert ledger.arrive(("a",), 11, "a", again=False)
    assert ledger.end == 2


def test_without_an_identity_it_is_a_second_row_rather_than_none() -> None:
    ledger: Ledger[int] = Ledger()
    ledger.arrive(("a",), 1)
    ledger.plan(0, 1)
    ledger.lost(keep=False)
    assert ledger.done(1) == []
    assert ledger.arrive(("a",), 2, again=True)
    assert ledger.end == 2


def test_a_forgetful_broker_is_told_nothing() -> None:
    ledger = filled("a", "b")
    ledger.plan(0, 2)
    ledger.lost(keep=True)
    ledger.forget_identities()
    assert ledger.done(1) == []
    assert ledger.arrive(("a",), 11, "a", again=True)
    assert ledger.rows(1, 3) == [("b",), ("a",)]


def test_one_whose_acknowledgement_got_lost_comes_twice_rather_than_never() -> None:
    # Known again it would be passed over; but the acknowledgement may have arrived, and the broker
    # have given what tells messages apart to another one, which then would be lost.
    ledger = filled("a")
    ledger.plan(0, 1)
    assert ledger.done(1) == [1]
    ledger.lost(keep=True)
    assert ledger.arrive(("a",), 11, "a", again=True)
    assert ledger.end == 2


class Broker:
    """Has messages, delivers what is not acknowledged anew, and never forgets.

    When it is ``deaf`` acknowledgements do not arrive: the connection is about to be lost.
    """

    def __init__(self) -> None:
        self.published = 0
        self.held: dict[int, int] = {}
        self.ready: list[tuple[int, bool]] = []
        self.tag = 0
        self.deaf = False
        self.unheard = 0

    def deliver(self, ledger: Ledger[int], identified: bool) -> None:
        if self.ready:
            message, again = self.ready.pop(0)
            self.tag += 1
            self.held[self.tag] = message
            identity = message if identified else None
            if not ledger.arrive((message,), self.tag, identity, again=again):
                self.acknowledge(self.tag)

    def acknowledge(self, tag: int) -> None:
        if self.deaf:
            self.unheard += 1
        else:
            del self.held[tag]

    def lose(self) -> None:
        self.deaf = False
        self.ready = [(message, True) for message in self.held.values()] + self.ready
        self.held = {}


@given(
    st.lists(
        st.sampled_from(["publish", "deliver", "plan", "lose", "finish", "deafen"]), max_size=80
    ),
    st.booleans(),
    st.booleans(),
)
def test_no_message_is_lost_whatever_happens(steps: list[str], keep: bool, named: bool) -> None:
    keep = keep and named
    ledger: Ledger[int] = Ledger()
    broker, start, end = Broker(), 0, 0
    seen: list[int] = []

    def finish() -> None:
        nonlocal start
        seen.extend(row[0] for row in ledger.rows(start, end))
        start = end
        for tag in ledger.done(end):
            broker.acknowledge(tag)

    for step in [*steps, "lose", *["deliver"] * 80, "finish", "plan", "finish"]:
        if step == "publish":
            broker.ready.append((broker.published, False))
            broker.published += 1
        elif step == "deliver":
            broker.deliver(ledger, named)
        elif step == "plan" and end == start:
            end = ledger.plan(start, None)
        elif step == "lose":
            broker.lose()
            ledger.lost(keep=keep)
        elif step == "deafen":
            broker.deaf = True
        elif step == "finish":
            finish()
    assert set(seen) == set(range(broker.published))
    assert broker.held == {}
    if named:
        # Twice comes only what was done with while the broker did not hear of it.
        assert len(seen) <= broker.published + broker.unheard
