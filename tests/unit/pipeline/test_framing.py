from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.errors import ConverterError
from penstock.pipeline.functions.framing import (
    check_framing,
    frame,
    indexes,
    skip_indexes,
    split_frame,
)


@given(st.integers(0, 2**32 - 1), st.binary())
def test_frames_come_back(schema_id: int, payload: bytes) -> None:
    assert split_frame(frame(schema_id) + payload) == (schema_id, payload)


@given(st.lists(st.integers(0, 2**20), min_size=1, max_size=9), st.binary())
def test_ways_to_a_type_are_skipped(way: list[int], payload: bytes) -> None:
    assert skip_indexes(indexes(way) + payload) == payload


def test_the_way_to_the_first_type_is_one_byte() -> None:
    assert indexes([0]) == b"\0"
    assert indexes([1, 0]) == bytes([4, 2, 0])


@pytest.mark.parametrize("data", [b"", b"\0\0\0\0", b"\1\0\0\0\1x", b"{}     "])
def test_what_has_no_header(data: bytes) -> None:
    with pytest.raises(ConverterError, match="framing='plain'"):
        split_frame(data)


@pytest.mark.parametrize("data", [b"", b"\x80", b"\x04\x02", b"\xff" * 9])
def test_torn_ways(data: bytes) -> None:
    with pytest.raises(ConverterError, match="torn"):
        skip_indexes(data)


def test_what_is_no_framing_or_id() -> None:
    assert check_framing("confluent")
    assert not check_framing("plain")
    with pytest.raises(ConverterError, match="framing='kafka' is none of plain, confluent"):
        check_framing("kafka")
    with pytest.raises(ConverterError, match="32 bits"):
        frame(2**32)
