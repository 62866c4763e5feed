from __future__ import annotations

from collections import Counter

from aiokafka.partitioner import DefaultPartitioner
from hypothesis import given
from hypothesis import strategies as st
from kafka.partitioner import default as kafka_default

from penstock.client.core.partitioner import (
    REMEMBERED_BYTES,
    Chooser,
    _remembered,
    murmur2,
    partition_for_key,
)


@given(st.binary(max_size=2 * REMEMBERED_BYTES))
def test_murmur2_is_the_one_of_kafka_clients(key: bytes) -> None:
    assert murmur2(key) == kafka_default.murmur2(key) & 0xFFFFFFFF


@given(st.binary(max_size=32), st.integers(1, 1000))
def test_keys_go_where_aiokafka_puts_them(key: bytes, count: int) -> None:
    places = list(range(count))
    assert partition_for_key(key, count) == DefaultPartitioner()(key, places, places)


def test_known_answers_of_java() -> None:
    # org.apache.kafka.common.utils.UtilsTest.testMurmur2
    answers = {
        b"21": -973932308,
        b"foobar": -790332482,
        b"a-little-bit-long-string": -985981536,
        b"a-little-bit-longer-string": -1486304829,
        b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
        b"abc": 479470107,
    }
    for key, answer in answers.items():
        assert murmur2(key) == answer & 0xFFFFFFFF


def chooser(strategy: object = "default", stick_bytes: int = 100) -> Chooser:
    turns = iter(range(1_000_000))
    return Chooser(strategy, stick_bytes=lambda: stick_bytes, pick=lambda n: next(turns) % n)  # type: ignore[arg-type]


def choose(who: Chooser, key: bytes | None = None, available: list[int] | None = None) -> int:
    places = [0, 1, 2, 3] if available is None else available
    return who.choose("t", key, b"v", size_bytes=50, partition_count=4, available=lambda: places)


def test_null_keys_stick_for_a_batch_and_then_move_on() -> None:
    who = chooser()
    places = [choose(who) for _ in range(8)]
    assert places[0] == places[1] != places[2] == places[3] != places[4]
    assert len(set(places)) > 2


def test_null_keys_go_only_where_a_leader_is() -> None:
    who = chooser(stick_bytes=1)
    assert {choose(who, available=[2]) for _ in range(5)} == {2}
    assert choose(chooser(), available=[]) in range(4)


def test_keyed_records_ignore_who_is_available() -> None:
    assert choose(chooser(), b"key", [1]) == partition_for_key(b"key", 4)


def test_round_robin_takes_turns_even_with_keys() -> None:
    who = chooser("round_robin")
    assert Counter(choose(who, b"same") for _ in range(8)) == {0: 2, 1: 2, 2: 2, 3: 2}


def test_a_custom_partitioner_sees_everything() -> None:
    seen = []

    def mine(*told: object) -> int:
        seen.append(told)
        return 3

    assert choose(chooser(mine), b"k", [1, 3]) == 3
    assert seen == [("t", b"k", b"v", 4, [1, 3])]


def test_short_keys_are_remembered_and_long_ones_are_not() -> None:
    _remembered.cache_clear()
    for _ in range(2):
        murmur2(b"k" * REMEMBERED_BYTES)
        murmur2(b"k" * (REMEMBERED_BYTES + 1))
    found = _remembered.cache_info()
    assert (found.hits, found.misses, found.currsize) == (1, 1, 1)
    assert found.maxsize is not None
    assert found.maxsize * REMEMBERED_BYTES < 2**21
