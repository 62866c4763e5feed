from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.wire.errors import CorruptRecordError
from penstock.wire.varint import (
    MAX_VARINT_BYTES,
    SMALL,
    SMALL_LIMIT,
    decode_varint,
    encode_varint,
    size_of_varint,
)

INT64 = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (0, "00"),
        (-1, "01"),
        (1, "02"),
        (63, "7e"),
        (-64, "7f"),
        (64, "8001"),
        (-65, "8101"),
        (8191, "fe7f"),
        (8192, "808001"),
        (2**31 - 1, "feffffff0f"),
        (-(2**31), "ffffffff0f"),
        (2**63 - 1, "feffffffffffffffff01"),
        (-(2**63), "ffffffffffffffffff01"),
    ],
)
def test_known_encodings(value, encoded):
    assert encode_varint(value).hex() == encoded
    assert decode_varint(bytes.fromhex(encoded), 0) == (value, len(encoded) // 2)


@given(value=INT64, before=st.binary(max_size=3), after=st.binary(max_size=3))
def test_round_trip_anywhere_in_a_buffer(value, before, after):
    encoded = encode_varint(value)
    assert len(encoded) == size_of_varint(value) <= MAX_VARINT_BYTES
    for kind in (bytes, bytearray, memoryview):
        end = len(before) + len(encoded)
        assert decode_varint(kind(before + encoded + after), len(before)) == (value, end)


def test_the_table_holds_what_is_computed():
    assert len(SMALL) == SMALL_LIMIT
    for value in range(SMALL_LIMIT):
        assert decode_varint(SMALL[value], 0) == (value, len(SMALL[value]))
        assert len(SMALL[value]) <= 2


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 2**100])
def test_refuses_more_than_64_bits(value):
    with pytest.raises(ValueError, match="does not fit into 64 bits"):
        encode_varint(value)


@given(value=INT64)
def test_a_number_cut_short_is_corrupt(value):
    encoded = encode_varint(value)
    for cut in range(len(encoded)):
        with pytest.raises(CorruptRecordError, match=f"ends inside a number, at byte {cut}"):
            decode_varint(encoded[:cut], 0)


@pytest.mark.parametrize("encoded", [b"\x80" * 11, b"\xff" * 10, b"\x80" * 9 + b"\x02"])
def test_a_number_too_long_is_corrupt(encoded):
    with pytest.raises(CorruptRecordError, match="more than 64 bits"):
        decode_varint(encoded + b"\x00", 0)


@given(garbage=st.binary(max_size=16), position=st.integers(0, 20))
def test_garbage_decodes_or_is_corrupt(garbage, position):
    try:
        value, end = decode_varint(garbage, position)
    except CorruptRecordError:
        return
    assert -(2**63) <= value < 2**63
    assert position < end <= len(garbage)
