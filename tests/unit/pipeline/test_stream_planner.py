from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client import TopicPartition
from penstock.pipeline.errors import DataLossError
from penstock.pipeline.source.offsets import Offsets
from penstock.pipeline.source.stream_planner import StreamPlanner
from penstock.pipeline.source_options import SourceOptions

A0, A1, B0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)
IDS = {"a": "id-a", "b": "id-b"}


def planner(**options: str) -> StreamPlanner:
    given = {"penstock.bootstrap.servers": "localhost:9092", "subscribePattern": ".*", **options}
    return StreamPlanner(SourceOptions.load(given).for_stream())


def begins(partitions: Iterable[TopicPartition]) -> Offsets:
    return dict.fromkeys(partitions, 2)


def plan(
    found: StreamPlanner, start: Offsets, latest: Offsets, now_ms: float = 0, **more: Any
) -> Offsets:
    given: dict[str, Any] = {
        "topic_ids": IDS, "known_ids": IDS, "earliest": begins, "weigh": lambda _: {}, **more
    }  # fmt: skip
    return found.next_end(start, latest, now_ms=now_ms, **given)


def test_a_batch_goes_to_the_end() -> None:
    assert plan(planner(), {A0: 3, A1: 4}, {A0: 9, A1: 4}) == {A0: 9, A1: 4}


def test_a_place_that_moves_is_written_down_first() -> None:
    found = planner()
    found.begin({A0: 5}, is_fixed=False)
    assert plan(found, {A0: 5}, {A0: 9}) == {A0: 5}
    assert plan(found, {A0: 5}, {A0: 9}) == {A0: 9}


def test_a_place_that_does_not_move_is_read_from_at_once() -> None:
    found = planner()
    found.begin({A0: 5}, is_fixed=True)
    assert plan(found, {A0: 5}, {A0: 9}) == {A0: 9}


def test_a_query_that_failed_at_its_first_batch_goes_on_from_the_checkpoint() -> None:
    found = planner()
    found.begin({A0: 8}, is_fixed=False)  # The latest by now; the checkpoint has 5.
    assert plan(found, {A0: 5}, {A0: 9}) == {A0: 9}


def test_a_trigger_of_one_batch_reads_in_it() -> None:
    found = planner(maxOffsetsPerTrigger="1")
    found.begin({A0: 5}, is_fixed=False)
    assert plan(found, {A0: 5}, {A0: 9}, unlimited=True) == {A0: 9}


def test_new_partitions_begin_at_their_start() -> None:
    found = planner()
    first = plan(found, {A0: 5}, {A0: 5, A1: 9})
    assert first == {A0: 5, A1: 2}
    assert plan(found, first, {A0: 5, A1: 9}) == {A0: 5, A1: 9}


def test_limits() -> None:
    found = planner(maxOffsetsPerTrigger="10", maxBytesPerTrigger="30")
    weighed: list[Offsets] = []

    def weigh(start: Offsets) -> dict[TopicPartition, float]:
        weighed.append(start)
        return dict.fromkeys(start, 6.0)

    assert plan(found, {A0: 0, A1: 7}, {A0: 100, A1: 7}, weigh=weigh) == {A0: 5, A1: 7}
    assert weighed == [{A0: 0}]
    assert plan(found, {A0: 0, A1: 7}, {A0: 100, A1: 7}, unlimited=True) == {A0: 100, A1: 7}


def test_too_few_wait_but_not_for_ever() -> None:
    found = planner(minOffsetsPerTrigger="10", maxTriggerDelay="5s")
    assert plan(found, {A0: 0}, {A0: 3}, now_ms=0) == {A0: 3}  # Nobody has waited yet.
    assert plan(found, {A0: 3}, {A0: 9}, now_ms=4_999) == {A0: 3}
    assert plan(found, {A0: 3}, {A0: 13}, now_ms=4_999) == {A0: 13}
    assert plan(found, {A0: 13}, {A0: 14}, now_ms=9_999) == {A0: 14}


def test_too_few_at_the_end_of_what_is_available_now_are_read() -> None:
    found = planner(minOffsetsPerTrigger="10", maxTriggerDelay="5s")
    found.end_at({A0: 13})
    assert plan(found, {A0: 0}, {A0: 20}) == {A0: 13}
    found.end_at({A0: 15})
    assert plan(found, {A0: 13}, {A0: 20}, now_ms=1) == {A0: 15}


