"""A power cut at any step of making and of deleting a partition."""

from __future__ import annotations

import contextlib
import errno
import itertools
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.broker.core.ports import DamagedLogError
from penstock.broker.storage.disk import Disk
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.manager import LogManager
from penstock.broker.storage.settings import FlushPolicy, LogSettings
from penstock.wire.errors import DataDirectoryError, DiskFullError, StorageError
from penstock.wire.ids import TopicId, TopicIdPartition, TopicPartition
from tests.unit.storage.storage_kit import (
    BrokenDisk,
    Clock,
    PowerCutDisk,
    PowerCutError,
    batch,
    values_of,
)

ONE = TopicId(b"1" * 16)
SEEDS = 6
VALUES = [value * 700 for value in "abc"]  # Each has a segment.
CONFIGS = {"segment.bytes": "1024"}


class Machine:
    """A broker with one data directory."""

    def __init__(self, root: Path, disk: Disk) -> None:
        self.root = root
        self.disk = disk
        self.may_be_shut: set[TopicIdPartition] = set()
        self.open()

    def open(self) -> None:
        settings = LogSettings(flush_policy=FlushPolicy.COMMIT, checkpoint_interval_ms=10**9)
        self.manager = LogManager(
            [self.root], settings, lambda _: None, Clock(), cluster_id="c1", disk=self.disk
        )
        self.manager.open()

    def make(self, partition: int, *values: str) -> PartitionLog:
        log = self.manager.get_or_create("t", partition, ONE, CONFIGS)
        for value in values:
            log.append_as_leader(batch(value), 0, now_ms=1)
        if values:
            log.flush()
        return log

    def log(self, partition: int) -> PartitionLog | None:
        return self.manager.get(TopicIdPartition(ONE, partition))

    def start(self) -> None:
        self.open()
        directory = self.manager._directories[0]
        assert not self.manager.failed_directories
        assert directory.unopened.keys() <= self.may_be_shut
        assert self.may_be_shut or not directory.has_unopened

    def stop(self) -> None:
        with contextlib.suppress(Exception):  # Of the dead machine's, which is between two calls.
            self.manager.close()
        shutil.rmtree(self.root, ignore_errors=True)


class MortalMachine(Machine):
    """It may lose its power at any call."""

    def __init__(self, root: Path) -> None:
        self.power = PowerCutDisk()
        super().__init__(root, self.power)

    def die(self, chance: random.Random) -> None:
        """What is left of it starts in another directory."""
        self.manager._directories[0]._background.wait()
        self.power.cut_after = None
        root = self.root.with_name(self.root.name + "+")
        self.power.cut_power(self.root, root, chance)
        self.stop()
        self.root, self.disk = root, (mended := PowerCutDisk())
        self.power = mended
        mended.settle(root)


def dying_at_each_step(
    tmp_path: Path, prepare: Callable[[Machine], None], act: Callable[[Machine], None]
) -> Iterator[tuple[MortalMachine, bool]]:
    """The machine after a power cut at each call of ``act``, and again in the start after it.

    With it, whether ``act`` had returned.
    """
    done = False
    for step in itertools.count():
        if done:
            assert step > 1
            return
        for seed in range(SEEDS):
            chance = random.Random(f"{step} {seed}")
            machine = MortalMachine(tmp_path / f"{step}-{seed}")
            prepare(machine)
            machine.manager.record_broker_epoch(17)
            machine.power.settle(machine.root)
            machine.power.cut_after = step
            with contextlib.suppress(PowerCutError):
                act(machine)
                done = True
            machine.die(chance)
            machine.power.cut_after = seed
            with contextlib.suppress(PowerCutError):
                machine.start()
            machine.die(chance)
            machine.start()
            yield machine, done
            machine.stop()


async def test_a_power_cut_while_a_partition_is_made(tmp_path: Path) -> None:
    def prepare(machine: Machine) -> None:
        machine.make(1, *VALUES)
        machine.manager._directories[0]._save_all()

    for machine, done in dying_at_each_step(tmp_path, prepare, lambda one: one.make(0) and None):
        kept = machine.log(1)
        assert kept is not None
        assert values_of(kept) == VALUES
        assert machine.manager.previous_broker_epoch() == 17
        assert not done or machine.log(0) is not None
        assert values_of(machine.make(0, "new")) == ["new"]


