"""The tasks of a batch, and what becomes of topics that are not what the offsets are of."""

from __future__ import annotations

import pytest

from penstock.client import TopicPartition
from penstock.pipeline.errors import DataLossError
from penstock.pipeline.source.cluster_view import Topic
from penstock.pipeline.source.slices import finishing, slices
from penstock.pipeline.source_options import SourceOptions

A0, A1 = TopicPartition("a", 0), TopicPartition("a", 1)
TOPICS = {"a": Topic("id-a", (A0, A1), 0)}


def options(**more: str) -> SourceOptions:
    return SourceOptions.load(
        {"penstock.bootstrap.servers": "localhost:9092", "subscribe": "a", **more}
    )


def test_the_first_task_says_what_is_finished() -> None:
    planned = finishing(slices(options(), TOPICS, {A0: 3, A1: 4}, {A0: 5, A1: 9}), {A0: 3})
    assert [getattr(one, "finished", "?") for one in planned] == [{A0: 3}, None]


@pytest.mark.parametrize(
    ("topics", "match"),
    [
        ({}, "partition a-0: it is not there any more, and offsets 3 to 5"),
        ({"a": Topic("id-a", (A1,), 0)}, "partition a-0: it is not there any more"),
        ({"a": Topic("new", (A0,), 0)}, "partition a-0: its topic was deleted and made anew"),
    ],
)
def test_what_is_gone_is_lost(topics: dict[str, Topic], match: str) -> None:
    with pytest.raises(DataLossError, match=match):
        slices(options(), topics, {A0: 3}, {A0: 5}, topic_ids={"a": "id-a"})
    lossy = options(failOnDataLoss="false")
    assert slices(lossy, topics, {A0: 3}, {A0: 5}, topic_ids={"a": "id-a"}) == []


def test_offsets_without_an_id_are_those_of_the_topic_that_is_there() -> None:
    (planned,) = slices(options(), TOPICS, {A0: 3}, {A0: 5}, topic_ids={})
    assert (planned.start, planned.end, planned.topic_id) == (3, 5, "id-a")
