"""The compiled way into open batches: what it takes it takes as the long way would, and no more."""

from __future__ import annotations

import gc
import sys
import threading
import time
from array import array
from collections import Counter
from itertools import pairwise
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.client.core.partitioner import partition_for_key
from penstock.wire import codec, intake, reference
from penstock.wire.codec import (
    Claim,
    Intake,
    Places,
    Receipt,
    Strings,
    Stuck,
    first_odd,
    join_headers,
)
from penstock.wire.columns import BytesColumn
from penstock.wire.compression import Compression
from penstock.wire.records import BatchBuilder, decode_batch, record_size_bound

compiled = pytest.mark.skipif(not codec.IS_COMPILED, reason="the package was built without it")
PARTITIONS = 5
DATA = st.none() | st.binary(max_size=300)


class Place(NamedTuple):
    topic: str
    partition: int
    offset: int
    timestamp_ms: int


def receipt_of(partition: int = 0) -> Receipt:
    return Receipt("t", partition, Place)


class Producer:
    """An intake with an open batch for each partition of topic t."""

    def __init__(
        self, *, memory: int = 10**6, largest: int = 10**6, limit: int = 10**6, hashes: bool = True
    ) -> None:
        self.intake: Intake[Receipt, Any] = Intake(
            Claim, buffer_memory_bytes=memory, max_record_bytes=largest, hashes_keys=hashes
        )
        self.builders = [BatchBuilder() for _ in range(PARTITIONS)]
        self.receipts = [receipt_of(number) for number in range(PARTITIONS)]
        self.stuck = Stuck(2, 10**6)
        for number in range(PARTITIONS):
            self.open(number, limit)
        self.intake.stick("t", self.stuck)

    def open(self, number: int, limit: int = 10**6) -> None:
        self.intake.open(
            "t",
            number,
            partition_count=PARTITIONS,
            body=self.builders[number],
            receipt=self.receipts[number],
            limit_bytes=limit,
        )

    def take(self, value: Any = b"v", key: Any = None, partition: Any = None) -> Any:
        return self.intake.take("t", value, key, partition)

    @property
    def counts(self) -> list[int]:
        return [builder.record_count for builder in self.builders]


@compiled
@given(st.lists(st.tuples(DATA, DATA, st.none() | st.integers(0, PARTITIONS - 1)), max_size=40))
def test_what_is_taken_is_in_the_batch_as_if_it_had_been_appended(
    records: list[tuple[bytes | None, bytes | None, int | None]],
) -> None:
    producer = Producer()
    expected: dict[int, list[tuple[bytes | None, bytes | None, int]]] = {}
    for key, value, partition in records:
        before = round(time.time_ns() / 1e6) - 1
        claim = producer.take(value, key, partition)
        if partition is not None:
            place = partition
        else:
            place = 2 if key is None else partition_for_key(key, PARTITIONS)
        there = expected.setdefault(place, [])
        assert claim.receipt is producer.receipts[place]
        assert claim.index == len(there)
        assert before <= claim.timestamp_ms <= before + 60_000
        there.append((key, value, claim.timestamp_ms))
    for place, there in expected.items():
        builder, plain = producer.builders[place], BatchBuilder()
        for key, value, timestamp_ms in there:
            plain.append(timestamp_ms, key, value)
        assert builder.build() == plain.build()
        found = [(one.key, one.value, one.timestamp_ms) for one in decode_batch(builder.build())]
        assert found == there
    assert producer.intake.used_bytes == sum(one.size_bytes - 61 for one in producer.builders)
    keyless = sum(key is None and partition is None for key, _, partition in records)
    assert (producer.stuck.left_bytes < 10**6) == (keyless > 0)


@compiled
@given(
    st.lists(st.tuples(DATA, DATA), max_size=40),
    st.none() | st.integers(0, PARTITIONS - 1),
    st.booleans(),
)
def test_many_are_taken_as_one_by_one(
    records: list[tuple[bytes | None, bytes | None]], partition: int | None, each: bool
) -> None:
    times: int | array[int] = array("q", range(len(records))) if each else 7
    one_by_one, together = Producer(), Producer()
    claims = [one_by_one.take(value, key, partition) for key, value in records]
    places: Places[Receipt] = Places()
    keys, values = [key for key, _ in records], [value for _, value in records]
    taken = together.intake.take_many(
        "t", values, keys, times, partition=partition, before=0, places=places
    )
    assert taken == len(places) == len(records)
    again = together.intake.take_many(
        "t", [b"v"], None, 9, partition=0, before=len(records), places=places
    )
    assert (again, len(places)) == (1, len(records) + 1)
    for number, claim in enumerate(claims):
        receipt, index = places.place(number)
        partition_number = one_by_one.receipts.index(claim.receipt)
        assert places.receipts[receipt] is together.receipts[partition_number]
        assert index == claim.index
        if index == 0 and not each:
            first = decode_batch(together.builders[partition_number].build())[0]
            assert first.timestamp_ms == 7
    assert sum(together.counts) == sum(one_by_one.counts) + 1
    with pytest.raises(IndexError):
        places.place(len(records) + 1)


