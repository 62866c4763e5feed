"""What is on record of a replica is what is so, in whatever order reports and metadata pass."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.broker.core.metadata_image import MetadataImage
from penstock.broker.core.ports import DamagedLogError
from penstock.broker.replication.reporting import ReplicaReporter
from penstock.raft_meta.core.versions import METADATA_VERSION
from penstock.v1 import cluster_pb2, controller_pb2
from penstock.wire.errors import CorruptRecordError, NetworkError, StaleBrokerEpochError
from penstock.wire.ids import TopicId, TopicIdPartition

NODE: Final = 2
KEY: Final = TopicIdPartition(TopicId(b"orders-id-16-by!"), 0)
DAMAGED: Final = CorruptRecordError("a batch is not sound")
SHUT: Final = DamagedLogError("a header is damaged", 3)
ONLINE: Final = cluster_pb2.REPLICA_STATE_ONLINE


class Sent:
    """A report on its way: taken by the controllers at any time, or at none."""

    def __init__(self, command: cluster_pb2.ReportReplicasCommand) -> None:
        self.command = command
        self.response: controller_pb2.ReportReplicasResponse | None = None  # Once it is taken.
        self.answer: asyncio.Future[controller_pb2.ReportReplicasResponse] = (
            asyncio.get_running_loop().create_future()
        )


class World:
    """A reporter, the controllers' record of its replica, and all that is between the two.

    Each step says whether it could be made. Broker 1 is in sync throughout, and can lead.
    """

    def __init__(self) -> None:
        self.epoch = 1
        self.is_damaged = self.is_shut = self.is_copying = False
        self.record = cluster_pb2.PartitionRecord(
            topic_id=KEY.topic_id, partition=0, replicas=[1, NODE], isr=[1, NODE], leader=1
        )
        self.index = 0
        self.unheard: list[cluster_pb2.MetadataDelta] = []
        self.untaken: list[Sent] = []
        self.waiting: Sent | None = None
        self.image = MetadataImage()
        self.reporter = ReplicaReporter(NODE, self.image, lambda: self.epoch, self._report)
        self._publish(topics=[cluster_pb2.TopicRecord(topic_id=KEY.topic_id, name="orders")])
        self.hear()

    async def _report(
        self, command: cluster_pb2.ReportReplicasCommand
    ) -> controller_pb2.ReportReplicasResponse:
        assert self.waiting is None, "one report is in flight at a time"
        self.waiting = Sent(command)
        self.untaken.append(self.waiting)
        try:
            return await self.waiting.answer
        finally:
            self.waiting = None

    def _publish(self, topics: list[cluster_pb2.TopicRecord] | None = None) -> None:
        self.index += 1
        self.record.partition_epoch += 1
        copied = cluster_pb2.PartitionRecord()
        copied.CopyFrom(self.record)
        self.unheard.append(
            cluster_pb2.MetadataDelta(
                index=self.index,
                metadata_version=METADATA_VERSION,
                topics=topics or [],
                partitions=[copied],
            )
        )

    @property
    def is_offline_on_record(self) -> bool:
        return NODE in self.record.offline_replicas

    # What happens here.

    def damage(self) -> bool:
        """A batch is found not to be sound; who mends it says so again and again."""
        self.is_damaged = True
        self.reporter.set_damaged(KEY, DAMAGED)
        return True

    def mend(self) -> bool:
        """All of it is sound."""
        if not self.is_damaged:
            return False
        self.is_damaged = False
        self.reporter.set_sound(KEY)
        return True

    def shut(self) -> bool:
        """The log, or the copy of it, can't be used."""
        self.is_shut = True
        self.reporter.set_offline(KEY, SHUT)
        return True

    def copy(self) -> bool:
        """Another log is begun, which the leader sends."""
        if not self.is_shut:
            return False
        self.is_shut, self.is_copying = False, True
        self.reporter.set_copying(KEY, SHUT)
        return True

    def finish(self) -> bool:
        """The copy has gone as far as it has to."""
        if self.is_shut or not self.is_copying:
            return False
        self.is_copying = False
        self.reporter.set_copied(KEY)
        return True

    def register(self) -> bool:
        """The process registers anew: all counts as mended."""
        self.epoch += 1
        del self.record.offline_replicas[:]
        self._publish()
        self.reporter.compare_all()
        return True

    # What happens between here and there.

    def hear(self) -> bool:
        """The oldest metadata not heard yet are acted on, as penstock.broker.replication does."""
        if not self.unheard:
            return False
        self.image.apply(self.unheard.pop(0))
        self.reporter.compare(KEY)
        self.reporter.resume()
        return True

    def take(self, place: int = 0) -> bool:
        """The controllers take one of the reports that were sent, however long ago."""
        if place >= len(self.untaken):
            return False
        sent = self.untaken.pop(place)
        sent.response = controller_pb2.ReportReplicasResponse()
        if sent.command.broker_epoch != self.epoch:
            sent.response.error.CopyFrom(StaleBrokerEpochError("of before").to_proto())
            return True
        for entry in sent.command.replicas:
            is_offline = entry.state != ONLINE
            if is_offline != self.is_offline_on_record:
                self.record.offline_replicas[:] = [NODE] if is_offline else []
                self._publish()
        return True

    def answer(self) -> bool:
        """What the controllers said of the report that is waited for arrives."""
        if self.waiting is None or self.waiting.response is None or self.waiting.answer.done():
            return False
        self.waiting.answer.set_result(self.waiting.response)
        return True

    def lose(self) -> bool:
        """No answer arrives in time; the report may be taken all the same, and later."""
        if self.waiting is None or self.waiting.answer.done():
            return False
        self.waiting.answer.set_exception(NetworkError("no answer in time"))
        return True

    def change(self) -> bool:
        """Something else of the partition is another, of which the broker hears."""
        self._publish()
        return True

    # All of it.

    async def run(self, *steps: str) -> bool:
        """Make these steps; whether each of them could be made."""
        for step in steps:
            if not self._step(step)():
                return False
            await self._breathe()
        return True

    def _step(self, name: str) -> Callable[[], bool]:
        if name == "take the last":
            return lambda: self.take(len(self.untaken) - 1) if self.untaken else False
        step: Callable[[], bool] = getattr(self, name)
        return step

    async def _breathe(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)

    async def come_to_rest(self) -> None:
        """All that is on its way arrives, and what follows from it."""
        for _ in range(100):
            made = [self.take(), self.answer(), self.hear()]
            await self._breathe()
            if not any(made):
                return
        raise AssertionError("it never comes to rest")

    def check(self) -> None:
        assert self.is_offline_on_record == (self.is_damaged or self.is_shut or self.is_copying)
        assert self.reporter.is_settled
        assert self.waiting is None


