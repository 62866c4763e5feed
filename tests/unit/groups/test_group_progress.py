"""For how long groups have stood still, look by look."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.broker.core.group_progress import GroupProgress, Lag
from penstock.wire.ids import TopicPartition

A0, A1, B0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)


def test_one_partition_that_stands_still_is_not_hidden_by_others_that_move() -> None:
    progress = GroupProgress()
    progress.look({"g": {A0: 5, A1: 5}}, {A0: 10, A1: 10}, 0)
    found = progress.look({"g": {A0: 5, A1: 9}}, {A0: 10, A1: 20}, 60)
    assert found == {("g", "a"): Lag(16, 60)}


def test_a_group_that_waits_for_records_does_not_stand_still() -> None:
    progress = GroupProgress()
    committed = {"g": {A0: 5}}
    for now_s in (0, 1000, 2000):
        assert progress.look(committed, {A0: 5}, now_s) == {("g", "a"): Lag(0, 0)}
    # Its time begins with the record that it could read.
    assert progress.look(committed, {A0: 6}, 2010) == {("g", "a"): Lag(1, 0)}
    assert progress.look(committed, {A0: 7}, 2020) == {("g", "a"): Lag(2, 10)}


def test_a_position_set_back_is_progress_too() -> None:
    progress = GroupProgress()
    progress.look({"g": {A0: 5}}, {A0: 9}, 0)
    assert progress.look({"g": {A0: 0}}, {A0: 9}, 10) == {("g", "a"): Lag(9, 0)}


def test_a_leader_that_does_not_answer_once_hides_a_topic_and_forgets_nothing() -> None:
    progress = GroupProgress()
    committed = {"g": {A0: 5, A1: 5, B0: 1}}
    progress.look(committed, {A0: 9, A1: 5, B0: 1}, 0)
    assert progress.look(committed, {A1: 5, B0: 1}, 10) == {("g", "b"): Lag(0, 0)}
    found = progress.look(committed, {A0: 9, A1: 5, B0: 1}, 20)
    assert found == {("g", "a"): Lag(4, 20), ("g", "b"): Lag(0, 0)}


def test_a_group_that_went_and_came_back_is_counted_anew() -> None:
    progress = GroupProgress()
    progress.look({"g": {A0: 5}}, {A0: 9}, 0)
    assert progress.look({}, {}, 10) == {}
    assert progress.look({"g": {A0: 5}}, {A0: 9}, 20) == {("g", "a"): Lag(4, 0)}


LOOK = st.tuples(st.integers(0, 3), st.none() | st.integers(0, 3), st.integers(0, 100))


@given(st.lists(LOOK, max_size=30))
def test_stalled_is_the_time_since_the_first_of_equal_looks(
    looks: list[tuple[int, int | None, int]],
) -> None:
    """Against what is computed from the whole history: position, end (or none known) and step."""
    progress = GroupProgress()
    now_s = 0
    history: list[tuple[int, int, int]] = []
    for position, end, step_s in looks:
        now_s += step_s
        ends = {} if end is None else {A0: end}
        found = progress.look({"g": {A0: position}}, ends, now_s)
        if end is None:
            assert found == {}
            continue
        history.append((now_s, position, end))
        since_s = now_s
        for seen_s, at, until in reversed(history):
            if at != position or until <= at:
                break
            since_s = seen_s
        assert found == {("g", "a"): Lag(max(0, end - position), now_s - since_s)}
