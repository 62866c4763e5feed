from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from penstock.broker.core.epoch_history import EpochEntry, EpochHistory
from penstock.broker.core.ports import EpochEnd


def history(*entries: tuple[int, int]) -> EpochHistory:
    return EpochHistory(EpochEntry(*entry) for entry in entries)


def test_an_epoch_ends_where_the_next_one_begins_and_the_newest_at_the_logs_end() -> None:
    epochs = history((1, 0), (4, 10), (7, 25))
    assert epochs.end_of_epoch(1, 40) == EpochEnd(1, 10)
    assert epochs.end_of_epoch(4, 40) == EpochEnd(4, 25)
    assert epochs.end_of_epoch(7, 40) == EpochEnd(7, 40)


def test_an_unknown_epoch_is_answered_with_the_largest_one_below_it() -> None:
    epochs = history((1, 0), (4, 10), (7, 25))
    assert epochs.end_of_epoch(5, 40) == EpochEnd(4, 25)
    assert epochs.end_of_epoch(99, 40) == EpochEnd(7, 40)
    assert epochs.end_of_epoch(0, 40) == EpochEnd(-1, -1)
    assert history().end_of_epoch(3, 0) == EpochEnd(-1, -1)


def test_a_leadership_that_wrote_nothing_gives_way_to_the_next() -> None:
    epochs = history((1, 0), (4, 10))
    assert epochs.assign(6, 10)
    assert epochs.entries == ((1, 0), (6, 10))


def test_a_follower_forgets_what_a_leadership_that_wrote_nothing_claimed() -> None:
    epochs = history((1, 0), (9, 10))
    assert epochs.assign(5, 10)
    assert epochs.entries == ((1, 0), (5, 10))


def test_an_epoch_assigned_again_changes_nothing() -> None:
    epochs = history((1, 0), (4, 10))
    assert not epochs.assign(4, 30)
    assert epochs.entries == ((1, 0), (4, 10))


@pytest.mark.parametrize(("epoch", "offset"), [(3, 12), (0, 1), (4, 9), (-1, 20), (5, -1)])
def test_an_epoch_that_goes_back_is_refused(epoch: int, offset: int) -> None:
    epochs = history((1, 0), (4, 10))
    with pytest.raises(ValueError, match="leader epoch"):
        epochs.assign(epoch, offset)
    assert epochs.entries == ((1, 0), (4, 10))


def test_cutting_the_end_forgets_epochs_that_begin_there_or_later() -> None:
    epochs = history((1, 0), (4, 10), (7, 25))
    assert not epochs.truncate_from_end(26)
    assert epochs.truncate_from_end(25)
    assert epochs.entries == ((1, 0), (4, 10))
    assert epochs.truncate_from_end(0)
    assert epochs.entries == ()


def test_cutting_the_start_keeps_the_epoch_that_the_log_then_begins_in() -> None:
    epochs = history((1, 0), (4, 10), (7, 25))
    assert epochs.truncate_from_start(12)
    assert epochs.entries == ((4, 12), (7, 25))
    assert not epochs.truncate_from_start(12)
    assert not epochs.truncate_from_start(5)
    assert epochs.truncate_from_start(25)
    assert epochs.entries == ((7, 25),)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6)), max_size=8),
    start=st.integers(0, 40),
    end=st.integers(0, 40),
)
def test_every_offset_has_the_epoch_that_wrote_it(
    lengths: list[tuple[int, int]], start: int, end: int
) -> None:
    epochs = EpochHistory()
    written: list[int] = []
    epoch = 0
    for step, length in lengths:
        epoch += step
        epochs.assign(epoch, len(written))
        written += [epoch] * length
    written = written[:end]
    epochs.truncate_from_end(end)
    start = min(start, len(written))
    epochs.truncate_from_start(start)
    epochs.validate()
    for offset in range(start, len(written)):
        assert epochs.epoch_at(offset) == written[offset]
        found, until = epochs.span_at(offset)
        assert found == written[offset]
        assert set(written[offset:until]) == {found}
        last = len(written) - 1 - written[::-1].index(found)
        assert epochs.end_of_epoch(found, len(written)).end_offset == last + 1
