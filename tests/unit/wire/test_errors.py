from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.v1 import common_pb2
from penstock.wire import errors
from penstock.wire.errors import (
    ERRORS,
    ErrorCode,
    LeaderHint,
    NotLeaderError,
    PenstockError,
    UnknownErrorCodeError,
    error_from_proto,
)

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, PenstockError) and cls is not PenstockError
]

# The numbers that Kafka's protocol guide gives; they are on the wire and can never change.
KAFKA_CODES = {
    "UNKNOWN_SERVER_ERROR": -1,
    "OFFSET_OUT_OF_RANGE": 1,
    "CORRUPT_MESSAGE": 2,
    "UNKNOWN_TOPIC_OR_PARTITION": 3,
    "LEADER_NOT_AVAILABLE": 5,
    "NOT_LEADER": 6,
    "REQUEST_TIMED_OUT": 7,
    "MESSAGE_TOO_LARGE": 10,
    "COORDINATOR_LOAD_IN_PROGRESS": 14,
    "COORDINATOR_NOT_AVAILABLE": 15,
    "NOT_COORDINATOR": 16,
    "NOT_ENOUGH_REPLICAS": 19,
    "NOT_ENOUGH_REPLICAS_AFTER_APPEND": 20,
    "UNKNOWN_MEMBER_ID": 25,
    "TOPIC_ALREADY_EXISTS": 36,
    "INVALID_CONFIG": 40,
    "NOT_CONTROLLER": 41,
    "OUT_OF_ORDER_SEQUENCE_NUMBER": 45,
    "DUPLICATE_SEQUENCE_NUMBER": 46,
    "INVALID_PRODUCER_EPOCH": 47,
    "STORAGE_ERROR": 56,
    "FENCED_LEADER_EPOCH": 74,
    "UNKNOWN_LEADER_EPOCH": 75,
    "STALE_BROKER_EPOCH": 77,
    "PRODUCER_FENCED": 90,
    "UNKNOWN_TOPIC_ID": 100,
    "FENCED_MEMBER_EPOCH": 110,
    "STALE_MEMBER_EPOCH": 113,
}


def test_codes_and_classes_are_one_to_one():
    assert set(ERRORS) == set(ErrorCode)
    assert len({cls.code for cls in CLASSES}) == len(CLASSES) == len(ErrorCode)
    assert {cls.code: cls for cls in CLASSES} == ERRORS
    # IntEnum would take two names for one number as aliases, silently.
    assert len(ErrorCode.__members__) == len(ErrorCode)


def test_kafkas_numbers_are_kafkas():
    assert {name: int(ErrorCode[name]) for name in KAFKA_CODES} == KAFKA_CODES


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_explains_itself(cls):
    assert cls.__name__.endswith("Error")
    assert cls().message == cls.__doc__
    assert cls.__doc__[0].isupper()
    assert cls.__doc__.endswith(".")
    assert str(cls("what, where, what next")) == "what, where, what next"
    # A picture out of date is worth a new look whether or not the request may be repeated; what
    # never leaves the process is no use to refresh for.
    assert not (cls.refresh_metadata and cls.code >= 2000)


hints = st.one_of(
    st.none(),
    st.builds(
        LeaderHint,
        st.integers(-1, 2**31 - 1),
        st.integers(-1, 2**31 - 1),
        st.text(max_size=20),
        st.integers(0, 65_535),
    ),
)


@given(code=st.sampled_from(ErrorCode), message=st.text(min_size=1, max_size=40), leader=hints)
def test_errors_cross_the_wire(code, message, leader):
    error = ERRORS[code](message, leader=leader)
    received = common_pb2.Error.FromString(error.to_proto().SerializeToString())
    again = error_from_proto(received)
    assert type(again) is ERRORS[code]
    assert again.message == message
    assert again.leader == leader
    assert (again.retriable, again.refresh_metadata) == (error.retriable, error.refresh_metadata)


def test_a_code_from_the_future_is_never_success_and_never_repeated():
    error = error_from_proto(common_pb2.Error(code=31_000, message="too many moons"))
    assert type(error) is UnknownErrorCodeError
    assert not error.retriable
    assert error.message == "error code 31000: too many moons"


def test_the_code_of_success_is_no_error():
    # Kafka's 0 is NONE; a proto that was never filled in must not become a typed refusal.
    assert type(error_from_proto(common_pb2.Error())) is UnknownErrorCodeError
    assert 0 not in {int(code) for code in ErrorCode}


def test_a_leader_hint_is_kept():
    hint = LeaderHint(node_id=2, leader_epoch=7, host="127.0.0.1", port=9093)
    assert error_from_proto(NotLeaderError("ask 2", leader=hint).to_proto()).leader == hint
    assert error_from_proto(NotLeaderError("ask around").to_proto()).leader is None
