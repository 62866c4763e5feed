"""A request that no broker takes costs exactly the records that fit into none, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from penstock.client.core.send_events import StreamBroken, Woken
from penstock.client.core.too_large import RequestTooLargeError, not_read
from penstock.client.transport import rpc_error
from penstock.wire.errors import InvalidRequestError, NetworkError, RecordTooLargeError
from tests.unit.client.test_refused_batches import FullDisk

TOO_LARGE = "Received message larger than max (2000 vs. 1000)"


def status(details: str) -> Any:
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    return SimpleNamespace(code=lambda: code, details=lambda: details)


def too_large(size_bytes: int = 2_000, limit_bytes: int = 1_000) -> RequestTooLargeError:
    error = RequestTooLargeError("it takes 1000")
    error.size_bytes, error.limit_bytes = size_bytes, limit_bytes
    return error


@pytest.mark.parametrize(
    "details", [TOO_LARGE, f"SERVER: {TOO_LARGE}", TOO_LARGE.replace("Received", "CLIENT: Sent")]
)
def test_what_grpc_says_becomes_an_error_that_is_not_retriable(details: str) -> None:
    error = rpc_error(status(details), "broker 1", "Groups.CommitOffsets")
    assert isinstance(error, InvalidRequestError)
    assert not error.retriable
    assert "broker 1" in error.message
    assert "Groups.CommitOffsets" in error.message
    assert "2000 bytes" in error.message
    assert "limit is 1000" in error.message
    assert "next: send less at a time" in error.message


@pytest.mark.parametrize("details", [f"CLIENT: {TOO_LARGE}", "no memory"])
def test_what_is_not_of_the_request_may_be_asked_for_again(details: str) -> None:
    assert isinstance(rpc_error(status(details), "broker 1", "Log.Fetch"), NetworkError)


def test_who_is_to_blame_is_known_by_its_size() -> None:
    sent = {1: (500, 1), 2: (19_000, 1), 3: (17_500, 1), 4: (50_000, 2), 5: (19_500, 1)}
    # The third is below it with all that frames it; the others from the second on are above.
    assert not_read(sent, too_large(19_100, 19_050)) == ([2, 4, 5], set())
    assert not_read({3: (17_000, 1), 6: (16_000, 5)}, too_large(18_500, 18_000)) == ([3, 6], set())
    assert not_read({1: (10, 1), 2: (20, 1)}, too_large(10**6, 10**5)) == ([2], set())
    assert not_read({}, too_large()) == ([], set())


def test_what_came_behind_it_was_not_read_either() -> None:
    sent = {1: (10, 1), 2: (50_000, 1), 3: (10, 1), 4: (60_000, 1), 5: (20, 1)}
    assert not_read(sent, too_large(50_100, 20_000)) == ([2, 4], {3, 5})


def test_a_record_that_fits_into_no_request_fails_and_the_others_are_sent() -> None:
    world = FullDisk()
    world.begin()
    world.send_batches(3)
    # They are of the same size; the first is told to be larger.
    first = next(iter(world.requests[1]))
    world.sender._requests[1][first.correlation_id].size_bytes = 5_000
    world.requests[1].clear()  # The broker reads none of them.
    world.feed(StreamBroken(1, too_large(5_100, 4_000)))
    assert isinstance(world.verdicts[2], RecordTooLargeError)
    assert "fits into no request: it takes 1000" in world.verdicts[2].message
    assert "may have been written" not in world.verdicts[2].message
    world.heal()
    world.now += 1_000
    world.feed(Woken())
    world.round_trip()
    world.check()
    assert all(isinstance(world.verdicts[value], int) for value in (3, 4))


def test_what_was_never_sent_is_not_to_blame() -> None:
    world = FullDisk()
    world.begin()
    world.send_batches(1)
    [request] = world.requests[1]
    unsent = frozenset([request.correlation_id])
    world.feed(StreamBroken(1, too_large(), unsent))
    assert 2 not in world.verdicts
