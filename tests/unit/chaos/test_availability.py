"""Windows of unavailability, of histories written by hand."""

from __future__ import annotations

from penstock.chaos.availability import Window, longest_ms, windows, written_partitions
from penstock.chaos.history import Event, History, Type

SECOND = 1_000_000_000


def write(  # noqa: PLR0917 - as an operation reads.
    p: str, start: float, end: float, type_: Type, partition: int = 0, acks: str = "all"
) -> list[Event]:
    value = {"topic": "t", "partition": partition, "acks": acks}
    return [
        Event(int(start * SECOND), p, Type.INVOKE, "append", value),
        Event(int(end * SECOND), p, type_, "append", value if type_ is Type.OK else None),
    ]


def found(*operations: list[Event]) -> list[tuple[str, float, float, bool]]:
    history = History([event for one in operations for event in one])
    return [
        (one.partition, one.start_t / SECOND, one.end_t / SECOND, one.is_open)
        for one in windows(history)
    ]


def test_writes_that_succeed_in_time_leave_no_window() -> None:
    assert found(write("a", 0, 0.1, Type.OK), write("a", 5, 5.4, Type.OK)) == []


def test_a_time_in_which_nothing_was_asked_for_is_no_window() -> None:
    assert found(write("a", 0, 0.1, Type.OK), write("a", 9, 9.1, Type.OK)) == []


def test_one_slow_write_is_a_window() -> None:
    assert found(write("a", 1, 2.5, Type.OK)) == [("t-0", 1, 2.5, False)]


def test_writes_that_fail_one_after_the_other_are_one_window() -> None:
    assert found(
        write("a", 1, 1.1, Type.FAIL),
        write("a", 1.5, 1.6, Type.INFO),
        write("a", 2, 2.1, Type.OK),
        write("a", 3, 3.1, Type.OK),
    ) == [("t-0", 1, 2.1, False)]


def test_while_others_succeed_one_that_hangs_is_no_window() -> None:
    quick = [write("b", tenth / 10, tenth / 10 + 0.05, Type.OK) for tenth in range(30)]
    assert found(write("a", 0, 3, Type.OK), *quick) == []


def test_partitions_have_windows_of_their_own() -> None:
    assert found(write("a", 0, 1, Type.OK, 0), write("b", 0, 0.1, Type.OK, 1)) == [
        ("t-0", 0, 1, False)
    ]


def test_what_nobody_acknowledges_proves_nothing() -> None:
    assert found(write("a", 0, 2, Type.OK), write("b", 1, 1.01, Type.OK, acks="0")) == [
        ("t-0", 0, 2, False)
    ]


def test_a_window_may_last_to_the_end() -> None:
    assert found(write("a", 0, 0.1, Type.OK), write("a", 1, 4, Type.INFO)) == [("t-0", 1, 4, True)]


def test_final_reads_are_not_the_load() -> None:
    final = Event(
        9 * SECOND, "z", Type.INVOKE, "append", {"topic": "t", "partition": 0}, "", "final"
    )
    assert windows(History([final])) == []


def test_partitions_stand_in_the_order_of_their_numbers() -> None:
    events = [event for number in (10, 2, 0) for event in write(str(number), 0, 1, Type.OK, number)]
    assert written_partitions(events) == ["t-0", "t-2", "t-10"]


def test_the_longest_of_none_is_nothing() -> None:
    assert longest_ms([]) == 0
    assert longest_ms([Window("t-0", 0, SECOND), Window("t-0", 0, 2 * SECOND)]) == 2000


def test_a_write_that_goes_on_hanging_after_a_success_waits_from_then_on() -> None:
    assert found(
        write("a", 0, 9, Type.INFO), write("b", 0, 0.1, Type.OK), write("b", 9.4, 9.5, Type.OK)
    ) == [("t-0", 0.1, 9.5, False)]
