"""What a process has been sent and has not acted on yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

Message = TypeVar("Message")


class _Process(Protocol):
    def after(self, delay_ms: int, action: Callable[[], None], /) -> object: ...


class Inbox(Generic[Message]):
    """Messages in their order, each acted on at once, but while the process is busy with others.

    ``act`` is told of each message when its time has come. What has waited is acted on one message
    a step: the checkers look at what a process has done after each, and what it was for no longer
    than a step they would not see.
    """

    def __init__(self, process: _Process, act: Callable[[Message], None]) -> None:
        self._process = process
        self._act = act
        self._waiting: list[Message] = []
        self._busy = 0  # With so many things that take a while.
        self._going_on = False  # The next step is to come.

    def take(self, message: Message) -> None:
        """Act on it, after all that came before."""
        self._waiting.append(message)
        self._work()

    def be_busy(self, for_ms: int) -> None:
        """Act on nothing for a while."""
        self._busy += 1
        self._process.after(for_ms, self._is_done)

    def _is_done(self) -> None:
        self._busy -= 1
        self._work()

    def _work(self) -> None:
        if not self._waiting or self._busy or self._going_on:
            return
        self._act(self._waiting.pop(0))
        if self._waiting:
            self._going_on = True
            self._process.after(0, self._go_on)

    def _go_on(self) -> None:
        self._going_on = False
        self._work()
