"""What runs beside a controller's loop: on a thread of its own, which stands still at its disk.

A snapshot's write stands still at each of its operations; a voter while its disk has no room.
Only one of all threads ever runs, the world's or one of these, so that a seed gives the same run.
In between the world goes on: messages arrive, other threads write, the process is killed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.simulation.quorum.virtual_time import EXECUTOR_S, Clock, ProcessLoop, Scheduler

if TYPE_CHECKING:
    from tests.simulation.quorum.node import Process

_here = threading.local()


class _Gone(BaseException):
    """The process is no more: what ran in it ends where it stands."""


def pause() -> None:
    """Stand still until the world lets this thread go on, if it writes beside the voter's."""
    call: CallBeside | None = getattr(_here, "call", None)
    if call is not None and call.pauses:
        call.wait_for_turn()


def stand_still() -> None:
    """On a thread beside the world's: wait until the world lets it go on."""
    call: CallBeside = _here.call
    call.wait_for_turn()


class CallBeside:
    """A function on its thread; one that ``pauses`` stands still at each operation of its disk."""

    def __init__(self, function: Callable[[], Any], *, pauses: bool = True) -> None:
        self.pauses = pauses
        self._function = function
        self._turn = threading.Semaphore(0)
        self._turn_is_over = threading.Semaphore(0)
        self._is_abandoned = False
        self._has_ended = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        _here.call = self
        try:
            self.wait_for_turn(first=True)
            self._result = self._function()
        except BaseException as error:
            self._error = error
        self._has_ended = True
        self._turn_is_over.release()

    def wait_for_turn(self, *, first: bool = False) -> None:
        """On the function's thread: let the world go on."""
        if not first:
            self._turn_is_over.release()
        self._turn.acquire()
        if self._is_abandoned:
            raise _Gone

    def go_on(self) -> bool:
        """Let it run until it ends, or stands still again; whether it has ended."""
        self._turn.release()
        self._turn_is_over.acquire()
        return self._has_ended

    def result(self) -> Any:
        """What the function returned, or raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._result

    def abandon(self) -> None:
        """It never runs again."""
        if not self._has_ended:
            self._is_abandoned = True
            self.go_on()
        self._thread.join()


class ThreadTime(ProcessLoop):
    """When the voter's thread runs: it goes on while the loop of its process is stuck.

    No loop runs on that thread. What runs there finds the process by the loop that it belongs to.
    """

    def __init__(self, loop: ControllerLoop) -> None:
        super().__init__(loop.scheduler, loop.clock)
        self._loop = loop

    def _run(self, callback: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self._loop._run(callback, arguments)


class ControllerLoop(ProcessLoop):
    """A controller's loop, whose executor takes as long as the disk does."""

    def __init__(self, scheduler: Scheduler, clock: Clock, process: Process) -> None:
        super().__init__(scheduler, clock)
        self.process = process  # How the stand-ins find it.
        self.thread_time = ThreadTime(self)
        self._calls: list[CallBeside] = []

    def hold(self, seconds: float) -> None:
        self.hold_loop(seconds)
        self.thread_time.hold(seconds)

    def hold_loop(self, seconds: float) -> None:
        """The loop is stuck, long at one thing; the voter's thread goes on."""
        super().hold(seconds)

    def release(self) -> None:
        super().release()
        self.thread_time.release()

    def clock_changed(self) -> None:
        super().clock_changed()
        self.thread_time.clock_changed()

    @property
    def is_writing_beside(self) -> bool:
        """Something beside it stands still at the disk."""
        return bool(self._calls)

    def run_in_executor(  # type: ignore[override]  # As much of it as is used.
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future = self.create_future()
        self.in_world_time(EXECUTOR_S, self._begin, partial(func, *args), future)
        return future

    def _begin(self, function: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        if not future.done():  # It was cancelled before it began.
            call = CallBeside(function)
            self._calls.append(call)
            self._go_on(call, future)

    def _go_on(self, call: CallBeside, future: asyncio.Future[Any]) -> None:
        if not call.go_on():
            self.in_world_time(self.process.world.write_latency_s(), self._go_on, call, future)
            return
        self._calls.remove(call)
        with self.process.may_crash():
            try:
                result = call.result()
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

    def kill(self) -> None:
        if self._calls:
            self.process.world.counts["killed during a write beside"] += 1
        for call in self._calls:
            call.abandon()
        self._calls.clear()
        if self.process.thread is not None:
            self.process.thread.abandon()
        self.thread_time.kill()
        super().kill()
