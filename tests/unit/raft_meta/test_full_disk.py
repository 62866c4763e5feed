"""A voter without room on its disk: it says nothing, promises nothing, and goes on when it can."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import pytest

from penstock.raft_meta import driver
from penstock.raft_meta.config import ControllerConfig
from penstock.raft_meta.driver import VoterThread
from penstock.raft_meta.journal import COMMAND, NO_OP, LmdbJournal
from penstock.raft_meta.quorum import Leadership, Role
from penstock.raft_meta.raft_quorum import RaftQuorum
from penstock.raft_meta.snapshots import Snapshot, SnapshotStore
from penstock.raft_meta.voter import Installed
from penstock.raft_meta.voters import VoterSet
from penstock.wire.errors import DataDirectoryError, RequestTimedOutError
from tests.support import eventually
from tests.unit.raft_meta.lone_voter import Lone
from tests.unit.raft_meta.raft_fuzz import open_fast

DEADLINE_S = 20


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "ROOM_RETRY_S", 0.01)


class FullEnvironment:
    """An LMDB environment whose commits find no room while ``full``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._environment = open_fast(*arguments, **options)
        self.full = False

    def begin(self, *, write: bool = False) -> Any:
        transaction = self._environment.begin(write=write)
        return Refusing(transaction) if write and self.full else transaction

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)


class Refusing:
    def __init__(self, transaction: Any) -> None:
        self._transaction = transaction

    def __enter__(self) -> Any:
        return self._transaction

    def __exit__(self, *_error: object) -> None:
        self._transaction.abort()
        raise lmdb.DiskError("mdb_txn_commit: No space left on device", errno.ENOSPC)


def test_a_sync_without_room_is_tried_again_with_all_that_it_had(tmp_path: Path) -> None:
    waited: list[Exception] = []

    def await_room(error: Exception) -> None:
        waited.append(error)
        journal._environment.full = len(waited) < 3

    def open_journal() -> LmdbJournal:
        return LmdbJournal(
            tmp_path,
            cluster_id="c",
            node_id=1,
            open_environment=FullEnvironment,
            await_room=await_room,
        )

    journal = open_journal()
    journal.add(NO_OP, 1, 0)
    journal.sync()
    journal.add(COMMAND + b"x", 2, 3)
    journal.setCurrentTerm(3, "2")
    journal._environment.full = True
    journal.sync()
    assert len(waited) == 3
    assert not journal.dirty
    journal.abandon()
    journal = open_journal()
    assert [entry.log_index for entry in journal[:]] == [1, 2]
    assert (journal.getCurrentTerm(), journal.getVotedForNodeId()) == (3, "2")
    journal.abandon()


def test_a_journal_that_nobody_waits_for_keeps_what_it_had(tmp_path: Path) -> None:
    named = {"cluster_id": "c", "node_id": 1}
    journal = LmdbJournal(tmp_path, open_environment=FullEnvironment, **named)  # type: ignore[arg-type]
    journal.add(NO_OP, 1, 0)
    journal.sync()
    journal.add(COMMAND + b"x", 2, 3)
    journal._environment.full = True
    with pytest.raises(lmdb.DiskError):
        journal.sync()
    assert journal.dirty
    journal.abandon()


def test_a_journal_that_cannot_be_made_for_want_of_room_is_not_called_damaged(
    tmp_path: Path,
) -> None:
    def full(*arguments: Any, **options: Any) -> FullEnvironment:
        environment = FullEnvironment(*arguments, **options)
        environment.full = True
        return environment

    with pytest.raises(DataDirectoryError, match="free space") as refused:
        LmdbJournal(tmp_path, cluster_id="c", node_id=1, open_environment=full)
    assert "damaged" not in refused.value.message


# --- snapshots -----------------------------------------------------------------------------------


