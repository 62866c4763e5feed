"""What a broker says of itself when it registers: which registration it follows on."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from penstock.v1 import cluster_pb2
from tests.support import eventually
from tests.unit.broker.scripted_controllers import Bench, FakeController


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    one = Bench()
    yield one
    await one.stop()


def follows(controller: FakeController) -> list[int]:
    return [request.follows_broker_epoch for request in controller.registrations]


async def test_the_first_registration_of_a_node_follows_none(bench: Bench) -> None:
    await bench.start()
    await eventually(lambda: bool(bench.epochs))
    (request,) = bench.controllers[1].registrations
    assert request.HasField("follows_broker_epoch")
    assert request.follows_broker_epoch == 0


@pytest.mark.parametrize("previous", [-1, 54])
async def test_it_says_after_which_registration_it_lacks_nothing(
    bench: Bench, previous: int
) -> None:
    bench.previous_broker_epoch = previous
    await bench.start()
    await eventually(lambda: bool(bench.epochs))
    (request,) = bench.controllers[1].registrations
    assert request.previous_broker_epoch == previous


async def test_it_is_told_what_the_node_had_before_it_registers(bench: Bench) -> None:
    def prepare(controller: FakeController) -> None:
        controller.registered = cluster_pb2.BrokerRecord(node_id=1, broker_epoch=55)
        controller.tells_slowly = True

    await bench.start(prepare=prepare)
    first = bench.controllers[1]
    await eventually(lambda: bool(first.known))  # It follows, and knows who is active.
    first.may_tell.set()
    await eventually(lambda: bool(bench.epochs))
    assert follows(first) == [55]


async def test_it_asks_again_when_it_has_heard_of_another_registration(bench: Bench) -> None:
    def prepare(controller: FakeController) -> None:
        controller.newest_epoch = 77

    await bench.start(prepare=prepare)
    first = bench.controllers[1]
    await eventually(lambda: len(first.registrations) >= 2)
    assert not bench.epochs
    for controller in bench.controllers.values():  # Its feed may be of any of them.
        controller.registered = cluster_pb2.BrokerRecord(node_id=1, broker_epoch=77)
        controller.say(first, 1)
    await eventually(lambda: bool(bench.epochs))
    assert set(follows(first)[:-1]) == {0}
    assert follows(first)[-1] == 77
    same = {request.incarnation_id for request in first.registrations}
    assert len(same) == 1, "the process is the same one"