@compiled
def test_what_runs_while_many_are_taken_may_close_the_batch_and_nothing_goes_into_it() -> None:
    """A batch lets go of the places that it was last entered in, and with them of anything."""
    producer = Producer()
    builder = producer.builders[0]

    class Last(Receipt):
        def __del__(self) -> None:
            # As metadata do, and the sender: another thread may have its turn here.
            producer.intake.clear()
            producer.intake.close("t", 0)
            sealed.append(builder.build())

    def take(places: Places[Receipt]) -> int:
        return producer.intake.take_many(
            "t", [b"v"] * 3, None, 1, partition=0, before=before, places=places
        )

    sealed: list[bytes] = []
    before = 0
    former: Places[Receipt] = Places()
    assert take(former) == 3
    former.receipts.append(Last("t", 0, Place))
    del former
    places: Places[Receipt] = Places()
    taken = take(places)
    assert [len(decode_batch(batch)) for batch in sealed] == [builder.record_count]
    assert (taken, len(places)) == (0, 0)
    assert producer.intake.used_bytes == builder.size_bytes - BatchBuilder().size_bytes


@compiled
def test_lists_of_other_lengths_are_declined() -> None:
    producer = Producer()
    places: Places[Receipt] = Places()

    def take(values: Any, keys: Any, times: Any, before: int, partitions: Any = None) -> int:
        partition = 0 if partitions is None else None
        return producer.intake.take_many(
            "t", values, keys, times, partition=partition, before=before, places=places,
            partitions=partitions,
        )  # fmt: skip

    assert take([b"v"] * 3, [b"k"] * 2, 1, 0) == 0
    assert take(strings([b"v"] * 3), strings([b"k"] * 2), 1, 0) == 0
    assert take(strings([b"v"] * 3), [b"k"] * 4, 1, 0) == 0
    assert take([b"v"] * 3, None, array("q", [1, 2]), 0) == 0
    assert take([b"v"] * 3, None, 1, 0, array("i", [1, 2])) == 0
    assert take([b"v"] * 3, None, 1, 1) == -1
    assert take([b"v"] * 3, None, array("q", [-1, 2, 3]), 0) == 0
    for odd in (-2, PARTITIONS):
        assert take([b"v"] * 3, None, 1, 0, array("i", [odd, 0, 0])) == 0
    assert take([b"v", "text", b"v"], None, 1, 0) == 1
    assert producer.counts[0] == len(places) == 1


COLUMN = st.lists(st.none() | st.binary(max_size=20), max_size=40)


@given(COLUMN, st.data())
def test_strings_of_a_column_are_those_that_it_was_made_of(
    strings: list[bytes | None], data: st.DataObject
) -> None:
    validity, offsets, buffer = pa.array(strings, pa.binary()).buffers()
    column = BytesColumn(validity, strings.count(None), offsets, buffer or b"")
    first = data.draw(st.integers(0, len(strings)))
    count = data.draw(st.integers(0, len(strings) - first))
    wanted = strings[first : first + count]
    for kind in (Strings, reference.Strings):
        found = kind(column, first, count)
        assert list(found) == wanted
        assert found.longest == max(map(len, filter(None, wanted)), default=0)
        for number in (-1, count):
            with pytest.raises(IndexError):
                found[number]


@given(
    st.none() | st.binary(max_size=4),
    st.lists(st.integers(-2, 12), max_size=8),
    st.binary(max_size=10),
    st.integers(-2, 9),
    st.integers(-2, 9),
)
@example(b"", [0, 0], b"", 0, 1)
def test_strings_beyond_a_columns_buffers_are_refused_and_not_read(
    validity: bytes | None, ends: list[int], data: bytes, first: int, count: int
) -> None:
    column = BytesColumn(validity, 0, array("i", ends).tobytes(), data)

    def outcome(kind: Any) -> Any:
        try:
            return list(kind(column, first, count))
        except ValueError as error:
            return str(error)

    assert outcome(Strings) == outcome(reference.Strings)


