"""How the quorum feeds the state machine: in order, in slices, and snapshots beside it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from penstock.raft_meta import raft_quorum
from penstock.raft_meta.config import ControllerConfig
from penstock.raft_meta.link import Message
from penstock.raft_meta.quorum import Role
from penstock.raft_meta.raft_quorum import RaftQuorum
from penstock.raft_meta.snapshots import Snapshot, SnapshotStore
from penstock.raft_meta.voter import Committed
from penstock.wire.errors import RequestTimedOutError
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
    quorum._on_output([Committed(n, 1, b"%d" % n, -1) for n in range(100, 103)], [], 102)
    quorum._on_output([Committed(n, 1, b"%d" % n, -1) for n in range(103, 105)], [], 104)
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


async def test_one_snapshot_is_taken_at_a_time(lone):
    quorum, machine, store = lone
    machine.may_encode.clear()
    for number in range(35):
        await quorum.propose(b"%d" % number)
    machine.may_encode.set()
    await eventually(lambda: quorum._taking._task is None)
    assert len(machine.encoded_on) == 1
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


async def test_a_message_that_cannot_be_queued_ends_the_controller_and_loses_no_command(
    lone, monkeypatch
):
    """Going on without what came with the message would make another state machine of this one."""
    quorum, machine, _ = lone
    await quorum.propose(b"a")
    inner = quorum._on_output

    def break_the_link(_peer: int, _message: Message) -> None:
        raise OSError("the link is broken")

    def with_a_message(events, _messages, applied_index):
        inner(events, [(9, Message())] if events else [], applied_index)

    monkeypatch.setattr(quorum.link, "send", break_the_link)
    monkeypatch.setattr(quorum, "_on_output", with_a_message)
    proposal = quorum.submit(b"b")
    with pytest.raises(OSError, match="the link is broken"):
        await asyncio.wait_for(quorum.wait_failed(), 30)
    with pytest.raises(RequestTimedOutError):
        await proposal
    await asyncio.to_thread(quorum._thread.join)
    assert machine.applied == [b"a"]
    assert Committed in map(type, quorum._events)


async def test_the_status_tells_what_the_machine_has_applied(lone, monkeypatch):
    quorum, machine, _ = lone
    await quorum.propose(b"a")
    await eventually(lambda: quorum.status().applied_index == quorum.status().commit_index)
    applied = quorum.status().applied_index
    monkeypatch.setattr(raft_quorum, "_SLICE_S", 0.0)
    events = [Committed(n, 1, b"%d" % n, -1) for n in (100, 101)]
    quorum._on_output(events, [], 102)  # The last one is no command.
    assert (machine.applied[-1], quorum.status().applied_index) == (b"100", 100)
    await eventually(lambda: quorum.status().applied_index == 102)
    assert machine.applied[-2:] == [b"100", b"101"]
    assert applied < 100


async def test_a_hand_over_that_the_thread_does_not_take_leaves_the_next_one_free(
    lone, monkeypatch
):
    quorum, _, _ = lone
    offer = quorum._thread.offer
    monkeypatch.setattr(quorum._thread, "offer", lambda _operation, _size: False)
    assert not await quorum.hand_over()
    asked: list[object] = []
    monkeypatch.setattr(
        quorum._thread, "offer", lambda *offered: asked.append(offered) or offer(*offered)
    )
    assert not await quorum.hand_over(), "there is nobody to hand over to"
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("voters", "said"),
    [
        ((1,), "may not found a cluster"),
        ((1, 2, 3), "may not found a cluster"),
        ((0, 1, 2), "this controller knows of no voters"),  # Another one founds.
    ],
)
async def test_a_controller_that_waits_says_what_for(tmp_path, monkeypatch, voters, said):
    # Again and again: the first may come before the thread has told what it found.
    monkeypatch.setattr(raft_quorum, "_REMINDER_S", 0.02)
    config = ControllerConfig(
        node_id=1,
        cluster_id="c",
        data_dir=tmp_path,
        listen=("127.0.0.1", 0),
        voters=dict.fromkeys(voters, ("127.0.0.1", 1)),
    )
    quorum = RaftQuorum(config, Machine())
    with capture_logs() as lines:
        await quorum.start()
        await eventually(lambda: any(said in line["event"] for line in lines))
        await quorum.stop()
    reminder = next(line for line in lines if said in line["event"])
    assert reminder["log_level"] == "warning"
    assert ("penstock format --found" in reminder["next_step"]) == ("found" in said)
