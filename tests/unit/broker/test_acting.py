"""Acting on the metadata in slices of time, with the real replicas over logs in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import pytest

from penstock.broker.acting import SLICE_S, MetadataActor
from penstock.broker.core.metadata_image import ImageChange, MetadataImage
from penstock.broker.replication.manager import ReplicaManager
from penstock.broker.replication.partition import Partition
from penstock.v1 import cluster_pb2
from penstock.wire.errors import StorageError
from penstock.wire.ids import TopicId, TopicIdPartition, TopicPartition
from tests.unit.replication.memory_log import MemoryLog, MemoryLogs

TOPIC_ID = TopicId(b"orders-id-16-by!")
TOPIC = cluster_pb2.TopicRecord(topic_id=TOPIC_ID, name="orders")
COUNT = 60
DISK_S = 0.004
"""What making or removing a log takes."""
EVENT_S = 0.001
"""What a replica takes for an event."""
STEP_S = DISK_S + 3 * EVENT_S
"""More than one partition takes."""


class SlowLogs(MemoryLogs):
    """Logs on a disk that takes its time, on a clock of the test's."""

    def __init__(self, kit: Kit) -> None:
        super().__init__()
        self.kit = kit
        self.fault: Exception | None = None

    def get_or_create(self, topic: str, partition: int, *rest: Any, **options: Any) -> MemoryLog:
        self.kit.now_s += DISK_S
        if self.fault is not None and len(self.open) >= COUNT // 2:
            raise self.fault
        return super().get_or_create(topic, partition, *rest, **options)

    def delete(self, key: TopicIdPartition) -> None:
        self.kit.now_s += DISK_S
        super().delete(key)

    def set_aside(self, key: TopicIdPartition) -> None:
        self.kit.now_s += DISK_S
        super().set_aside(key)


class Kit:
    """What acts on the metadata of broker 1, and somebody else on the same event loop."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.epoch = 1
        self.index = 0
        self.image = MetadataImage()
        self.logs = SlowLogs(self)
        self.failures: list[BaseException] = []
        self.caught_up = 0
        self.told: list[tuple[int, int]] = []  # Who follows: the index, and the replicas then.
        self.longest_s = 0.0  # That the other one ever waited for its turn.
        self.turns = 0
        self._last_turn_s = 0.0
        self._ticker: asyncio.Handle | None = None
        self.manager = ReplicaManager(
            1,
            self.logs,  # type: ignore[arg-type]  # As the brokers of the replication tests.
            self.image,
            alter_partition=self._never,
            report_replicas=self._never,
            broker_epoch=lambda: self.epoch,
            may_serve=lambda: True,
            open_stream=self._never,
            ask_coordinator=self._never,
        )
        self.actor = MetadataActor(
            self.manager,
            first=lambda _: None,
            followers=(lambda change: self.told.append((change.index, self.hosted)),),
            on_caught_up=self._caught_up,
            on_failed=self.failures.append,
            clock_s=lambda: self.now_s,
        )

    async def _never(self, *_: Any) -> Any:
        raise AssertionError("nobody is asked")

    def _caught_up(self) -> None:
        self.caught_up += 1

    @property
    def hosted(self) -> int:
        return len(list(self.manager.partitions()))

    def apply(self, **fields: Any) -> ImageChange:
        self.index += 1
        change = self.image.apply(cluster_pb2.MetadataDelta(index=self.index, **fields))
        assert change is not None
        return change

    def begin_turns(self) -> None:
        self.longest_s, self.turns, self._last_turn_s = 0.0, 0, self.now_s
        self._take_turn()

    def _count_turn(self) -> None:
        self.turns += 1
        self.longest_s = max(self.longest_s, self.now_s - self._last_turn_s)
        self._last_turn_s = self.now_s

    def _take_turn(self) -> None:
        self._count_turn()
        self._ticker = asyncio.get_running_loop().call_soon(self._take_turn)

    def end_turns(self) -> None:
        assert self._ticker is not None
        self._ticker.cancel()
        self._count_turn()

    async def act(self, **fields: Any) -> float:
        """Act on a change; how long it took, if nobody else had to wait too long meanwhile."""
        change = self.apply(**fields)
        began_s = self.now_s
        self.begin_turns()
        await self.actor.on_change(change)
        self.end_turns()
        assert self.longest_s <= SLICE_S + STEP_S
        return self.now_s - began_s


async def turns_until(condition: Callable[[], bool]) -> None:
    """Give everybody else on the event loop a turn, until ``condition`` holds."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("10,000 turns of the event loop were not enough")


