"""How long nothing succeeded, by partition and by fault."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from penstock.chaos.checkers import Evidence, HeldFault
from penstock.chaos.checkers.records import NEVER, OK, Records, partition_name
from penstock.chaos.checkers.spans import Column
from penstock.chaos.errors import PlanError
from penstock.chaos.history import History, Operation, Type
from penstock.chaos.verdict import Findings, Verdict

_MS: Final = 1_000_000
_SHOWN: Final = 100


@dataclass(frozen=True, slots=True)
class Objective:
    """The longest times without a success that are allowed; None allows any.

    A run is told of them by the names in ``OBJECTIVES``.
    """

    window_ms: int | None = None
    """Of any partition, at any time."""
    kill_p50_ms: int | None = None
    """Of half of the partitions whose leader was killed."""
    kill_p99_ms: int | None = None


OBJECTIVES: Final[Mapping[str, str]] = {
    "window": "window_ms",
    "kill-p50": "kill_p50_ms",
    "kill-p99": "kill_p99_ms",
}
"""The fields of an Objective by the names that people give them."""


def objective_of(named: Mapping[str, int]) -> Objective | None:
    """What these names state together; None for nothing. Raises PlanError."""
    for name, most_ms in named.items():
        if name not in OBJECTIVES:
            raise PlanError(
                f"there is no objective {name!r}; next: take of {', '.join(sorted(OBJECTIVES))}"
            )
        if not isinstance(most_ms, int) or most_ms < 0:
            raise PlanError(
                f"the objective {name}={most_ms} is not met by anything; next: name whole "
                "milliseconds, from 0 on"
            )
    return Objective(**{OBJECTIVES[name]: ms for name, ms in named.items()}) if named else None


@dataclass(frozen=True, slots=True)
class Window:
    """A time in which a partition was asked for and nothing succeeded."""

    partition: str
    start_t: int
    end_t: int
    ended: bool
    """Off: nothing succeeded any more until the load ended."""

    @property
    def ms(self) -> float:
        """How long it was."""
        return (self.end_t - self.start_t) / _MS

    def shown(self) -> Mapping[str, Any]:
        """For the report."""
        return {
            "partition": self.partition,
            "start_s": round(self.start_t / 1e9, 3),
            "ms": round(self.ms, 1),
            "ended": self.ended,
        }


class Availability:
    """A partition is unavailable from its last success, or (where nothing was under way then) from
    the first write that was invoked after it, to the next success; successes are appends and puts
    that were answered ok, and writes of a register, which counts as a partition. Windows of less
    than ``shortest_ms`` are not told of. A window belongs to a fault that began before it ended and
    until ``after_ms`` after which it had been healed it began. The time of a leader kill is, for
    each partition that a killed node led (as far as brokers were asked; otherwise for the worst
    partition), its longest window that belongs to the kill, or 0. An anomaly is a window, or a
    percentile of leader kills, above the stated objective; without one there are figures only.
    """

    name = "availability"

    def __init__(
        self,
        objective: Objective | None = None,
        *,
        shortest_ms: int = 100,
        after_ms: int = 5_000,
    ) -> None:
        self._objective: Final = objective or Objective()
        self._shortest_t: Final = shortest_ms * _MS
        self._after_t: Final = after_ms * _MS

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        findings = Findings(self.name)
        windows: list[Window] = []
        for name, begun, ended, ok in _attempts(history):
            findings.looked_at += int(np.count_nonzero(ok))
            windows += _windows(name, begun, ended, ok, self._shortest_t)
        windows.sort(key=lambda window: -window.ms)
        faults = [(fault, self._of(fault, windows)) for fault in evidence.faults]
        kills = [
            ms for fault, its in faults if _is_kill(fault) for ms in _kill_ms(evidence, fault, its)
        ]
        self._judge(findings, windows, kills)
        return findings.verdict(
            "no write succeeded",
            windows=[window.shown() for window in windows[:_SHOWN]],
            longest_ms=round(windows[0].ms, 1) if windows else 0,
            leader_kills={"count": len(kills)}
            | {f"p{share}_ms": round(percentile(kills, share), 1) for share in (50, 99) if kills},
            by_fault=[
                {
                    "kind": fault.kind,
                    "began_s": round(fault.began_t / 1e9, 3),
                    "struck": list(fault.struck),
                    "longest": its[0].shown() if its else None,
                }
                for fault, its in faults
            ],
        )

    def _of(self, fault: HeldFault, windows: Sequence[Window]) -> list[Window]:
        """Those that belong to it, the longest first."""
        until = fault.healed_t + self._after_t
        return [one for one in windows if one.end_t > fault.began_t and one.start_t < until]

    def _judge(self, findings: Findings, windows: Sequence[Window], kills: list[float]) -> None:
        objective = self._objective
        for window in windows:
            if objective.window_ms is not None and window.ms > objective.window_ms:
                findings.add(
                    f"{window.partition}: nothing succeeded for {window.ms:.0f} ms from "
                    f"{window.start_t / 1e9:.3f} s, more than {objective.window_ms} ms",
                    window.shown(),
                )
        for share, most in ((50, objective.kill_p50_ms), (99, objective.kill_p99_ms)):
            if most is None:
                continue
            if not kills:
                findings.doubt("no leader was killed")
            elif percentile(kills, share) > most:
                findings.add(
                    f"the {share}th percentile of {len(kills)} leader kills is "
                    f"{percentile(kills, share):.0f} ms without a success, more than {most} ms",
                    {"ms": [round(ms, 1) for ms in sorted(kills)[-_SHOWN:]]},
                )


def percentile(values: Sequence[float], share: float) -> float:
    """By nearest rank."""
    return sorted(values)[max(0, math.ceil(len(values) * share / 100) - 1)]


def _is_kill(fault: HeldFault) -> bool:
    return "kill" in {fault.kind, fault.nemesis} or fault.kind.startswith("kill")


def _kill_ms(evidence: Evidence, fault: HeldFault, windows: Sequence[Window]) -> Iterator[float]:
    """The time of each partition that a killed node led."""
    led = _led(evidence, fault)
    if led is None:
        yield windows[0].ms if windows else 0.0
        return
    for partition in sorted(led):
        yield max((one.ms for one in windows if one.partition == partition), default=0.0)


def _led(evidence: Evidence, fault: HeldFault) -> set[str] | None:
    """What the struck nodes led before; None where nobody was asked."""
    leader: dict[str, int] = {}
    for said in sorted(evidence.watermarks, key=lambda said: int(said["t"])):
        if said["t"] < fault.began_t and said["is_leader"]:
            leader[f"{said['topic']}-{said['partition']}"] = said["node"]
    if not leader:
        return None
    return {partition for partition, node in leader.items() if node in fault.struck}


_Attempts = tuple[str, Column, Column, Column]


def _attempts(history: History) -> Iterator[_Attempts]:
    """By partition when each write was invoked and ended, and whether it succeeded."""
    records = history.derived(Records.of)
    attempted = records.attempted
    order = np.argsort(attempted.partition, kind="stable")
    names, starts = np.unique(attempted.partition[order], return_index=True)
    for number, its in zip(names.tolist(), np.split(order, starts[1:]), strict=False):
        place = attempted.operation[its]
        outcome = records.outcome[place] == OK
        yield records.partitions.names[number], records.begun[place], records.ended[place], outcome
    others: dict[str, list[Operation]] = defaultdict(list)
    for one in history.of("put", "write"):
        others[_name(one)].append(one)
    for name, operations in sorted(others.items()):
        begun = np.array([one.invoked.t for one in operations], np.int64)
        ended = [NEVER if one.completed is None else one.completed.t for one in operations]
        ok = np.array([one.type is Type.OK for one in operations])
        yield name, begun, np.array(ended, np.int64), ok


def _name(one: Operation) -> str:
    asked = one.invoked.value
    if one.invoked.f == "write":
        return f"register {asked['register']}"
    return partition_name(asked["topic"], asked["partition"])


def _windows(
    name: str, begun: Column, ended: Column, ok: Column, shortest_t: int
) -> Iterator[Window]:
    """Between successes, and after the last one."""
    # One that was never answered, since its client is gone, asks for nothing any more.
    ended = np.where(ended == NEVER, begun + 1, ended)
    successes = np.concatenate([begun.min(initial=NEVER, keepdims=True), np.sort(ended[ok])])
    last = int(ended.max(initial=0))
    gaps = np.flatnonzero(np.diff(successes) >= shortest_t)
    spans = [(int(successes[at]), int(successes[at + 1]), True) for at in gaps.tolist()]
    if last - int(successes[-1]) >= shortest_t:
        spans.append((int(successes[-1]), last, False))
    for start, end, is_over in spans:
        open_then = begun[(ended > start) & (begun < end)]
        asked = max(start, int(open_then.min(initial=NEVER)))
        if end - asked >= shortest_t:
            yield Window(name, asked, end, is_over)
