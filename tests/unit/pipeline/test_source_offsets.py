from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client import TopicPartition
from penstock.pipeline.source.offsets import (
    EARLIEST,
    LATEST,
    describe,
    from_json,
    ids_from_json,
    parse_partitions,
    parse_wanted,
    to_json,
)

PARTITIONS = st.builds(
    TopicPartition, st.sampled_from(["a", "b", "orders-1"]), st.integers(0, 2**31 - 1)
)
OFFSETS = st.dictionaries(PARTITIONS, st.integers(0, 2**63 - 1), max_size=20)


@given(OFFSETS)
def test_offsets_go_through_a_checkpoint(offsets: dict[TopicPartition, int]) -> None:
    assert from_json(json.loads(json.dumps(to_json(offsets)))) == offsets


@given(st.permutations([TopicPartition("a", n) for n in (0, 2, 10)]))
def test_equal_offsets_are_equal_text(order: list[TopicPartition]) -> None:
    text = json.dumps(to_json(dict.fromkeys(order, 7)))
    assert text == '{"a": {"0": 7, "2": 7, "10": 7}}'


def test_the_form_is_that_of_sparks_kafka_connector() -> None:
    text = '{"orders":{"0":23,"1":-1},"events":{"0":-2}}'
    assert parse_wanted(text) == {
        TopicPartition("orders", 0): 23,
        TopicPartition("orders", 1): LATEST,
        TopicPartition("events", 0): EARLIEST,
    }


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("earlest", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "a JSON object by topic is wanted"),
        ('{"a": 5}', "topic 'a' wants each partition's offset"),
        ('{"a": {"x": 5}}', "topic 'a': 'x' is no partition"),
        ('{"a": {"-1": 5}}', "topic 'a': '-1' is no partition"),
        ('{"a": {"0": -3}}', "partition a-0: -3 is no offset"),
        ('{"a": {"0": "5"}}', "partition a-0: '5' is no offset"),
        ('{"a": {"0": 5.0}}', "partition a-0: 5.0 is no offset"),
        ('{"a": {"0": true}}', "partition a-0: True is no offset"),
        ('{"a": {"0": 1, "0": 2}}', "a name stands there twice"),
        ('{"a": {"0": 1, "00": 2}}', "partition a-0 stands there twice"),
    ],
)
def test_what_is_wrong_is_said(text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        parse_wanted(text)


def test_a_checkpoint_has_the_ids_of_topics() -> None:
    offsets = {TopicPartition("a", 0): 5, TopicPartition("b", 1): 6}
    text = to_json(offsets, {"a": "id-a", "c": "id-c"})
    assert text == {"a": {"0": 5, "id": "id-a"}, "b": {"1": 6}}
    assert from_json(text) == offsets
    assert ids_from_json(text) == {"a": "id-a"}
    with pytest.raises(ValueError, match="'id' is no partition"):
        from_json({"a": {"0": 5, "id": 7}})


def test_a_checkpoint_has_no_places() -> None:
    with pytest.raises(ValueError, match="-1 is no offset"):
        from_json({"a": {"0": -1}})


@given(st.text())
def test_any_text_is_offsets_or_refused(text: str) -> None:
    try:
        parse_wanted(text)
    except ValueError:
        return


def test_partitions_are_sorted_and_once() -> None:
    found = parse_partitions('{"b": [1, 0, 1], "a": [3]}')
    assert found == (TopicPartition("a", 3), TopicPartition("b", 0), TopicPartition("b", 1))


@pytest.mark.parametrize("text", ["{}", '{"a": []}', '{"a": 1}', '{"a": [-1]}', '{"a": [1.5]}', ""])
def test_what_names_no_partitions_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no partition|list of partitions|not JSON"):
        parse_partitions(text)


def test_messages_name_a_few() -> None:
    many = [TopicPartition("a", number) for number in range(7)]
    assert describe(many) == "a-0, a-1, a-2, a-3, a-4 and 2 more"
    assert describe(many[:2]) == "a-0, a-1"