@given(
    st.dictionaries(st.sampled_from([A0, A1, B0]), st.integers(0, 50)),
    st.integers(1, 20),
    st.integers(0, 30),
)
def test_what_is_available_now_is_read_up_and_no_further(
    target: Offsets, most: int, more: int
) -> None:
    found = planner(maxOffsetsPerTrigger=str(most))
    found.end_at(target)
    start: Offsets = {}
    latest = {one: offset + more for one, offset in target.items()}
    seen = []
    while (end := plan(found, start, latest, earliest=lambda new: dict.fromkeys(new, 0))) != start:
        assert all(end[one] >= start.get(one, 0) for one in end)
        seen.append(start)
        start = end
        assert len(seen) < 1_000
    assert start == target


def test_what_an_earlier_run_has_read_beyond_the_target_stays() -> None:
    found = planner()
    found.end_at({A0: 5})
    assert plan(found, {A0: 7}, {A0: 9}) == {A0: 7}


@pytest.mark.parametrize(
    ("latest", "ids", "match"),
    [
        ({A1: 4}, IDS, "partition a-0 is not there any more, and was read up to offset 3"),
        ({A0: 2, A1: 4}, IDS, "a-0 was read up to offset 3, and ends at 2 now"),
        ({A0: 9, A1: 9}, {"a": "another"}, "topic a was deleted and made anew"),
    ],
)
def test_what_is_gone(latest: Offsets, ids: dict[str, str], match: str) -> None:
    found = planner()
    plan(found, {A0: 3, A1: 4}, {A0: 3, A1: 4})
    with pytest.raises(DataLossError, match=match):
        plan(found, {A0: 3, A1: 4}, latest, topic_ids=ids)


def test_who_may_lose_goes_on_from_the_start_of_a_log_that_was_cut() -> None:
    found = planner(failOnDataLoss="false")
    cut = plan(found, {A0: 3, A1: 9}, {A0: 3, A1: 4})
    assert cut == {A0: 3, A1: 2}
    assert plan(found, cut, {A0: 3, A1: 4}) == {A0: 3, A1: 4}


def test_who_may_lose_goes_on_from_the_start_of_a_topic_made_anew() -> None:
    found = planner(failOnDataLoss="false")
    other = {"topic_ids": {**IDS, "a": "another"}}
    # The other topic has one partition less: what was read of that is no position in it.
    anew = plan(found, {A0: 3, A1: 4, B0: 7}, {A0: 50, B0: 7}, **other)
    assert anew == {A0: 2, B0: 7}
    assert plan(found, anew, {A0: 50, B0: 7}, topic_ids=other["topic_ids"], known_ids=other[
        "topic_ids"
    ]) == {A0: 50, B0: 7}  # fmt: skip


def test_a_topic_made_anew_before_the_first_batch_is_noticed() -> None:
    found = planner()
    found.begin({A0: 5}, is_fixed=False)
    with pytest.raises(DataLossError, match="topic a was deleted and made anew"):
        plan(found, {A0: 5}, {A0: 9}, topic_ids={"a": "another"})


@pytest.mark.parametrize("restarts", [False, True])
def test_a_partition_that_was_missing_is_not_read_twice(restarts: bool) -> None:
    found = planner(failOnDataLoss="false")
    without = plan(found, {A0: 3, A1: 4}, {A0: 9})
    assert without == {A0: 9, A1: 4}
    if restarts:
        found = planner(failOnDataLoss="false")
    assert plan(found, without, {A0: 9, A1: 6}) == {A0: 9, A1: 6}


def test_a_topic_that_was_missing_is_not_read_twice_unless_it_is_another_one() -> None:
    found = planner(failOnDataLoss="false")
    without = plan(found, {A0: 3, B0: 4}, {A0: 3}, topic_ids={"a": "id-a"})
    assert without == {A0: 3, B0: 4}
    assert plan(found, without, {A0: 3, B0: 6}) == {A0: 3, B0: 6}
    assert plan(found, without, {A0: 3, B0: 6}, topic_ids={"a": "id-a", "b": "new"})[B0] == 2


def test_a_partition_that_available_now_did_not_see_is_not_read_twice() -> None:
    found = planner(failOnDataLoss="false", minOffsetsPerTrigger="9")
    found.end_at({A0: 5})
    assert plan(found, {A0: 3, A1: 4}, {A0: 5, A1: 9}) == {A0: 5, A1: 4}


def test_what_is_missing_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    found = planner(failOnDataLoss="false")
    for _ in range(3):
        plan(found, {A0: 3, A1: 4}, {A0: 3})
    assert len(caplog.messages) == 1
    plan(found, {A0: 3, A1: 4}, {A0: 3, A1: 4})
    plan(found, {A0: 3, A1: 4}, {A0: 3})
    assert len(caplog.messages) == 2
