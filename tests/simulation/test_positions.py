"""What must not be with positions that are sent in transactions is seen where it is."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from penstock.chaos.simulator.checkers import Violation
from penstock.chaos.simulator.transactions.anomalies import Anomaly, processed_twice_or_never
from penstock.chaos.simulator.transactions.history import (
    Began,
    Consumed,
    Decided,
    Event,
    History,
    Identity,
    Kind,
    LoggedBatch,
)
from penstock.chaos.simulator.transactions.position_anomalies import (
    OF_POSITIONS,
    position_moved_twice,
    position_went_back,
    uncommitted_position,
)
from penstock.chaos.simulator.transactions.positions import Moves, PositionTold
from penstock.wire.ids import TopicId, TopicIdPartition

KEY, OTHER = (TopicIdPartition(TopicId(b"t" * 16), number) for number in range(2))


def identity(txn: int) -> Identity:
    return Identity(txn, 0)


def moves(
    txn: int, before: int, after: int, *, group: str = "g", key: TopicIdPartition = KEY
) -> list[Event]:
    return [Began(txn, f"t{txn}", identity(txn)), Moves(txn, group, key, before, after)]


def committed(txn: int, commit: bool = True) -> list[Event]:
    return [Decided(identity(txn), commit)]


def told(offset: int, asked_at: int, *, stable: bool = True) -> list[Event]:
    return [PositionTold(asked_at, "g", KEY, offset, stable)]


def judge(anomaly: Anomaly, *events: Iterable[Event]) -> None:
    anomaly(History(event for some in events for event in some), {})


def test_positions_as_they_should_be() -> None:
    for anomaly in OF_POSITIONS:
        judge(
            anomaly,
            told(-1, 0),
            moves(1, 0, 3),
            told(-1, 3, stable=False),
            committed(1),
            told(3, 5),
            moves(2, 3, 5),
            committed(2, commit=False),
            moves(3, 3, 4),
            committed(3),
            told(3, 8),  # Asked before that was committed.
            told(4, 13),
            moves(4, 0, 2, group="another"),
            moves(5, 0, 2, key=OTHER),
            committed(4),
            committed(5),
        )


@pytest.mark.parametrize("stable", [True, False])
def test_a_position_of_what_is_not_committed(stable: bool) -> None:
    for ending in ([], committed(1, commit=False)):
        with pytest.raises(Violation, match=r"group g, partition 0: .* told position 3, which no"):
            judge(uncommitted_position, moves(1, 0, 3), ending, told(3, 2, stable=stable))
    with pytest.raises(Violation, match="told position 3"):
        judge(uncommitted_position, moves(1, 0, 3), told(3, 2), committed(1))
    with pytest.raises(Violation, match="told position 2"):
        judge(uncommitted_position, moves(1, 0, 3), committed(1), told(2, 3))


def test_a_position_that_goes_back() -> None:
    events = moves(1, 0, 3), committed(1), moves(2, 3, 5), committed(2)
    for offset in (3, -1):
        with pytest.raises(Violation, match=f"position 5 was committed, .* told {offset}"):
            judge(position_went_back, *events, told(offset, 6))
    judge(position_went_back, *events, told(3, 6, stable=False))  # Who asks so, bears it.


def test_a_zombie_moves_what_another_has_moved() -> None:
    events = moves(1, 0, 3), moves(2, 0, 2), committed(1)
    judge(position_moved_twice, *events, committed(2, commit=False))
    with pytest.raises(Violation, match="transaction 2 moved the position to 2, and transaction 1"):
        judge(position_moved_twice, *events, committed(2))


def test_members_of_a_group_share_what_is_to_be_processed() -> None:
    logs = {
        KEY: [
            LoggedBatch(at, at + 1, Identity(-1, -1), Kind.PLAIN, (value,))
            for at, value in enumerate((b"a", b"b", b"c"))
        ]
    }

    def case(*consumed: Consumed) -> History:
        ends = [*committed(1), *committed(2)]
        return History([*moves(1, 0, 1), *moves(2, 1, 2), *consumed, *ends])

    shared = case(Consumed(1, (b"a",), "g"), Consumed(2, (b"b",), "g"))
    processed_twice_or_never(shared, logs)
    for group, expected in (("g", "was processed by"), ("another", "another processed 1 records")):
        history = case(Consumed(1, (b"b",), "g"), Consumed(2, (b"b",), group))
        with pytest.raises(Violation, match=expected):
            processed_twice_or_never(history, logs)
