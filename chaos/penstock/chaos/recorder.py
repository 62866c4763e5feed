"""Writes down what a client does, as it does it."""

from __future__ import annotations

import time
from typing import Any, Final

from penstock.chaos.history import Event, HistoryWriter, Type


class Recorder:
    """The events of one process of a history, which has one operation under way at a time.

    ``epoch_ns`` is what the machine's monotonic clock showed when the run began. For one task or
    thread; recorders of one worker may share a writer.
    """

    def __init__(
        self, writer: HistoryWriter, process: str, epoch_ns: int, *, phase: str = ""
    ) -> None:
        self._writer: Final = writer
        self._process: Final = process
        self._epoch_ns: Final = epoch_ns
        self._phase: Final = phase
        self._under_way: str | None = None

    def beside(self, role: str) -> Recorder:
        """That of another process, which the same client does meanwhile: ``PROCESS/ROLE``."""
        process = f"{self._process}/{role}"
        return Recorder(self._writer, process, self._epoch_ns, phase=self._phase)

    def invoke(self, f: str, value: Any = None) -> None:
        """An operation begins. The one before must have ended."""
        assert self._under_way is None, f"{self._process}: {self._under_way} is under way"
        self._under_way = f
        self._add(Type.INVOKE, f, value, "")

    def ok(self, value: Any = None) -> None:
        """It is done, and this came of it."""
        self._complete(Type.OK, value, "")

    def fail(self, error: str) -> None:
        """It is not done, and never will be: say so only where that is promised."""
        self._complete(Type.FAIL, None, error)

    def info(self, error: str, value: Any = None) -> None:
        """It may be done, or still be done later."""
        self._complete(Type.INFO, value, error)

    def _complete(self, type_: Type, value: Any, error: str) -> None:
        f, self._under_way = self._under_way, None
        assert f is not None, f"{self._process}: nothing is under way"
        self._add(type_, f, value, error)

    def _add(self, type_: Type, f: str, value: Any, error: str) -> None:
        t = time.monotonic_ns() - self._epoch_ns
        self._writer.add(Event(t, self._process, type_, f, value, error, self._phase))
