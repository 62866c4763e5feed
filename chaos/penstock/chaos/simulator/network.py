"""A network in virtual time: requests that may be lost or doubled, streams that keep their order.

A stream behaves as a TCP connection does. What is sent over a cut link waits until the link is
whole again or until either end gives up, and the ends may learn of the end at different times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Protocol

from penstock.chaos.simulator.scheduler import Scheduler, Timer

_CHANGING = frozenset(  # The requests that change something.
    {
        "command",
        "produce",
        "init producer id",
        "end transaction",
        "abort transaction",
        "begin attempt",
        "commit group",
        "add partitions",
        "write markers",
        "commit transaction offsets",
    }
)
_RETRY_MS = 50
_GIVE_UP_MS = (500, 4000)  # A sender that hears nothing gives a connection up after as long.


class Process(Protocol):
    """A running program; a restarted one is another process.

    ``address``: a broker's is its node id, a controller's is minus that of its node.
    """

    address: int
    alive: bool

    def serve(self, method: str, request: Any, reply: Callable[[Any], None]) -> None:
        """Answer a request, now or later, once."""
        ...

    def accept(self, service: str, end: End) -> None:
        """Take a stream that somebody opened: set the handlers of ``end``."""
        ...


@dataclass(slots=True)
class Weather:
    """How the network is: probabilities per request, and delays in milliseconds."""

    late: float
    left_over: float
    lost: float = 0.02
    doubled: float = 0.05
    late_openings: float = 0.02  # Of streams.
    delay_ms: tuple[int, int] = (1, 4)
    late_ms: tuple[int, int] = (50, 800)
    left_over_ms: tuple[int, int] = (50, 4000)  # After the call was given up.
    left_behind_ms: tuple[int, int] = (0, 600)  # After the sender ended.


class Network:
    """Who can reach whom, and how fast."""

    def __init__(self, scheduler: Scheduler, rng: Random, *, late: float, left_over: float) -> None:
        self.scheduler = scheduler
        self.weather = Weather(late, left_over)
        self.processes: dict[int, Process] = {}
        self.slow_ms: dict[int, int] = {}  # Nodes whose network is slow: by how much at most.
        self._cut: set[tuple[int, int]] = set()  # Between nodes.
        self._rng = rng
        self._ends: dict[int, list[End]] = {}  # Of each node's process, the open ones.

    # Faults.

    def cut(self, source: int, target: int) -> None:
        """Nothing gets from one node to another."""
        self._cut.add((source, target))

    def heal(self) -> None:
        """All links are whole and fast again."""
        self._cut.clear()
        self.slow_ms.clear()

    def calm(self) -> None:
        """Nothing is lost, doubled or late any more."""
        self.heal()
        self.weather = Weather(late=0, left_over=0, lost=0, doubled=0, late_openings=0)

    @property
    def is_cut(self) -> bool:
        """Something does not get somewhere."""
        return bool(self._cut)

    def linked(self, source: int, target: int) -> bool:
        """What is sent from one node arrives at the other."""
        return not self._cut or (abs(source), abs(target)) not in self._cut

    def connected(self, one: int, other: int) -> bool:
        """Both ways are open."""
        return self.linked(one, other) and self.linked(other, one)

    def delay_ms(self, source: int, target: int) -> int:
        """How long the next message takes."""
        delay_ms = self._rng.randint(*self.weather.delay_ms)
        if not self.slow_ms:
            return delay_ms
        slow = max(self.slow_ms.get(abs(source), 0), self.slow_ms.get(abs(target), 0))
        return delay_ms + (self._rng.randint(0, slow) if slow else 0)

    # Requests.

    def call(
        self,
        source: Process,
        target: int,
        method: str,
        request: Any,
        on_answer: Callable[[Any], None],
        *,
        timeout_ms: int,
    ) -> None:
        """Ask another node once. ``on_answer`` gets the answer, or None when there was none.

        A second sending may arrive after the first, and of what changes something one long after
        the call was given up, or its sender ended.
        """
        call = _Call(self, source, target, (method, request), on_answer)
        self._send(source.address, target, call.arrive)
        if self._rng.random() < self.weather.doubled:
            self._send(source.address, target, call.arrive)
        if method in _CHANGING and self._rng.random() < self.weather.left_over:
            delay_ms = timeout_ms + self._rng.randint(*self.weather.left_over_ms)
            self.scheduler.after(delay_ms, call.arrive, node=abs(target))
        call.timer = self.scheduler.after(timeout_ms, call.finish, node=abs(source.address))

    def _send(self, source: int, target: int, arrive: Callable[[], None]) -> None:
        """``arrive`` looks itself whether the link is whole by then."""
        if self._rng.random() < self.weather.lost:
            return
        delay_ms = self.delay_ms(source, target)
        if self._rng.random() < self.weather.late:
            delay_ms += self._rng.randint(*self.weather.late_ms)
        self.scheduler.after(delay_ms, arrive, node=abs(target))

    # Streams.

    def connect(self, source: Process, target: int, service: str) -> End:
        """Open a stream. It breaks at once, or after a while, when nobody is there.

        Where that takes long it is given up, and may be taken after the one that came in its place.
        """
        near, far = End(self, source), End(self, None)
        near.peer, far.peer = far, near
        near.target, far.target = target, source.address
        self._ends.setdefault(source.address, []).append(near)

        def arrive() -> None:
            process = self.processes.get(target)
            if not self.connected(source.address, target):
                near.lose(self._rng.randint(*_GIVE_UP_MS))
            elif process is None or not process.alive:
                near.lose(self.delay_ms(target, source.address))
            elif near.is_open:
                far.owner = process
                self._ends.setdefault(target, []).append(far)
                process.accept(service, far)
                near.pump()
            elif near.queue:
                self._take_what_is_left(near, process, service)

        delay_ms = self.delay_ms(source.address, target)
        if self._rng.random() < self.weather.late_openings:
            delay_ms += self._rng.randint(*self.weather.late_ms)
            near.lose(self._rng.randint(1, delay_ms))
        self.scheduler.after(delay_ms, arrive, node=abs(target))
        return near

    def _take_what_is_left(self, near: End, process: Process, service: str) -> None:
        """A stream was given up before it was taken: what was sent on it is read all the same."""
        assert near.owner is not None
        far = End(self, process)
        far.peer, far.target = near, near.owner.address
        self._ends.setdefault(process.address, []).append(far)
        process.accept(service, far)
        while near.queue and far.is_open:
            far.on_message(near.queue.popleft())
        far.lose(self.delay_ms(process.address, far.target))

    def reset(self, one: int, other: int) -> None:
        """Break every stream between two nodes, as something between them that forgets may do.

        The ends learn of it at different times. Of what was under way a part still arrives, maybe
        after what is sent on the stream that takes the place of the broken one.
        """
        between = [
            end
            for address in (one, -one, other, -other)
            for end in self._ends.get(address, [])
            if {abs(address), abs(end.target)} == {one, other}
        ]
        told: set[int] = set()
        for end in self._rng.sample(between, len(between)):
            if end.is_open and id(end) not in told:
                told |= {id(end), id(end.peer)}
                end.break_off(self._rng.randint(0, 3), self._rng.randint(1, 300))

    def give_up_ms(self) -> int:
        """How long an end waits for the other before it gives the stream up."""
        return self._rng.randint(*_GIVE_UP_MS)

    def ended(self, process: Process, *, silently: bool) -> None:
        """A process ended: the kernel closes its connections, unless the power went.

        Of what it has sent a part may still arrive, after its successor has spoken even.
        """
        ends = self._ends.pop(process.address, [])
        for end in ends:
            linked = self.linked(process.address, end.target)
            arriving = self._rng.randint(0, len(end.queue)) if linked else 0
            delay_ms = end.leave_over(arriving, self._rng.randint(*self.weather.left_behind_ms))
            if silently or not linked:
                end.peer.lose(delay_ms + self.give_up_ms())
            else:
                end.peer.lose(delay_ms + self.delay_ms(process.address, end.target))

    def closed(self, end: End) -> None:
        """Forget a closed end."""
        if end.owner is not None:
            ends = self._ends.get(end.owner.address, [])
            if end in ends:
                ends.remove(end)


class _Call:
    """A request that was sent, once or more often, and the first answer to it."""

    __slots__ = (
        "_method", "_network", "_on_answer", "_request", "_source", "_target", "timer",
    )  # fmt: skip

    def __init__(
        self,
        network: Network,
        source: Process,
        target: int,
        what: tuple[str, Any],
        on_answer: Callable[[Any], None],
    ) -> None:
        self.timer: Timer | None = None  # None when it is over.
        self._network = network
        self._source = source
        self._target = target
        self._method, self._request = what
        self._on_answer = on_answer

    def arrive(self) -> None:
        """One sending of the request is there, if the link is whole."""
        network, target = self._network, self._target
        if not network.linked(self._source.address, target):
            return
        process = network.processes.get(target)
        if process is None or not process.alive:
            self._answer(None)  # Connection refused.
        else:
            process.serve(self._method, self._request, self._answer)

    def _answer(self, answer: Any) -> None:
        self._network._send(self._target, self._source.address, partial(self._land, answer))

    def _land(self, answer: Any) -> None:
        if self._network.linked(self._target, self._source.address):
            self.finish(answer)

    def finish(self, answer: Any = None) -> None:
        """The answer is there, or the source gives the call up; what comes later is nothing."""
        timer = self.timer
        if timer is not None and self._source.alive:
            self.timer = None
            timer.cancel()
            self._on_answer(answer)


class End:
    """One end of a stream. ``on_message`` and ``on_broken`` are set by its owner."""

    __slots__ = (
        "_moving", "_network", "_stalled_ms", "is_open", "on_broken", "on_message", "owner", "peer",
        "queue", "target",
    )  # fmt: skip

    def __init__(self, network: Network, owner: Process | None) -> None:
        self.owner = owner
        self.peer: End = self
        self.target = -1
        self.is_open = True
        self.queue: deque[Any] = deque()
        self.on_message: Callable[[Any], None] = lambda _: None
        self.on_broken: Callable[[], None] = lambda: None
        self._network = network
        self._moving = False
        self._stalled_ms = -1  # Since when the link has been cut, as this sender sees it.

    def send(self, message: Any) -> None:
        """Send after everything sent before."""
        if self.is_open:
            self.queue.append(message)
            self.pump()

    def pump(self) -> None:
        """Bring the first message that waits on its way."""
        if self.queue and not self._moving and self.owner is not None:
            self._moving = True
            delay_ms = self._network.delay_ms(self.owner.address, self.target)
            self._later(delay_ms, self._arrive)

    def _later(self, delay_ms: int, action: Callable[[], None]) -> None:
        """Let something happen where this end's peer is."""
        self._network.scheduler.after(delay_ms, action, node=abs(self.target))

    def _arrive(self) -> None:
        self._moving = False
        if not self.queue or self.owner is None or not self.is_open:
            return
        if self.peer.owner is None:
            return  # Not accepted yet; accepting pumps.
        network = self._network
        if network.is_cut and not network.connected(self.owner.address, self.target):
            if self._stalled_ms < 0:
                self._stalled_ms = network.scheduler.now_ms
                self.lose(network.give_up_ms(), unless=lambda: self._stalled_ms < 0)
            self._moving = True
            self._later(_RETRY_MS, self._arrive)
            return
        self._stalled_ms = -1
        message = self.queue.popleft()
        if self.peer.is_open:
            self.peer.on_message(message)
        self.pump()

    def close(self) -> None:
        """End the stream from this side; ``on_broken`` is not called here."""
        if not self.is_open:
            return
        self.is_open = False
        self._network.closed(self)
        if self.owner is not None and self._network.linked(self.owner.address, self.target):
            self._hand_over()  # What was sent before still arrives, and then the end.
        self._tell_peer()

    def break_off(self, arriving: int, delay_ms: int) -> None:
        """Break now; the first messages that wait arrive nevertheless, and the end of it later."""
        self._network.closed(self)
        self.leave_over(arriving, delay_ms)
        self.peer.lose(delay_ms + 1)
        if self.owner is not None and self.owner.alive:
            self.on_broken()

    def leave_over(self, arriving: int, delay_ms: int) -> int:
        """This end is no more; the first messages that wait arrive. When all have, if any will."""
        for _ in range(max(0, len(self.queue) - arriving)):
            self.queue.pop()
        self.is_open = False
        if not self.queue:
            return 0
        self._hand_over(delay_ms)
        return delay_ms

    def _hand_over(self, delay_ms: int = 0) -> None:
        rest = list(self.queue)
        self.queue.clear()

        def deliver() -> None:
            for message in rest:
                if self.peer.is_open:
                    self.peer.on_message(message)

        self._later(delay_ms, deliver)

    def lose(self, delay_ms: int, unless: Callable[[], bool] = lambda: False) -> None:
        """This end learns that the stream is broken, in a while."""

        def broken() -> None:
            if not self.is_open or unless():
                return
            self.is_open = False
            self._network.closed(self)
            self._tell_peer()
            if self.owner is not None and self.owner.alive:
                self.on_broken()

        node = 0 if self.owner is None else abs(self.owner.address)
        self._network.scheduler.after(delay_ms, broken, node=node)

    def lose_soon(self) -> None:
        """This end breaks now."""
        self.lose(0)

    def _tell_peer(self) -> None:
        if self.peer.is_open:
            source = -1 if self.owner is None else self.owner.address
            if self._network.linked(source, self.target):
                self.peer.lose(self._network.delay_ms(source, self.target))
            else:
                self.peer.lose(self._network.give_up_ms())