@pytest.fixture(autouse=True, scope="module")
def _no_pauses() -> Iterator[None]:
    """What was not taken is sent again at once: here time is only what happens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.broker.replication.sending._MIN_BACKOFF_S", 0)
        yield


async def _at_rest_after(*steps: str) -> bool:
    world = World()
    possible = await world.run(*steps)
    if possible:
        await world.come_to_rest()
        world.check()
    await world.reporter.stop()
    return possible


async def test_an_answer_to_a_repeated_report_does_not_swallow_that_it_was_mended() -> None:
    assert await _at_rest_after(
        "damage",
        "take",
        "answer",  # The first `replicas reported`.
        "damage",  # The metadata do not show it yet, so that it is said again.
        "hear",  # They do: it is mended before the second report is answered.
        "mend",
        "take",
        "answer",
    )


def _merged(ours: tuple[str, ...], others: tuple[str, ...], count: int) -> Iterator[list[str]]:
    """``ours`` in their order, with ``count`` of any of the others before, between and after."""
    if not count:
        yield list(ours)
        return
    if ours:
        for rest in _merged(ours[1:], others, count):
            yield [ours[0], *rest]
    for other in others:
        for rest in _merged(ours, others, count - 1):
            yield [other, *rest]


@pytest.mark.parametrize(
    "ours",
    [
        ("damage", "damage", "mend"),
        ("damage", "mend", "damage"),
        ("damage", "register"),
        ("shut", "copy", "finish"),
        ("shut", "copy", "change"),
        ("shut", "copy", "damage"),
    ],
)
async def test_in_every_order_of_few_steps_what_is_on_record_is_what_is_so(
    ours: tuple[str, ...],
) -> None:
    tried = 0
    for steps in _merged(ours, ("take", "hear", "answer"), 5):
        tried += await _at_rest_after(*steps)
    assert tried > 10


@given(
    st.lists(
        st.sampled_from(
            [
                *("damage", "mend", "shut", "copy", "finish", "register", "change"),
                *("hear", "take", "take the last", "answer", "lose"),
            ]
        ),
        max_size=30,
    )
)
def test_in_any_order_what_is_on_record_is_what_is_so(steps: list[str]) -> None:
    async def run() -> None:
        world = World()
        for step in steps:
            await world.run(step)  # What can't be made is passed over.
        await world.come_to_rest()
        world.check()
        await world.reporter.stop()

    asyncio.run(run())
