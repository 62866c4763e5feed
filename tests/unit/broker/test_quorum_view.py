"""How the quorum stands, asked of scripted controllers on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from penstock.broker.controller_directory import ControllerDirectory
from penstock.broker.quorum_view import QuorumView
from penstock.raft_meta.connecting import NodeConnector
from penstock.v1 import controller_pb2
from penstock.wire.errors import (
    ClusterNotFoundedError,
    NetworkError,
    NotControllerError,
    NotEnoughVotersError,
)
from tests.unit.broker.scripted_controllers import FakeController

ENOUGH_MS = 60_000


class Bench:
    """Three controllers, of which the first leads in term 4, and what a broker sees of them."""

    def __init__(self) -> None:
        self.nodes = {number: FakeController(number) for number in (1, 2, 3)}
        self.view: QuorumView
        self.directory: ControllerDirectory

    async def start(self) -> None:
        for node in self.nodes.values():
            await node.start()
            node.active, node.epoch = self.nodes[1], 4
            node.voters = list(self.nodes.values())
        addresses = {node.node_id: ("127.0.0.1", node.port) for node in self.nodes.values()}
        self.directory = ControllerDirectory(addresses, NodeConnector(None))
        self.directory.observe(1, 4, "127.0.0.1", self.nodes[1].port)
        self.view = QuorumView(self.directory, 2)

    async def stop(self) -> None:
        await self.directory.close()
        for node in self.nodes.values():
            await node.stop()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    one = Bench()
    await one.start()
    yield one
    await one.stop()


async def test_a_confirmed_leader_is_asked_alone(bench: Bench) -> None:
    answer = await bench.view.describe(ENOUGH_MS)
    assert (answer.answered_by, answer.confirmed) == (1, True)
    assert [node.asked for node in bench.nodes.values()] == [1, 0, 0]


async def test_a_leader_that_is_cut_off_is_not_believed_while_another_is_confirmed(
    bench: Bench,
) -> None:
    bench.nodes[1].confirms = False
    for number in (2, 3):
        bench.nodes[number].active, bench.nodes[number].epoch = bench.nodes[3], 5
    answer = await bench.view.describe(ENOUGH_MS)
    assert (answer.answered_by, answer.confirmed, answer.term) == (3, True, 5)


async def test_without_a_leader_the_brokers_own_controller_answers(bench: Bench) -> None:
    for node in bench.nodes.values():
        node.active = None
    answer = await bench.view.describe(ENOUGH_MS)
    assert (answer.answered_by, answer.leader_id, answer.confirmed) == (2, -1, False)


async def test_whoever_knows_the_newest_term_is_shown(bench: Bench) -> None:
    for node in bench.nodes.values():
        node.active = None
    bench.nodes[3].epoch = 9
    assert (await bench.view.describe(ENOUGH_MS)).answered_by == 3


async def test_a_leader_whose_software_confirms_nothing_is_shown_and_not_waited_for(
    bench: Bench,
) -> None:
    for node in bench.nodes.values():
        node.confirms = None
    answer = await bench.view.describe(ENOUGH_MS)
    assert (answer.answered_by, answer.HasField("confirmed")) == (1, False)
    assert [node.asked for node in bench.nodes.values()] == [1, 1, 1]


async def test_when_no_controller_answers_each_is_named(bench: Bench) -> None:
    for node in bench.nodes.values():
        await node.stop()
    with pytest.raises(NetworkError, match=r"controller 1 at .*controller 2 at .*controller 3 at"):
        await bench.view.describe(ENOUGH_MS)


@pytest.mark.parametrize("confirms", [False, None])
async def test_who_votes_is_taken_of_nobody_who_is_not_confirmed(
    bench: Bench, confirms: bool | None
) -> None:
    bench.nodes[1].confirms = confirms
    with pytest.raises(NotControllerError, match="does not say for sure who votes"):
        await bench.view.supported_version(ENOUGH_MS)


async def test_voters_that_confirm_nothing_are_asked_what_they_know(bench: Bench) -> None:
    """Of a cluster that is being upgraded: the leader is new, others are not."""
    for number, level in ((1, 9), (2, 3), (3, 4)):
        bench.nodes[number].supports = level
    bench.nodes[2].confirms = bench.nodes[3].confirms = None
    assert await bench.view.supported_version(ENOUGH_MS) == 3


def unfounded(bench: Bench, *, needs_permission: bool = False) -> None:
    for node in bench.nodes.values():
        node.active, node.epoch = None, 0
        node.founding = controller_pb2.QuorumFounding(
            founder_node_id=1, needs_permission=needs_permission and node.node_id == 1
        )


async def test_who_may_not_found_the_cluster_is_named_with_what_to_do(bench: Bench) -> None:
    unfounded(bench, needs_permission=True)
    with pytest.raises(
        ClusterNotFoundedError,
        match=r"as far as controllers 1, 2, 3 know: controller 1, .* may not; "
        r"next: stop node 1, say `penstock format .*--node-id 1 .*--found`",
    ):
        await bench.view.describe(ENOUGH_MS)


async def test_whom_the_founder_waits_for_is_named(bench: Bench) -> None:
    unfounded(bench)
    bench.nodes[1].awaited = [2, 3]
    with pytest.raises(ClusterNotFoundedError, match=r"waits for 2, 3; next: start those"):
        await bench.view.require_founded()


async def test_why_the_founder_refuses_one_that_it_waits_for_is_named(bench: Bench) -> None:
    unfounded(bench)
    bench.nodes[1].awaited = [2, 3]
    founding = bench.nodes[1].founding
    assert founding is not None
    founding.refusals[2] = "node 2 is of cluster 'Bogus', and this controller of 'c'"
    founding.refusals[9] = "nobody waits for this one"
    with pytest.raises(ClusterNotFoundedError) as caught:
        await bench.view.require_founded()
    said = caught.value.message
    assert "waits for 2, 3 (2 runs and is refused: node 2 is of cluster 'Bogus', and" in said
    assert "next: mend that, and start all that are waited for" in said
    assert "nobody waits" not in said


async def test_a_founder_that_does_not_answer_is_named(bench: Bench) -> None:
    unfounded(bench)
    await bench.nodes[1].stop()
    with pytest.raises(
        ClusterNotFoundedError,
        match=r"controllers 2, 3 know: controller 1, which founds it, does not answer; next: start "
        r"node 1",
    ):
        await bench.view.require_founded()


async def test_a_newcomer_that_knows_no_voters_says_nothing_of_the_cluster(bench: Bench) -> None:
    bench.nodes[2].founding = controller_pb2.QuorumFounding(founder_node_id=1)
    await bench.view.require_founded()
    assert (await bench.view.describe(ENOUGH_MS)).confirmed


async def test_nobody_who_does_not_answer_is_taken_for_unfounded(bench: Bench) -> None:
    for node in bench.nodes.values():
        await node.stop()
    await bench.view.require_founded()


async def test_a_broker_that_reaches_no_majority_of_the_voters_names_those_that_are_missing(
    bench: Bench,
) -> None:
    for number in (1, 3):
        await bench.nodes[number].stop()
    bench.nodes[2].active = None  # It hears its leader no more.
    with pytest.raises(
        NotEnoughVotersError,
        match=r"broker 2 reaches no majority of the voters 1, 2, 3, but 2: controller 1 at .*; "
        r"controller 3 at .*; next: start .*`penstock quorum status`",
    ):
        await bench.view.require_majority()


async def test_without_any_controller_that_answers_there_is_no_majority(bench: Bench) -> None:
    for node in bench.nodes.values():
        await node.stop()
    with pytest.raises(NotEnoughVotersError, match="of the voters 1, 2, 3, but none: controller 1"):
        await bench.view.require_majority()


async def test_a_majority_that_elects_somebody_is_waited_for(bench: Bench) -> None:
    await bench.nodes[1].stop()
    for number in (2, 3):
        bench.nodes[number].active = None
    await bench.view.require_majority()


async def test_a_follower_that_hears_its_leader_has_a_majority_behind_it(bench: Bench) -> None:
    """The broker is cut off from more controllers than that one."""
    for number in (1, 3):
        await bench.nodes[number].stop()
    await bench.view.require_majority()


async def test_a_leader_that_is_cut_off_is_no_majority(bench: Bench) -> None:
    bench.nodes[1].confirms = False
    for number in (2, 3):
        await bench.nodes[number].stop()
    with pytest.raises(NotEnoughVotersError, match="but 1: controller 2"):
        await bench.view.require_majority()


async def test_whoever_does_not_vote_counts_for_no_majority(bench: Bench) -> None:
    for node in bench.nodes.values():
        node.active, node.voters = None, [bench.nodes[1], bench.nodes[2]]
    await bench.nodes[2].stop()
    with pytest.raises(NotEnoughVotersError, match="voters 1, 2, but 1: controller 2"):
        await bench.view.require_majority()


async def test_one_controller_that_knows_of_no_voters_knows_it_alone(bench: Bench) -> None:
    unfounded(bench)
    for number in (2, 3):
        await bench.nodes[number].stop()
    bench.nodes[1].awaited = [2, 3]
    with pytest.raises(ClusterNotFoundedError, match="as far as controller 1 knows: controller 1"):
        await bench.view.require_founded()
