"""Ctrl-C and its like, for commands that have something to finish."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

# SIGHUP: the terminal, or the connection to it, is gone.
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle the stop signals by ``handler`` inside the block; for the main thread alone.

    A SIGHUP that our starter had us ignore (nohup) stays ignored.
    """
    numbers = [
        number
        for number in STOP_SIGNALS
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


class Interrupt:
    """The stop signals, seen where it does no harm. The second one is seen at once.

    Both may come at any moment; what is in work between two places that may break is finished,
    or never begun.
    """

    def __init__(self) -> None:
        self.count = 0
        self.signal_number = 0
        self._may_break = False

    @property
    def exit_status(self) -> int:
        """What a shell reports for a program that the signal ended."""
        return 128 + self.signal_number

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals inside the block, which a KeyboardInterrupt of ours ends quietly."""
        with handled(self._handle):
            try:
                yield
            except KeyboardInterrupt:
                if not self.count:
                    raise

    @contextmanager
    def may_break(self) -> Iterator[None]:
        """Inside the block a signal, also an earlier one, raises KeyboardInterrupt at once."""
        try:
            self.release()
            yield
        finally:
            self.hold()

    def hold(self) -> None:
        """From now on a first signal waits for ``release``."""
        self._may_break = False

    def release(self) -> None:
        """From now on a signal raises KeyboardInterrupt; as does one that came before."""
        self._may_break = True
        if self.count:
            self._may_break = False
            raise KeyboardInterrupt

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.signal_number = number
        if self._may_break or self.count > 1:
            self._may_break = False
            raise KeyboardInterrupt
