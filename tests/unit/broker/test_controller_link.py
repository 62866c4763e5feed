"""The broker's side of the Controller service, against scripted controllers on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from penstock.broker import controller_directory
from penstock.broker.controller_link import ActingFailedError
from penstock.broker.controller_log import FeedRefusals
from penstock.v1 import cluster_pb2, controller_pb2
from penstock.wire.errors import (
    BrokerFencedError,
    BrokerIdNotRegisteredError,
    ClusterNotFoundedError,
    InconsistentClusterIdError,
    NetworkError,
    NotControllerError,
    PenstockError,
    StaleBrokerEpochError,
    StorageError,
)
from tests.support import eventually
from tests.unit.broker.scripted_controllers import Bench, FakeController, heartbeats_more


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    one = Bench()
    await one.start()
    yield one
    await one.stop()


async def test_it_registers_once_and_is_heard(bench: Bench) -> None:
    first = bench.controllers[1]
    await eventually(lambda: len(first.heartbeats) >= 3)
    assert len(first.registrations) == 1
    assert first.registrations[0].cluster_id == "c"
    assert bench.epochs == [101]
    assert {beat.broker_epoch for beat in first.heartbeats} == {101}
    await eventually(bench.link.may_serve)


async def test_the_lease_runs_out_when_nobody_answers(bench: Bench) -> None:
    await eventually(bench.link.may_serve)
    bench.controllers[1].mute = True
    bench.now_ms = 1000
    assert not bench.link.may_serve()


async def test_it_follows_the_office_without_registering_anew(bench: Bench) -> None:
    first, second = bench.controllers[1], bench.controllers[2]
    await eventually(lambda: bool(first.heartbeats))
    first.say(second, 2)
    second.say(second, 2)
    await eventually(lambda: bool(second.heartbeats))
    assert bench.epochs == [101]
    assert second.heartbeats[0].broker_epoch == 101
    assert not second.registrations


async def test_a_hint_in_a_refusal_is_enough_to_find_the_active_one(bench: Bench) -> None:
    first, second = bench.controllers[1], bench.controllers[2]
    await eventually(lambda: bool(first.heartbeats))
    # Nobody tells the feed: only the refusal of the next heartbeat names the second.
    second.active, second.epoch = second, 2
    first.active, first.epoch = second, 2
    await eventually(lambda: bool(second.heartbeats))


async def test_a_dead_controller_is_left_for_another_that_knows_more(bench: Bench) -> None:
    first, second = bench.controllers[1], bench.controllers[2]
    await eventually(lambda: bool(first.heartbeats))
    await first.stop()
    second.say(second, 2)
    await eventually(lambda: bool(second.heartbeats))


async def test_another_controller_is_told_what_the_broker_has_already(bench: Bench) -> None:
    first, second = bench.controllers[1], bench.controllers[2]
    await eventually(lambda: first.known == [(0, 0)])
    first.say(first, 2)
    await eventually(lambda: bench.image.index == 1)
    await first.stop()
    await eventually(lambda: second.known[:1] == [(1, 2)])


async def test_a_broker_that_nobody_knows_registers_anew(bench: Bench) -> None:
    first = bench.controllers[1]
    await eventually(lambda: bool(first.heartbeats))
    first.refusal = BrokerIdNotRegisteredError()
    await eventually(lambda: len(first.registrations) >= 2)
    first.refusal = None
    assert first.registrations[0].incarnation_id != first.registrations[-1].incarnation_id


async def test_a_taken_node_id_ends_the_broker(bench: Bench) -> None:
    await eventually(lambda: bool(bench.controllers[1].heartbeats))
    bench.controllers[1].refusal = StaleBrokerEpochError("node 1 registered anew")
    with pytest.raises(StaleBrokerEpochError):
        async with asyncio.timeout(10):
            await bench.link.wait_failed()


async def test_controlled_shutdown_is_asked_for_at_once(bench: Bench) -> None:
    await eventually(bench.link.may_serve)
    assert await bench.link.shut_down_controlled(5000)
    assert bench.controllers[1].heartbeats[-1].want_shutdown


async def test_controlled_shutdown_gives_up_in_time(bench: Bench) -> None:
    await eventually(bench.link.may_serve)
    bench.controllers[1].mute = True
    assert not await bench.link.shut_down_controlled(50)


async def test_a_broker_that_no_controller_ever_heard_has_nothing_to_hand_over() -> None:
    bench = Bench()
    await bench.start(active=None)
    try:
        # Long enough to fail the test by its own time limit, should it be waited for.
        assert await asyncio.wait_for(bench.link.shut_down_controlled(600_000), 30)
        assert all(not one.heartbeats for one in bench.controllers.values())
    finally:
        await bench.stop()


async def test_a_registered_broker_takes_producer_ids(bench: Bench) -> None:
    await eventually(bench.link.may_serve)
    assert (await bench.link.allocate_producer_ids()).first_producer_id == 3000


async def test_a_broker_that_is_not_registered_sends_producers_elsewhere() -> None:
    bench = Bench()
    await bench.start(active=None)
    try:
        await eventually(lambda: bool(bench.controllers[1].watchers))
        with pytest.raises(BrokerFencedError, match="broker 1 is not registered") as caught:
            await bench.link.allocate_producer_ids()
        assert caught.value.retriable
    finally:
        await bench.stop()


@pytest.mark.parametrize("refusal", [StaleBrokerEpochError(), BrokerIdNotRegisteredError()])
async def test_a_registration_that_is_stale_is_no_fault_of_the_producer(
    bench: Bench, refusal: PenstockError
) -> None:
    await eventually(bench.link.may_serve)
    controller = bench.controllers[1]
    controller.mute = True  # The next heartbeat would mend, or end, what the refusal is about.
    controller.refusal = refusal
    with pytest.raises(BrokerFencedError, match="ask another broker"):
        await bench.link.allocate_producer_ids()


async def test_a_command_follows_the_office(bench: Bench) -> None:
    await eventually(bench.link.may_serve)
    first, second = bench.controllers[1], bench.controllers[2]
    first.active, first.epoch = second, 2
    second.active, second.epoch = second, 2
    result = await bench.link.execute_admin(cluster_pb2.Command(), 5000)
    assert result.index == 7
    assert not result.HasField("error")


async def test_the_voters_in_force_are_asked_what_they_know_and_not_those_of_the_settings(
    bench: Bench,
) -> None:
    await eventually(bench.link.may_serve)
    first, second = bench.controllers[1], bench.controllers[2]
    added = FakeController(3)  # Of which the settings know nothing.
    await added.start()
    first.supports, added.supports = 9, 4
    first.voters = [first, added]
    await second.stop()  # Removed, and gone for good.
    assert await bench.link.supported_by_controllers(2_000) == 4
    await added.stop()
    with pytest.raises(NetworkError, match=r"controller 3 .*penstock quorum remove 3"):
        await bench.link.supported_by_controllers(2_000)


async def test_a_controller_that_is_not_active_any_more_does_not_say_who_votes(
    bench: Bench,
) -> None:
    await eventually(bench.link.may_serve)
    first = bench.controllers[1]
    first.voters = [first]
    first.leads_quorum = False
    with pytest.raises(NotControllerError, match="controller 1 is not the active one"):
        await bench.link.supported_by_controllers(2_000)


async def test_waiting_for_an_index_sees_the_change(bench: Bench) -> None:
    first = bench.controllers[1]
    await eventually(lambda: bench.image.index == 0)
    waiting = asyncio.create_task(bench.link.wait_for_index(1, 5000))
    first.say(first, 1)
    await waiting
    assert bench.image.index == 1
    assert bench.changes[-1].index == 1


async def test_a_change_that_takes_its_time_is_not_reported_before_it_was_acted_on(
    bench: Bench,
) -> None:
    one = bench.controllers[1]
    await eventually(lambda: bench.link.broker_epoch == 101)
    before = bench.image.index
    bench.may_go_on.clear()
    one.say(one, 2)
    one.say(one, 2)
    await eventually(lambda: bench.image.index == before + 1)
    one.heartbeats.clear()
    await eventually(lambda: len(one.heartbeats) >= 3)
    assert {beat.metadata_index for beat in one.heartbeats} == {before}
    await bench.link.wait_for_index(before + 1, 10)
    assert bench.image.index == before + 1, "the next change waits for its turn"
    assert bench.acted[-1] == before
    bench.may_go_on.set()
    await eventually(lambda: one.heartbeats[-1].metadata_index == before + 2)
    assert [change.index for change in bench.changes[-2:]] == [before + 1, before + 2]


async def test_the_image_stays_as_it_is_while_the_registration_is_acted_on(bench: Bench) -> None:
    first = bench.controllers[1]
    await eventually(bench.link.may_serve)
    bench.catching_up = True
    bench.actor.on_registered()
    first.say(first, 1)
    await heartbeats_more(first, 3)
    assert (bench.image.index, bench.acted[-1]) == (0, 0)
    bench.catching_up = False
    await eventually(lambda: bench.acted[-1] == 1)


async def test_a_broker_slow_to_act_keeps_its_feed_and_serves_what_it_acted_on(
    bench: Bench,
) -> None:
    first, second = bench.controllers[1], bench.controllers[2]
    await eventually(bench.link.may_serve)
    bench.may_go_on.clear()
    first.say(first, 1)
    first.say(first, 1)  # This one waits in the feed, and is told of.
    await eventually(lambda: bench.image.index == 1)
    first.told_index = 2
    await heartbeats_more(first, 3)
    bench.now_ms = 900  # Beyond what a feed may lag, and a session lasts, in some steps.
    while bench.now_ms < 5_000:
        await heartbeats_more(first, 3)
        assert bench.link.may_serve(), f"at {bench.now_ms} ms"
        bench.now_ms += 700
    first.mute = True  # The session's rule holds for it as for any other.
    bench.now_ms += 1_000
    assert not bench.link.may_serve()
    first.mute = False
    bench.may_go_on.set()
    await eventually(lambda: bench.acted[-1:] == [2])
    await heartbeats_more(first, 3)
    assert (len(first.known), second.known) == (1, []), "its feed was not at fault"


async def test_a_fenced_broker_that_is_slow_to_act_does_not_serve(bench: Bench) -> None:
    first = bench.controllers[1]
    await eventually(bench.link.may_serve)
    bench.may_go_on.clear()
    first.say(first, 1)
    await eventually(lambda: bench.image.index == 1)
    first.fences = True
    await eventually(lambda: not bench.link.may_serve())


@pytest.mark.parametrize("fault", [StorageError("the disk"), KeyError("a mistake")])
async def test_what_could_not_be_acted_on_is_not_skipped_over(
    bench: Bench, fault: Exception
) -> None:
    first = bench.controllers[1]
    await eventually(lambda: bool(first.heartbeats))
    bench.fault = fault
    first.say(first, 1)
    first.say(first, 1)
    with pytest.raises((ActingFailedError, KeyError)):
        async with asyncio.timeout(10):
            await bench.link.wait_failed()
    await heartbeats_more(first, 3)
    assert bench.image.index == 1, "no change after it is taken"
    assert len(first.known) == 1, "no other feed is asked to go on from there"
    assert first.heartbeats[-1].metadata_index == 0


async def test_a_fenced_broker_does_not_serve_though_it_is_heard(bench: Bench) -> None:
    first = bench.controllers[1]
    await eventually(bench.link.may_serve)
    first.fences = True
    await eventually(lambda: not bench.link.may_serve())
    first.fences = False
    await eventually(bench.link.may_serve)


async def test_a_broker_whose_feed_keeps_silent_for_a_session_does_not_serve() -> None:
    bench = Bench()
    bench.session_timeout_ms = 4_000
    await bench.start(count=1)  # There is no other feed to follow.
    try:
        only = bench.controllers[1]
        await eventually(bench.link.may_serve)
        only.told_index = 5
        await heartbeats_more(only, 3)
        bench.now_ms = 3_999
        await heartbeats_more(only, 3)
        assert bench.link.may_serve()
        bench.now_ms = 4_000
        await eventually(lambda: not bench.link.may_serve())
        await heartbeats_more(only, 3)
        assert not bench.link.may_serve(), "it is heard, and yet"
    finally:
        await bench.stop()


async def test_a_feed_that_lags_behind_what_is_told_is_left_for_another(bench: Bench) -> None:
    first, second = bench.controllers[1], bench.controllers[2]
    await eventually(bench.link.may_serve)
    second.index = 5  # The first one is cut off from the quorum and hears of nothing any more.
    first.told_index = 5
    seen = len(first.heartbeats)  # On a busy machine there are many already, of before.
    await eventually(lambda: len(first.heartbeats) >= seen + 3)
    assert bench.image.index == 0
    bench.now_ms = 999
    await eventually(bench.link.may_serve)
    bench.now_ms = 1_000
    await eventually(lambda: bench.image.index == 5)


async def test_a_broker_that_stays_behind_stops_serving(bench: Bench) -> None:
    first = bench.controllers[1]
    await eventually(bench.link.may_serve)
    first.told_index = 5  # And nobody has it.
    seen = len(first.heartbeats)
    await eventually(lambda: len(first.heartbeats) >= seen + 3)
    bench.now_ms = 1_000
    await eventually(lambda: not bench.link.may_serve())
    seen = len(first.heartbeats)
    await eventually(lambda: len(first.heartbeats) >= seen + 3)
    assert not bench.link.may_serve()


async def test_feeds_that_are_refused_are_said_once_and_asked_for_ever_less_often(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench = Bench()

    def prepare(controller: FakeController) -> None:
        controller.refuses_feed = InconsistentClusterIdError("of cluster 'c', not of 'Bogus'")

    await bench.start(prepare=prepare)
    try:
        both = list(bench.controllers.values())
        await eventually(lambda: all(len(one.known) >= 3 for one in both))
        said = capsys.readouterr()
        assert (said.out + said.err).count("metadata feed refused") == 2
        for one in both:
            one.refuses_feed = None
        await eventually(bench.link.may_serve)
    finally:
        await bench.stop()


def test_a_refusal_is_said_again_when_it_is_another_and_after_a_while() -> None:
    refusals = FeedRefusals()
    assert refusals.pause_ms(50) == 50
    assert refusals.refused(1, "other cluster", 0) == {"unsaid": 0}
    assert refusals.refused(2, "other cluster", 0) == {"unsaid": 0}
    assert [refusals.refused(1, "other cluster", now) for now in (1_000, 59_999)] == [None, None]
    assert refusals.refused(1, "no such node", 59_999) == {"unsaid": 2}
    assert refusals.refused(2, "other cluster", 60_000) == {"unsaid": 0}
    pauses = []
    for _ in range(20):
        pauses.append(refusals.pause_ms(50))
        refusals.refused(1, "no such node", 60_000)
    assert pauses == sorted(pauses)
    assert pauses[-1] == 2_000
    refusals.heard()
    assert refusals.pause_ms(50) == 50


async def test_a_feed_that_knows_no_active_controller_is_left_for_another() -> None:
    bench = Bench()
    await bench.start(active=None)
    try:
        await eventually(lambda: bench.image.index == 0)
        second = bench.controllers[2]
        second.active, second.epoch = second, 1
        await eventually(lambda: bool(second.heartbeats))
    finally:
        await bench.stop()


async def test_a_command_to_a_cluster_that_nobody_founded_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And does not wait for the active controller that there cannot be."""
    monkeypatch.setattr(controller_directory, "_FOUNDING_MS", 10)
    bench = Bench()
    await bench.start(active=None)
    try:
        for one in bench.controllers.values():
            one.founding = controller_pb2.QuorumFounding(founder_node_id=1)
        command = cluster_pb2.Command(create_topic=cluster_pb2.CreateTopicCommand())
        with pytest.raises(ClusterNotFoundedError, match="the cluster is not founded yet"):
            await bench.link.execute_admin(command, 600_000)
        with pytest.raises(ClusterNotFoundedError):
            await bench.link.alter_voters(controller_pb2.AlterVotersRequest(), 600_000)
        # One that knows voters has a leader to wait for.
        bench.controllers[2].founding = None
        with pytest.raises(NotControllerError, match="Nothing was done"):
            await bench.link.execute_admin(command, 200)
    finally:
        await bench.stop()
