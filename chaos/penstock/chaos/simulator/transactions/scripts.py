"""Processes of clients whose doings are written down one after the other, as generators.

A script yields what it waits for: ``Ask`` gets the answer, or None when there was none in time;
``Sleep`` and ``Rest`` get nothing. Several scripts of one process go on beside each other. A
process that is held up (``pause``) does nothing for a while and then goes on as if nothing had
been.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from penstock.chaos.simulator.checkers import Checkers
from penstock.chaos.simulator.network import End, Network
from penstock.chaos.simulator.pace import Pace
from penstock.chaos.simulator.scheduler import Scheduler, Timer
from penstock.chaos.simulator.serving import Answer
from penstock.chaos.simulator.transactions.history import Event, History
from penstock.chaos.simulator.transactions.told import Told
from penstock.wire.errors import ErrorCode
from penstock.wire.ids import TopicIdPartition

_TIMEOUT_MS: Final = 600


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to a broker."""

    target: int
    method: str
    request: Any


@dataclass(frozen=True, slots=True)
class Sleep:
    """Some time, by chance between two bounds."""

    low_ms: int
    high_ms: int


class Rest(Sleep):
    """The time between two pieces of work: as long as it is quiet a longer one."""


Script = Generator[Ask | Sleep, Any, Any]


@dataclass(slots=True)
class ScriptPlace:
    """What scripted processes stand on.

    ``coordinator_of``: the partition of the coordinators' topic that a transactional id is kept in.
    ``topic_of``: the name of the topic that a partition is of.
    """

    scheduler: Scheduler
    network: Network
    rng: Random
    checkers: Checkers
    history: History
    told: Told
    brokers: tuple[int, ...]
    coordinator_of: Callable[[str], TopicIdPartition]
    topic_of: Callable[[TopicIdPartition], str]
    pace: Pace


def error_of(answer: Any) -> ErrorCode | None:
    """Why a request was refused, whoever answered; None for what was not."""
    if answer is None:
        return ErrorCode.REQUEST_TIMED_OUT
    if isinstance(answer, Answer):
        return answer.error
    return ErrorCode(answer.error.code) if answer.HasField("error") else None


class ScriptedProcess:
    """One process of a client: it knows leaders, and goes through its scripts."""

    def __init__(self, address: int, place: ScriptPlace) -> None:
        self.address = address
        self.alive = True
        self.place = place
        self.stopped = False
        self.running = 0  # Scripts that are not at their ends.
        self._leaders: dict[TopicIdPartition, tuple[int, int]] = {}
        self._count = 0

    # The network's process.

    def serve(self, method: str, request: Any, reply: Callable[[Any], None]) -> None:
        """Nobody asks a client."""
        raise AssertionError(f"a client serves nobody, but was asked for {method}")

    def accept(self, service: str, end: End) -> None:
        """Nobody opens a stream to a client."""
        raise AssertionError(f"a client serves nobody, but was to stream {service}")

    # Its life.

    def stop(self) -> None:
        """Begin nothing new."""
        self.stopped = True

    def end(self) -> None:
        """The process ends without a word; what it has sent may still arrive."""
        self.alive = False
        self.running = 0
        self.place.network.ended(self, silently=False)

    def pause(self, for_ms: int) -> None:
        """Do nothing for a while: answers wait, and no time passes for its scripts."""
        scheduler = self.place.scheduler
        scheduler.held_until_ms[self.address] = scheduler.now_ms + for_ms

    def note(self, event: Event) -> None:
        """Put something into the history."""
        self.place.history.note(event)
        self.place.told.note(event)

    def next_value(self) -> bytes:
        """The value of a record that nobody else writes."""
        self._count += 1
        return b"%d-%d" % (self.address, self._count)

    # Scripts.

    def run(self, script: Script, finished: Callable[[], None] = lambda: None) -> None:
        """Begin a script, soon."""
        self.running += 1
        self.later(0, lambda: self._go_on(script, None, finished))

    def _go_on(self, script: Script, value: Any, finished: Callable[[], None]) -> None:
        if not self.alive:
            return
        try:
            step = script.send(value)
        except StopIteration:
            self.running -= 1
            finished()
            return
        if isinstance(step, Sleep):
            if isinstance(step, Rest):
                delay_ms = self.place.pace.rest_ms(self.place.rng, step.low_ms, step.high_ms)
            else:
                delay_ms = self.place.rng.randint(step.low_ms, step.high_ms)
            self.later(delay_ms, lambda: self._go_on(script, None, finished))
            return
        self.place.network.call(
            self,
            step.target,
            step.method,
            step.request,
            lambda answer: self._go_on(script, answer, finished),
            timeout_ms=_TIMEOUT_MS,
        )

    def later(self, delay_ms: int, action: Callable[[], None]) -> Timer:
        """Let something happen here, unless the process stands still by then."""
        return self.place.scheduler.after(delay_ms, action, node=self.address)

    # Parts of scripts.

    def ask(self, key: TopicIdPartition, method: str, request: Any) -> Script:
        """Ask who is thought to lead a partition, once. After a refusal find out who does."""
        answer = yield Ask(self.leader(key), method, request)
        if error_of(answer) is not None:
            if isinstance(answer, Answer):
                self._take_hint(key, answer)
            self.run(self.find_leader(key))
        return answer

    def leader(self, key: TopicIdPartition) -> int:
        """Who is thought to lead a partition; anybody where that is not known."""
        leader, _ = self._leaders.get(key, (-1, -1))
        return leader if leader >= 0 else self.place.rng.choice(self.place.brokers)

    def leader_epoch(self, key: TopicIdPartition) -> int:
        """The newest leader epoch that the process has heard of."""
        return self._leaders.get(key, (-1, -1))[1]

    def find_leader(self, key: TopicIdPartition) -> Script:
        """Ask anybody who leads a partition."""
        answer = yield Ask(self.place.rng.choice(self.place.brokers), "metadata", key)
        if answer is not None:
            self._take_hint(key, answer)

    def _take_hint(self, key: TopicIdPartition, answer: Answer) -> None:
        """An answer may know a newer leader; an older one is no news (KIP-320)."""
        if answer.leader_epoch > self.leader_epoch(key):
            self._leaders[key] = answer.leader, answer.leader_epoch
