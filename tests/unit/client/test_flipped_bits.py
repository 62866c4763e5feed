"""Any one bit of a fetched batch is flipped, on its way or in memory: no reader is led astray."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from penstock.client.core.fetch_events import (
    Effect,
    FetchAnswered,
    Fetched,
    MadeAnew,
    OutOfRange,
    SendFetch,
    Wanted,
    Woken,
)
from penstock.client.core.fetcher import Fetcher
from penstock.client.core.lane import Lane
from penstock.wire.batch import checksum
from penstock.wire.errors import OffsetOutOfRangeError
from penstock.wire.records import Compression, RecordData, encode_batch, parse_header
from penstock.wire.rewriting import filler
from tests.unit.client.test_fetcher import T0, make, start, take

_STEPS = 100
"""So often a fetcher may do something before it counts as one that hangs."""

_UNCHECKED = (*range(8), *range(12, 16))
"""A batch's base offset and leader epoch, which its own checksum leaves out."""


def _batches() -> list[bytes]:
    """Four offsets of epoch 1, a filler of three, a marker, and four and one of epoch 2."""

    def records(*values: str) -> list[RecordData]:
        return [RecordData(1, b"k", value.encode()) for value in values]

    squeezed = records("e" * 40, "f" * 40, "g" * 40, "h" * 40)
    return [
        encode_batch(records("a", "b", "c", "d"), base_offset=0, leader_epoch=1),
        filler(4, 6, 1, 1),
        encode_batch(records(""), base_offset=7, leader_epoch=1, is_control=True),
        encode_batch(squeezed, base_offset=8, leader_epoch=2, compression=Compression.LZ4),
        encode_batch(records("i"), base_offset=12, leader_epoch=2),
    ]


_LOG = _batches()
_END = 13
_EXPECTED = {
    **dict(zip(range(4), (b"a", b"b", b"c", b"d"), strict=True)),
    **dict(zip(range(8, 12), (b"e" * 40, b"f" * 40, b"g" * 40, b"h" * 40), strict=True)),
    12: b"i",
}


def _answer(wanted: Wanted, damage: Callable[[bytes], bytes], *, checked: bool) -> Fetched:
    """What a broker of that log answers."""
    if not 0 <= wanted.offset <= _END:
        return Fetched(T0, OffsetOutOfRangeError(f"{wanted.offset} is outside"), b"")
    ends = {1: 8, 2: _END}
    known = max((epoch for epoch in ends if epoch <= wanted.last_fetched_epoch), default=-1)
    end = ends.get(known, 0)
    if wanted.last_fetched_epoch >= 0 and (
        known < wanted.last_fetched_epoch or end < wanted.offset
    ):
        return Fetched(T0, None, b"", _END, end)
    left = [batch for batch in _LOG if parse_header(batch).next_offset > wanted.offset]
    sound = b"".join(left)
    crc = checksum(sound) if checked else None
    return Fetched(T0, None, damage(sound), _END, records_crc=crc)


class _Reader:
    """A fetcher that reads the whole log; the first answer that has records may be damaged."""

    def __init__(self, offset: int, *, checked: bool) -> None:
        self.fetcher, _ = make((1, 2))
        self.checked = checked
        self.taken: list[tuple[int, bytes | None]] = []
        self.open: list[SendFetch] = list(start(self.fetcher, offset=offset))
        self.now_ms = 0.0

    def take_in(self, effects: Sequence[Effect]) -> None:
        assert not [one for one in effects if isinstance(one, OutOfRange | MadeAnew)], effects
        self.open += [one for one in effects if isinstance(one, SendFetch)]

    def answer(self, damage: Callable[[bytes], bytes] = lambda data: data) -> None:
        fetch = self.open.pop(0)
        result = _answer(fetch.wanted[0], damage, checked=self.checked)
        self.take_in(self.fetcher.handle(FetchAnswered(fetch.fetch_id, (result,)), self.now_ms))

    def take(self) -> None:
        for record in take(self.fetcher, 3, self.now_ms):
            self.taken.append((record.offset, record.value))
        self.take_in(self.fetcher.handle(Woken(), self.now_ms))
        self.fetcher.validate()

    def run(self) -> None:
        """Until all is taken and the fetcher waits for more at the end."""
        for _ in range(_STEPS):
            self.take()
            waits = [fetch for fetch in self.open if fetch.wanted[0].offset == _END]
            if waits and self.fetcher.cursor(T0) == _END:
                return
            if self.open:
                self.answer()
            else:
                self.now_ms = max(self.now_ms, min(self.fetcher.next_deadline_ms(), 1e9))
                self.take_in(self.fetcher.handle(Woken(), self.now_ms))
        raise AssertionError(f"it hangs at {self.fetcher.cursor(T0)}: {self.fetcher.trouble()}")


def _flip(data: bytes, bit: int) -> bytes:
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


def _bits(offset: int, *, unchecked: bool) -> Iterator[int]:
    """The bits of what is answered at ``offset``, with or without what no batch checks itself."""
    at = 0
    for batch in _LOG:
        if parse_header(batch).next_offset > offset:
            for byte in range(len(batch)):
                if unchecked or byte not in _UNCHECKED:
                    yield from range((at + byte) * 8, (at + byte) * 8 + 8)
            at += len(batch)


def _expected(offset: int) -> list[tuple[int, bytes]]:
    return [(at, value) for at, value in _EXPECTED.items() if at >= offset]


def _reads_all(offset: int, bit: int, *, checked: bool) -> None:
    reader = _Reader(offset, checked=checked)
    reader.answer(lambda data: _flip(data, bit))
    if reader.open:  # It fetches on at once, and is answered before anything is taken.
        reader.answer()
    reader.run()
    assert reader.taken == _expected(offset), f"bit {bit}"


@pytest.mark.parametrize("offset", [0, 2, 5, 9])
def test_a_bit_flipped_on_its_way_changes_nothing_of_what_is_read(offset: int) -> None:
    for bit in _bits(offset, unchecked=True):
        _reads_all(offset, bit, checked=True)


@pytest.mark.parametrize("offset", [0, 2, 5, 9])
def test_of_brokers_that_send_no_checksum_so_does_what_batches_check(offset: int) -> None:
    for bit in _bits(offset, unchecked=False):
        _reads_all(offset, bit, checked=False)


@pytest.mark.parametrize("offset", [0, 2, 5, 9])
def test_a_bit_flipped_in_what_is_buffered_changes_nothing_of_what_is_read(offset: int) -> None:
    for bit in _bits(offset, unchecked=True):
        reader = _Reader(offset, checked=True)
        reader.answer()
        [chunk] = _lane(reader.fetcher).chunks
        chunk.data = _flip(chunk.data, bit)
        reader.run()
        assert reader.taken == _expected(offset), f"bit {bit}"


def _lane(fetcher: Fetcher) -> Lane:
    return fetcher._lanes[T0]
