"""A controller's process: everything of production but gRPC, the thread and the disk.

RaftQuorum, Voter, Guard, engine, LmdbJournal, SnapshotStore, ControllerShell, ActiveController,
ClusterState and the Controller service run as they are. In the places of the voter's thread, the
Raft link, LMDB, files, chance and time stands what the simulation decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.raft_meta import (
    directory_lock,
    engine,
    raft_quorum,
    recovery,
    snapshots,
    taking,
    transfer,
)
from penstock.raft_meta.active import ControllerShell
from penstock.raft_meta.config import ControllerConfig
from penstock.raft_meta.core.controller_events import Propose
from penstock.raft_meta.driver import ROOM_RETRY_S, Operation, Output, VoterThread
from penstock.raft_meta.guarding import Encoded
from penstock.raft_meta.journal import LmdbJournal
from penstock.raft_meta.quorum import Role
from penstock.raft_meta.raft_quorum import RaftQuorum
from penstock.raft_meta.reports import NothingTold
from penstock.raft_meta.rules import replicating
from penstock.raft_meta.service import ControllerServicer
from penstock.raft_meta.voter import Voter
from penstock.v1 import controller_pb2, raft_pb2
from tests.simulation.quorum.beside import CallBeside, ControllerLoop, ThreadTime, stand_still
from tests.simulation.quorum.checkers import Violation
from tests.simulation.quorum.disk import Crash, Disk, SimulatedOs, SimulatedPath, is_injected
from tests.simulation.quorum.network import End
from tests.simulation.quorum.virtual_time import Clock, ProcessLoop

if TYPE_CHECKING:
    from tests.simulation.quorum.world import World

CLUSTER_ID = "simulated"

T = TypeVar("T")


class InjectedFailure(Exception):  # noqa: N818 - it is one of a kind.
    """What makes an active controller give up its office."""


class SimulatedThread(VoterThread):
    """Steps the voter as production's does, in the world's time.

    It runs on the world's own thread, but while its disk has no room on one beside it.
    """

    def __init__(
        self,
        make_voter: Callable[[float], Voter],
        *,
        on_output: Output,
        on_failed: Callable[[BaseException], None],
        on_room: Callable[[Exception | None], bool] = lambda _error: False,
        loop_late_since_s: Callable[[float], float | None] = lambda _now_s: None,
    ) -> None:
        super().__init__(
            make_voter,
            on_output=on_output,
            on_failed=on_failed,
            on_room=on_room,
            loop_late_since_s=loop_late_since_s,
        )
        self._loop: Any = asyncio.get_running_loop()
        self._time: ThreadTime = self._loop.thread_time
        self._process: Process = self._loop.process
        self._process.thread = self
        self._inbox: deque[Operation] = deque()
        self._due = False
        self._busy_until_s = 0.0
        self._timer: Any = None
        self._when_stopped: Callable[[], None] = lambda: None
        self._call: CallBeside | None = None  # The voter waits for room in it.
        self.voter: Voter | None = None

    def start(self) -> Future[None]:
        self._time.call_soon(self._begin)
        return self._ready

    def _begin(self) -> None:
        def made(voter: Voter) -> None:
            self.voter = voter
            self._ready.set_result(None)
            self._wake_up()

        self._do(lambda: self._make_voter(self._now_s()), made, self._ready.set_exception)

    def submit(self, operation: Operation) -> None:
        self._inbox.append(operation)
        self._wake_up()

    def offer(self, operation: Operation, size_bytes: int) -> bool:
        self.submit(operation)
        return True

    def stop(self) -> None:
        self._stopping = True
        self._wake_up()

    def join(self) -> None:
        """Nothing: the loop's executor gives it the time."""

    def _now_s(self) -> float:
        return float(self._time.time())

    def _stops_within(self, seconds: float) -> bool:
        """As production: it stands still, and is let go on sooner when it is to stop."""
        assert seconds == ROOM_RETRY_S
        counts, voter = self._process.world.counts, self.voter
        counts["waits for room"] += 1
        if voter is not None and voter.status().role is Role.LEADER:
            counts["waits of leaders for room"] += 1
        stand_still()
        return self._stopping

    def abandon(self) -> None:
        """The process is gone."""
        if self._call is not None:
            self._call.abandon()
            self._call = None

    # What takes the disk.

    def _do(
        self,
        work: Callable[[], T],
        then: Callable[[T], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Do what could reach the disk, and then the rest."""
        with self._process.may_crash():
            if self._process.disk.fullness:
                self._call = CallBeside(partial(self._beside, work), pauses=False)
                self._go_on(self._call, then, failed)
            else:
                self._end(work, then, failed)

    def _beside(self, work: Callable[[], T]) -> T:
        asyncio._set_running_loop(self._loop)  # The stand-ins find their process by it.
        return work()

    def _go_on(
        self, call: CallBeside, then: Callable[[T], None], failed: Callable[[BaseException], None]
    ) -> None:
        if call is not self._call:
            return  # It went on already.
        if call.go_on():
            self._call = None
            with self._process.may_crash():
                self._end(call.result, then, failed)
            return
        retry_s = 0.0 if self._stopping else ROOM_RETRY_S
        self._time.call_later(retry_s, self._go_on, call, then, failed)
        self._when_stopped = partial(self._go_on, call, then, failed)

    def _end(
        self,
        work: Callable[[], T],
        then: Callable[[T], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        try:
            result = work()
        except Exception as error:
            if not is_injected(error):
                raise
            self.voter = None  # The thread has ended.
            failed(error)
        else:
            then(result)

    # The step.

    def _wake_up(self) -> None:
        if self._call is not None:
            if self._stopping:
                self._time.call_soon(self._when_stopped)
        elif not self._due and self.voter is not None:
            self._due = True
            world = self._process.world
            delay_s = max(self._busy_until_s - world.scheduler.now_s, world.rng.uniform(0, 2e-4))
            self._time.in_world_time(delay_s, self._step)

    def _step(self) -> None:
        self._due = False
        voter, world = self.voter, self._process.world
        if voter is None or self._call is not None:
            return
        if self._stopping:
            self.voter = None
            self._do(voter.close, lambda _closed: None, self._on_failed)
            return
        count = min(len(self._inbox), world.settings.operations_a_step)
        operations = [self._inbox.popleft() for _ in range(count)]
        before = self._process.disk.operations
        self._do(
            lambda: self._act(voter, operations), partial(self._acted, before), self._on_failed
        )

    def _acted(self, disk_before: int, output: tuple[list[Any], list[Any]]) -> None:
        voter, world = self.voter, self._process.world
        assert voter is not None
        world.steps += 1
        status = voter.status()
        world.checkers.after_step(self._process, voter, status)
        wrote = self._process.disk.operations > disk_before
        took_s = world.disk_latency_s() if wrote else 2e-5
        self._busy_until_s = world.scheduler.now_s + took_s
        # What was said leaves when the disk is done: in between the process may die.
        self._time.in_world_time(took_s, self._on_output, *output, status)
        if self._inbox or self._stopping:
            self._wake_up()
        if self._timer is not None:
            self._timer.cancel()
        self._step_ended(voter, self._now_s() + took_s)
        self._timer = self._time.call_at(voter.next_deadline_s(), self._wake_up)


class SimulatedLink:
    """Stands in for RaftLink."""

    def __init__(
        self,
        *,
        node_id: int,
        on_message: Callable[[int, Any], None],
        on_lost: Callable[[int], None],
        **_named: object,
    ) -> None:
        loop: Any = asyncio.get_running_loop()
        self._world: World = loop.process.world
        self._node_id = node_id
        self._is_open = False
        self.on_message = on_message
        self.on_lost = on_lost
        loop.process.link = self

    def start(self, _directory_id: bytes) -> None:
        self._is_open = True

    def reach(self, peers: Mapping[int, tuple[str, int]]) -> None:
        """Everybody is reached as it is."""

    def addresses_of(self, peer: int) -> list[tuple[str, int]]:
        return [("simulated", peer)] if peer in self._world.settings.nodes else []

    def connected(self) -> frozenset[int]:
        weather = self._world.network.weather
        return frozenset(n for n in self._world.processes if not weather.cut(n, self._node_id))

    def heard_at(self, peer: int) -> tuple[str, int] | None:
        return next(iter(self.addresses_of(peer)), None)

    def failure_of(self, _peer: int) -> str:
        return ""  # Nobody is told why the network does what it does.

    def refusals(self) -> dict[int, str]:
        return {}  # All are of one cluster.

    async def stop(self) -> None:
        self._is_open = False

    def send(self, peer: int, message: raft_pb2.RaftExchangeRequest) -> None:
        if self._is_open:
            raw = message.SerializeToString()
            self._world.network.datagram(
                self._node_id, peer, lambda: self._world.raft_message(self._node_id, peer, raw)
            )


class Observed:
    """The shell as the quorum's state machine, under the checkers' eyes."""

    def __init__(self, process: Process, shell: ControllerShell) -> None:
        self._process = process
        self._shell = shell

    def apply(self, index: int, term: int, payload: bytes) -> bytes:
        checkers = self._process.world.checkers
        with self._telling():
            checkers.before_apply(self._process, index, term, payload)
            result = self._shell.apply(index, term, payload)
            checkers.applied(self._process, index, payload, result, self._shell.state)
        return result

    def freeze(self) -> Callable[[], bytes]:
        encode, index = self._shell.freeze(), self._process.applied_index

        def later() -> bytes:
            data = encode()
            with self._telling():
                self._process.world.checkers.encoded(self._process, index, data)
            return data

        return later

    def install(self, index: int, snapshot: bytes) -> None:
        with self._telling():
            if self._process.loop.is_writing_beside:
                self._process.world.counts["installed during a write beside"] += 1
            self._shell.install(index, snapshot)
            self._process.world.checkers.installed(self._process, index, self._shell.state)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """What is raised here ends the controller, in production; and here the simulation."""
        try:
            yield
        except Violation as violation:
            self._process.world.fail(violation)
            raise
        except Exception:
            self._process.world.fail(Violation(f"unexpected: {traceback.format_exc()}"))
            raise


class InOrder(dict[Any, None]):
    """A set that is iterated in the order of its making, so that a seed gives the same run."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)


class CallContext:
    """A gRPC call as the service sees it."""

    def __init__(self, loop: ProcessLoop, timeout_s: float | None) -> None:
        self._loop = loop
        self._ends_s = None if timeout_s is None else loop.time() + timeout_s

    def time_remaining(self) -> float | None:
        return None if self._ends_s is None else self._ends_s - self._loop.time()

    def peer(self) -> str:
        return "simulated"


class Process:
    """One controller process on a node's disk."""

    def __init__(self, world: World, node_id: int, disk: Disk) -> None:
        self.world = world
        self.node_id = node_id
        self.disk = disk
        self.applied_index = 0
        self.thread: SimulatedThread | None = None
        self.link: SimulatedLink | None = None
        self.ends: list[End] = []
        clock = Clock(world.scheduler, world.rng.uniform(1, 1000), world.draw_clock_rate())
        self.loop = ControllerLoop(world.scheduler, clock, self)
        self.is_stopping = False
        self.failures = 0  # So many times the active controller fails.
        self.loop.enter(self._start)

    @property
    def is_alive(self) -> bool:
        return self.loop.is_alive

    @property
    def voter(self) -> Voter | None:
        return self.thread.voter if self.is_alive and self.thread is not None else None

    def _start(self) -> None:
        settings = self.world.settings
        config = ControllerConfig(
            may_found=self.node_id not in self.world.emptied,  # As penstock format has it.
            node_id=self.node_id,
            cluster_id=CLUSTER_ID,
            data_dir=SimulatedPath(self.disk, "metadata"),  # type: ignore[arg-type]  # Enough of one.
            listen=("simulated", self.node_id),
            voters={number: ("simulated", number) for number in self.world.settings.voters},
            snapshot_entries=settings.snapshot_entries,
            propose_timeout_ms=3000,
        )
        self.shell = ControllerShell(config, clock_ms=self.loop.clock_ms)
        # Production has a set there, whose order is another in each process.
        self.shell.feed._watchers = InOrder()  # type: ignore[assignment]  # As much of a set.
        self._make_fail(self.shell)
        self.quorum = RaftQuorum(config, Observed(self, self.shell), levels=self.shell.levels)
        self.shell.bind(self.quorum)
        self.servicer = ControllerServicer(config, self.shell, self.quorum, NothingTold())
        self.spawn(self._take_part)

    def _make_fail(self, shell: ControllerShell) -> None:
        """Let the active controller fail when ``failures`` says so; what else fails is a finding.

        It fails after it has decided to propose something, so that this is lost.
        """
        handle, renounce = shell._core.handle, shell._renounce

        def handle_or_fail(event: Any, now_ms: int) -> list[Any]:
            effects = handle(event, now_ms)
            if self.failures and any(isinstance(effect, Propose) for effect in effects):
                self.failures -= 1
                raise InjectedFailure
            return effects

        def renounce_or_complain() -> None:
            if isinstance(sys.exception(), InjectedFailure):
                self.world.counts["offices given up"] += 1
                self.world.note(f"controller {self.node_id} fails and gives up its office")
                renounce()
            else:
                self.world.fail(Violation(f"unexpected: {traceback.format_exc()}"))

        shell._core.handle = handle_or_fail  # type: ignore[method-assign]  # As said.
        shell._renounce = renounce_or_complain  # type: ignore[method-assign]  # As said.

    async def _take_part(self) -> None:
        """Until the engine fails; production ends the process then, and another is started."""
        try:
            await self.quorum.start()
            await self.quorum.wait_failed()
        except Exception as error:
            if not is_injected(error):
                raise
        if not self.is_stopping:
            self.world.note(f"controller {self.node_id} ends: its disk failed")
            self.loop.in_world_time(self.world.rng.uniform(0, 0.3), self.world.died, self)

    def spawn(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Task[Any]:
        """Run something in this process; what it raises ends the simulation."""
        return self.loop.create_task(self.world.watched(work))

    @contextlib.contextmanager
    def may_crash(self) -> Iterator[None]:
        """Where the disk may end the process."""
        try:
            yield
        except Crash:
            self.world.crash(self.node_id)

    # Services.

    def accept(self, end: End, method: str, timeout_s: float | None) -> bool:
        """Take a call, as the gRPC server does."""
        if not self.is_alive or self.is_stopping:
            return False
        self.ends.append(end)
        self.loop.enter(self._serve, end, method, timeout_s)
        return True

    def _serve(self, end: End, method: str, timeout_s: float | None) -> None:
        context = CallContext(self.loop, timeout_s)
        task = self.spawn(lambda: self._call(end, method, context))
        end.on_broken = task.cancel

    async def _call(self, end: End, method: str, context: CallContext) -> None:
        handler = getattr(self.servicer, method)
        if method == "Heartbeat":
            await self._answer(end, handler(end, context))
            return
        request = await anext(end)
        if method == "WatchMetadata":
            await self._answer(end, handler(request, context))
        else:
            end.send(await handler(request, context))
            end.finish()

    async def _answer(self, end: End, responses: AsyncIterator[Any]) -> None:
        async for response in responses:
            encoded = isinstance(response, Encoded)
            watch = controller_pb2.WatchMetadataResponse
            end.send(watch.FromString(response.data) if encoded else response)
        end.finish()

    async def stop(self) -> None:
        """Stop as planned: hand over, leave, and end."""
        self.is_stopping = True
        await self.quorum.hand_over()
        self.shell.stop()
        await self.quorum.stop()
        self.loop.in_world_time(0.05, lambda: self.world.stopped(self.node_id))


def _journal(path: Any, **named: Any) -> LmdbJournal:
    return LmdbJournal(
        path,
        open_environment=path.disk.open_environment,
        new_directory_id=lambda: path.disk.rng.randbytes(16),
        **named,
    )


def _seeded() -> random.Random:
    loop: Any = asyncio.get_running_loop()
    return random.Random(loop.process.world.rng.random())


def _let_go_of_directory() -> None:
    loop: Any = asyncio._get_running_loop()
    if loop is not None and loop.is_writing_beside:  # Else it is an operator's command.
        number = loop.process.node_id
        loop.process.world.fail(
            Violation(f"controller {number} writes into a directory that it let go of")
        )


class ImpatientTime:
    """Stands in for the module ``time``: the state machine's slices end where chance wills."""

    @staticmethod
    def thread_time() -> float:
        return 0.0  # Nothing takes any of the processor's time.

    @staticmethod
    def monotonic() -> float:
        loop: Any = asyncio.get_running_loop()
        return float(loop.time()) + loop.process.world.rng.choice([0.0, 0.0, 0.0, 1.0])


@contextlib.contextmanager
def simulated(*, batch_bytes: int, chunk_bytes: int) -> Iterator[None]:
    """Inside, the production modules find the simulation where the machine would be."""
    no_os = SimpleNamespace(
        O_RDWR=0, O_CREAT=0, open=lambda *_: 0, close=lambda _descriptor: _let_go_of_directory()
    )  # fmt: skip
    no_lock = SimpleNamespace(LOCK_EX=0, LOCK_NB=0, flock=lambda *_: None)
    patches: list[tuple[Any, str, Any]] = [
        (raft_quorum, "VoterThread", SimulatedThread),
        (raft_quorum, "RaftLink", SimulatedLink),
        (raft_quorum, "LmdbJournal", _journal),
        (recovery, "LmdbJournal", _journal),
        (raft_quorum, "random", SimpleNamespace(Random=_seeded)),
        (raft_quorum, "time", ImpatientTime()),
        (taking, "time", ImpatientTime()),
        (raft_quorum, "os", no_os),
        (directory_lock, "os", no_os),
        (directory_lock, "fcntl", no_lock),
        (snapshots, "os", SimulatedOs),
        (engine, "MAX_BATCH_BYTES", batch_bytes),
        (replicating, "MAX_BATCH_BYTES", batch_bytes),
        (transfer, "CHUNK_BYTES", chunk_bytes),
    ]
    with contextlib.ExitStack() as stack:
        for module, name, stand_in in patches:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, stand_in)
        yield
