"""Frames survive every way of cutting them, and whatever is no frame is refused before it costs."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.broker.replication.frames import (
    MAX_HELLO_BYTES,
    PREAMBLE,
    Frame,
    FrameDecoder,
    FrameError,
    Kind,
    encode_header,
)
from penstock.wire.transport import MAX_MESSAGE_BYTES

FRAMES = st.lists(
    st.tuples(st.sampled_from(Kind), st.binary(max_size=200) | st.binary(min_size=5_000)),
    max_size=12,
)


def encoded(frames: list[tuple[Kind, bytes]]) -> bytes:
    return PREAMBLE + b"".join(encode_header(kind, len(body)) + body for kind, body in frames)


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts})
    return [
        data[begin:end]
        for begin, end in zip([0, *places], [*places, len(data)], strict=True)
        if begin < end  # A connection never brings nothing.
    ]


def test_the_bytes_are_these() -> None:
    # What is on the wire is a contract with every version that is running somewhere.
    assert encoded([(Kind.WELCOME, b"ab"), (Kind.MESSAGE, b"")]) == (
        b"penstock\x00\x01\x00\x00\x00\x02\x02ab\x00\x00\x00\x00\x01"
    )
    assert [int(kind) for kind in (Kind.MESSAGE, Kind.WELCOME, Kind.END)] == [1, 2, 3]


@given(FRAMES, st.lists(st.integers(min_value=0), max_size=30))
def test_frames_come_out_as_they_went_in_however_they_are_cut(
    frames: list[tuple[Kind, bytes]], cuts: list[int]
) -> None:
    decoder = FrameDecoder()
    found: list[Frame] = []
    for piece in pieces_of(encoded(frames), cuts):
        found += decoder.feed(piece)
    assert found == frames
    assert decoder.is_between_frames


@given(FRAMES.filter(bool), st.integers(min_value=1))
def test_a_frame_comes_with_its_last_byte_and_not_before(
    frames: list[tuple[Kind, bytes]], missing: int
) -> None:
    data = encoded(frames)
    held_back = 1 + missing % (len(frames[-1][1]) + 5)
    decoder = FrameDecoder()
    assert decoder.feed(data[:-held_back]) == frames[:-1]
    assert decoder.is_between_frames == (held_back == len(frames[-1][1]) + 5)
    assert decoder.feed(data[-held_back:]) == frames[-1:]


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=20))
@example([b"penstock", b"\x01"])
def test_any_other_bytes_are_refused_or_waited_for(pieces: list[bytes]) -> None:
    decoder = FrameDecoder(MAX_HELLO_BYTES)
    cause = ""
    for piece in pieces:
        try:
            decoder.feed(piece)
        except FrameError as error:
            cause = error.cause
            break
    heard = b"".join(pieces)
    if PREAMBLE.startswith(heard[: len(PREAMBLE)]):
        assert cause in {"", "oversize", "malformed"}
    elif len(heard) < len(PREAMBLE) and heard.startswith(PREAMBLE[:8]):
        assert cause == "", "half of a version is none yet"
    else:
        assert cause in {"stranger", "version"}


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01", b"PRI * HTTP/2.0", b"x"])
def test_another_protocol_is_known_by_its_first_byte(first: bytes) -> None:
    with pytest.raises(FrameError) as caught:
        FrameDecoder().feed(first)
    assert caught.value.cause == "stranger"


def test_another_version_is_named() -> None:
    with pytest.raises(FrameError, match="version 7; this broker knows 1") as caught:
        FrameDecoder().feed(b"penstock\x00\x07")
    assert caught.value.cause == "version"


@pytest.mark.parametrize("limit", [MAX_HELLO_BYTES, MAX_MESSAGE_BYTES])
def test_a_length_is_refused_as_soon_as_it_is_announced(limit: int) -> None:
    fits = FrameDecoder(limit)
    assert fits.feed(PREAMBLE + limit.to_bytes(4, "big") + b"\x01") == []
    with pytest.raises(FrameError, match=f"{limit + 1} bytes is announced") as caught:
        FrameDecoder(limit).feed(PREAMBLE + (limit + 1).to_bytes(4, "big") + b"\x01")
    assert caught.value.cause == "oversize"


def test_a_frame_of_no_known_kind_is_refused() -> None:
    with pytest.raises(FrameError, match="kind 9") as caught:
        FrameDecoder().feed(PREAMBLE + b"\x00\x00\x00\x00\x09")
    assert caught.value.cause == "malformed"


def test_nobody_sends_what_nobody_would_take() -> None:
    assert encode_header(Kind.MESSAGE, MAX_MESSAGE_BYTES)
    with pytest.raises(FrameError, match="larger than a frame may be"):
        encode_header(Kind.MESSAGE, MAX_MESSAGE_BYTES + 1)


def test_bytes_that_come_one_by_one_are_kept_as_few_objects() -> None:
    decoder = FrameDecoder()
    body = bytes(range(256)) * 1024
    data = encoded([(Kind.MESSAGE, body)])
    found: list[Frame] = []
    most = 0
    for number in range(len(data)):
        found += decoder.feed(data[number : number + 1])
        most = max(most, len(decoder._parts))
    assert found == [(Kind.MESSAGE, body)]
    # Few, but more than one: they are not put together anew with each byte.
    assert 1 < most <= 2 + len(body) // (64 * 1024)