def broker(epoch: int = 1) -> cluster_pb2.BrokerRecord:
    return cluster_pb2.BrokerRecord(node_id=1, broker_epoch=epoch)


def partitions(count: int = COUNT, node: int = 1, epoch: int = 0) -> list[Any]:
    return [
        cluster_pb2.PartitionRecord(
            topic_id=TOPIC_ID,
            partition=number,
            replicas=[node],
            isr=[node],
            leader=node,
            leader_epoch=epoch,
            partition_epoch=epoch,
        )
        for number in range(count)
    ]


@pytest.fixture
async def kit(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Kit]:
    one = Kit()
    handle: Callable[[Partition, Any], None] = Partition.handle

    def timed(partition: Partition, event: Any) -> None:
        one.now_s += EVENT_S
        handle(partition, event)

    monkeypatch.setattr(Partition, "handle", timed)
    await one.act(snapshot=True, brokers=[broker()])
    yield one
    await one.actor.stop()
    await one.manager.stop()


async def test_new_partitions_are_made_with_turns_for_others_in_between(kit: Kit) -> None:
    assert await kit.act(topics=[TOPIC], partitions=partitions()) > COUNT * DISK_S
    assert kit.hosted == COUNT
    assert kit.turns >= COUNT * DISK_S / (SLICE_S + STEP_S)
    assert kit.turns <= COUNT * STEP_S / SLICE_S + 3, "nor is a turn given away after each step"


async def test_what_the_disk_has_to_do_for_new_partitions_is_awaited_before_they_are_made(
    kit: Kit,
) -> None:
    made_ahead: dict[TopicIdPartition, bool] = {}

    async def make_ahead(
        wanted: Mapping[TopicIdPartition, TopicPartition], *, is_new: bool
    ) -> None:
        assert not kit.logs.open.keys() & wanted.keys()
        await asyncio.sleep(0)  # Not a wait: others have a turn while the disk is busy.
        made_ahead.update(dict.fromkeys(wanted, is_new))

    kit.logs.make_ahead = make_ahead  # type: ignore[method-assign]
    await kit.act(topics=[TOPIC], partitions=partitions(4))
    assert (kit.hosted, made_ahead) == (4, {}), "a few are there at once"
    await kit.act(partitions=partitions())
    assert made_ahead.keys() == set(list(kit.logs.made_new)[4:])
    assert all(made_ahead[key] == kit.logs.made_new[key] for key in made_ahead)
    await kit.act(partitions=partitions(epoch=1))
    assert len(made_ahead) == COUNT - 4, "they are here"


async def test_the_time_counts_and_not_the_number(kit: Kit) -> None:
    """No turn is given away for partitions that take no time: they are none of this broker's."""
    await kit.act(topics=[TOPIC], partitions=partitions(1000, node=2))
    assert kit.turns == 2


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ({"removed_topics": [TOPIC_ID]}, 0),
        ({"partitions": partitions(node=2, epoch=1)}, 0),
        ({"brokers": [broker()]}, COUNT),
        ({"topics": [TOPIC]}, COUNT),
        ({"snapshot": True, "brokers": [broker()]}, 0),
        (
            {
                "snapshot": True,
                "brokers": [broker()],
                "topics": [TOPIC],
                "partitions": partitions(epoch=1),
            },
            COUNT,
        ),
    ],
    ids=["topic removed", "moved away", "brokers", "settings", "forgotten", "snapshot"],
)
async def test_whatever_the_change_is_others_have_their_turns(
    kit: Kit, change: dict[str, Any], left: int
) -> None:
    await kit.act(topics=[TOPIC], partitions=partitions())
    assert await kit.act(**change) >= COUNT * EVENT_S
    assert kit.hosted == left
    assert kit.told[-1] == (kit.index, left), "who follows is told when all of it is so"


