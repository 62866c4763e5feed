"""What is refused before it enters the log, and what old logs may have in them."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.raft_meta.core.proposals import check_proposal
from penstock.v1 import cluster_pb2
from penstock.wire.errors import InvalidConfigError
from tests.unit.raft_meta_core.metadata_driver import Driver, topic_id

TOO_LARGE = r"max\.message\.bytes=8000 is above segment\.bytes=5000.*at least 8000.*at most 5000"


def created(name: str = "new", number: int = 7, **configs: str) -> cluster_pb2.Command:
    command = cluster_pb2.Command()
    command.create_topic.name = name
    command.create_topic.topic_id = topic_id(number)
    command.create_topic.configs.update(dotted(configs))
    return command


def altered(remove: tuple[str, ...] = (), **configs: str) -> cluster_pb2.Command:
    command = cluster_pb2.Command()
    command.alter_topic_configs.topic = "orders"
    command.alter_topic_configs.set.update(dotted(configs))
    command.alter_topic_configs.remove.extend(remove)
    return command


def dotted(configs: dict[str, str]) -> dict[str, str]:
    return {key.replace("_", "."): text for key, text in configs.items()}


def driver(**configs: str) -> Driver:
    made = Driver(brokers=1)
    made.create(partitions=1, replication_factor=1, **configs)
    return made


def test_a_topic_whose_batches_are_larger_than_its_segments_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match=TOO_LARGE):
        check_proposal(driver().state, created(max_message_bytes="8000", segment_bytes="5000"))


@pytest.mark.parametrize(
    ("has", "sets"),
    [
        ({}, {"max_message_bytes": "8000", "segment_bytes": "5000"}),
        ({"segment_bytes": "5000"}, {"max_message_bytes": "8000"}),
        ({"max_message_bytes": "8000"}, {"segment_bytes": "5000"}),
    ],
)
def test_so_are_changes_that_would_make_it_one(has: dict[str, str], sets: dict[str, str]) -> None:
    with pytest.raises(InvalidConfigError, match=TOO_LARGE):
        check_proposal(driver(**has).state, altered(**sets))


@pytest.mark.parametrize(
    "configs",
    [
        {},
        {"segment_bytes": "4096"},
        {"max_message_bytes": "33554432"},
        {"max_message_bytes": "5000", "segment_bytes": "5000"},
        {"max_message_bytes": "much", "segment_bytes": "5000"},
        {"max_message_bytes": "8000", "segment_bytes": "5"},
    ],
)
def test_sizes_that_fit_are_no_matter_of_it_nor_defaults_nor_what_is_malformed(
    configs: dict[str, str],
) -> None:
    state = driver().state
    for command in (created(**configs), altered(**configs)):
        before = command.SerializeToString(deterministic=True)
        check_proposal(state, command)
        assert command.SerializeToString(deterministic=True) == before


def test_the_change_that_makes_them_fit_is_judged_by_what_is_left() -> None:
    state = driver(segment_bytes="5000").state
    check_proposal(state, altered(("segment.bytes",), max_message_bytes="8000"))
    check_proposal(state, altered(segment_bytes="8000", max_message_bytes="8000"))


def test_a_topic_that_is_there_is_left_to_the_one_who_says_so() -> None:
    wrong = {"max_message_bytes": "8000", "segment_bytes": "5000"}
    state = driver().state
    check_proposal(state, created("orders", 7, **wrong))
    check_proposal(state, created("other", 1, **wrong))
    check_proposal(state, cluster_pb2.Command())


def test_what_an_old_log_has_is_applied_as_it_was() -> None:
    old: dict[str, Any] = {"max_message_bytes": "8000", "segment_bytes": "5000"}
    state = driver(**old).state
    assert state.topics[topic_id(1)].configs == dotted(old)
    check_proposal(state, altered(retention_ms="1"))
    check_proposal(state, altered(("segment.bytes",)))
    with pytest.raises(InvalidConfigError):
        check_proposal(state, altered(segment_bytes="6000"))
