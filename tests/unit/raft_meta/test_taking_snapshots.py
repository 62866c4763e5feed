"""A snapshot is written while its voter goes on: what may happen meanwhile, and what is left."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.raft_meta.config import ControllerConfig
from penstock.raft_meta.directory_lock import lock, locked
from penstock.raft_meta.driver import Operation
from penstock.raft_meta.journal import RaftSafetyError
from penstock.raft_meta.quorum import Role
from penstock.raft_meta.raft_quorum import RaftQuorum
from penstock.raft_meta.snapshots import Snapshot, SnapshotStore
from penstock.raft_meta.taking import SnapshotTaking
from penstock.raft_meta.voter import Installed
from penstock.v1 import raft_pb2
from penstock.wire.errors import DataDirectoryError, StorageError
from tests.support import eventually
from tests.unit.raft_meta.lone_voter import Lone, Message, append, entry

DEADLINE_S = 30
ENTRIES = 10
"""After so many a snapshot is due."""


class Machine:
    """Keeps what it was fed."""

    def __init__(self) -> None:
        self.applied: list[bytes] = []

    def apply(self, _index: int, _term: int, payload: bytes) -> bytes:
        self.applied.append(payload)
        return b"done"

    def freeze(self) -> Callable[[], bytes]:
        frozen = b",".join(self.applied)
        return lambda: frozen

    def install(self, _index: int, snapshot: bytes) -> None:
        self.applied = snapshot.split(b",")


class DiskOfFiles:
    """Has the syncs of files hang or fail, but not the main thread's, nor those of directories."""

    def __init__(self) -> None:
        self.error: OSError | None = None
        self.threads: list[str] = []  # Those on which such a sync began.
        self.began = threading.Event()
        self.goes_on = threading.Event()
        self.goes_on.set()
        self._fsync = os.fsync

    def fsync(self, descriptor: int) -> None:
        beside = threading.current_thread() is not threading.main_thread()
        if beside and stat.S_ISREG(os.fstat(descriptor).st_mode):
            self.threads.append(threading.current_thread().name)
            self.began.set()
            assert self.goes_on.wait(DEADLINE_S)
            if self.error is not None:
                raise self.error
        self._fsync(descriptor)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[DiskOfFiles]:
    disk = DiskOfFiles()
    monkeypatch.setattr(os, "fsync", disk.fsync)
    yield disk
    disk.goes_on.set()


def config(directory: Path) -> ControllerConfig:
    return ControllerConfig(
        may_found=True,
        node_id=1,
        cluster_id="c",
        data_dir=directory,
        listen=("127.0.0.1", 0),
        voters={1: ("127.0.0.1", 1)},
        snapshot_entries=ENTRIES,
    )


@pytest.fixture
async def quorum(tmp_path: Path, disk: DiskOfFiles) -> AsyncIterator[RaftQuorum]:
    """A quorum of one that leads."""
    quorum = RaftQuorum(config(tmp_path), Machine())
    await quorum.start()
    await eventually(lambda: quorum.status().role is Role.LEADER)
    yield quorum
    disk.goes_on.set()
    await quorum.stop()


async def propose_until_due(quorum: RaftQuorum) -> None:
    for number in range(ENTRIES):
        await quorum.propose(b"%d" % number)


def files(directory: Path) -> set[str]:
    """The snapshot's, and what lies about of others."""
    return {path.name for path in directory.glob("snapshot*")}


# --- the controller ------------------------------------------------------------------------------


async def test_the_voter_goes_on_while_a_write_hangs(
    quorum: RaftQuorum, disk: DiskOfFiles, tmp_path: Path
) -> None:
    disk.goes_on.clear()
    await propose_until_due(quorum)
    await eventually(lambda: bool(disk.threads))
    for number in range(3 * ENTRIES):  # Enough for more snapshots: one is taken at a time.
        assert await quorum.propose(b"meanwhile %d" % number) == b"done"
    assert len(disk.threads) == 1
    assert not {"raft", threading.main_thread().name} & set(disk.threads)
    assert "snapshot" not in files(tmp_path)
    disk.goes_on.set()
    await eventually(lambda: files(tmp_path) == {"snapshot"})
    snapshot = SnapshotStore(tmp_path).load()
    assert snapshot is not None
    assert snapshot.data == b",".join(b"%d" % number for number in range(ENTRIES))
    await quorum.propose(b"next")
    await eventually(lambda: len(disk.threads) == 2)


