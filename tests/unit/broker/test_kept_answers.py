"""Answers made of metadata are kept, and are always those that would be made now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.service import kept_answers
from penstock.broker.service.kept_answers import KeptAnswers
from penstock.broker.service.metadata import MetadataServicer
from penstock.broker.service.outside import ToldOutside
from penstock.v1 import cluster_pb2, metadata_pb2
from penstock.wire.errors import MetadataDivergedError
from penstock.wire.ids import TopicId
from tests.unit.broker.test_metadata_service import founded, no_internal_topic
from tests.unit.broker.test_services import image_with

Answer = metadata_pb2.DescribeTopicsResponse
LARGE = kept_answers.LARGE_BYTES


class Maker:
    """Makes answers of some size, and counts them."""

    def __init__(self, size_bytes: int = LARGE) -> None:
        self.size_bytes = size_bytes
        self.made = 0

    def __call__(self) -> Answer:
        self.made += 1
        return Answer(cluster_id="x" * self.size_bytes)


class Versions:
    def __init__(self) -> None:
        self.now = 1
        self.answers = KeptAnswers(lambda: self.now)

    def ask(self, question: bytes, make: Callable[[], Answer]) -> Answer:
        return self.answers.answer(Answer, question, make)


def test_an_answer_is_made_once_while_the_metadata_stay_as_they_are() -> None:
    versions, make = Versions(), Maker()
    first = versions.ask(b"a", make)
    assert versions.ask(b"a", make) is first
    assert versions.ask(b"b", make) is not first
    assert make.made == 2
    versions.now += 1
    assert versions.ask(b"a", make) is not first
    assert make.made == 3
    assert versions.answers.encoded(first, None) is None


def test_the_same_bytes_ask_something_else_of_another_method() -> None:
    versions, make = Versions(), Maker()
    versions.ask(b"a", make)
    other = metadata_pb2.WatchResponse(everything=True)
    assert versions.answers.answer(metadata_pb2.WatchResponse, b"a", lambda: other) is other


def test_small_answers_and_very_large_ones_are_not_kept() -> None:
    versions = Versions()
    for size_bytes in (LARGE - 100, kept_answers._KEPT_BYTES):
        make = Maker(size_bytes)
        question = str(size_bytes).encode()
        answers = [versions.ask(question, make) for _ in range(2)]
        assert make.made == 2
        assert versions.answers.encoded(answers[0], None) is None


def test_what_is_kept_is_bounded_and_what_nobody_asks_for_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept_answers, "_KEPT_BYTES", 3 * LARGE + LARGE // 2)
    versions, make = Versions(), Maker()
    a, b, c = (versions.ask(name, make) for name in (b"a", b"b", b"c"))
    assert versions.ask(b"a", make) is a
    versions.ask(b"d", make)
    assert make.made == 4
    assert versions.answers.encoded(b, None) is None
    assert [versions.ask(name, make) for name in (b"a", b"c")] == [a, c]
    assert make.made == 4
    versions.ask(b"b", make)
    assert make.made == 5
    assert len(versions.answers._by_id) == len(versions.answers._by_question) == 3


def test_an_answer_is_turned_into_bytes_once_for_each_port() -> None:
    versions = Versions()
    told: list[Answer] = []

    def outside(answer: Answer) -> Answer:
        told.append(answer)
        return Answer(cluster_id="outside")

    answer = versions.ask(b"a", Maker())
    inside = versions.answers.encoded(answer, None)
    assert inside == answer.SerializeToString()
    assert versions.answers.encoded(answer, None) is inside
    for _ in range(2):
        data = versions.answers.encoded(answer, outside)
        assert data == Answer(cluster_id="outside").SerializeToString()
    assert told == [answer]
    assert versions.answers.encoded(Maker()(), None) is None


def test_names_that_look_like_two_are_not_taken_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_answers, "LARGE_BYTES", 0)
    servicer = MetadataServicer(1, image_with("a", "b"), no_internal_topic, founded)
    for names in ({"a\0b"}, {"a", "b"}, {"a\n\x01b"}, {"ab"}, {"a"}):
        told = servicer._told(frozenset(names), brokers=False)
        assert {topic.name for topic in told.topics} == names


async def test_why_replicas_are_out_of_sync_is_asked_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is no part of the metadata."""
    monkeypatch.setattr(kept_answers, "LARGE_BYTES", 0)
    image = image_with("orders")
    topic_id = TopicId(b"orders".ljust(16, b"_"))
    record = cluster_pb2.PartitionRecord(topic_id=topic_id, replicas=[1, 2], isr=[1])
    image.apply(cluster_pb2.MetadataDelta(index=2, partitions=[record]))
    reasons = [metadata_pb2.OUT_OF_SYNC_REASON_SLOW, metadata_pb2.OUT_OF_SYNC_REASON_BOOTSTRAPPING]
    left = [*reasons]
    servicer = MetadataServicer(1, image, no_internal_topic, founded, lambda _key: {2: left.pop(0)})
    request = metadata_pb2.DescribeTopicsRequest(topics=["orders"], out_of_sync=True)
    for reason in reasons:
        answer = await servicer.DescribeTopics(request, None)
        assert [each.reason for each in answer.topics[0].partitions[0].out_of_sync] == [reason]


