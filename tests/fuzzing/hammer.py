"""The process that has the sanitised codec: hammers it and compares it with the reference."""

from __future__ import annotations

import importlib.util
import random
import sys
from array import array
from itertools import accumulate
from typing import Any

from penstock.wire import reference
from penstock.wire.columns import BytesColumn
from penstock.wire.errors import CorruptRecordError
from penstock.wire.record import Bounds

NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF)
TIMES = (-1, 0, 5, 1_700_000_000_000, 2**63 - 1)


def load(path: str) -> Any:
    """The module that was built, under its own name."""
    spec = importlib.util.spec_from_file_location("penstock.wire._codec", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def some_bytes(chance: random.Random) -> bytes | None:
    size = chance.choice((None, 0, 1, 5, 63, 64, 200, 8192))
    return None if size is None else chance.randbytes(size)


def body_of(codec: Any, count: int, chance: random.Random) -> bytes:
    """Records, written by both alike."""
    ours, theirs = codec.RecordsBody(), reference.RecordsBody()
    for _ in range(count):
        headers = [
            (chance.choice(("", "a", "näme")), some_bytes(chance))
            for _ in range(chance.choice((0, 0, 0, 1, 3)))
        ]
        record = (chance.choice(TIMES), some_bytes(chance), some_bytes(chance), headers)
        assert outcome(ours.append, *record) == outcome(theirs.append, *record)
    assert ours.body() == theirs.body()
    return bytes(ours.body())


def mutated(sound: bytes, chance: random.Random) -> bytes:
    data = bytearray(sound)
    for _ in range(chance.choice((0, 1, 1, 2, 5))):
        place = chance.randrange(len(data) + 1)
        match chance.randrange(5):
            case 0 if data:
                data[place % len(data)] ^= 1 << chance.randrange(8)
            case 1 if data:
                data[place % len(data)] = chance.choice(NUMBERS)
            case 2:
                del data[place : place + chance.randint(1, 70)]
            case 3:
                data[place:place] = chance.randbytes(chance.randint(1, 11))
            case _:
                del data[place:]
    return bytes(data)


def outcome(function: Any, *arguments: Any) -> Any:
    try:
        return plain(function(*arguments))
    except (CorruptRecordError, ValueError) as error:
        return str(error)


def gather(builder: Any, parts: Any) -> Any:
    return [outcome(builder.add, *part) for part in parts], plain(builder.build())


def plain(value: Any) -> Any:
    if isinstance(value, bytearray):
        return bytes(value)
    return [plain(one) for one in value] if isinstance(value, tuple) else value


def strings_in(kind: Any, column: BytesColumn, first: int, count: int) -> Any:
    found = kind(column, first, count)
    return list(found), found.longest


def check_strings(codec: Any, chance: random.Random) -> None:
    """A column whose offsets may be anything, read by both alike."""
    size = chance.choice((0, 1, 7, 8, 9, 40))
    column = reference.column_of([some_bytes(chance) for _ in range(size)])
    offsets = mutated(bytes(column.offsets), chance)
    validity = None if column.validity is None else mutated(bytes(column.validity), chance)
    odd = BytesColumn(validity, column.null_count, offsets, column.data)
    first, count = chance.randrange(-1, 4), chance.randrange(-1, size + 2)
    expected = outcome(strings_in, reference.Strings, odd, first, count)
    assert outcome(strings_in, codec.Strings, odd, first, count) == expected


def check_headers(codec: Any, chance: random.Random) -> None:
    """Headers whose lists may be anything, joined by both alike."""
    counts = [chance.choice((0, 0, 1, 3)) for _ in range(chance.choice((0, 1, 5)))]
    total = sum(counts)
    names = [chance.choice((b"", b"a", b"n\xc3\xa4me", b"\xff", None)) for _ in range(total)]
    sound = bool(chance.randrange(3))
    parts = [b"ok"] * total if sound else names, [some_bytes(chance) for _ in range(total)]
    ends = array("i", accumulate(counts, initial=0))
    if not chance.randrange(4):
        ends[chance.randrange(len(ends))] = chance.choice((-1, 0, 1, total, total + 1, 2**31 - 1))
    found = [
        one.join_headers(
            ends,
            *(one.Strings(reference.column_of(part), 0, total) for part in parts),
        )
        for one in (codec, reference)
    ]
    assert (found[0] is None) == (found[1] is None)
    assert found[0] is None or list(found[0]) == list(found[1])


def main(path: str, rounds: int, seed: int) -> None:
    codec = load(path)
    refused = 0
    for number in range(rounds):
        chance = random.Random(f"{seed}-{number}")
        count = chance.choice((1, 1, 2, 5, 20))
        sound = body_of(codec, count, chance)
        check_strings(codec, chance)
        check_headers(codec, chance)
        for _ in range(4):
            data = mutated(sound, chance)
            wrong = chance.choice((0, 0, 0, 0, 1, -1, 1000))
            last_delta = chance.choice((count - 1, count + 5))
            bounds = Bounds(
                count + wrong, chance.choice((0, 7)), last_delta, chance.choice(TIMES), wrong != 1
            )
            for name in ("parse_records", "parse_columns"):
                expected = outcome(getattr(reference, name), data, bounds)
                assert outcome(getattr(codec, name), data, bounds) == expected, (seed, number, name)
                refused += isinstance(expected, str)
            parts = [(data, bounds, -1, 2), (sound, Bounds(count, 0, count, 5, 0), 3, 9)] * 2
            built = [gather(one.ColumnsBuilder(), parts) for one in (codec, reference)]
            assert built[0] == built[1], (seed, number, "columns")
            framed = (data, bounds, chance.choice((-1, 3, 9)), tuple, ("t", 1), (b"id",))
            expected = outcome(reference.parse_records_as, *framed)
            assert outcome(codec.parse_records_as, *framed) == expected, (seed, number, "as")
    sys.stdout.write(f"{rounds} rounds of seed {seed}: {refused} of {8 * rounds} refused, alike\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
