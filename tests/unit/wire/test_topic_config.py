from __future__ import annotations

import pytest

from penstock.wire.cluster_config import validate_cluster_configs
from penstock.wire.config_keys import suggest
from penstock.wire.errors import InvalidConfigError
from penstock.wire.topic_config import (
    TOPIC_CONFIGS,
    config_value,
    effective_min_isr,
    integer_config,
    validate_topic_configs,
)


@pytest.mark.parametrize("key", list(TOPIC_CONFIGS))
def test_every_key_is_whole(key):
    entry = TOPIC_CONFIGS[key]
    assert entry.key == key
    assert entry.documentation.endswith(".")
    if entry.default:
        entry.parse(entry.default)
        validate_topic_configs({key: entry.default})
        assert config_value({}, key) == entry.default


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("cleanup.policy", "compact"),
        ("cleanup.policy", "compact,delete"),
        ("cleanup.policy", "delete, compact"),
        ("max.message.bytes", "61"),
        ("max.message.bytes", str(32 * 1024 * 1024)),
        ("message.timestamp.type", "LogAppendTime"),
        ("min.cleanable.dirty.ratio", "0"),
        ("min.cleanable.dirty.ratio", "1"),
        ("min.insync.replicas", "3"),
        ("retention.ms", "-1"),
        ("segment.bytes", "4096"),
        ("unclean.leader.election.enable", "true"),
    ],
)
def test_what_is_allowed(key, text):
    validate_topic_configs({key: text})


@pytest.mark.parametrize(
    ("key", "text", "wanted"),
    [
        ("cleanup.policy", "shred", "delete, compact or compact,delete is wanted"),
        ("cleanup.policy", "", "delete, compact or compact,delete is wanted"),
        ("compression.type", "zip", "one of producer is wanted"),
        ("max.message.bytes", "60", "a whole number from 61 to 33554432 is wanted"),
        ("max.message.bytes", "33554433", "a whole number from 61 to 33554432 is wanted"),
        ("message.timestamp.type", "createtime", "one of CreateTime, LogAppendTime is wanted"),
        ("min.cleanable.dirty.ratio", "1.5", "a number from 0 to 1 is wanted"),
        ("min.cleanable.dirty.ratio", "nan", "a number from 0 to 1 is wanted"),
        ("min.cleanable.dirty.ratio", "half", "a number from 0 to 1 is wanted"),
        ("min.insync.replicas", "0", "a whole number from 1 to 32767 is wanted"),
        ("min.insync.replicas", "two", "a whole number is wanted"),
        ("retention.ms", "-2", "a whole number from -1 to"),
        ("retention.ms", "1e3", "a whole number is wanted"),
        ("retention.ms", "\u0663", "a whole number is wanted"),
        ("min.cleanable.dirty.ratio", "\u0660", "a number from 0 to 1 is wanted"),
        ("unclean.leader.election.enable", "yes", "true or false is wanted"),
    ],
)
def test_what_is_refused_says_what_is_wanted(key, text, wanted):
    with pytest.raises(InvalidConfigError) as caught:
        validate_topic_configs({"segment.ms": "1000", key: text})
    assert f"topic config {key}={text!r}: {wanted}" in caught.value.message


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("retention.mss", "; did you mean 'retention.ms'?"),
        ("min.insync.replica", "; did you mean 'min.insync.replicas'?"),
        ("colour", ""),
    ],
)
def test_an_unknown_key_names_the_near_one(key, hint):
    with pytest.raises(InvalidConfigError) as caught:
        validate_topic_configs({key: "1"})
    assert caught.value.message == f"unknown topic config {key!r}{hint}"


def test_of_several_mistakes_the_first_in_order_is_named_everywhere():
    mistakes = dict.fromkeys(("segment.ms", "colour", "retention.ms"), "x")
    for configs in (mistakes, dict(reversed(mistakes.items()))):
        with pytest.raises(InvalidConfigError, match="'colour'"):
            validate_topic_configs(configs)
        with pytest.raises(InvalidConfigError, match="'colour'"):
            validate_cluster_configs(configs)


def test_a_refusal_is_short_however_long_the_mistake_is():
    for configs in ({"x" * 10**6: "1"}, {"retention.ms": "x" * 10**6}):
        with pytest.raises(InvalidConfigError) as caught:
            validate_topic_configs(configs)
        assert len(caught.value.message) < 1000


def test_suggestions():
    assert suggest("acess-log", ["access-log", "orders"]) == "; did you mean 'access-log'?"
    assert suggest("payments", ["access-log", "orders"]) == ""
    assert suggest("anything", []) == ""


@pytest.mark.parametrize(
    ("configs", "replication_factor", "expected"),
    [
        ({}, 1, 1),
        ({}, 2, 1),
        ({}, 3, 2),
        ({}, 5, 2),
        ({"min.insync.replicas": "3"}, 3, 3),
        ({"min.insync.replicas": "1"}, 3, 1),
        ({"min.insync.replicas": ""}, 3, 2),
    ],
)
def test_min_isr_in_force(configs, replication_factor, expected):
    assert effective_min_isr(configs, replication_factor) == expected


def test_a_set_value_wins_over_the_default():
    assert config_value({"segment.ms": "5"}, "segment.ms") == "5"
    assert integer_config({"segment.ms": "5"}, "segment.ms") == 5
    assert integer_config({}, "segment.bytes") == 1024**3
    with pytest.raises(KeyError):
        config_value({}, "no.such.key")