async def test_a_power_cut_while_a_log_that_does_not_open_is_begun_anew(tmp_path: Path) -> None:
    """It never passes for a shorter one, and the start never counts as one that lost nothing."""
    key = TopicIdPartition(ONE, 0)

    def prepare(machine: Machine) -> None:
        for partition in range(2):
            machine.make(partition, *VALUES)
        machine.manager._directories[0]._save_all()
        machine.manager.record_broker_epoch(16)
        for log in machine.manager.logs():
            log.close(save=False)
        path = max((machine.root / "t-0").glob("*.log"))
        data = bytearray(path.read_bytes())
        data[8] ^= 1  # Of a batch's length.
        path.write_bytes(data)
        machine.manager._directories[0]._use_state()._environment.close()
        machine.may_be_shut = {key}
        machine.start()
        assert machine.manager.previous_broker_epoch() == -1
        assert isinstance(machine.manager.unopened()[key], DamagedLogError)

    def begin_anew(machine: Machine) -> None:
        machine.manager.keep_damaged(key)
        machine.make(0)

    for machine, done in dying_at_each_step(tmp_path, prepare, begin_anew):
        assert machine.manager.previous_broker_epoch() == -1
        other = machine.log(1)
        assert other is not None
        assert values_of(other) == VALUES
        log, shut = machine.log(0), machine.manager.unopened()
        assert not (done and shut)
        if key in shut:
            kept = sum(path.stat().st_size for path in (machine.root / "t-0").glob("*.log"))
            assert kept > sum(map(len, VALUES)), "nothing was taken from it"
        else:
            assert log is None or log.log_end_offset == 0
            [aside] = machine.root.glob("t-0.*.damaged")
            assert sum(path.stat().st_size for path in aside.glob("*.log")) > sum(map(len, VALUES))


@pytest.mark.parametrize("keeps", [False, True])
async def test_a_power_cut_while_a_partition_is_deleted(tmp_path: Path, keeps: bool) -> None:
    key = TopicIdPartition(ONE, 0)

    def prepare(machine: Machine) -> None:
        machine.make(0, *VALUES)
        machine.manager._directories[0]._save_all()

    def act(machine: Machine) -> None:
        if keeps:
            machine.manager.set_aside(key)
        else:
            machine.manager.delete(key)

    for machine, done in dying_at_each_step(tmp_path, prepare, act):
        log = machine.log(0)
        assert not (done and log), "it came back"
        if log is not None:
            assert values_of(log) == VALUES
            assert machine.manager.previous_broker_epoch() == 17
            continue
        strays = list(machine.root.glob("*.stray"))
        assert len(strays) == keeps
        if not keeps:
            assert values_of(machine.make(0, "new")) == ["new"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("call", ["name", "commit"])
@pytest.mark.parametrize("what", ["make", "make ahead", "delete", "cut", "start"])
async def test_a_name_or_a_commit_that_fails_loses_nothing(
    tmp_path: Path, what: str, call: str, number: int
) -> None:
    disk = BrokenDisk(number)
    machine = Machine(tmp_path / "logs", disk)
    log = machine.make(1, *VALUES)
    machine.manager._directories[0]._save_all()
    disk.failing = {call}
    with contextlib.suppress(StorageError, DiskFullError, DataDirectoryError):
        if what == "make":
            machine.make(0)
        elif what == "make ahead":
            wanted = {TopicIdPartition(ONE, 0): TopicPartition("t", 0)}
            await machine.manager.make_ahead(wanted, is_new=True)
        elif what == "delete":
            machine.manager.delete(log.key)
        elif what == "cut":
            log.truncate_to(2)
        else:
            machine.manager.close()
            machine.open()
    disk.failing = set()
    with contextlib.suppress(StorageError, DiskFullError, DataDirectoryError):
        machine.manager.close()
    machine.start()
    log_again = machine.log(1)
    if what == "delete" and call == "commit":
        assert log_again is None
    else:
        assert log_again is not None
        assert values_of(log_again) in ([VALUES, VALUES[:2]] if what == "cut" else [VALUES])
    assert values_of(machine.make(0, "new")) == ["new"]
    machine.stop()
