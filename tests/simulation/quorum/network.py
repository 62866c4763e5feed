"""The network: Raft messages as datagrams of the worst kind, and connections that behave as TCP's.

A datagram is lost, doubled, late or overtaken. A connection keeps its order, holds what it carries
while it is cut, and breaks at each end when that end learns that the other process is gone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any

from tests.simulation.quorum.virtual_time import ProcessLoop, Scheduler

CALM_DELAY_S = (0.0005, 0.002)
_RETRY_S = 0.05
_CONNECT_TIMEOUT_S = 1.0


class Broken(Exception):  # noqa: N818 - it is an event, not a mistake.
    """The connection broke, or could not be made."""


class Weather:
    """What the network does to what it carries."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.duplication = 0.0
        self.delay_s = CALM_DELAY_S
        self.cut: Callable[[int, int], bool] = lambda _source, _target: False

    def clear(self) -> None:
        """The sun shines."""
        self.__init__()  # type: ignore[misc]  # Begin anew.


class Network:
    """Carries everything between nodes, by their numbers."""

    def __init__(self, scheduler: Scheduler, rng: Random) -> None:
        self.scheduler = scheduler
        self.weather = Weather()
        self.sent = self.lost = self.doubled = 0
        self._rng = rng

    def delay_s(self) -> float:
        """How long the next message takes."""
        return self._rng.uniform(*self.weather.delay_s)

    def datagram(self, source: int, target: int, arrive: Callable[[], None]) -> None:
        """Perhaps, once or twice, in a while."""
        self.sent += 1
        copies = 1
        if self._rng.random() < self.weather.duplication:
            self.doubled += 1
            copies = 2
        for _ in range(copies):
            if self.weather.cut(source, target) or self._rng.random() < self.weather.loss:
                self.lost += 1
            else:
                self.scheduler.after(self.delay_s(), arrive)


class End:
    """One end of a connection, in one process. Iterate over it for what comes."""

    def __init__(self, network: Network, loop: ProcessLoop, node_id: int) -> None:
        self._network = network
        self.loop = loop
        self.node_id = node_id
        self.other: End = self
        self.is_broken = False
        self._is_over = False
        self._incoming: deque[tuple[float, Any]] = deque()  # On its way to this end.
        self._carrying = False
        self._items: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.on_broken: Callable[[], None] = lambda: None

    # Sending.

    def send(self, message: Any) -> None:
        """Have the other end get a copy."""
        self._put(type(message).FromString(message.SerializeToString()))

    def finish(self) -> None:
        """Nothing more comes from here."""
        self._put(None)

    def hang_up(self) -> None:
        """This process, or this call of it, is gone."""
        if not self.is_broken:
            self.is_broken = True
            self._put(Broken())

    def _put(self, item: Any) -> None:
        other, network = self.other, self._network
        arrival_s = network.scheduler.now_s + network.delay_s()
        if other._incoming:
            arrival_s = max(arrival_s, other._incoming[-1][0])
        other._incoming.append((arrival_s, item))
        if not other._carrying:
            other._carrying = True
            network.scheduler.at(arrival_s, other._carry)

    # Receiving.

    def _carry(self) -> None:
        """What is due arrives, unless the connection is cut: then it is sent again, in order."""
        network, now_s = self._network, self._network.scheduler.now_s
        if network.weather.cut(self.other.node_id, self.node_id):
            network.scheduler.after(_RETRY_S, self._carry)
            return
        while self._incoming and self._incoming[0][0] <= now_s:
            self.loop.enter(self._arrive, self._incoming.popleft()[1])
        if self._incoming:
            network.scheduler.at(self._incoming[0][0], self._carry)
        else:
            self._carrying = False

    def _arrive(self, item: Any) -> None:
        if isinstance(item, Broken):
            if not self.is_broken:
                self.is_broken = True
                self.on_broken()
        elif item is None:
            self._is_over = True
        else:
            self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        while not self._items:
            if self._is_over:
                raise StopAsyncIteration
            if self.is_broken:
                raise Broken
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()


async def connect(
    network: Network,
    loop: ProcessLoop,
    node_id: int,
    target: int,
    accept: Callable[[End], bool],
) -> End:
    """Open a connection from this process to a node. ``accept`` runs there; False refuses.

    Raises Broken.
    """
    ours = End(network, loop, node_id)
    answered: asyncio.Future[bool] = loop.create_future()

    def arrive() -> None:
        if network.weather.cut(node_id, target):
            return
        theirs = End(network, loop, target)
        theirs.other, ours.other = ours, theirs
        accepted = accept(theirs)
        network.scheduler.after(network.delay_s(), lambda: loop.enter(answer, accepted))

    def answer(accepted: bool) -> None:
        if not network.weather.cut(target, node_id) and not answered.done():
            answered.set_result(accepted)

    network.scheduler.after(network.delay_s(), arrive)
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            accepted = await answered
    except TimeoutError:
        ours.hang_up()
        raise Broken from None
    if not accepted:
        raise Broken
    return ours
