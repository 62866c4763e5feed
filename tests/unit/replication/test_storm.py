"""Elections, kills and restarts under load: what was acknowledged is there in the end."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.manager import LogManager
from penstock.broker.storage.settings import FlushPolicy, LogSettings
from penstock.wire.errors import PenstockError
from penstock.wire.ids import TopicIdPartition, TopicPartition
from penstock.wire.records import decode_batch, iter_batches
from tests.support import eventually
from tests.unit.replication.brokers import KEY, Brokers, running
from tests.unit.replication.memory_log import MemoryLogs


class DiskLogs:
    """The real logs in a directory; ``crash`` leaves it as a process does that is killed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.on_durable: Callable[[Any], None] = lambda _: None
        self.manager = self._open()

    def _open(self) -> LogManager:
        manager = LogManager(
            [self.path],
            LogSettings(flush_policy=FlushPolicy.COMMIT),
            self._durable,
            lambda: time.monotonic_ns() // 1_000_000,
            cluster_id="cluster",
        )
        manager.open()
        return manager

    def _durable(self, log: PartitionLog) -> None:
        self.on_durable(log)

    def crash(self) -> None:
        self.manager.close()
        self.manager = self._open()

    def logs(self) -> Iterable[PartitionLog]:
        return self.manager.logs()

    def get_or_create(
        self,
        topic: str,
        partition: int,
        topic_id: bytes,
        configs: Mapping[str, str],
        *,
        internal: bool,
        is_new: bool,
    ) -> PartitionLog:
        return self.manager.get_or_create(
            topic, partition, topic_id, configs, internal=internal, is_new=is_new
        )

    async def make_ahead(
        self, wanted: Mapping[TopicIdPartition, TopicPartition], *, is_new: bool
    ) -> None:
        await self.manager.make_ahead(wanted, is_new=is_new)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)

    @property
    def open(self) -> dict[TopicIdPartition, PartitionLog]:
        return {log.key: log for log in self.manager.logs()}


def values(log: Any) -> list[bytes]:
    data = log.read(log.log_start_offset, 1 << 30, below=log.log_end_offset)
    return [r.value or b"" for _, part in iter_batches(data) for r in decode_batch(part)]


async def produce(brokers: Brokers, acknowledged: list[bytes], stop: asyncio.Event) -> None:
    number = 0
    while not stop.is_set():
        number += 1
        value = b"%06d" % number
        leader = brokers.partitions[0].leader
        try:
            await brokers[leader].append(value, timeout_ms=1000)
        except PenstockError:
            await asyncio.sleep(0.002)  # Paces a writer that is refused.
        else:
            acknowledged.append(value)


async def strike(brokers: Brokers, chance: random.Random) -> None:
    """One blow. At most one broker is down at a time: two in sync are needed to go on."""
    down = [node_id for node_id, broker in brokers.brokers.items() if broker.stopped]
    kind = chance.choice(("elect", "elect", "kill", "deafen"))
    if down:
        await brokers.restart(down[0])
        await eventually(lambda: len(brokers.isr()) >= 2)
    elif kind == "kill" and len(brokers.isr()) == 3:
        await brokers.kill(chance.choice((1, 2, 3)))
    elif kind == "deafen":
        node = brokers[chance.choice((1, 2, 3))]
        node.deaf = True
        brokers.change(leader=chance.choice(sorted(brokers.isr())))
        await asyncio.sleep(chance.random() / 50)  # How long it hears nothing.
        node.listen()
    else:
        brokers.change(leader=chance.choice(sorted(brokers.isr())))
    await asyncio.sleep(chance.random() / 20)  # Paces the blows.


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("kind", ["memory", "disk"])
async def test_nothing_acknowledged_is_lost(tmp_path: Path, kind: str, seed: int) -> None:
    chance = random.Random(seed)
    async with running(0) as brokers:
        for node_id in (1, 2, 3):
            logs = MemoryLogs() if kind == "memory" else DiskLogs(tmp_path / str(node_id))
            await brokers.start(node_id, logs)  # type: ignore[arg-type]
        brokers.create_topic()
        acknowledged: list[bytes] = []
        stop = asyncio.Event()
        producer = asyncio.create_task(produce(brokers, acknowledged, stop))
        for _ in range(20):
            await strike(brokers, chance)
        stop.set()
        await producer
        for node_id, broker in list(brokers.brokers.items()):
            if broker.stopped:
                await brokers.restart(node_id)
        await eventually(lambda: brokers.isr() == {1, 2, 3})
        await brokers[brokers.partitions[0].leader].append(b"last")
        logs_held = [values(broker.logs.open[KEY]) for broker in brokers.brokers.values()]
        assert logs_held[0] == logs_held[1] == logs_held[2]
        assert len(acknowledged) > 3
        held = iter(logs_held[0])
        # All of them, in the order in which they were acknowledged.
        assert all(value in held for value in acknowledged)
        for broker in brokers.brokers.values():
            await broker.stop()
        if kind == "disk":
            for broker in brokers.brokers.values():
                broker.logs.manager.close()  # type: ignore[attr-defined]
