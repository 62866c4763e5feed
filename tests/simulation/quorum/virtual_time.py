"""Virtual time: one queue of events for the world, and an event loop and a clock for each process.

A process' clock never goes back, as a monotonic clock doesn't; but it may run fast or slow, stand
still and leap, and the process itself may be held up, as a virtual machine is.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

EXECUTOR_S = 0.01  # What runs beside the loop is done after so long.
_TASKS_KEPT = 64  # So many, and those that are done are forgotten.


class Scheduler:
    """Runs events in the order of their times."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Have something happen at a time, or now if that is past."""
        heapq.heappush(self._queue, (max(time_s, self.now_s), next(self._count), action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Have something happen in a while."""
        self.at(self.now_s + delay_s, action)

    def run_until(self, end_s: float) -> None:
        """Let everything happen that is due until then."""
        queue = self._queue
        while queue and queue[0][0] <= end_s:
            self.now_s, _, action = heapq.heappop(queue)
            self.events += 1
            action()
        self.now_s = end_s


class Clock:
    """A process' monotonic clock, as a piecewise linear function of the world's time."""

    def __init__(self, scheduler: Scheduler, start_s: float, rate: float) -> None:
        self._scheduler = scheduler
        self._origin_s = scheduler.now_s
        self._local_s = start_s
        self.rate = rate

    def time_s(self) -> float:
        """What it shows."""
        return self._local_s + (self._scheduler.now_s - self._origin_s) * self.rate

    def set(self, *, rate: float, leap_s: float = 0.0) -> None:
        """Leap forward, and run at another rate from now on."""
        self._local_s = self.time_s() + leap_s
        self._origin_s = self._scheduler.now_s
        self.rate = rate

    def world_time_s(self, local_s: float) -> float:
        """When it will show ``local_s``, if it is not set meanwhile."""
        left_s = local_s - self.time_s()
        if left_s <= 0:
            return self._scheduler.now_s
        return math.inf if self.rate == 0 else self._scheduler.now_s + left_s / self.rate


class Handle:
    """A callback to come; what asyncio calls a TimerHandle."""

    __slots__ = ("_when", "arguments", "callback", "is_cancelled")

    def __init__(
        self, callback: Callable[..., object], arguments: tuple[Any, ...], when: float
    ) -> None:
        self.callback = callback
        self.arguments = arguments
        self.is_cancelled = False
        self._when = when

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self._when


class ProcessLoop(asyncio.AbstractEventLoop):
    """The asyncio loop of one process, as much of one as the production code uses.

    When the process is dead nothing of it ever runs again, and nothing is said about it.
    """

    def __init__(self, scheduler: Scheduler, clock: Clock) -> None:
        self.scheduler = scheduler
        self.clock = clock
        self.is_alive = True
        self._held_until_s = 0.0
        self._held: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._count = itertools.count()
        self._armed_s = math.inf
        self._tasks: list[asyncio.Task[Any]] = []  # In their order: a seed gives the same run.

    # Running.

    def enter(self, callback: Callable[..., object], *arguments: Any) -> None:
        """Run something as a part of this process, if it lives; later, if it is held up."""
        if not self.is_alive:
            return
        if self._held_until_s > self.scheduler.now_s or self._held:
            self._held.append((callback, arguments))
            return
        self._run(callback, arguments)

    def _run(self, callback: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            callback(*arguments)
        finally:
            asyncio._set_running_loop(outer)

    def hold(self, seconds: float) -> None:
        """The process stands still: what comes meanwhile waits, in its order."""
        self._held_until_s = self.scheduler.now_s + seconds
        self.scheduler.after(seconds, self._let_go)

    def release(self) -> None:
        """It goes on at once."""
        self._held_until_s = 0.0
        self._let_go()

    def _let_go(self) -> None:
        while self._held and self.is_alive and self._held_until_s <= self.scheduler.now_s:
            self._run(*self._held.popleft())

    def in_world_time(self, delay_s: float, callback: Callable[..., object], *args: Any) -> None:
        """Run something after a delay that no clock of the process has a say in."""
        self.scheduler.after(delay_s, lambda: self.enter(callback, *args))

    def kill(self) -> None:
        """The process is gone."""
        if not self.is_alive:
            return
        self.is_alive = False
        self._timers.clear()
        self._held.clear()
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            for task in self._tasks:
                # What a coroutine does as it is closed happens in a process that is gone.
                with contextlib.suppress(BaseException):
                    task.get_coro().close()  # type: ignore[union-attr]  # They are coroutines.
        finally:
            asyncio._set_running_loop(outer)

    def _fire(self, handle: Handle) -> None:
        if not handle.is_cancelled:
            handle.callback(*handle.arguments)

    # Time.

    def time(self) -> float:
        return self.clock.time_s()

    def clock_ms(self) -> int:
        """The clock in milliseconds, as the controller's shell reads it."""
        return int(self.clock.time_s() * 1000)

    def clock_changed(self) -> None:
        """The clock was set: timers are due at other times now."""
        self._armed_s = math.inf
        self._arm()

    def call_at(  # type: ignore[override]  # Ours are not asyncio's handles.
        self, when: float, callback: Callable[..., object], *args: Any, context: object = None
    ) -> Handle:
        handle = Handle(callback, args, when)
        if self.is_alive:
            heapq.heappush(self._timers, (when, next(self._count), handle))
            self._arm()
        return handle

    def call_later(  # type: ignore[override]  # As above.
        self, delay: float, callback: Callable[..., object], *args: Any, context: object = None
    ) -> Handle:
        return self.call_at(self.time() + delay, callback, *args)

    def _arm(self) -> None:
        while self._timers and self._timers[0][2].is_cancelled:
            heapq.heappop(self._timers)
        if not self._timers:
            return
        at_s = self.clock.world_time_s(self._timers[0][0])
        if at_s < self._armed_s:
            self._armed_s = at_s
            self.scheduler.at(at_s, lambda: self.enter(self._ring, at_s))

    def _ring(self, armed_s: float) -> None:
        if armed_s != self._armed_s:
            return  # Armed anew since.
        self._armed_s = math.inf
        now_s = self.time() + 1e-9
        while self._timers and self._timers[0][0] <= now_s:
            handle = heapq.heappop(self._timers)[2]
            self.call_soon(self._fire, handle)
        self._arm()

    def call_soon(  # type: ignore[override]  # As above.
        self, callback: Callable[..., object], *args: Any, context: object = None
    ) -> Handle:
        handle = Handle(callback, args, self.time())
        if self.is_alive:
            now_s = self.scheduler.now_s
            self.scheduler.at(now_s, lambda: self.enter(self._fire, handle))
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # There is one thread.

    # Futures and tasks.

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]  # As much of it as is used.
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: object = None
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name)
        if len(self._tasks) >= _TASKS_KEPT:
            self._tasks = [kept for kept in self._tasks if not kept.done()]
        self._tasks.append(task)
        return task

    def run_in_executor(  # type: ignore[override]  # As much of it as is used.
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future = self.create_future()

        def run() -> None:
            if future.done():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.in_world_time(EXECUTOR_S, run)
        return future

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return not self.is_alive

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A task of a dead process was forgotten; living ones tell of their failures themselves."""
