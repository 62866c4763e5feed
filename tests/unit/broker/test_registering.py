"""What a broker says of itself when it registers: which registration it follows on, and
where clients from outside reach it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from penstock.v1 import cluster_pb2
from penstock.wire.errors import RequestTimedOutError
from tests.support import eventually
from tests.unit.broker.scripted_controllers import Bench, FakeController, heartbeats_more


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


OUTSIDE = ("b1.example.com", 9094)


def externals(controller: FakeController) -> list[tuple[str, int]]:
    return [(one.external_host, one.external_port) for one in controller.registrations]


async def test_it_says_what_clients_from_outside_are_told(bench: Bench) -> None:
    bench.external = OUTSIDE
    await bench.start()
    await eventually(lambda: bool(bench.epochs))
    assert externals(bench.controllers[1]) == [OUTSIDE]


async def test_a_broker_that_has_none_for_them_says_nothing(bench: Bench) -> None:
    await bench.start()
    await eventually(lambda: bool(bench.epochs))
    assert externals(bench.controllers[1]) == [("", 0)]


def record(broker_epoch: int, external: tuple[str, int] = ("", 0)) -> cluster_pb2.BrokerRecord:
    return cluster_pb2.BrokerRecord(
        node_id=1,
        broker_epoch=broker_epoch,
        external_host=external[0],
        external_port=external[1],
    )


def tell(bench: Bench, metadata_version: int, told: cluster_pb2.BrokerRecord) -> None:
    """By whichever controller its feed is of."""
    for controller in bench.controllers.values():
        controller.metadata_version, controller.registered = metadata_version, told
        controller.say(bench.controllers[1], 1)


async def test_it_says_so_again_when_the_level_has_risen_and_stays_the_same_registration(
    bench: Bench,
) -> None:
    bench.external = OUTSIDE
    await bench.start(prepare=lambda one: setattr(one, "metadata_version", 6))
    first = bench.controllers[1]
    await eventually(lambda: bool(bench.epochs))
    tell(bench, 6, record(101))
    await heartbeats_more(first, 3)
    assert len(first.registrations) == 1, "at that level it would change nothing"
    tell(bench, 7, record(101))
    await eventually(lambda: len(first.registrations) >= 2)
    assert set(externals(first)) == {OUTSIDE}
    assert {request.incarnation_id for request in first.registrations} == {
        first.registrations[0].incarnation_id
    }
    tell(bench, 7, record(101, OUTSIDE))
    await heartbeats_more(first, 2)  # What it was about to say.
    said = len(first.registrations)
    await heartbeats_more(first, 3)
    assert len(first.registrations) == said, "it is known now"
    assert bench.epochs == [101], "nobody below takes it for another registration"
    assert bench.link.broker_epoch == 101


@pytest.mark.parametrize("fails", [True, False])
async def test_heartbeats_go_on_while_it_cannot_say_so(
    bench: Bench, capsys: pytest.CaptureFixture[str], fails: bool
) -> None:
    bench.external = OUTSIDE
    bench.session_timeout_ms = 200
    await bench.start(prepare=lambda one: setattr(one, "metadata_version", 6))
    first = bench.controllers[1]
    await eventually(bench.link.may_serve)
    hangs = asyncio.Event()
    first.registers_again = RequestTimedOutError("no majority in time") if fails else hangs
    tell(bench, 7, record(101))
    await eventually(lambda: len(first.registrations) >= 4)
    await heartbeats_more(first, 3)
    assert first.streams == 1, "what is said beside them ends no stream of heartbeats"
    said = capsys.readouterr()
    assert (said.out + said.err).count("are not told of external.advertised yet") == 1
    first.registers_again = None
    hangs.set()
    tried = len(first.registrations)
    await eventually(lambda: len(first.registrations) > tried)
    tell(bench, 7, record(101, OUTSIDE))
    await heartbeats_more(first, 2)
    assert first.streams == 1
    assert bench.epochs == [101]


async def test_below_that_level_it_warns_and_says_what_to_do(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.external = OUTSIDE
    await bench.start(prepare=lambda one: setattr(one, "metadata_version", 6))
    await eventually(lambda: bool(bench.epochs))
    said = capsys.readouterr()
    assert "penstock cluster upgrade" in said.out + said.err
