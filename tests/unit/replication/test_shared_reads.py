"""What is kept of reads and appends for the followers that ask next."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.broker.core.ports import AppendInfo
from penstock.broker.replication.shared_reads import SharedReads


def partition(end: int = 10, *, feeds: int = 2) -> Any:
    """A partition led here, as far as it matters."""
    made = SimpleNamespace(
        log=SimpleNamespace(log_start_offset=0, log_end_offset=end),
        replica=SimpleNamespace(leader_epoch=4),
        feeds=dict.fromkeys(range(feeds)),
    )
    return _Identified(made)


class _Identified:
    """Equal to nothing but itself, as partitions are."""

    def __init__(self, made: SimpleNamespace) -> None:
        self.__dict__ = made.__dict__


def test_the_same_read_is_found_and_no_other() -> None:
    reads, one, other = SharedReads(), partition(), partition()
    reads.was_read(one, 7, b"abc", 10)
    assert reads.find(one, 7, 3) == (b"abc", 10)
    assert reads.find(one, 7, 2) is None  # It does not fit.
    assert reads.find(one, 8, 3) is None
    assert reads.find(other, 7, 3) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda one: setattr(one.log, "log_end_offset", 11),
        lambda one: setattr(one.log, "log_start_offset", 8),
        lambda one: setattr(one.replica, "leader_epoch", 5),
    ],
    ids=["the log grew", "it was deleted", "another leadership"],
)
def test_a_read_that_would_give_something_else_now_is_not_found(change: Any) -> None:
    reads, one = SharedReads(), partition()
    reads.was_read(one, 7, b"abc", 10)
    change(one)
    assert reads.find(one, 7, 3) is None


def test_what_was_appended_is_found_with_all_that_follows_it() -> None:
    reads, one = SharedReads(), partition(end=13, feeds=1)
    reads.appended(one, AppendInfo(10, 12, -1, 3, records=b"abc"))
    assert reads.find(one, 10, 100) == (b"abc", 13)
    one.log.log_end_offset = 14
    assert reads.find(one, 10, 100) is None  # It would be but half of what is to be sent.
    reads.appended(one, AppendInfo(13, 13, -1, 1, records=b"d"))
    one.log.log_end_offset = 15
    reads.appended(one, AppendInfo(14, 14, -1, 1, records=b"e"))
    assert reads.find(one, 10, 100) == (b"abcde", 15)
    assert reads.find(one, 13, 100) == (b"de", 15)
    assert reads.find(one, 10, 4) == (b"abcd", 14)  # As many as fit.
    assert reads.find(one, 10, 2) is None


def test_what_is_of_another_epoch_is_not_put_behind_what_is_kept() -> None:
    reads, one = SharedReads(), partition(end=11, feeds=1)
    one.replica.leader_epoch = 3
    reads.appended(one, AppendInfo(11, 11, -1, 1, records=b"b"))
    one.replica.leader_epoch = 4
    reads.appended(one, AppendInfo(10, 10, -1, 1, records=b"a"))
    assert reads.find(one, 10, 100) == (b"a", 11)
    one.log.log_end_offset = 12
    assert reads.find(one, 10, 100) is None


def test_nothing_is_kept_that_nobody_asks_for() -> None:
    reads = SharedReads()
    reads.appended(partition(feeds=0), AppendInfo(9, 9, -1, 1, records=b"a"))
    reads.appended(partition(), AppendInfo(9, 9, -1, 100_000))
    reads.was_read(partition(feeds=1), 9, b"a", 10)
    assert reads.size_bytes == 0


def test_the_oldest_make_room_and_what_is_too_large_is_not_kept() -> None:
    reads = SharedReads(max_bytes=10)
    places = [partition() for _ in range(4)]
    for place in places:
        reads.was_read(place, 7, b"abcd", 10)
        assert reads.size_bytes <= 10
    assert [reads.find(place, 7, 10) is not None for place in places] == [False, False, True, True]
    reads.was_read(places[3], 7, b"abcd", 10)  # Once more: it counts once.
    assert reads.size_bytes == 8
    reads.was_read(places[0], 7, bytes(11), 10)
    assert reads.find(places[0], 7, 100) is None


def test_of_what_is_here_no_more_nothing_is_kept() -> None:
    reads, one, other = SharedReads(max_bytes=10), partition(), partition()
    reads.was_read(one, 3, b"a", 5)
    reads.was_read(one, 7, b"abc", 10)
    reads.was_read(other, 7, b"abcd", 10)
    reads.forget(one)
    reads.forget(one)
    assert reads.find(one, 7, 3) is None
    assert reads.find(other, 7, 4) == (b"abcd", 10)
    assert reads.size_bytes == 4
    reads.was_read(other, 3, bytes(10), 10)  # What it crowds out is known no more either.
    reads.forget(other)
    assert reads.size_bytes == 0
    gone = weakref.ref(other)
    del other
    assert gone() is None
