"""Which faults a run has, and when: made of the seed before it begins."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any, Final

from penstock.chaos.errors import PlanError, reason_of
from penstock.chaos.nemeses import Fault, Nemesis, ScheduledFault

_QUIET_MS: Final = 3_000
"""Before the first fault, so that a report shows what is usual; and after the last is healed."""
_HELD_SHARE: Final = (0.3, 0.7)
"""So much of the time to the next fault one is held; the rest is for recovering."""


def schedule(
    seed: int, nemeses: Sequence[Nemesis], nodes: int, duration_ms: int, interval_ms: int
) -> list[ScheduledFault]:
    """Faults of these nemeses, one every ``interval_ms`` or so, by turns in an order of chance.

    The same arguments make the same schedule. Each fault is healed before the next one begins;
    what has several at a time is a nemesis that has several others. Empty where nothing fits in.
    """
    random = Random(f"{seed}/schedule")
    found: list[ScheduledFault] = []
    round_: list[Nemesis] = []
    at_ms = _QUIET_MS
    while nemeses and at_ms + interval_ms <= duration_ms:
        if not round_:
            round_ = random.sample(list(nemeses), len(nemeses))
        fault = round_.pop().plan(random, nodes)
        hold_ms = int(interval_ms * random.uniform(*_HELD_SHARE))
        jitter_ms = int(random.uniform(0, interval_ms - hold_ms) / 2)
        found.append(ScheduledFault(at_ms + jitter_ms, hold_ms, fault))
        at_ms += interval_ms
    return found


def write_schedule(faults: Sequence[ScheduledFault], path: Path) -> None:
    """Keep it, to be repeated and shrunk."""
    path.write_text(json.dumps([asdict(one) for one in faults], indent=1) + "\n", encoding="utf-8")


def read_schedule(path: Path) -> list[ScheduledFault]:
    """What ``write_schedule`` wrote. Raises PlanError for anything else."""
    try:
        entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        return [
            ScheduledFault(int(one["at_ms"]), int(one["hold_ms"]), Fault(**one["fault"]))
            for one in entries
        ]
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise PlanError(
            f"{path} is no schedule of faults ({reason_of(error)}); next: take schedule.json of a "
            "run"
        ) from None