def strings(data: list[bytes | None]) -> Strings:
    """A column that has others before these and behind them."""
    validity, offsets, buffer = pa.array([b"first", *data, b"last"], pa.binary()).buffers()
    return Strings(BytesColumn(validity, data.count(None), offsets, buffer), 1, len(data))


@compiled
@given(
    st.lists(st.tuples(DATA, DATA, st.integers(-1, PARTITIONS - 1)), max_size=40),
    st.booleans(),
    st.booleans(),
)
def test_columns_are_taken_as_lists_are(
    records: list[tuple[bytes | None, bytes | None, int]], with_keys: bool, placed: bool
) -> None:
    values = [value for value, _, _ in records]
    keys = [key for _, key, _ in records] if with_keys else None
    partitions = array("i", [number for _, _, number in records]) if placed else None
    times = array("q", range(len(records)))
    from_lists, from_columns = Producer(), Producer()
    one_by_one: Places[Receipt] = Places()
    for number, (value, key, partition) in enumerate(records):
        from_lists.intake.take_many(
            "t", [value], [key] if with_keys else None, number,
            partition=partition if placed and partition >= 0 else None,
            before=number, places=one_by_one,
        )  # fmt: skip
    together: Places[Receipt] = Places()
    taken = from_columns.intake.take_many(
        "t", strings(values), None if keys is None else strings(keys), times,
        partition=None, before=0, places=together, partitions=partitions,
    )  # fmt: skip
    assert taken == len(together) == len(records)
    assert [together.place(number)[1] for number in range(taken)] == [
        one_by_one.place(number)[1] for number in range(taken)
    ]
    for mine, other in zip(from_columns.builders, from_lists.builders, strict=True):
        assert bytes(mine.body()) == bytes(other.body())
    assert from_columns.stuck.left_bytes == from_lists.stuck.left_bytes


NAMES = st.none() | st.text(max_size=5).map(str.encode) | st.just(b"\xff")


@given(
    st.lists(st.lists(st.tuples(NAMES, DATA), max_size=3), max_size=9),
    st.sampled_from([0, 0, 0, 1, -1]),
    st.integers(0, 9),
)
def test_headers_of_columns_are_joined_as_they_stand_in_batches(
    headers: list[list[tuple[bytes | None, bytes | None]]], wrong: int, where: int
) -> None:
    pairs = [pair for some in headers for pair in some]
    ends = array("i", [0])
    for some in headers:
        ends.append(ends[-1] + len(some))
    ends[where % len(ends)] += wrong
    names, values = [name for name, _ in pairs], [value for _, value in pairs]
    found = join_headers(ends, strings(names), strings(values))
    by_reference = [
        reference.Strings(reference.column_of(part), 0, len(part)) for part in (names, values)
    ]
    expected = reference.join_headers(ends, *by_reference)
    assert (None if found is None else list(found)) == (
        None if expected is None else list(expected)
    )
    fits = ends[0] == 0 and list(ends) == sorted(ends) and ends[-1] == len(pairs)
    sound = fits and all(name not in (None, b"\xff") for name in names)
    assert (found is not None) == sound
    if found is not None:
        assert list(found) == [
            reference.encode_headers(
                [(str(name, "utf-8"), value) for name, value in pairs[low:high] if name is not None]
            )
            for low, high in pairwise(ends)
        ]


@compiled
def test_headers_are_taken_with_their_records() -> None:
    producer, places = Producer(limit=400), Places[Receipt]()
    names, values = strings([b"a", b"name"]), strings([b"1", None])
    headers = join_headers(array("i", [0, 0, 2]), names, values)
    column = strings([b"v", b"w"])

    def take(headers: Any, partition: int) -> int:
        return producer.intake.take_many(
            "t", column, None, 5, partition=partition, before=len(places), places=places,
            headers=headers,
        )  # fmt: skip

    assert take(headers, 0) == 2
    found = decode_batch(producer.builders[0].build())
    assert [one.headers for one in found] == [(), (("a", b"1"), ("name", None))]
    # As many as values, and what is too large with them is declined.
    assert take(join_headers(array("i", [0]), strings([]), strings([])), 0) == 0
    large = join_headers(array("i", [0, 0, 1]), strings([b"h"]), strings([b"x" * 400]))
    assert take(large, 1) == 1


@compiled
def test_a_column_that_is_written_to_is_not_read_beyond_its_data() -> None:
    offsets = array("i", [0, 3, 6])
    column = Strings(BytesColumn(None, 0, offsets, b"onetwo"), 0, 2)
    offsets[2] = 7
    producer, places = Producer(), Places[Receipt]()
    assert column[0] == b"one"
    with pytest.raises(ValueError, match="not within the data any more"):
        column[1]
    taken = producer.intake.take_many("t", column, None, 1, partition=0, before=0, places=places)
    assert taken == producer.counts[0] == 1