async def test_the_log_before_a_snapshot_goes_once_it_is_in_its_place(
    quorum: RaftQuorum, disk: DiskOfFiles
) -> None:
    first: list[int] = []

    async def ask() -> int:
        asked = len(first)
        quorum._thread.submit(lambda voter, _now_s: first.append(voter._journal.first_index))
        await eventually(lambda: len(first) > asked)
        return first[-1]

    disk.goes_on.clear()
    await propose_until_due(quorum)
    await eventually(lambda: bool(disk.threads))
    assert await ask() == 1
    disk.goes_on.set()
    await eventually(lambda: quorum._taking._task is None)
    assert await ask() > 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE])
async def test_a_disk_without_room_or_a_process_without_descriptors_costs_one_snapshot(
    quorum: RaftQuorum, disk: DiskOfFiles, tmp_path: Path, number: int
) -> None:
    disk.error = OSError(number, os.strerror(number))
    with capture_logs() as lines:
        await propose_until_due(quorum)
        await eventually(lambda: bool(disk.threads) and quorum._taking._task is None)
    assert [line["event"] for line in lines if line["log_level"] == "warning"] == [
        "no room for a metadata snapshot"
    ]
    assert not files(tmp_path)
    assert not quorum._failed.done()
    disk.error = None
    await propose_until_due(quorum)
    await eventually(lambda: files(tmp_path) == {"snapshot"})


async def test_a_write_that_fails_ends_the_controller(
    quorum: RaftQuorum, disk: DiskOfFiles, tmp_path: Path
) -> None:
    disk.error = OSError(errno.EIO, "Input/output error")
    await propose_until_due(quorum)
    with pytest.raises(StorageError, match=r"controller's disk failed.*Input/output error; next: "):
        await asyncio.wait_for(quorum.wait_failed(), DEADLINE_S)
    assert not files(tmp_path)
    await asyncio.to_thread(quorum._thread.join)


async def test_a_stop_during_a_write_keeps_the_directory_until_it_has_ended(
    quorum: RaftQuorum, disk: DiskOfFiles, tmp_path: Path
) -> None:
    disk.goes_on.clear()
    await propose_until_due(quorum)
    await eventually(lambda: bool(disk.threads))
    stopping = asyncio.create_task(quorum.stop())
    await asyncio.to_thread(quorum._thread.join)
    with pytest.raises(DataDirectoryError, match="another process"):
        lock(tmp_path)
    assert not stopping.done()
    assert files(tmp_path) == {"snapshot.aside"}
    disk.goes_on.set()
    await asyncio.wait_for(stopping, DEADLINE_S)
    assert not files(tmp_path), "it was not put in its place, and takes no room"
    with locked(tmp_path):
        pass


class Steps:
    """A voter's thread whose operations run when the test says so."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def run_one(self) -> None:
        self.operations.pop(0)(self, 0.0)  # type: ignore[arg-type]  # As much of a voter as is used.

    def snapshot_of(self, index: int, data: bytes) -> Snapshot:
        return Snapshot(index, 1, data)

    def keep(self, _snapshot: Snapshot) -> None:
        return


async def test_a_write_never_begins_once_stop_was_called(tmp_path: Path) -> None:
    """The voter has said what snapshot it is, and the loop is about to hear it."""
    voter, written, failed = Steps(), list[Snapshot](), list[BaseException]()

    class Store(SnapshotStore):
        def write_aside(self, snapshot: Snapshot) -> bool:
            written.append(snapshot)
            return True

    taking = SnapshotTaking(
        config(tmp_path),
        Machine(),
        Store(tmp_path),
        submit=voter.operations.append,
        on_failed=failed.append,
    )

    async def begin(index: int) -> None:
        for _ in range(ENTRIES):
            taking.count(b"x")
        taking.begin_if_due(index)
        await eventually(lambda: bool(voter.operations))

    await begin(20)
    voter.run_one()
    await eventually(lambda: bool(voter.operations))
    voter.run_one()
    await eventually(lambda: taking._task is None)
    await begin(40)
    voter.run_one()
    await taking.stop()
    assert [snapshot.index for snapshot in written] == [20]
    assert not failed


# --- the voter -----------------------------------------------------------------------------------


def chunk_of(snapshot: Snapshot, term: int) -> Message:
    """All of a leader's snapshot."""
    return Message(
        term=term,
        snapshot_chunk=raft_pb2.SnapshotChunk(
            last_index=snapshot.index,
            last_term=snapshot.term,
            total_bytes=len(snapshot.data),
            crc32c=snapshot.crc,
            data=snapshot.data,
            round=1,
        ),
    )


