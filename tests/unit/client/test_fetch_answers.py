"""What a consumer keeps of an answer in memory is bounded by the records that it counts."""

from __future__ import annotations

from penstock.client.fetch_loop import results_of
from penstock.v1 import log_pb2
from penstock.wire.laden import FETCH_RESPONSE


def answer(*sizes: int) -> bytes:
    response = log_pb2.FetchResponse()
    for number, size in enumerate(sizes):
        entry = response.partitions.add(records=bytes([number]) * size, high_watermark=number)
        entry.partition.topic = "orders"
        entry.partition.partition = number
    return response.SerializeToString()


def test_records_that_are_most_of_an_answer_are_not_copied_and_others_keep_nothing_of_it() -> None:
    few, most, none = results_of(FETCH_RESPONSE.parse(answer(40_000, 60_000, 0)))
    assert isinstance(few.records, bytes)
    assert few.records == bytes(40_000)
    assert isinstance(most.records, memoryview)
    assert most.records == b"\x01" * 60_000
    assert none.records == b""
    assert [result.end_offset for result in (few, most, none)] == [0, 1, 2]


def test_of_many_partitions_with_as_much_each_none_keeps_all_of_the_answer() -> None:
    results = results_of(FETCH_RESPONSE.parse(answer(*[30_000] * 4)))
    assert all(isinstance(result.records, bytes) for result in results)
