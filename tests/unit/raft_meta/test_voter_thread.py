"""The voter's thread while its disk hangs: what waits for it is bounded, and told."""

from __future__ import annotations

import asyncio
import math
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from penstock.raft_meta.active import ControllerShell
from penstock.raft_meta.config import ControllerConfig
from penstock.raft_meta.driver import INBOX_BYTES, INBOX_OPERATIONS, VoterThread
from penstock.raft_meta.quorum import Leadership, QuorumStatus, Role
from penstock.raft_meta.raft_quorum import RaftQuorum
from penstock.v1 import raft_pb2
from penstock.wire.errors import NotControllerError
from tests.support import eventually

DEADLINE_S = 20


class HangingVoter:
    """A voter whose disk answers when the test lets it."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.stepping = threading.Event()
        self.got: list[int] = []

    def step(self, _now_s: float) -> tuple[list[object], list[object]]:
        self.stepping.set()
        assert self.gate.wait(DEADLINE_S)
        return [], []

    def stood_still(self, _since_s: float, _now_s: float) -> None:
        return

    def next_deadline_s(self) -> float:
        return math.inf

    def status(self) -> None:
        return None

    def close(self) -> None:
        return


@pytest.fixture
def hanging():
    voter = HangingVoter()
    failed: Future[None] = Future()
    thread = VoterThread(
        lambda _now_s: voter,  # type: ignore[arg-type,return-value]
        on_output=lambda *_: None,
        on_failed=failed.set_exception,
    )
    thread.start().result(DEADLINE_S)
    thread.submit(lambda _voter, _now_s: None)
    assert voter.stepping.wait(DEADLINE_S)
    yield voter, thread
    voter.gate.set()
    thread.stop()
    thread.join()
    assert not failed.done()


def note(number: int):
    return lambda voter, _now_s: voter.got.append(number)


def test_what_waits_for_a_thread_that_hangs_is_bounded_in_number(hanging) -> None:
    voter, thread = hanging
    assert all(thread.offer(note(number), 0) for number in range(INBOX_OPERATIONS))
    assert not thread.offer(note(-1), 0)
    last = threading.Event()
    thread.submit(lambda _voter, _now_s: last.set())  # What the voter's own work needs is taken.
    voter.gate.set()
    assert last.wait(DEADLINE_S)
    assert voter.got == list(range(INBOX_OPERATIONS))


def test_what_waits_for_a_thread_that_hangs_is_bounded_in_bytes(hanging) -> None:
    voter, thread = hanging
    assert thread.offer(note(0), INBOX_BYTES - 10)
    assert not thread.offer(note(1), 11)
    assert thread.offer(note(2), 10)
    done = threading.Event()
    thread.submit(lambda _voter, _now_s: done.set())
    voter.gate.set()
    assert done.wait(DEADLINE_S)
    assert thread.offer(note(3), INBOX_BYTES), "it is empty again"
    again = threading.Event()
    thread.submit(lambda _voter, _now_s: again.set())
    assert again.wait(DEADLINE_S)
    assert voter.got == [0, 2, 3]


def config(directory: Path) -> ControllerConfig:
    return ControllerConfig(
        may_found=True,
        node_id=1,
        cluster_id="hanging",
        data_dir=directory,
        listen=("127.0.0.1", 0),
        voters={1: ("127.0.0.1", 1)},
    )


class Machine:
    """Applies anything."""

    def __init__(self) -> None:
        self.applied: list[bytes] = []

    def apply(self, _index: int, _term: int, payload: bytes) -> bytes:
        self.applied.append(payload)
        return b"done"


async def test_a_quorum_whose_disk_hangs_refuses_proposals_and_loses_messages(
    tmp_path: Path,
) -> None:
    machine = Machine()
    quorum = RaftQuorum(config(tmp_path), machine)  # type: ignore[arg-type]
    gate, hangs = threading.Event(), threading.Event()

    def hang(_voter: object, _now_s: float) -> None:
        hangs.set()
        gate.wait(DEADLINE_S)

    await quorum.start()
    try:
        await eventually(lambda: quorum.status().role is Role.LEADER)
        quorum._thread.submit(hang)
        assert await asyncio.to_thread(hangs.wait, DEADLINE_S)
        taken = quorum.submit(b"taken")
        for _ in range(INBOX_OPERATIONS + 10):
            quorum._on_message(2, raft_pb2.RaftExchangeRequest())
            quorum._on_peer_lost(2)
        assert len(quorum._thread._operations) == INBOX_OPERATIONS
        with pytest.raises(NotControllerError, match="disk") as refused:
            await quorum.propose(b"refused")
        assert refused.value.retriable
        with pytest.raises(NotControllerError, match="disk"):
            await quorum.read_index()
        gate.set()
        assert await asyncio.wait_for(taken, DEADLINE_S) == b"done"
        await eventually(lambda: not quorum._thread._operations)
        assert await quorum.propose(b"later") == b"done"
        assert machine.applied == [b"taken", b"later"]
    finally:
        gate.set()
        await quorum.stop()


class RefusingQuorum:
    """Takes no proposal until the test lets it."""

    def __init__(self) -> None:
        self.refuses = True
        self.refused: list[bytes] = []
        self.taken: list[bytes] = []

    def add_leadership_listener(self, _listener: object) -> None:
        return

    def status(self) -> QuorumStatus:
        return QuorumStatus(1, Role.LEADER, 1, 1, 0, 0, 0)

    def submit(self, payload: bytes) -> asyncio.Future[bytes]:
        if self.refuses:
            self.refused.append(payload)
            raise NotControllerError("the disk hangs")
        self.taken.append(payload)
        return asyncio.get_running_loop().create_future()


async def test_a_leader_whose_claim_is_refused_claims_again(tmp_path: Path) -> None:
    quorum = RefusingQuorum()
    shell = ControllerShell(config(tmp_path))
    shell.bind(quorum)  # type: ignore[arg-type]
    shell._on_leadership(Leadership(1, 1, leading=True))
    await eventually(lambda: len(quorum.refused) == 2)
    quorum.refuses = False
    await eventually(lambda: bool(quorum.taken))
    assert quorum.taken == quorum.refused[:1]
    shell.stop()


class HandingOverQuorum(RefusingQuorum):
    """Takes each proposal, and refuses it a moment later: its leader hands over."""

    def submit(self, payload: bytes) -> asyncio.Future[bytes]:
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if self.refuses:
            self.refused.append(payload)
            future.set_exception(NotControllerError("it hands over"))
        else:
            self.taken.append(payload)
        return future


async def test_a_leader_whose_claim_met_a_hand_over_claims_again_when_that_failed(
    tmp_path: Path,
) -> None:
    quorum = HandingOverQuorum()
    shell = ControllerShell(config(tmp_path))
    shell.bind(quorum)  # type: ignore[arg-type]
    shell._on_leadership(Leadership(1, 1, leading=True))
    await eventually(lambda: len(quorum.refused) == 2)
    quorum.refuses = False
    await eventually(lambda: bool(quorum.taken))
    assert quorum.taken == quorum.refused[:1]
    shell.stop()


async def test_a_claim_of_an_earlier_term_is_not_made_again(tmp_path: Path) -> None:
    quorum = RefusingQuorum()
    shell = ControllerShell(config(tmp_path))
    shell.bind(quorum)  # type: ignore[arg-type]
    for term in (1, 2):
        shell._on_leadership(Leadership(term, 1, leading=True))
    quorum.refuses = False
    await eventually(lambda: bool(quorum.taken))
    shell.stop()
    assert quorum.taken == [quorum.refused[1]]
