"""A disk that lost what it had confirmed: the start after it must not say that all is there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support import eventually
from tests.unit.replication.brokers import Brokers, running
from tests.unit.replication.test_storm import DiskLogs

LOST_IN = 17


async def run_that_lost_records(brokers: Brokers, logs: DiskLogs) -> None:
    """Broker 3 leads with these logs, whose disk forgets a record that broker 1 has."""
    logs.manager.record_broker_epoch(LOST_IN)
    await brokers.start(3, logs)  # type: ignore[arg-type]
    brokers.create_topic()
    brokers.change(leader=3)
    for value in (b"a", b"b"):
        await brokers[3].append(value)
    await brokers.kill(1)
    brokers[3].log().truncate_to(1)
    await brokers.restart(1)
    await eventually(lambda: brokers.isr() == {1, 2})


@pytest.mark.parametrize("how", ["clean stop", "kill", "registered anew and killed"])
async def test_the_start_after_a_leader_lost_records_does_not_say_that_all_is_there(
    tmp_path: Path, how: str
) -> None:
    async with running(2) as brokers:
        logs = DiskLogs(tmp_path / "data")
        await run_that_lost_records(brokers, logs)
        if how == "registered anew and killed":
            await eventually(lambda: _unmarked(logs))
            logs.manager.record_broker_epoch(LOST_IN + 1)
        await brokers[3].stop()
        if how != "clean stop":
            await eventually(lambda: _unmarked(logs))
            shutil.copytree(tmp_path / "data", tmp_path / "killed")
            logs.path = tmp_path / "killed"
        logs.crash()
        assert logs.manager.previous_broker_epoch() == -1
        # What is here now is all that the next run begins with, and that is kept.
        logs.manager.record_broker_epoch(LOST_IN + 2)
        logs.crash()
        assert logs.manager.previous_broker_epoch() == LOST_IN + 2
        logs.manager.close()


async def test_the_start_after_a_run_that_lost_nothing_says_so(tmp_path: Path) -> None:
    async with running(2) as brokers:
        logs = DiskLogs(tmp_path / "data")
        logs.manager.record_broker_epoch(LOST_IN)
        await brokers.start(3, logs)  # type: ignore[arg-type]
        brokers.create_topic()
        await brokers[1].append(b"a")
        await brokers[3].stop()
        logs.crash()
        assert logs.manager.previous_broker_epoch() == LOST_IN
        logs.manager.close()


def _unmarked(logs: DiskLogs) -> bool:
    [directory] = logs.manager._directories
    state = directory._use_state()
    state._load()
    return state.durable_run is None
