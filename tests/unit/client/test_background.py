"""The thread that synchronous clients run on, where callers are interrupted at any point."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from penstock.client import background
from penstock.client.background import LoopThread


@pytest.fixture
def thread() -> LoopThread:
    return LoopThread.shared()


class Waiting:
    """Work that waits for ever, and notes how it ends."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self.cancelled = threading.Event()

    async def forever(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            await asyncio.Event().wait()
        finally:
            self.tasks.discard(task)
            self.cancelled.set()

    def stop(self) -> None:
        for task in self.tasks:
            task.cancel()


def interrupting(count: int) -> Callable[[FrameType, str, object], Any]:
    """A trace function that raises KeyboardInterrupt at the count-th line of the module."""
    left = count

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != background.__file__:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    return trace


def settle(thread: LoopThread) -> None:
    """Return when the loop has done what it was given, and what that began."""

    async def nothing() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    asyncio.run_coroutine_threadsafe(nothing(), thread.loop).result(10)


def test_results_and_errors_arrive(thread: LoopThread) -> None:
    async def add(left: int, *, right: int) -> int:
        return left + right

    async def fail() -> None:
        raise ValueError("as it happens")

    assert thread.run(add, 1, right=2) == 3
    assert thread.submit(add, 2, right=2).result(10) == 4
    with pytest.raises(ValueError, match="as it happens"):
        thread.run(fail)


def test_a_cancelled_future_cancels_the_work(thread: LoopThread) -> None:
    work = Waiting()
    future = thread.submit(work.forever)
    settle(thread)
    assert len(work.tasks) == 1
    assert future.cancel()
    assert work.cancelled.wait(10)


def test_an_interrupt_at_any_point_leaves_nothing_behind(thread: LoopThread) -> None:
    work = Waiting()
    for count in range(1, 100):
        before = sys.gettrace()
        timer = threading.Timer(0.2, lambda: thread.call(work.stop))
        timer.start()
        sys.settrace(interrupting(count))
        try:
            with pytest.raises((KeyboardInterrupt, concurrent.futures.CancelledError)) as raised:
                thread.run(work.forever)
        finally:
            sys.settrace(before)
            timer.cancel()
            timer.join()
        settle(thread)
        assert not work.tasks, f"interrupted at line {count}"
        gc.collect()  # What was never awaited says so now, which fails the test.
        if not isinstance(raised.value, KeyboardInterrupt):
            break
    assert count > 5


def test_what_comes_late_for_a_closed_loop_is_not_reported_and_all_else_is(
    thread: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    of_poller = "Exception in callback PollerCompletionQueue._handle_events(<a loop>)()"

    async def report() -> None:
        for message, error in (
            (of_poller, RuntimeError("Event loop is closed")),
            (of_poller, ValueError("reported: not of a closed loop")),
            ("Exception in callback mine()", RuntimeError("reported: not of the poller")),
        ):
            context = {"message": message, "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)

    thread.run(report)
    assert [str(entry.exc_info[1]) for entry in caplog.records if entry.exc_info] == [
        "reported: not of a closed loop",
        "reported: not of the poller",
    ]
