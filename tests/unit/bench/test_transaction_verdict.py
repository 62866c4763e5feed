"""The verdict of the soak of transactions fires for each of the faults that it is there for."""

from __future__ import annotations

import pytest
from bench.transaction_verdict import Notes, Read, differences, judge, read_notes, value_of

SIZE = 3


def read_of(*values: bytes) -> Read:
    read = Read(SIZE)
    read.add(values)
    return read


def whole(number: int, writer: str = "w") -> list[bytes]:
    return [value_of(writer, number, place) for place in range(SIZE)]


NOTES = {"w": Notes(begun=3, committed={0}, aborted={1})}


def test_all_is_well_where_committed_is_read_and_aborted_is_not():
    verdict = judge(NOTES, read_of(*whole(0)))
    assert verdict.faults == []
    assert (verdict.committed, verdict.aborted, verdict.unknown) == (1, 1, 1)
    assert verdict.unknown_committed == 0
    assert judge(NOTES, read_of(*whole(0), *whole(2))).unknown_committed == 1


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ([], "lost: 1"),
        (whole(0)[:2], "torn: 1"),
        ([*whole(0), *whole(2)[1:]], "torn: 1"),
        ([*whole(0), whole(0)[0]], "doubled: 1"),
        ([*whole(0), *whole(2), *whole(2)], "doubled: 1"),
        ([*whole(0), whole(1)[0]], "aborted_read: 1"),
        ([*whole(0), *whole(1)], "aborted_read: 1"),
        ([*whole(0), *whole(3)], "foreign: 1"),
        ([*whole(0), *whole(0, "x")], "foreign: 1"),
        ([*whole(0), b"what"], "foreign: 1"),
        ([*whole(0), b"w 0 7"], "foreign: 1"),
    ],
)
def test_each_fault_is_found(values: list[bytes], fault: str):
    assert judge(NOTES, read_of(*values)).faults == [fault]


def test_notes_are_read_up_to_where_the_writer_was_killed():
    notes = read_notes("begun 0\ncommitted 0\nbegun 1\naborted 1\nbegun 2\ncommitted")
    assert notes == Notes(begun=3, committed={0}, aborted={1})
    assert notes.next_number == 3
    assert notes.unknown == 1
    assert read_notes("") == Notes()
    assert read_notes("begun 1") == Notes()


def test_what_was_processed_is_compared_value_by_value():
    source = read_of(*whole(0), *whole(1))
    assert differences(source, read_of(*whole(1), *whole(0))) == {}
    found = differences(source, read_of(*whole(0), whole(0)[0], whole(1)[0]))
    assert found == {"unprocessed": 2, "processed_twice": 1}
