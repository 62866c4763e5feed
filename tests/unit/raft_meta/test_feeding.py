"""How the quorum feeds the state machine: in order, in slices, and snapshots beside it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from penstock.raft_meta import raft_quorum
from penstock.raft_meta.config import ControllerConfig
from penstock.raft_meta.quorum import Role
from penstock.raft_meta.raft_quorum import RaftQuorum
from penstock.raft_meta.snapshots import Snapshot, SnapshotStore
from penstock.raft_meta.voter import Committed
from tests.support import eventually

SNAPSHOT_OF_NOTHING = Snapshot(0, 0, b"")


class Machine:
    """Keeps what it was fed."""

    def __init__(self) -> None:
        self.applied: list[bytes] = []
        self.encoded_on: list[threading.Thread] = []
        self.may_encode = threading.Event()
        self.may_encode.set()
        self.encodes = True

    def apply(self, _index: int, _term: int, payload: bytes) -> bytes:
        self.applied.append(payload)
        return b"done"

    def freeze(self) -> Callable[[], bytes]:
        frozen = b",".join(self.applied)

        def encode() -> bytes:
            assert self.may_encode.wait(10)
            self.encoded_on.append(threading.current_thread())
            if not self.encodes:
                raise ZeroDivisionError
            return frozen

        return encode

    def install(self, index: int, snapshot: bytes) -> None:
        raise AssertionError


@pytest.fixture
async def lone(tmp_path):
    """A quorum of one, its machine, and its directory."""
    config = ControllerConfig(
        may_found=True,
        node_id=1,
        cluster_id="c",
        data_dir=tmp_path,
        listen=("127.0.0.1", 0),
        voters={1: ("127.0.0.1", 1)},
        snapshot_entries=10,
    )
    machine = Machine()
    quorum = RaftQuorum(config, machine)
    await quorum.start()
    await eventually(lambda: quorum.status().role is Role.LEADER)
    yield quorum, machine, SnapshotStore(tmp_path)
    machine.may_encode.set()
    await quorum.stop()


async def test_the_loop_goes_on_between_commands(lone, monkeypatch):
    quorum, machine, _ = lone
    monkeypatch.setattr(raft_quorum, "_SLICE_S", 0.0)
    seen: list[int] = []
    watch = asyncio.create_task(count_rounds(machine, seen))
    quorum._on_output([Committed(n, 1, b"%d" % n, -1) for n in range(100, 103)], [])
    quorum._on_output([Committed(n, 1, b"%d" % n, -1) for n in range(103, 105)], [])
    await watch
    assert machine.applied == [b"100", b"101", b"102", b"103", b"104"]
    assert {1, 2, 3, 4} <= set(seen), "others had their turn after each command"


async def count_rounds(machine: Machine, seen: list[int]) -> None:
    async with asyncio.timeout(30):
        while len(machine.applied) < 5:
            seen.append(len(machine.applied))
            await asyncio.sleep(0)


async def test_a_snapshot_is_encoded_beside_the_loop_and_holds_what_was_applied_then(lone):
    quorum, machine, store = lone
    machine.may_encode.clear()
    for number in range(10):
        await quorum.propose(b"a%d" % number)
    await quorum.propose(b"later")  # The loop does not wait for the encoding.
    assert store.load() is None
    machine.may_encode.set()
    await eventually(lambda: store.load() is not None)
    snapshot = store.load()
    assert snapshot is not None
    assert snapshot.data == b",".join(b"a%d" % number for number in range(10))
    assert threading.main_thread() not in machine.encoded_on


async def test_one_snapshot_is_encoded_at_a_time(lone):
    quorum, machine, store = lone
    machine.may_encode.clear()
    for number in range(35):
        await quorum.propose(b"%d" % number)
    machine.may_encode.set()
    await eventually(lambda: len(machine.encoded_on) == 1)
    await quorum.propose(b"next")
    await eventually(lambda: (store.load() or SNAPSHOT_OF_NOTHING).data.endswith(b"next"))
    assert len(machine.encoded_on) == 2


async def test_commands_that_take_long_bring_a_snapshot_before_there_are_many(lone, monkeypatch):
    quorum, machine, store = lone
    await quorum.propose(b"quick")
    assert not machine.encoded_on
    used_s = iter([0.0, 5.0])
    monkeypatch.setattr(time, "thread_time", lambda: next(used_s, 5.0))
    await quorum.propose(b"slow")
    monkeypatch.undo()
    await eventually(lambda: store.load() is not None)
    snapshot = store.load()
    assert snapshot is not None
    assert snapshot.data == b"quick,slow"


async def test_a_state_that_cannot_be_encoded_ends_the_controller(lone):
    quorum, machine, _ = lone
    machine.encodes = False
    for number in range(10):
        await quorum.propose(b"%d" % number)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(quorum.wait_failed(), 30)
