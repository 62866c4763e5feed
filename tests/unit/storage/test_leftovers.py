"""What a start finds in a data directory that says not whose log it is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.wire.ids import TopicId
from tests.unit.storage.storage_kit import batch, values_of
from tests.unit.storage.test_log_manager import Kit

ONE = TopicId(b"1" * 16)


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[Kit]:
    kit = Kit(tmp_path / "one", tmp_path / "two")
    yield kit
    for manager in kit.managers:
        manager.close()


@pytest.mark.parametrize(
    "names", [["partition.metadata.tmp"], ["00000000000000000000.log"], ["partition.metadata"]]
)
async def test_of_a_partition_that_was_being_made_nothing_is_in_the_way(
    kit: Kit, names: list[str]
) -> None:
    kit.open().close()
    directory = kit.paths[0] / "t-0"
    directory.mkdir()
    for name in names:
        (directory / name).touch()
    assert kit.open().get_or_create("t", 0, ONE, {}).log_end_offset == 0


@pytest.mark.parametrize(
    "name",
    [
        "backup-2024/notes.txt",
        "backup-2024/t-0/partition.metadata",
        "syslog-7/messages.log",
        "old-1/00000000000000000000.log.gz",
        "t-0/00000000000000000000.snapshot",
        "my-files-delete/notes.txt",
        "t-0-delete/notes.txt",
    ],
)
async def test_what_this_broker_did_not_make_is_never_removed(kit: Kit, name: str) -> None:
    path = kit.paths[0] / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"precious")
    for _ in range(2):
        kit.open().close()
        assert path.read_bytes() == b"precious"


async def test_a_directory_of_somebody_else_is_told_of_and_costs_no_clean_stop(kit: Kit) -> None:
    manager = kit.open()
    manager.record_broker_epoch(3)
    manager.close()
    for path in kit.paths:
        (path / "backup-2024").mkdir()
        (path / "backup-2024" / "notes.txt").write_bytes(b"precious")
    with capture_logs() as lines:
        manager = kit.open()
    told = [line["path"] for line in lines if line["event"] == "directory_ignored"]
    assert told == [str(path / "backup-2024") for path in kit.paths]
    assert manager.previous_broker_epoch() == 3
    manager.get_or_create("backup", 2024, ONE, {}).append_as_leader(batch("a"), 0, now_ms=1)
    manager.close()
    assert [values_of(log) for log in kit.open().logs()] == [["a"]]