class Text(str):
    __slots__ = ()


class Octets(bytes):
    __slots__ = ()


@compiled
def test_what_there_is_more_to_is_declined_and_changes_nothing() -> None:
    producer = Producer(largest=500)
    for value, key, partition in (
        ("text", None, None),
        (bytearray(b"v"), None, None),
        (Octets(b"v"), None, None),
        (b"v", "text", None),
        (b"v", None, PARTITIONS),
        (b"v", None, -1),
        (b"v", None, 2**80),
        (b"v", None, True),
        (b"v", None, "1"),
        (b"v", None, 1.0),
        (b"v" * 408, None, None),
        (b"v" * 200, b"k" * 208, None),
    ):
        assert producer.take(value, key, partition) is None
    for topic in ("other", Text("t"), b"t", None, ["t"]):
        assert producer.intake.take(topic, b"v", None, None) is None
    assert producer.counts == [0] * PARTITIONS
    assert producer.intake.used_bytes == 0
    assert producer.take(b"v" * 407) is not None


@compiled
def test_batches_are_added_to_up_to_their_limit_and_the_memorys() -> None:
    bound = record_size_bound(None, b"v" * 100)
    producer = Producer(limit=61 + 3 * bound)
    while producer.take(b"v" * 100, partition=1):
        assert producer.builders[1].size_bytes <= 61 + 3 * bound
    assert producer.counts[1] == 3
    producer = Producer(memory=2 * bound)
    assert producer.take(b"v" * 100, partition=0)
    producer.intake.charge(bound)
    assert producer.take(b"v" * 100, partition=1) is None
    producer.intake.charge(-bound)
    assert producer.take(b"v" * 100, partition=1)


@compiled
def test_nothing_is_added_where_no_batch_is_open_or_nobody_says_where() -> None:
    producer = Producer()
    producer.intake.close("t", 1)
    producer.intake.close("t", PARTITIONS)
    producer.intake.close("other", 0)
    assert producer.take(partition=1) is None
    producer.open(1)
    assert producer.take(partition=1)
    producer.stuck.left_bytes = 1
    assert producer.take()
    assert producer.stuck.left_bytes < 0
    assert producer.take() is None
    producer.intake.stick("t", Stuck(PARTITIONS, 10))
    assert producer.take() is None
    producer.intake.clear()
    assert producer.take(partition=0) is None
    by_turns = Producer(hashes=False)
    assert by_turns.take(key=b"k") is None
    assert by_turns.take() is None
    assert by_turns.take(partition=3)


@compiled
def test_threads_add_while_batches_are_closed_and_nothing_is_lost_or_counted_twice() -> None:
    producer = Producer(memory=10**12)
    stop = threading.Event()
    taken: list[list[Any]] = [[], [], []]

    def send(mine: list[Any]) -> None:
        while not stop.is_set():
            claim = producer.take(partition=0)
            if claim is not None:
                mine.append((claim.receipt, claim.index))

    threads = [threading.Thread(target=send, args=(mine,)) for mine in taken]
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        sizes = close_and_open(producer, threads)
    finally:
        sys.setswitchinterval(usual_s)
        producer.intake.close("t", 0)
        stop.set()
        for thread in threads:
            thread.join(30)
    sizes[producer.receipts[0]] = producer.builders[0].record_count
    places = [place for mine in taken for place in mine]
    assert len(places) == len(set(places)) == sum(sizes.values())
    assert Counter(receipt for receipt, _ in places) == +sizes


def close_and_open(producer: Producer, threads: list[threading.Thread]) -> Counter[Receipt]:
    for thread in threads:
        thread.start()
    sizes: Counter[Receipt] = Counter()
    while len(sizes) < 300:
        builder, receipt = producer.builders[0], producer.receipts[0]
        while builder.record_count < 5:
            time.sleep(0)
        producer.intake.close("t", 0)
        sizes[receipt] = builder.record_count
        producer.builders[0], producer.receipts[0] = BatchBuilder(), receipt_of()
        producer.open(0)
    return sizes


