"""A known bug: one rule left out, and how it is hunted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from penstock.chaos.simulator.faults import Fault
from penstock.chaos.simulator.simulation import Report, Simulation

NO_LOSS: Final[Mapping[str, object]] = {"flush_policy": "commit", "unclean": False}
"""Fields of the Plan under which nothing that was acknowledged may be lost."""


@dataclass(frozen=True, slots=True)
class Bug:
    """``target.name`` is replaced by ``replacement``.

    ``shown_by``: the kinds of faults under which it does harm soon, or whatever the seed draws;
    ``given``: fields of the Plan without which it does none; ``faults``: a schedule for what chance
    brings about too seldom; ``also``: what is replaced besides, where the rule stands in several
    places, or an assertion of the core would see it first.
    """

    description: str
    target: object
    name: str
    replacement: object
    shown_by: tuple[str, ...] | None = None
    given: Mapping[str, object] = field(default_factory=lambda: NO_LOSS)
    faults: Sequence[Fault] | None = None
    also: Sequence[tuple[object, str, object]] = ()

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The bug is in the cores inside of the ``with`` block."""
        places = [(self.target, self.name, self.replacement), *self.also]
        kept = [vars(target)[name] for target, name, _ in places]
        for target, name, replacement in places:
            setattr(target, name, replacement)
        try:
            yield
        finally:
            for (target, name, _), before in zip(places, kept, strict=True):
                setattr(target, name, before)

    def hunt(self, first: int, seeds: int) -> Report | None:
        """Run seeds with the bug in the cores until one shows it; that one's report.

        Raises TypeError when the replacement does not fit the code any more: that shows nothing.
        """
        with self.planted():
            for seed in range(first, first + seeds):
                run = Simulation(seed, self.faults, only=self.shown_by, given=self.given)
                report = run.run()
                if "TypeError" in (report.violation or ""):
                    raise TypeError(f"{self.description}: {report.violation}")
                if report.violation is not None:
                    return report
        return None
