"""What records hold, and what is made of what was read; which errors are certain."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.chaos.workloads.casting import acknowledged
from penstock.chaos.workloads.outcomes import is_certain, words_of
from penstock.chaos.workloads.values import DAMAGED, ValueMaker, parse_value, runs_of
from penstock.client import (
    BrokerFencedError,
    DeliveryTimeoutError,
    NetworkError,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    NotLeaderError,
    OutOfOrderSequenceError,
    RecordMetadata,
    StorageError,
)


@given(st.integers(0, 2**40), st.integers(0, 300))
def test_a_record_says_who_wrote_it_and_in_which_place(number: int, size: int) -> None:
    value = ValueMaker("producer-3~2", size).values(number, 1)[0]
    assert parse_value(value) == ("producer-3~2", number)
    assert len(value) >= min(size, 1)


def test_values_have_the_size_that_was_asked_for() -> None:
    assert abs(len(ValueMaker("p", 100).values(7, 1)[0]) - 100) <= 10


@given(st.integers(0, 99), st.integers(1, 255))
def test_any_byte_that_is_another_is_found(place: int, change: int) -> None:
    value = bytearray(ValueMaker("p", 120).values(41, 1)[0])
    value[place] ^= change
    assert parse_value(bytes(value))[0].startswith(DAMAGED)


@pytest.mark.parametrize("value", [None, b"", b"hello", b"a|b|c|d", b"a|1|zz|d"])
def test_what_nobody_of_us_wrote_is_found(value: bytes | None) -> None:
    assert parse_value(value)[0].startswith(DAMAGED)


def test_what_goes_up_by_one_side_by_side_is_a_run() -> None:
    a, b = ValueMaker("a", 0), ValueMaker("b", 0)
    records = [
        *((0, 10 + at, value) for at, value in enumerate(a.values(5, 3))),
        (0, 14, a.values(8, 1)[0]),  # An offset was left out.
        (0, 15, a.values(10, 1)[0]),  # A number was.
        (0, 16, b.values(11, 1)[0]),
        (1, 17, b.values(12, 1)[0]),
    ]
    assert runs_of(records) == [
        [0, 10, "a", 5, 3],
        [0, 14, "a", 8, 1],
        [0, 15, "a", 10, 1],
        [0, 16, "b", 11, 1],
        [1, 17, "b", 12, 1],
    ]
    assert runs_of([]) == []


def at(offset: int) -> RecordMetadata:
    return RecordMetadata("t", 0, offset, 0)


def test_what_was_acknowledged_is_kept_as_the_broker_said() -> None:
    lost = NetworkError("gone")
    assert acknowledged(7, [at(3), at(4), lost, at(5), at(9), at(-1), at(-1)]) == [
        [7, 2, 3],
        [10, 1, 5],
        [11, 1, 9],
        [12, 2, -1],
    ]


@pytest.mark.parametrize(
    "error",
    [
        BrokerFencedError("no"),
        NotEnoughReplicasError("too few"),
        DeliveryTimeoutError("1 record was not acknowledged (attempts: 0). It was not sent"),
        DeliveryTimeoutError("... They were not written: every attempt was refused"),
    ],
)
def test_what_is_refused_before_the_append_is_certain(error: Exception) -> None:
    assert is_certain(error)


@pytest.mark.parametrize(
    "error",
    [
        NotLeaderError("broker 1 does not lead"),
        NetworkError("gone"),
        StorageError("the disk failed"),
        NotEnoughReplicasAfterAppendError("it is in the log"),
        OutOfOrderSequenceError("after another"),
        NotEnoughReplicasError("an attempt is unknown, and it may have been written all the same"),
        DeliveryTimeoutError("... It may have been written all the same"),
        OSError("what else"),
    ],
)
def test_everything_else_is_ambiguous(error: Exception) -> None:
    assert not is_certain(error)


def test_an_error_is_written_with_its_code() -> None:
    assert words_of(NetworkError("gone")) == "NETWORK_EXCEPTION: gone"
    assert words_of(OSError("no")) == "OSError: no"


def test_a_checksum_in_other_letters_is_another() -> None:
    values = ValueMaker("p", 0).values(0, 50)
    lettered = next(value for value in values if value != value.upper().replace(b"P|", b"p|", 1))
    head, number, checksum, padding = lettered.split(b"|", 3)
    other = b"|".join((head, number, checksum.upper(), padding))
    assert parse_value(lettered)[0] == "p"
    assert parse_value(other)[0].startswith(DAMAGED)