@given(st.integers(-1, 2**62), st.integers(0, 2**31), st.integers(-1, 2**62), st.booleans())
def test_a_claim_has_its_place_once_its_receipt_is_settled(
    base_offset: int, index: int, log_time_ms: int, fails: bool
) -> None:
    offset = base_offset + index if base_offset >= 0 else -1
    time_ms = log_time_ms if log_time_ms >= 0 else 17
    for kinds in (codec, intake):
        receipt = kinds.Receipt("t", 3, Place)
        claim = kinds.Claim(receipt, index, 17)
        assert claim.place() is None
        receipt.base_offset, receipt.log_append_time_ms = base_offset, log_time_ms
        receipt.error = ValueError("no") if fails else None
        assert claim.place() is None
        receipt.is_settled = True
        found = claim.place()
        assert found == (None if fails else ("t", 3, offset, time_ms))
        assert fails or type(found) is Place
        assert receipt.place(index, 17) == Place("t", 3, offset, time_ms)


@compiled
def test_claims_are_looked_at_by_the_collector_once_they_can_be_in_a_cycle() -> None:
    producer = Producer()
    claim = producer.take()
    assert not gc.is_tracked(claim)
    claim.complete([claim])
    assert gc.is_tracked(claim)
    claim.complete(None)
    assert gc.is_tracked(Claim(receipt_of(), 0, 0))


def test_first_odd_finds_what_is_not_plain_or_too_long() -> None:
    for find in (first_odd, intake.first_odd):
        assert find([], 3) == 0
        assert find([b"", None, b"abc"], 3) == 3
        assert find([b"", None, b"abcd"], 3) == 2
        assert find([b"", "a"], 3) == 1
        assert find([Octets(b"a")], 3) == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**31)), max_size=200))
def test_places_are_kept_as_they_were_added(added: list[tuple[int, int]]) -> None:
    receipts = [receipt_of() for _ in range(4)]
    for kind in (Places, intake.Places):
        places: Any = kind()
        for receipt, index in added:
            places.add(receipts[receipt], index)
        found = [places.place(number) for number in range(len(places))]
        assert [(places.receipts[receipt], index) for receipt, index in found] == [
            (receipts[receipt], index) for receipt, index in added
        ]


def test_without_the_compiled_codec_everything_goes_the_long_way() -> None:
    slow: intake.Intake[Receipt, Any] = intake.Intake(
        intake.Claim, buffer_memory_bytes=10, max_record_bytes=10, hashes_keys=True
    )
    slow.open(
        "t",
        0,
        partition_count=1,
        body=BatchBuilder(),
        receipt=receipt_of(),
        limit_bytes=10**6,
    )
    slow.stick("t", intake.Stuck(0, 10))
    assert slow.take("t", b"v", None, None) is None
    places: intake.Places[Receipt] = intake.Places()
    assert slow.take_many("t", [b"v"], None, 1, partition=0, before=0, places=places) == 0
    slow.charge(5)
    assert slow.used_bytes == 5
    with pytest.raises(TypeError):
        intake.Intake(int, buffer_memory_bytes=1, max_record_bytes=1, hashes_keys=True)  # type: ignore[type-var] # what is refused


@given(st.lists(DATA, min_size=1, max_size=30), st.sampled_from(Compression))
def test_a_sealed_batch_is_the_one_that_is_built(
    values: list[bytes | None], compression: Compression
) -> None:
    builder = BatchBuilder()
    for value in values:
        builder.append(5, None, value)
    identity: dict[str, Any] = {
        "compression": compression,
        "producer_id": 7,
        "producer_epoch": 3,
        "base_sequence": 11,
    }
    built = builder.build(**identity)
    sealed = builder.seal(**identity)
    assert sealed == built
    other = builder.build(compression=compression)
    assert sealed == built != other


@compiled
def test_a_builder_without_records_has_nothing_to_show() -> None:
    with pytest.raises(BufferError):
        memoryview(BatchBuilder())  # type: ignore[arg-type]  # Only the compiled one has a buffer.


@compiled
def test_a_batch_in_use_stays_as_it_is() -> None:
    builder = BatchBuilder()
    builder.append(5, None, b"v" * 20_000)
    sealed = builder.seal()
    before = bytes(sealed)
    with pytest.raises(BufferError):
        builder.append(5, None, b"w")
    with pytest.raises(BufferError):
        builder.seal(producer_id=1)
    with pytest.raises(ValueError, match="a header of 3 bytes"):
        builder.behind(b"abc")
    del builder
    others = [BatchBuilder() for _ in range(50)]  # None gets the memory, though it is wanted.
    for other in others:
        other.append(5, None, b"o" * 20_000)
    assert bytes(sealed) == before
    del sealed, other
    built = {other.build() for other in others}
    assert len(built) == 1
    assert decode_batch(built.pop())[0].value == b"o" * 20_000
