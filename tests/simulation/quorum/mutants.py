"""The rules, one left out at a time: what each of them is for, and that its absence is noticed.

A mutant is caught by seeds of the simulator, or by a deterministic test where chance would take
too long. ``hunt`` says by which.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from tests.simulation.quorum.world import World


@dataclass(frozen=True)
class Mutant:
    """``target.name`` is replaced, for as long as it is planted."""

    description: str
    target: Any
    name: str
    replacement: Any
    tests: tuple[str, ...] = ()
    """Deterministic tests that must fail with it, tried before any seed."""

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """The rule is left out inside of the ``with`` block."""
        kept = vars(self.target)[self.name]
        setattr(self.target, self.name, self.replacement)
        try:
            yield
        finally:
            setattr(self.target, self.name, kept)


@dataclass(frozen=True)
class Caught:
    """What noticed it."""

    by: str
    how: str
    seeds: int = 0


MUTANTS: Final[dict[str, Mutant]] = {}


def hunt(mutant: Mutant, first: int, seeds: int) -> Caught | None:
    """Run tests and then seeds with the rule left out, until one of them notices."""
    with mutant.planted():
        for number in range(first, first + seeds):
            report = World(number).run()
            if report.violation:
                return Caught(
                    f"seed {number}", report.violation.strip().splitlines()[-1], number - first + 1
                )
    return None


Runner = Callable[[str], bool]
