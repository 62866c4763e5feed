"""When a controller is ready, and how controllers stand where a node is about to be stopped."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.core.rolling import VoterStanding, why_not_roll
from penstock.broker.readiness import Picture, Rollable, quorum_standing, why_controller_not_ready
from penstock.raft_meta.quorum import QuorumStatus, Role
from penstock.v1.cluster_pb2 import BrokerRecord, MetadataDelta, PartitionRecord, TopicRecord
from penstock.v1.controller_pb2 import DescribeQuorumResponse, QuorumVoter


def status(
    role: Role = Role.FOLLOWER,
    leader: int = 2,
    *,
    commit_index: int = 5_000,
    applied_index: int = 5_000,
    leaders_commit_index: int = 0,
) -> QuorumStatus:
    return QuorumStatus(
        1,
        role,
        4,
        leader,
        commit_index,
        applied_index,
        last_index=5_000,
        leaders_commit_index=leaders_commit_index,
    )


@pytest.mark.parametrize(
    "sound",
    [
        status(),
        status(Role.LEADER, 1),
        status(leaders_commit_index=5_900),
        # A newcomer leads a cluster in which nothing is decided yet.
        status(Role.LEADER, 1, commit_index=0, applied_index=0),
    ],
)
def test_who_leads_or_follows_closely_is_ready(sound: QuorumStatus) -> None:
    assert why_controller_not_ready(sound) == ""


@pytest.mark.parametrize(
    ("lacking", "said"),
    [
        (status(leader=-1), "knows no leader"),
        (status(applied_index=3_000), "2000 entries"),
        (status(Role.LEADER, 1, applied_index=3_000), "2000 entries"),
        (status(leaders_commit_index=9_000), "4000 entries"),
        (status(commit_index=0, applied_index=0), "heard nothing from the leader 2"),
    ],
)
def test_who_lacks_something_says_what(lacking: QuorumStatus, said: str) -> None:
    assert said in why_controller_not_ready(lacking)


def quorum(*, confirmed: bool = True, **third: Any) -> DescribeQuorumResponse:
    """Three controllers of which 1 leads; ``third`` is what is said of the last one."""
    voters = [
        QuorumVoter(node_id=1, match_index=-1, directory_id=b"a"),
        QuorumVoter(node_id=2, match_index=90, directory_id=b"b", found_directory_id=b"b"),
        QuorumVoter(node_id=3, directory_id=b"c", **{"match_index": 100, **third}),
    ]
    return DescribeQuorumResponse(
        leader_id=1, answered_by=1, commit_index=100, confirmed=confirmed, voters=voters
    )


def test_the_leader_lacks_nothing_and_others_what_is_decided_and_not_theirs() -> None:
    standing = quorum_standing(quorum(match_index=120))
    assert standing.doubt == ""
    assert standing.voters == [
        VoterStanding(1, behind=0, answers=True),
        VoterStanding(2, behind=10, answers=True),
        VoterStanding(3, behind=0, answers=True),
    ]
    assert why_not_roll(2, (), (), standing) == []


@pytest.mark.parametrize(
    ("third", "found"),
    [
        ({"unreachable": True}, VoterStanding(3, behind=0, answers=False)),
        ({"match_index": -1}, VoterStanding(3, behind=-1, answers=True)),
        # It answers out of an empty disk, and does not vote.
        ({"found_directory_id": b"x"}, VoterStanding(3, behind=0, answers=False)),
    ],
    ids=["silent", "unheard", "wiped"],
)
def test_one_that_does_not_count_is_no_part_of_a_majority(
    third: dict[str, Any], found: VoterStanding
) -> None:
    standing = quorum_standing(quorum(**third))
    assert standing.voters[2] == found
    (reason,) = why_not_roll(2, (), (), standing)
    assert "only 1 of 3 controllers would be there and caught up" in reason


def test_a_leader_that_no_majority_confirms_is_not_believed() -> None:
    standing = quorum_standing(quorum(confirmed=False))
    assert "no majority of the controllers confirms who leads them" in standing.doubt
    (reason,) = why_not_roll(2, (), (), standing)
    assert reason.startswith(standing.doubt)


class Told:
    """Node 1 of three brokers, in a cluster whose last change is broker 3's drain or fencing."""

    def __init__(self) -> None:
        self.image = MetadataImage()
        brokers = [BrokerRecord(node_id=node, broker_epoch=node) for node in (1, 2, 3)]
        partition = PartitionRecord(
            topic_id=b"t" * 16, replicas=[1, 3], isr=[1, 3], leader=1, min_insync_replicas=1
        )
        self.image.apply(
            MetadataDelta(
                index=7,
                controller_epoch=4,
                snapshot=True,
                brokers=brokers,
                topics=[TopicRecord(name="t", topic_id=b"t" * 16)],
                partitions=[partition],
            )
        )
        self.term, self.decided = 4, 8
        self.news = asyncio.Event()
        self.waits: list[tuple[int, int]] = []
        self.waited = asyncio.Event()
        self.rollable = Rollable(1, Picture(self.image, self.wait), self.describe)

    async def wait(self, index: int, timeout_ms: int) -> None:
        self.waits.append((index, timeout_ms))
        self.waited.set()
        await self.news.wait()

    async def describe(self, _timeout_ms: int) -> DescribeQuorumResponse:
        answer = quorum()
        answer.metadata_index = self.decided
        answer.term = self.term
        return answer

    def hear(self) -> None:
        fenced = BrokerRecord(node_id=3, broker_epoch=3, fenced=True)
        self.image.apply(MetadataDelta(index=8, controller_epoch=4, brokers=[fenced]))
        self.news.set()


async def test_a_node_judges_by_all_that_was_decided_before_the_question() -> None:
    told = Told()
    asked = asyncio.create_task(told.rollable.verdict())
    await told.waited.wait()
    told.hear()
    [reason] = (await asked).reasons
    assert "node 1 has the only replica in sync of t-0 (broker 3 is down)" in reason
    assert told.waits == [(8, 1_000)], "for long enough to hear, and for less than a probe waits"


async def test_a_node_that_hears_nothing_more_is_not_believed() -> None:
    told = Told()
    told.news.set()  # The time is up.
    verdict = await told.rollable.verdict()
    [reason] = verdict.reasons
    assert "up to index 7 of controller epoch 4, and they have changed up to 8 of 4;" in reason
    assert verdict.passes


async def test_a_picture_of_another_epoch_is_not_believed_whatever_its_index() -> None:
    # A leader that has not taken over yet; or the picture's history was given up.
    told = Told()
    told.news.set()
    told.term, told.decided = 5, 3
    [reason] = (await told.rollable.verdict()).reasons
    assert "up to index 7 of controller epoch 4, and they have changed up to 3 of 5" in reason
    told.term, told.decided = 4, 7
    assert (await told.rollable.verdict()).reasons == []