# --- whatever happens ----------------------------------------------------------------------------

NAMES = ("orders", "bills", "__x", "orders\0bills")
IDS = {name: name.encode().ljust(16, b"_")[:16] for name in NAMES}
few = st.integers(0, 3)
names = st.sampled_from(NAMES)
nodes = st.lists(st.integers(1, 3), unique=True)

brokers = st.builds(
    cluster_pb2.BrokerRecord,
    node_id=st.integers(1, 3),
    host=st.just("inside"),
    port=few,
    fenced=st.booleans(),
    in_controlled_shutdown=st.booleans(),
    broker_epoch=few,
    drained_since_ms=few,
    external_host=st.sampled_from(["", "outside"]),
    external_port=few,
)
topics = st.builds(
    lambda name, configs: cluster_pb2.TopicRecord(
        name=name, topic_id=IDS[name], internal=name == "__x", configs=configs
    ),
    names,
    st.dictionaries(st.just("retention.ms"), st.sampled_from(["1", "2"])),
)
partitions = st.builds(
    lambda name, **fields: cluster_pb2.PartitionRecord(topic_id=IDS[name], **fields),
    names,
    partition=st.integers(0, 1),
    leader=st.integers(-1, 3),
    leader_epoch=few,
    replicas=nodes,
    isr=nodes,
    elr=nodes,
    offline_replicas=nodes,
    partition_epoch=few,
)


# What the controllers may send; its index and epoch are steps from those of before.
deltas = st.builds(
    cluster_pb2.MetadataDelta,
    index=st.integers(-1, 2),
    controller_epoch=st.sampled_from([0, 0, 0, 1]),
    controller_id=few,
    snapshot=st.booleans(),
    metadata_version=few,
    brokers=st.lists(brokers, max_size=2),
    removed_brokers=st.lists(st.integers(1, 3), max_size=1),
    topics=st.lists(topics, max_size=2),
    removed_topics=st.lists(st.sampled_from([*IDS.values()]), max_size=1),
    partitions=st.lists(partitions, max_size=2),
)
requests = st.builds(
    metadata_pb2.DescribeTopicsRequest,
    topics=st.lists(st.sampled_from([*NAMES, "nosuch"]), max_size=2),
    topic_ids=st.lists(st.sampled_from([*IDS.values(), b"n" * 16]), max_size=1),
    all_topics=st.booleans(),
    include_internal=st.booleans(),
)
watched = st.tuples(st.frozensets(names, max_size=2), st.booleans(), st.booleans())
steps = st.lists(st.one_of(deltas, requests, watched), max_size=25)


def applied(image: MetadataImage, delta: cluster_pb2.MetadataDelta) -> bool:
    """Whether it could be what follows, so that it was taken over or passed by."""
    delta.index += image.index
    delta.controller_epoch += image.controller_epoch
    present = {topic.topic_id for topic in image.topics()}
    kept = set() if delta.snapshot else present - set(delta.removed_topics)
    known = kept | {topic.topic_id for topic in delta.topics}
    told = [each for each in delta.partitions if each.topic_id in known]
    del delta.partitions[:]
    delta.partitions.extend(told)
    try:
        return image.apply(delta) is not None
    except MetadataDivergedError:
        return False


async def asked(servicer: MetadataServicer, question: Any) -> Any:
    if isinstance(question, metadata_pb2.DescribeTopicsRequest):
        return await servicer.DescribeTopics(question, None)
    names, with_brokers, everything = question
    return servicer._told(names, with_brokers, everything=everything)


@given(steps=steps)
async def test_whatever_happens_a_kept_answer_is_the_one_that_would_be_made(
    steps: list[Any],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_answers, "LARGE_BYTES", 0)
        patch.setattr(kept_answers, "_KEPT_BYTES", 600)
        image = image_with("orders", "bills")
        keeping = MetadataServicer(1, image, no_internal_topic, founded)
        tell = ToldOutside(image)
        questions: list[Any] = []
        for step in steps:
            if isinstance(step, cluster_pb2.MetadataDelta):
                before = image.version
                assert applied(image, step) == (image.version != before)
            else:
                questions.append(step)
            for question in questions:  # All that was ever asked, of the new metadata too.
                answer = await asked(keeping, question)
                fresh = await asked(
                    MetadataServicer(1, image, no_internal_topic, founded), question
                )
                assert answer == fresh
                for port in (None, cast("Any", tell)):
                    data = keeping.answers.encoded(answer, port)
                    told = fresh if port is None else port(fresh)
                    assert data is None or type(fresh).FromString(data) == told
            assert keeping.answers._size_bytes <= 600
