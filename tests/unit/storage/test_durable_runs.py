"""A crash that cost nothing: which start may say that all is here that the run acknowledged."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.broker.core.last_run import FoundDirectory, RunMark, epoch_to_report
from penstock.broker.found_logs import tell_of_damage
from penstock.broker.storage.disk import Disk
from penstock.broker.storage.local_state import LocalState
from penstock.broker.storage.log import PartitionLog
from penstock.broker.storage.manager import LogManager
from penstock.broker.storage.settings import FlushPolicy, LogSettings
from penstock.wire.ids import TopicId, TopicIdPartition
from tests.support import eventually
from tests.unit.storage.storage_kit import BrokenDisk, Clock, batch, values_of

ONE = TopicId(b"1" * 16)
KEY = TopicIdPartition(ONE, 0)
WAITS_NOT = [FlushPolicy.OS, FlushPolicy.INTERVAL]
Open = Callable[..., LogManager]


@pytest.fixture
def open_logs() -> Iterator[Open]:
    managers = []

    def open_manager(
        *paths: Path, policy: FlushPolicy = FlushPolicy.COMMIT, disk: Disk | None = None
    ) -> LogManager:
        settings = LogSettings(flush_policy=policy, checkpoint_interval_ms=20)
        manager = LogManager(paths, settings, lambda _: None, Clock(), cluster_id="c1", disk=disk)
        manager.open()
        managers.append(manager)
        return manager

    yield open_manager
    for manager in managers:
        manager.close()


def crash(manager: LogManager, *paths: Path) -> None:
    """Leave the files as a kill would: copied aside before the close tidies them up."""
    for path in paths:
        deleted = shutil.ignore_patterns("*-delete")  # It goes away under the copy's eyes.
        shutil.copytree(path, path.with_name(path.name + "-crashed"), ignore=deleted)
    manager.close()
    for path in paths:
        shutil.rmtree(path)
        path.with_name(path.name + "-crashed").rename(path)


async def write(manager: LogManager, *values: str, partition: int = 0) -> PartitionLog:
    """Append to a partition, until that is as durable as the policy has it, and known."""
    log = manager.get_or_create("t", partition, ONE, {})
    for value in values:
        log.append_as_leader(batch(value), 0, now_ms=1)
    await eventually(lambda: log.durable_offset == log.log_end_offset)
    await saved(manager)
    return log


async def saved(manager: LogManager) -> None:
    """Wait until what is known of the partitions is in local state."""
    for directory in manager._directories:
        await eventually(lambda at=directory: at._saves.timer is None)  # type: ignore[misc]
        done: list[bool] = []
        directory._flusher.run(lambda done=done: done.append(True))  # type: ignore[misc]
        await eventually(lambda done=done: bool(done))  # type: ignore[misc]


async def test_a_crash_under_commit_costs_nothing_and_says_so(
    open_logs: Open, tmp_path: Path
) -> None:
    paths = tmp_path / "a", tmp_path / "b"
    manager = open_logs(*paths)
    assert manager.previous_broker_epoch() == -1
    manager.record_broker_epoch(17)
    await write(manager, "x", "y")
    await write(manager, "z", partition=1)
    crash(manager, *paths)
    manager = open_logs(*paths)
    assert manager.previous_broker_epoch() == 17
    assert sorted(values_of(log) for log in manager.logs()) == [["x", "y"], ["z"]]
    manager.record_broker_epoch(23)
    crash(manager, *paths)
    assert open_logs(*paths).previous_broker_epoch() == 23


async def test_a_torn_tail_was_acknowledged_by_nobody(open_logs: Open, tmp_path: Path) -> None:
    manager = open_logs(tmp_path / "a")
    manager.record_broker_epoch(17)
    log = await write(manager, "x")
    crash(manager, tmp_path / "a")
    with (log.directory / "00000000000000000000.log").open("ab") as file:
        file.write(bytes(batch("torn", base_offset=1))[:-1])
    manager = open_logs(tmp_path / "a")
    assert manager.previous_broker_epoch() == 17
    assert [values_of(log) for log in manager.logs()] == [["x"]]


async def test_a_flushed_batch_that_is_not_sound_any_more_was_acknowledged(
    open_logs: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = open_logs(tmp_path / "a")
    manager.record_broker_epoch(17)
    log = await write(manager, "x")
    with monkeypatch.context() as patch:
        patch.setattr(LocalState, "write", lambda _: None)  # It lags behind what is flushed.
        await write(manager, "y")
        crash(manager, tmp_path / "a")
    path = log.directory / "00000000000000000000.log"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    manager = open_logs(tmp_path / "a")
    assert [values_of(log) for log in manager.logs()] == [["x"]]
    assert manager.previous_broker_epoch() == -1


@pytest.mark.parametrize("clean", [False, True])
async def test_a_log_with_a_hole_lost_something(
    open_logs: Open, tmp_path: Path, clean: bool
) -> None:
    manager = open_logs(tmp_path / "a")
    manager.record_broker_epoch(17)
    log = await write(manager, "x")
    for value in "yz":
        log.roll()
        await write(manager, value)
    if clean:
        manager.close()
    else:
        crash(manager, tmp_path / "a")
    (log.directory / "00000000000000000001.log").unlink()
    manager = open_logs(tmp_path / "a")
    assert manager.previous_broker_epoch() == -1
    told: list[tuple[str, int]] = []
    tell_of_damage(manager, lambda log, offset: told.append((log.name, offset)))
    assert told == [("t-0", 1)]  # Which has it copied from another replica.


async def test_a_flushed_leader_epoch_that_is_not_as_it_was_is_told_of_as_other_damage(
    open_logs: Open, tmp_path: Path
) -> None:
    """As where a bit of a record has turned: all that was acknowledged is here, but damaged."""
    manager = open_logs(tmp_path / "a")
    manager.record_broker_epoch(17)
    log = await write(manager, "x", "y")
    crash(manager, tmp_path / "a")
    path = log.directory / "00000000000000000000.log"
    data = bytearray(path.read_bytes())
    data[len(batch("x")) + 13] ^= 4
    path.write_bytes(data)
    manager = open_logs(tmp_path / "a")
    assert manager.previous_broker_epoch() == 17
    told: list[tuple[str, int]] = []
    tell_of_damage(manager, lambda log, offset: told.append((log.name, offset)))
    assert told == [("t-0", 1)]


@pytest.mark.parametrize("behind_a_hole", [b"", batch("x")])
async def test_records_dropped_behind_a_hole_may_have_been_acknowledged(
    open_logs: Open, tmp_path: Path, behind_a_hole: bytes
) -> None:
    manager = open_logs(tmp_path / "a")
    manager.record_broker_epoch(17)
    log = await write(manager, "x")
    crash(manager, tmp_path / "a")
    (log.directory / "00000000000000000005.log").write_bytes(behind_a_hole)
    manager = open_logs(tmp_path / "a")
    assert [values_of(log) for log in manager.logs()] == [["x"]]
    assert manager.previous_broker_epoch() == (-1 if behind_a_hole else 17)


@pytest.mark.parametrize("policy", WAITS_NOT)
async def test_a_crash_under_another_policy_may_have_cost_something(
    open_logs: Open, tmp_path: Path, policy: FlushPolicy
) -> None:
    manager = open_logs(tmp_path / "a", policy=policy)
    manager.record_broker_epoch(17)
    await write(manager, "x")
    crash(manager, tmp_path / "a")
    manager = open_logs(tmp_path / "a")
    assert manager.previous_broker_epoch() == -1
    # What was found is flushed: from here on nothing is lost.
    manager.record_broker_epoch(18)
    crash(manager, tmp_path / "a")
    assert open_logs(tmp_path / "a").previous_broker_epoch() == 18


@pytest.mark.parametrize("policy", WAITS_NOT)
async def test_a_run_under_another_policy_takes_the_mark_away(
    open_logs: Open, tmp_path: Path, policy: FlushPolicy
) -> None:
    manager = open_logs(tmp_path / "a")
    manager.record_broker_epoch(17)
    await write(manager, "x")
    crash(manager, tmp_path / "a")
    manager = open_logs(tmp_path / "a", policy=policy)
    assert manager.previous_broker_epoch() == 17
    manager.record_broker_epoch(17)  # Whatever number it is given.
    crash(manager, tmp_path / "a")
    assert open_logs(tmp_path / "a").previous_broker_epoch() == -1


@pytest.mark.parametrize("clean", [False, True])
async def test_a_run_that_never_registered_leaves_what_the_one_before_was(
    open_logs: Open, tmp_path: Path, clean: bool
) -> None:
    manager = open_logs(tmp_path / "a")
    manager.record_broker_epoch(17)
    await write(manager, "x")
    crash(manager, tmp_path / "a")
    manager = open_logs(tmp_path / "a")
    if clean:
        manager.close()
    else:
        crash(manager, tmp_path / "a")
    assert open_logs(tmp_path / "a").previous_broker_epoch() == 17


@pytest.mark.parametrize("how", ["emptied", "left out", "state lost", "the only one"])
async def test_a_directory_that_is_gone_voids_the_mark(
    open_logs: Open, tmp_path: Path, how: str
) -> None:
    paths = [tmp_path / "a"] if how == "the only one" else [tmp_path / "a", tmp_path / "b"]
    manager = open_logs(*paths)
    manager.record_broker_epoch(17)
    await write(manager, "x")
    crash(manager, *paths)
    if how == "left out":
        paths.pop()
    else:
        shutil.rmtree(paths[-1] / (".state" if how == "state lost" else ""))
    assert open_logs(*paths).previous_broker_epoch() == -1


async def test_a_partition_that_is_gone_voids_the_mark(open_logs: Open, tmp_path: Path) -> None:
    manager = open_logs(tmp_path / "a")
    manager.record_broker_epoch(17)
    await write(manager, "x")
    crash(manager, tmp_path / "a")
    shutil.rmtree(tmp_path / "a" / "t-0")
    assert open_logs(tmp_path / "a").previous_broker_epoch() == -1


async def test_a_partition_put_back_voids_the_mark(open_logs: Open, tmp_path: Path) -> None:
    manager = open_logs(tmp_path / "a")
    manager.record_broker_epoch(17)
    await write(manager, "x")
    manager.set_aside(KEY)
    await saved(manager)
    crash(manager, tmp_path / "a")
    [stray] = (tmp_path / "a").glob("*.stray")
    stray.rename(tmp_path / "a" / "t-0")
    manager = open_logs(tmp_path / "a")
    assert manager.previous_broker_epoch() == -1
    assert [values_of(log) for log in manager.logs()] == [["x"]]


async def test_a_partition_deleted_by_order_leaves_the_mark(
    open_logs: Open, tmp_path: Path
) -> None:
    manager = open_logs(tmp_path / "a")
    manager.record_broker_epoch(17)
    await write(manager, "x")
    manager.delete(KEY)
    await saved(manager)
    crash(manager, tmp_path / "a")
    assert open_logs(tmp_path / "a").previous_broker_epoch() == 17


async def test_a_log_that_does_not_open_voids_the_mark_for_this_run_and_the_next(
    open_logs: Open, tmp_path: Path
) -> None:
    manager = open_logs(tmp_path / "a")
    manager.record_broker_epoch(17)
    log = await write(manager, "x")
    crash(manager, tmp_path / "a")
    path = log.directory / "00000000000000000000.log"
    kept = path.read_bytes()
    path.write_bytes(kept[:-1])
    manager = open_logs(tmp_path / "a")
    assert manager.previous_broker_epoch() == -1
    manager.record_broker_epoch(18)
    crash(manager, tmp_path / "a")
    path.write_bytes(kept)
    assert open_logs(tmp_path / "a").previous_broker_epoch() == -1


async def test_a_log_that_stays_shut_does_not_spoil_the_clean_stop_of_the_others(
    open_logs: Open, tmp_path: Path
) -> None:
    manager = open_logs(tmp_path / "a")
    manager.record_broker_epoch(3)
    bad = await write(manager, "x")
    good = await write(manager, "y", partition=1)
    crash(manager, tmp_path / "a")
    path = bad.directory / "00000000000000000000.log"
    sound = path.read_bytes()
    path.write_bytes(sound[:-1])
    manager = open_logs(tmp_path / "a")
    assert manager.previous_broker_epoch() == -1, "the run before had it, and may have led it"
    manager.record_broker_epoch(4)
    manager.close()
    manager = open_logs(tmp_path / "a")
    assert list(manager.unopened()) == [bad.key]
    assert manager.previous_broker_epoch() == 4, "that run did not have it"
    assert [log.opened_clean for log in manager.logs()] == [True]
    manager.record_broker_epoch(5)
    manager.close()
    path.write_bytes(sound + b"torn")
    manager = open_logs(tmp_path / "a")
    assert manager.previous_broker_epoch() == -1, "whatever it is that was put there"
    opened = {log.key: log.opened_clean for log in manager.logs()}
    assert opened == {bad.key: False, good.key: True}, "nobody had looked at it to its end"
    assert path.read_bytes() == sound
    manager.record_broker_epoch(6)
    manager.close()
    manager = open_logs(tmp_path / "a")
    assert manager.previous_broker_epoch() == 6
    assert [log.opened_clean for log in manager.logs()] == [True, True]


async def test_a_log_that_opens_no_more_after_a_clean_stop_voids_its_mark(
    open_logs: Open, tmp_path: Path
) -> None:
    """Though another one was shut all the time."""
    manager = open_logs(tmp_path / "a")
    manager.record_broker_epoch(3)
    paths = [
        (await write(manager, "x", partition=partition)).directory / "00000000000000000000.log"
        for partition in range(2)
    ]
    crash(manager, tmp_path / "a")
    for epoch, path in enumerate(paths, 4):
        path.write_bytes(path.read_bytes()[:-1])
        manager = open_logs(tmp_path / "a")
        assert manager.previous_broker_epoch() == -1
        manager.record_broker_epoch(epoch)
        manager.close()
    assert open_logs(tmp_path / "a").previous_broker_epoch() == 5


async def test_a_disk_that_failed_voids_the_mark_of_all(open_logs: Open, tmp_path: Path) -> None:
    paths = tmp_path / "a", tmp_path / "b"
    disk = BrokenDisk()
    manager = open_logs(*paths, disk=disk)
    manager.record_broker_epoch(17)
    log = manager.get_or_create("t", 0, ONE, {})
    disk.failing = {"sync"}
    log.append_as_leader(batch("x"), 0, now_ms=1)
    await eventually(lambda: bool(manager.failed_directories))
    disk.failing = set()
    for directory in manager._directories:
        await eventually(lambda at=directory: _unmarked(at))  # type: ignore[misc]
    crash(manager, *paths)
    assert open_logs(*paths).previous_broker_epoch() == -1


async def test_voiding_the_mark_does_not_wait_for_files_that_are_deleted(
    open_logs: Open, tmp_path: Path
) -> None:
    disk = BrokenDisk()
    manager = open_logs(tmp_path / "a", disk=disk)
    manager.record_broker_epoch(17)
    log = manager.get_or_create("t", 0, ONE, {})
    deletion = threading.Event()
    log.home.run_in_background(lambda: assert_set(deletion))
    try:
        disk.failing = {"sync"}
        log.append_as_leader(batch("x"), 0, now_ms=1)
        await eventually(lambda: _unmarked(manager._directories[0]))
    finally:
        deletion.set()


def assert_set(event: threading.Event) -> None:
    assert event.wait(60)


def _unmarked(directory: object) -> bool:
    state = directory._state  # type: ignore[attr-defined]
    state._load()
    return state.durable_run is None


# --- the decision --------------------------------------------------------------------------------

A, B = b"a" * 16, b"b" * 16
BOTH = RunMark(7, frozenset({A, B}))


@pytest.mark.parametrize(
    ("found", "epoch"),
    [
        ([], -1),
        ([FoundDirectory(A, None, None, True)], -1),
        ([FoundDirectory(A, BOTH, None, True), FoundDirectory(B, BOTH, None, True)], 7),
        ([FoundDirectory(A, None, BOTH, True), FoundDirectory(B, None, BOTH, True)], 7),
        # A crash between the two directories' clean stops.
        ([FoundDirectory(A, BOTH, None, True), FoundDirectory(B, None, BOTH, True)], 7),
        ([FoundDirectory(A, None, BOTH, True), FoundDirectory(B, None, BOTH, False)], -1),
        ([FoundDirectory(A, None, BOTH, True), FoundDirectory(B, None, None, True)], -1),
        ([FoundDirectory(A, None, BOTH, True)], -1),
        (
            [
                FoundDirectory(A, None, BOTH, True),
                FoundDirectory(B, None, BOTH._replace(broker_epoch=6), True),
            ],
            -1,
        ),
        # A clean stop is of a later run than the mark beside it.
        (
            [FoundDirectory(A, RunMark(9, frozenset({A})), RunMark(7, frozenset({A})), True)],
            9,
        ),
    ],
)
def test_what_is_reported(found: list[FoundDirectory], epoch: int) -> None:
    assert epoch_to_report(found) == epoch
