"""A rule left out: a few words changed in one function, and what notices it."""

from __future__ import annotations

import contextlib
import inspect
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from tests.simulation.quorum.world import World
from tests.unit.raft_meta.leading_voter import Leader
from tests.unit.raft_meta.lone_voter import Lone

Test = Callable[..., object]


@dataclass(frozen=True)
class Mutant:
    """``old`` is ``new`` in a function's text. ``tests`` are those that must notice."""

    description: str
    function: Any
    old: str
    new: str
    tests: tuple[Test, ...] = ()

    def code(self) -> CodeType:
        """The function's code with the rule left out.

        Raises ValueError where the text is not found just once: the mutant must follow the code.
        """
        text = textwrap.dedent(inspect.getsource(self.function))
        if text.count(self.old) != 1:
            raise ValueError(f"{self.function.__qualname__} has {self.old!r} not just once")
        made: dict[str, Any] = {}
        exec(text.replace(self.old, self.new), self.function.__globals__, made)
        code: CodeType = made[self.function.__name__].__code__
        return code

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """The rule is left out inside of the ``with`` block, whoever holds the function."""
        kept, self.function.__code__ = self.function.__code__, self.code()
        try:
            yield
        finally:
            self.function.__code__ = kept


@dataclass(frozen=True)
class Caught:
    """What noticed it: a test, or a seed after so many."""

    by: str
    how: str
    seeds: int = 0


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "failed"


def complaint(test: Test) -> str:
    """Run one test of a lone voter or leader; what it complains of, or nothing."""
    with tempfile.TemporaryDirectory() as directory:
        (wanted,) = inspect.signature(test).parameters
        made = {"lone": Lone, "leader": Leader}.get(wanted)
        lone = None if made is None else made(Path(directory))
        try:
            test(Path(directory) if lone is None else lone)
        except Exception as error:
            return _last_line(f"{type(error).__name__}: {error}")
        finally:
            if lone is not None:
                lone.journal.abandon()
    return ""


def hunt(mutant: Mutant, first: int, seeds: int) -> Caught | None:
    """Run its tests, or else seeds, with the rule left out, until one of them notices."""
    with mutant.planted():
        for test in mutant.tests:
            how = complaint(test)
            if how:
                return Caught(f"{test.__module__.rpartition('.')[2]}.{test.__name__}", how)
        for number in range(first, first + seeds):
            report = World(number).run()
            if report.violation:
                return Caught(f"seed {number}", _last_line(report.violation), number - first + 1)
    return None