async def test_the_registration_is_acted_on_with_turns_for_others(kit: Kit) -> None:
    late = Kit()
    late.epoch = -1  # The answer to the registration is still on its way.
    await late.act(snapshot=True, brokers=[broker()], topics=[TOPIC], partitions=partitions())
    assert late.hosted == 0
    late.epoch = 1
    late.begin_turns()
    late.actor.on_registered()
    settled: list[bool] = []
    await turns_until(lambda: settled.append(late.manager.is_settled) or late.caught_up > 0)
    late.end_turns()
    assert late.longest_s <= SLICE_S + STEP_S
    assert late.hosted == COUNT
    assert late.manager.is_settled
    assert len(settled) > 10
    assert not any(settled[:-1]), "nobody must make it a leader of what it does not host yet"
    await late.manager.stop()


async def test_the_registration_is_acted_on_before_the_image_changes_again(kit: Kit) -> None:
    late = Kit()
    late.epoch = -1
    await late.act(snapshot=True, brokers=[broker()], topics=[TOPIC], partitions=partitions())
    late.epoch = 1
    late.actor.on_registered()
    await turns_until(lambda: late.hosted > 0)
    assert late.hosted < COUNT
    await late.actor.until_idle()
    assert (late.caught_up, late.hosted) == (1, COUNT)
    await late.actor.on_change(late.apply(removed_topics=[TOPIC_ID]))
    assert late.hosted == 0
    assert len(late.logs.deleted) == COUNT
    await late.manager.stop()


async def test_ended_in_the_middle_each_partition_is_all_or_nothing(kit: Kit) -> None:
    change = kit.apply(topics=[TOPIC], partitions=partitions())
    acting = asyncio.create_task(kit.actor.on_change(change))
    await turns_until(lambda: kit.hosted >= COUNT // 2)
    acting.cancel()
    await asyncio.gather(acting, return_exceptions=True)
    assert acting.cancelled()
    assert COUNT // 2 <= kit.hosted < COUNT
    assert {partition.key for partition in kit.manager.partitions()} == set(kit.logs.open)
    assert all(partition.is_leader for partition in kit.manager.partitions())
    assert kit.told[-1][0] < change.index
    # Whoever comes next isn't locked out, and a whole picture makes up for what was left undone.
    await kit.act(snapshot=True, brokers=[broker()], topics=[TOPIC], partitions=partitions())
    assert kit.hosted == COUNT


async def test_an_error_goes_through_and_nobody_is_told_that_it_was_acted_on(kit: Kit) -> None:
    kit.logs.fault = KeyError("a mistake")
    change = kit.apply(topics=[TOPIC], partitions=partitions())
    with pytest.raises(KeyError):
        await kit.actor.on_change(change)
    assert kit.told[-1][0] < change.index


async def test_an_error_in_acting_on_the_registration_is_reported() -> None:
    def broken() -> Iterator[None]:
        yield
        raise StorageError("the disk")

    one = Kit()
    one.manager.catch_up = broken  # type: ignore[method-assign]  # To fail as none does.
    one.actor.on_registered()
    await turns_until(lambda: bool(one.failures))
    assert [str(error) for error in one.failures] == ["the disk"]
    assert not one.caught_up
    with pytest.raises(StorageError, match="the disk"):  # No later change hides it.
        await one.actor.on_change(one.apply(snapshot=True, brokers=[broker()]))


async def test_the_registration_waits_for_the_change_that_is_acted_on(kit: Kit) -> None:
    change = kit.apply(topics=[TOPIC], partitions=partitions())
    acting = asyncio.create_task(kit.actor.on_change(change))
    await turns_until(lambda: kit.hosted > 0)
    kit.actor.on_registered()
    idle = asyncio.create_task(kit.actor.until_idle())
    await turns_until(idle.done)
    assert acting.done()
    assert (kit.hosted, kit.caught_up) == (COUNT, 1)


async def test_stopped_while_it_acts_on_the_registration_it_is_silent() -> None:
    late = Kit()
    late.epoch = -1
    await late.act(snapshot=True, brokers=[broker()], topics=[TOPIC], partitions=partitions())
    late.epoch = 1
    late.actor.on_registered()
    await asyncio.sleep(0)
    await late.actor.stop()
    assert late.hosted < COUNT
    assert (late.failures, late.caught_up) == ([], 0)
    await late.manager.stop()