@contextmanager
def follower(directory: Path) -> Iterator[Lone]:
    """A voter that has applied up to 8, and has 10."""
    lone = Lone(directory)
    lone.tell(2, append(1, (1, 0), *(entry(index, 1) for index in range(2, 11)), commit=8))
    try:
        yield lone
    finally:
        lone.journal.abandon()


def test_a_snapshot_that_was_installed_during_the_write_stays(tmp_path: Path) -> None:
    newer = Snapshot(20, 2, b"newer")
    with follower(tmp_path) as lone:
        store = SnapshotStore(tmp_path)
        older = lone.voter.snapshot_of(8, b"older")
        assert older is not None
        assert store.write_aside(older)
        lone.tell(2, chunk_of(newer, 2))
        lone.voter.keep(older)
        assert store.load() == newer
        assert files(tmp_path) == {"snapshot"}
        assert lone.voter.snapshot_of(8, b"older") is None
        lone.crash()
        lone.events.clear()
        lone.step()
        assert [event.snapshot for event in lone.of(Installed)] == [newer]


def test_an_installation_does_not_meet_the_write_under_way(
    tmp_path: Path, disk: DiskOfFiles
) -> None:
    newer = Snapshot(20, 2, b"newer")
    with follower(tmp_path) as lone, ThreadPoolExecutor(1) as executor:
        store = SnapshotStore(tmp_path)
        older = lone.voter.snapshot_of(8, b"older")
        assert older is not None
        disk.goes_on.clear()
        writing = executor.submit(store.write_aside, older)
        assert disk.began.wait(DEADLINE_S)
        lone.tell(2, chunk_of(newer, 2))
        assert store.load() == newer
        assert files(tmp_path) == {"snapshot", "snapshot.aside"}
        disk.goes_on.set()
        assert writing.result(DEADLINE_S)
        lone.voter.keep(older)
        assert store.load() == newer
        assert files(tmp_path) == {"snapshot"}


def test_a_snapshot_beyond_what_is_applied_is_none(tmp_path: Path) -> None:
    with follower(tmp_path) as lone, pytest.raises(RaftSafetyError, match="8 is applied"):
        lone.voter.snapshot_of(9, b"state")


def test_a_snapshot_tells_the_term_and_the_voters_of_its_index(tmp_path: Path) -> None:
    with follower(tmp_path) as lone:
        assert lone.voter.snapshot_of(8, b"s") == Snapshot(8, 1, b"s", lone.journal.voters)


def test_what_a_crash_leaves_of_a_write_is_gone_at_the_next_start(tmp_path: Path) -> None:
    with follower(tmp_path) as lone:
        older = lone.voter.snapshot_of(8, b"older")
        assert older is not None
        SnapshotStore(tmp_path).write_aside(older)
        (tmp_path / "snapshot.tmp").write_bytes(b"half of an installation's")
        lone.crash()
        assert not files(tmp_path)
        assert lone.journal.first_index == 1


def test_a_name_for_which_there_is_no_room_costs_one_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_source: Path, _target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with follower(tmp_path) as lone:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", full)
            lone.voter.compact(8, b"state")
        assert lone.journal.first_index == 1
        assert not files(tmp_path)
        lone.voter.compact(8, b"state")
        assert lone.journal.first_index == 6
