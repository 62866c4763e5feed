"""A whole world of one seed: controllers, brokers, administrators, faults, and its story."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import crc32c
import structlog

from penstock.raft_meta.quorum import Role
from penstock.v1 import cluster_pb2, raft_pb2
from tests.simulation.quorum.administrators import Administrator
from tests.simulation.quorum.checkers import Checkers, Violation
from tests.simulation.quorum.clients import Broker
from tests.simulation.quorum.disk import Disk
from tests.simulation.quorum.network import End, Network
from tests.simulation.quorum.node import Process, simulated
from tests.simulation.quorum.operator import Operator
from tests.simulation.quorum.virtual_time import Scheduler

_FIRST_BROKER = 101
_FIRST_ADMINISTRATOR = 201
_STORY_LINES = 60
NEVER_CUT = 1_000_000  # Entries; no seed has so many.
SMALL_BATCH_BYTES = 1200
SMALL_CHUNK_BYTES = 200
_OLD_CHANGES = 12  # So many are there to be asked for again.


@dataclass(frozen=True)
class Settings:
    """What a seed draws before anything happens."""

    controllers: int
    spares: int
    brokers: int
    snapshot_entries: int
    batch_bytes: int
    chunk_bytes: int
    operations_a_step: int
    client_pause_s: float
    deletions: float
    slow_disks: bool
    clock_drift: float
    turns: int
    recovers: bool

    @property
    def voters(self) -> range:
        """The voters of the first start."""
        return range(1, self.controllers + 1)

    @property
    def nodes(self) -> range:
        """All controllers, those that wait to be added too."""
        return range(1, self.controllers + self.spares + 1)

    @classmethod
    def drawn(cls, rng: Random) -> Settings:
        """Small batches, short steps and a log that is never cut are drawn often."""
        return cls(
            controllers=rng.choice([1, 2, 3, 3, 3, 5, 5]),
            spares=rng.choice([0, 0, 1, 2, 3]),
            brokers=rng.choice([2, 3, 4]),
            snapshot_entries=rng.choice([10, 10, 25, 60, NEVER_CUT]),
            batch_bytes=rng.choice([SMALL_BATCH_BYTES, SMALL_BATCH_BYTES, 4096, 1 << 20]),
            chunk_bytes=rng.choice([SMALL_CHUNK_BYTES, 1000, 1 << 18]),
            operations_a_step=rng.choice([1, 2, 4096]),
            client_pause_s=rng.choice([0.25, 0.5, 1.0]),
            deletions=rng.choice([0.2, 0.5]),
            slow_disks=rng.random() < 0.2,
            clock_drift=rng.choice([0.0, 0.001, 0.1]),
            turns=rng.choice([8, 8, 12, 16]),
            recovers=rng.random() < 0.15,
        )


@dataclass
class Report:
    """How a seed went."""

    seed: int
    settings: Settings
    violation: str = ""
    story: list[str] = field(default_factory=list)
    totals: Counter[str] = field(default_factory=Counter)
    digest: int = 0

    def __str__(self) -> str:
        if not self.violation:
            return f"seed {self.seed}: ok {dict(sorted(self.totals.items()))}"
        return "\n".join(
            [
                f"seed {self.seed}: VIOLATION: {self.violation}",
                f"  with {self.settings}",
                "  the last that happened:",
                *(f"    {line}" for line in self.story[-_STORY_LINES:]),
                f"  again: make sim SIM=quorum SEED_START={self.seed} SEEDS=1 JOBS=1",
            ]
        )


class World:
    """Everything of one seed. ``run`` once."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.settings = Settings.drawn(self.rng)
        self.scheduler = Scheduler()
        self.network = Network(self.scheduler, self.rng)
        self.checkers = Checkers()
        self.steps = 0
        self.counts: Counter[str] = Counter()
        self.story: list[str] = []
        self.failure: Violation | None = None
        self.topics_promised: dict[bytes, str] = {}
        self.topics_gone: dict[bytes, str] = {}  # Their deletion was acknowledged.
        self.blocks_told: set[int] = set()
        self.old_changes: deque[cluster_pb2.AlterPartitionCommand] = deque(maxlen=_OLD_CHANGES)
        self.old_registrations: deque[cluster_pb2.RegisterBrokerCommand] = deque(
            maxlen=_OLD_CHANGES
        )
        self.disks = {number: Disk(self.rng, self.counts) for number in self.settings.nodes}
        self.wiped: set[int] = set()  # Voters that lost their disks, and were not removed since.
        self.emptied: set[int] = set()  # Nodes whose first disk is gone.
        self.operator = Operator(self)
        self.processes: dict[int, Process] = {}
        self.brokers: dict[int, Broker] = {}
        self.administrators: list[Administrator] = []
        self.is_healed = False
        self.is_shut_down = False  # All controllers are stopped, and stay so.

    # What processes ask of it.

    def draw_clock_rate(self) -> float:
        """How fast a new process' clock runs."""
        return self.rng.uniform(1 - self.settings.clock_drift, 1 + self.settings.clock_drift)

    def disk_latency_s(self) -> float:
        """How long a sync takes."""
        slow = self.settings.slow_disks and not self.is_healed
        if slow and self.rng.random() < 0.05:
            return self.rng.uniform(0.05, 0.4)
        return self.rng.uniform(0.0002, 0.004)

    def write_latency_s(self) -> float:
        """How long a part of a large file takes; at times longer than an election timeout."""
        if not self.is_healed and self.rng.random() < 0.08:
            return self.rng.uniform(0.05, 2.0)
        return self.disk_latency_s()

    def known_controllers(self) -> list[int]:
        """Whom brokers and administrators may ask."""
        return list(self.settings.nodes)

    def voters(self) -> list[int]:
        """Who votes now, as far as the newest leader knows."""
        leader = self.some_leader()
        known = None if leader is None else leader.quorum._voters
        return sorted(self.settings.voters if known is None else known.node_ids)

    def broker_numbers(self) -> range:
        """All brokers, up or down."""
        return range(_FIRST_BROKER, _FIRST_BROKER + self.settings.brokers)

    def accept(self, target: int, end: End, method: str, timeout_s: float | None) -> bool:
        """A call arrives at a controller."""
        process = self.processes.get(target)
        if process is None:
            return False
        end.loop = process.loop
        return process.accept(end, method, timeout_s)

    def raft_message(self, source: int, target: int, raw: bytes) -> None:
        """A Raft message arrives at whatever process runs there by now."""
        process = self.processes.get(target)
        if process is not None and process.link is not None:
            message = raft_pb2.RaftExchangeRequest.FromString(raw)
            process.loop.enter(process.link.on_message, source, message)

    async def watched(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Run something whose every exception is a finding."""
        try:
            await work()
        except asyncio.CancelledError:
            raise
        except Violation as violation:
            self.fail(violation)
        except Exception:
            self.fail(Violation(f"unexpected: {traceback.format_exc()}"))

    def fail(self, violation: Violation) -> None:
        """Remember the first finding; the simulation ends soon."""
        self.failure = self.failure or violation

    def note(self, what: str) -> None:
        """Remember what happened, for people."""
        self.story.append(f"{self.scheduler.now_s:8.3f} s  {what}")

    def some_leader(self) -> Process | None:
        """The leader of the newest term among those alive, by their own account."""
        found: list[tuple[int, Process]] = []
        for process in self.processes.values():
            voter = process.voter
            if voter is not None and voter.status().role is Role.LEADER:
                found.append((voter.status().term, process))
        return max(found, key=lambda each: each[0], default=(0, None))[1]

    def empty(self, number: int) -> None:
        """A node loses its disk, and what runs on it."""
        self.crash(number, power=True)
        self.disks[number].wipe()
        self.emptied.add(number)

    def active(self) -> Process | None:
        """Who is the active controller, by its own account and of the newest epoch."""
        found = [
            process
            for process in self.processes.values()
            if process.thread is not None and process.shell._core.is_active
        ]
        return max(found, key=lambda process: process.shell._epoch, default=None)

    # Life and death.

    def start(self, number: int) -> None:
        """Start a controller that is down."""
        if number not in self.processes and not self.is_shut_down:
            self.note(f"controller {number} starts")
            self.processes[number] = Process(self, number, self.disks[number])

    def crash(self, number: int, *, power: bool | None = None, down_s: float | None = None) -> None:
        """Kill a controller, with its machine or without; it comes again."""
        process = self.processes.pop(number, None)
        if process is None:
            return
        power = self.rng.random() < 0.5 if power is None else power
        self.note(f"controller {number} {'loses power' if power else 'is killed'}")
        self.counts["power losses" if power else "kills"] += 1
        self._bury(process)
        self.disks[number].disarm()
        if power:
            self.disks[number].lose_power()
        delay_s = self.rng.uniform(0.01, 1.5) if down_s is None else down_s
        self.scheduler.after(delay_s, lambda: self.start(number))

    def died(self, process: Process) -> None:
        """A controller has ended, since it could not trust its disk any more."""
        if self.processes.get(process.node_id) is process:
            self.counts["controllers ended by their disks"] += 1
            self.crash(process.node_id)

    def stopped(self, number: int) -> None:
        """A controller has stopped as planned."""
        process = self.processes.pop(number, None)
        if process is not None:
            self.note(f"controller {number} has stopped")
            self.counts["planned stops"] += 1
            self._bury(process)
            self.scheduler.after(self.rng.uniform(0.01, 1.0), lambda: self.start(number))

    def _bury(self, process: Process) -> None:
        process.loop.kill()
        for end in process.ends:
            end.hang_up()
        for other in self.processes.values():
            self.network.scheduler.after(
                self.network.delay_s(), lambda other=other: self._lost(process.node_id, other)
            )

    def _lost(self, gone: int, other: Process) -> None:
        if other.link is not None and not self.network.weather.cut(gone, other.node_id):
            other.loop.enter(other.link.on_lost, gone)

    def start_broker(self, number: int, previous_epoch: int = -1) -> None:
        """Start a broker."""
        self.brokers[number] = Broker(self, number, previous_epoch)

    def kill_broker(self, number: int) -> None:
        """Kill a broker; another process takes its place after a while."""
        broker = self.brokers.pop(number, None)
        if broker is None:
            return
        clean = broker.may_stop
        self.note(f"broker {number} {'stops' if clean else 'is killed'}")
        self.counts["brokers killed"] += 1
        broker.kill()
        previous = broker.epoch if clean else -1
        self.scheduler.after(
            self.rng.uniform(0.02, 2.0), lambda: self.start_broker(number, previous)
        )

    # The run.

    def run(self) -> Report:
        """Faults, healing, and what must hold then."""
        report = Report(self.seed, self.settings, story=self.story)
        settings = self.settings
        with (
            quiet(),
            simulated(batch_bytes=settings.batch_bytes, chunk_bytes=settings.chunk_bytes),
        ):
            try:
                self._live()
            except Violation as violation:
                report.violation = str(violation)
            except Exception:
                report.violation = f"unexpected: {traceback.format_exc()}"
            finally:
                for process in self.processes.values():
                    process.loop.kill()
                for client in (*self.brokers.values(), *self.administrators):
                    client.loop.kill()
        report.totals = self._totals()
        report.digest = self._digest()
        return report

    def _digest(self) -> int:
        """The same in every process that runs this seed."""
        told = (self.scheduler.events, sorted(self.checkers.state_crc.items()), self.story)
        return crc32c.crc32c(repr(told).encode())

    def _totals(self) -> Counter[str]:
        checkers = self.checkers
        totals = Counter(self.counts)
        totals.update(checkers.counts)
        totals["seeds"] = 1
        totals["seeds whose log is never cut"] = self.settings.snapshot_entries >= NEVER_CUT
        totals["seeds of small batches"] = self.settings.batch_bytes <= SMALL_BATCH_BYTES
        totals["seeds of small chunks"] = self.settings.chunk_bytes <= SMALL_CHUNK_BYTES
        totals["seeds of one operation a step"] = self.settings.operations_a_step == 1
        totals["events"] = self.scheduler.events
        totals["steps of voters"] = self.steps
        totals["commits"] = len(checkers.decided)
        totals["elections"] = checkers.leader_changes
        totals["disk operations"] = sum(disk.operations for disk in self.disks.values())
        totals["messages lost"] = self.network.lost
        totals["messages doubled"] = self.network.doubled
        totals["virtual seconds"] = int(self.scheduler.now_s)
        return totals

    def _live(self) -> None:
        from tests.simulation.quorum.faults import Faults  # It needs World, for its types.
        from tests.simulation.quorum.healing import heal
        from tests.simulation.quorum.recovering import lose_a_majority

        for number in self.settings.nodes:
            self.start(number)
        if self.settings.spares:
            self.scheduler.after(1.0, self.operator.turn)
        for number in self.broker_numbers():
            self.start_broker(number)
        for offset in range(2):
            self.administrators.append(Administrator(self, _FIRST_ADMINISTRATOR + offset))
        self.scheduler.after(0.5, self._read)
        faults = Faults(self)
        self.let(self.rng.uniform(0.5, 2.0))
        for turn in range(self.settings.turns):
            if self.settings.recovers and turn == self.settings.turns // 2:
                lose_a_majority(self)
            faults.turn()
        heal(self)

    def let(self, seconds: float) -> None:
        """Let time pass, in pieces, and stop at the first finding."""
        end_s = self.scheduler.now_s + seconds
        while self.scheduler.now_s < end_s:
            self.scheduler.run_until(min(self.scheduler.now_s + 0.05, end_s))
            if self.failure is not None:
                raise self.failure

    def _read(self) -> None:
        """Somebody reads, at every controller that thinks it leads and at another one."""
        self.scheduler.after(self.rng.uniform(0.01, 0.2), self._read)
        asked = {self.rng.choice(list(self.settings.nodes))}
        for process in list(self.processes.values()):
            voter = process.voter
            leads = voter is not None and voter.status().role is Role.LEADER
            if voter is None or process.is_stopping or not (leads or process.node_id in asked):
                continue
            process.loop.enter(process.spawn, partial(self._read_at, process))

    async def _read_at(self, process: Process) -> None:
        from penstock.wire.errors import PenstockError  # Only what a read may end with.

        asked_index = self.checkers.told_index
        with contextlib.suppress(PenstockError):
            index = await process.quorum.read_index(timeout_ms=2000)
            self.checkers.read(asked_index, index, process.applied_index, process.node_id)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing is logged inside."""
    kept = structlog.get_config()
    level = structlog.make_filtering_bound_logger(logging.CRITICAL)
    structlog.configure(wrapper_class=level)
    try:
        yield
    finally:
        structlog.configure(**kept)


def totals_of(reports: list[Report]) -> Counter[str]:
    """The sum over many seeds."""
    whole: Counter[str] = Counter()
    for report in reports:
        whole.update(report.totals)
    return whole
