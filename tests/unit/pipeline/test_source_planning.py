from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client import TopicPartition
from penstock.pipeline.source.planning import (
    OffsetRange,
    available,
    limited,
    ranges,
    split,
    step,
)

A0, A1, B0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)
PARTITIONS = [TopicPartition("t", number) for number in range(8)]
SPANS = st.dictionaries(
    st.sampled_from(PARTITIONS), st.tuples(st.integers(0, 1000), st.integers(0, 1000)), max_size=8
)


def test_ranges_are_what_lies_between() -> None:
    start, end = {A0: 5, A1: 7, B0: 9}, {A0: 8, A1: 7, B0: 3}
    assert ranges(start, end) == [OffsetRange(A0, 5, 8)]


def test_a_partition_without_a_start_is_not_read_yet() -> None:
    assert ranges({}, {A0: 8}) == []


@given(SPANS, st.integers(1, 50), st.none() | st.integers(1, 400))
def test_splitting_loses_and_doubles_nothing(
    spans: dict[TopicPartition, tuple[int, int]], least: int, most: int | None
) -> None:
    whole = [OffsetRange(name, low, low + size) for name, (low, size) in sorted(spans.items())]
    pieces = split(whole, least, most)
    for one in whole:
        offsets = [
            offset
            for piece in pieces
            if piece.partition == one.partition
            for offset in range(piece.start, piece.end)
        ]
        assert offsets == list(range(one.start, one.end))
    assert all(0 < piece.size <= (most or piece.size) for piece in pieces)
    total = sum(one.size for one in whole)
    assert len(pieces) >= min(least, total, 1)
    if all(one.size >= least for one in whole) and whole:
        assert len(pieces) >= least


def test_a_large_partition_is_split_more_than_a_small_one() -> None:
    pieces = split([OffsetRange(A0, 0, 900), OffsetRange(A1, 0, 100)], 10)
    assert [piece.partition for piece in pieces] == [A0] * 9 + [A1]
    assert {piece.size for piece in pieces} == {100}


def test_enough_ranges_stay_as_they_are() -> None:
    whole = [OffsetRange(A0, 0, 900), OffsetRange(A1, 0, 100)]
    assert split(whole, 1) == whole
    assert split(whole, 2) == whole


def test_what_is_too_large_is_split_even_where_there_are_enough() -> None:
    whole = [OffsetRange(A0, 0, 900), OffsetRange(A1, 0, 100)]
    assert [piece.size for piece in split(whole, 1, 300)] == [300, 300, 300, 100]
    # Both bounds hold where they ask for different numbers of pieces.
    assert [piece.size for piece in split(whole, 10, 300)] == [100] * 10


@given(SPANS, st.integers(1, 3000))
def test_a_limit_bounds_and_moves_on(
    spans: dict[TopicPartition, tuple[int, int]], most: int
) -> None:
    start = {name: low for name, (low, _) in spans.items()}
    end = {name: low + size for name, (low, size) in spans.items()}
    found = limited(start, end, most)
    assert found.keys() == end.keys()
    having = [name for name in end if end[name] > start[name]]
    assert all(start[name] < found[name] <= end[name] for name in having)
    assert available(start, found) <= max(most, len(having))
    if available(start, end) <= most:
        assert found == end


def test_a_limit_is_shared_in_proportion() -> None:
    found = limited({A0: 0, A1: 100}, {A0: 900, A1: 200}, 100)
    assert found == {A0: 89, A1: 111}


def test_a_small_partition_beside_a_large_one_does_not_starve() -> None:
    found = limited({A0: 0, A1: 0}, {A0: 1_000_000, A1: 3}, 10)
    assert found[A1] > 0


def test_a_limit_may_count_bytes() -> None:
    found = limited({A0: 0, A1: 0}, {A0: 1000, A1: 1000}, 11_000, {A0: 10.0, A1: 100.0})
    assert found == {A0: 100, A1: 100}
    assert limited({A0: 0}, {A0: 10}, 5, {A0: 100.0}) == {A0: 1}


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_a_limit_leaves_what_has_nothing_where_it_is(most: int) -> None:
    assert limited({A0: 5, B0: 9}, {A0: 5, B0: 3}, most) == {A0: 5, B0: 3}


def test_a_new_partition_first_gets_its_place() -> None:
    first = step({A0: 5}, {A0: 9, A1: 30}, {A1: 20})
    assert first == {A0: 9, A1: 20}
    assert ranges({A0: 5}, first) == [OffsetRange(A0, 5, 9)]
    assert ranges(first, step(first, {A0: 9, A1: 30}, {})) == [OffsetRange(A1, 20, 30)]


def test_a_partition_of_unknown_begin_waits() -> None:
    assert step({}, {A0: 9}, {}) == {}