class NoRoomFor:
    """Makes so many writes of snapshots find no room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self.left = times
        write = SnapshotStore._write

        def refuse(store: SnapshotStore, snapshot: Snapshot, path: Path) -> None:
            if self.left:
                self.left -= 1
                raise OSError(errno.ENOSPC, "No space left on device")
            write(store, snapshot, path)

        monkeypatch.setattr(SnapshotStore, "_write", refuse)


@pytest.fixture
def lone(tmp_path: Path) -> Iterator[Lone]:
    lone = Lone(tmp_path, nodes=1)
    yield lone
    lone.journal.abandon()


def test_a_snapshot_without_room_leaves_the_log_as_it_is(
    lone: Lone, monkeypatch: pytest.MonkeyPatch
) -> None:
    lone.wait(0)
    for number in range(10):
        lone.propose(b"%d" % number, token=number)
        lone.wait(0.1)
    before = lone.log
    NoRoomFor(monkeypatch, 1)
    index = lone.status.applied_index
    lone.voter.compact(index, b"state")
    assert lone.log == before
    lone.voter.compact(index, b"state")
    assert lone.journal.first_index == index - 2
    lone.crash()
    lone.wait(0)
    [installed] = lone.of(Installed)
    assert installed.snapshot.data == b"state"  # type: ignore[attr-defined]


def test_a_snapshot_of_the_leader_is_taken_over_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lone, waited = Lone(tmp_path), []
    no_room = NoRoomFor(monkeypatch, 2)
    lone.voter._await_room = waited.append
    lone.wait(0)
    lone.voter._install(Snapshot(7, 1, b"state"))
    lone.step()
    assert (len(waited), no_room.left, lone.journal.first_index) == (2, 0, 7)
    lone.journal.abandon()


def test_what_is_left_of_a_snapshot_takes_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space"):
            SnapshotStore(tmp_path).save(Snapshot(7, 1, b"state"))
    assert not list(tmp_path.iterdir())


# --- the thread ----------------------------------------------------------------------------------


def test_a_leader_that_resigns_enters_a_term_that_it_does_not_lead(tmp_path: Path) -> None:
    lone = Lone(tmp_path)
    term = lone.lead()
    lone.step()
    lone.voter.resign(lone.now_s)
    assert lone.step() == []
    assert (lone.role, lone.status.term) == (Role.FOLLOWER, term + 1)
    assert lone.of(Leadership)[-1] == Leadership(term + 1, -1, leading=False)
    lone.voter.resign(lone.now_s)
    lone.step()
    assert lone.status.term == term + 1, "a follower has nothing to resign from"
    lone.journal.abandon()


class WaitingVoter:
    """A voter whose sync finds no room while ``full``."""

    thread: VoterThread
    full = True

    def __init__(self) -> None:
        self.calls: list[str] = []

    def step(self, _now_s: float) -> tuple[list[object], list[object]]:
        self.calls.append("step")
        while self.full:
            self.thread.await_room(OSError(errno.ENOSPC, "full"))
        return [], []

    def resign(self, _now_s: float, *, even_alone: bool) -> None:
        self.calls.append("resign even alone" if even_alone else "resign")

    def stood_still(self, _since_s: float, _now_s: float) -> None:
        return

    def next_deadline_s(self) -> float:
        return math.inf

    def status(self) -> None:
        return None

    def close(self) -> None:
        return


def start(
    voter: WaitingVoter, *, resigned: bool = False
) -> tuple[list[Exception | None], Future[None], threading.Event]:
    told: list[Exception | None] = []
    failed: Future[None] = Future()
    said = threading.Event()

    def on_room(error: Exception | None) -> bool:
        told.append(error)
        return error is not None and resigned

    voter.thread = VoterThread(
        lambda _now_s: voter,  # type: ignore[arg-type,return-value]
        on_output=lambda *_: said.set(),
        on_failed=failed.set_exception,
        on_room=on_room,
    )
    voter.thread.start().result(DEADLINE_S)
    voter.thread.submit(lambda _voter, _now_s: None)
    return told, failed, said


async def test_a_voter_without_room_says_nothing_and_leads_no_more_after_it() -> None:
    voter = WaitingVoter()
    told, failed, said = start(voter)
    await eventually(lambda: len(told) == 1)
    await asyncio.sleep(0.05)  # Time for several attempts: nothing is said meanwhile.
    assert not said.is_set()
    voter.full = False
    assert await asyncio.to_thread(said.wait, DEADLINE_S)
    assert [type(error) for error in told] == [OSError, type(None)], "once, not for each attempt"
    assert voter.calls == ["step", "resign", "step"]
    voter.thread.stop()
    voter.thread.join()
    assert not failed.done()


async def test_a_voter_that_was_said_to_resign_does_so_even_alone() -> None:
    """It was no more alone when that was said: its last peer was just being removed."""
    voter = WaitingVoter()
    told, _, said = start(voter, resigned=True)
    await eventually(lambda: len(told) == 1)
    voter.full = False
    assert await asyncio.to_thread(said.wait, DEADLINE_S)
    assert voter.calls == ["step", "resign even alone", "step"]
    voter.thread.stop()
    voter.thread.join()


def test_the_only_voter_leads_on_unless_others_were_told_otherwise(lone: Lone) -> None:
    lone.wait(0)
    lone.wait(0.1)
    term = lone.status.term
    lone.voter.resign(lone.now_s)
    lone.step()
    assert (lone.role, lone.status.term) == (Role.LEADER, term)
    lone.voter.resign(lone.now_s, even_alone=True)
    lone.step()
    lone.wait(0.1)
    assert lone.role is Role.LEADER
    assert lone.of(Leadership)[-1] == Leadership(lone.status.term, 1, leading=True)
    assert lone.status.term > term, "a term that was given up is never led again"
    lone.propose(b"x", token=5)
    lone.wait(0.1)
    assert lone.status.commit_index == lone.journal.last_index


async def test_a_voter_without_room_can_be_stopped() -> None:
    voter = WaitingVoter()
    told, failed, said = start(voter)
    await eventually(lambda: len(told) == 1)
    voter.thread.stop()
    await asyncio.to_thread(voter.thread.join)
    assert isinstance(failed.exception(DEADLINE_S), OSError)
    assert not said.is_set()


class Machine:
    """Applies anything."""

    def apply(self, _index: int, _term: int, _payload: bytes) -> bytes:
        return b"done"


@pytest.fixture
async def quorum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[RaftQuorum, FullEnvironment]]:
    """A quorum of one that leads, and its disk."""
    config = ControllerConfig(
        may_found=True,
        node_id=1,
        cluster_id="full",
        data_dir=tmp_path,
        listen=("127.0.0.1", 0),
        voters={1: ("127.0.0.1", 1)},
    )
    environments: list[FullEnvironment] = []

    def open_environment(*arguments: Any, **options: Any) -> FullEnvironment:
        environments.append(FullEnvironment(*arguments, **options))
        return environments[-1]

    monkeypatch.setitem(LmdbJournal.__init__.__kwdefaults__, "open_environment", open_environment)
    quorum = RaftQuorum(config, Machine())  # type: ignore[arg-type]
    await quorum.start()
    await eventually(lambda: quorum.status().role is Role.LEADER)
    yield quorum, environments[0]
    await quorum.stop()


async def test_a_proposal_waits_for_room(quorum: tuple[RaftQuorum, FullEnvironment]) -> None:
    voter, disk = quorum
    assert await voter.propose(b"before") == b"done"
    disk.full = True
    pending = voter.submit(b"while it is full")
    await eventually(lambda: voter._thread._without_room)
    assert not pending.done()
    disk.full = False
    assert await asyncio.wait_for(pending, DEADLINE_S) == b"done"
    assert not voter._failed.done()


async def test_who_was_told_that_a_voter_resigns_is_told_when_it_leads_again(
    quorum: tuple[RaftQuorum, FullEnvironment],
) -> None:
    """The last peer goes in the very step that finds no room: the one who stays was not alone when
    that was told, and is when there is room.
    """
    voter, disk = quorum
    await voter.propose(b"before")
    told: list[Leadership] = []
    voter.add_leadership_listener(told.append)
    term = voter.status().term
    disk.full = True
    voter._status = replace(voter._status, voters=VoterSet.of([1, 2]))
    pending = voter.submit(b"while it is full")
    await eventually(lambda: bool(told))
    assert told == [Leadership(term, -1, leading=False)]
    disk.full = False
    with contextlib.suppress(RequestTimedOutError):  # Its term ended meanwhile.
        await asyncio.wait_for(pending, DEADLINE_S)
    await eventually(lambda: told[-1].leading)
    assert told[-1].term > term, "the term that was given up is not claimed a second time"
    assert await voter.propose(b"after") == b"done"
