"""Fewer faults that still break it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.chaos.shrinking import OutOfTrialsError, smallest_failing


def needs(*culprits: int) -> Callable[[Sequence[int]], bool]:
    """A run that fails when all of these are in its schedule."""
    return lambda items: set(culprits) <= set(items)


@given(st.integers(1, 40), st.data())
def test_the_culprits_alone_are_left_in_their_order(count: int, data: st.DataObject) -> None:
    culprits = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=4))
    found = smallest_failing(list(range(count)), needs(*culprits))
    assert found == sorted(culprits)


def test_what_fails_without_any_fault_has_none() -> None:
    assert smallest_failing([1, 2, 3], lambda _: True) == []


def test_what_is_not_seen_to_fail_again_stays_whole() -> None:
    assert smallest_failing([1, 2, 3], lambda _: False) == [1, 2, 3]


@pytest.mark.parametrize("trials", range(12))
def test_when_no_more_runs_are_allowed_the_smallest_so_far_is_the_answer(trials: int) -> None:
    left = [trials]

    def fails(items: Sequence[int]) -> bool:
        if not left[0]:
            raise OutOfTrialsError
        left[0] -= 1
        return needs(5)(items)

    found = smallest_failing(list(range(8)), fails)
    assert 5 in found
    assert len(found) == 8 if trials < 2 else len(found) < 8 or trials < 3


def test_culprits_are_found_in_few_runs() -> None:
    runs: list[Sequence[int]] = []

    def fails(items: Sequence[int]) -> bool:
        runs.append(items)
        return needs(3, 60)(items)

    assert smallest_failing(list(range(64)), fails) == [3, 60]
    assert len(runs) < 100
