"""Whether processes take more and more."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from penstock.chaos.checkers import Evidence, Sample
from penstock.chaos.history import History
from penstock.chaos.verdict import Findings, Verdict

_S: Final = 1_000_000_000
_MOST_SAMPLES: Final = 200
_FEWEST_SAMPLES: Final = 20
_SURE: Final = 3.0
"""Standard deviations of the Mann-Kendall statistic: chance has them once in 700 processes."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What may leak: growth over the time looked at counts from this much on."""

    field: str
    least: int
    share: float
    """... and from this part of the median on."""


_KINDS: Final = (
    _Kind("memory_bytes", 32 << 20, 0.2),
    _Kind("descriptors", 20, 0.2),
    _Kind("threads", 10, 0.2),
)


class Leaks:
    """A process leaks memory, descriptors or threads where, outside of faults (and of the
    ``settle_s`` after each) and after its first ``warm_up_s``, what it has goes up: in all, and in
    the second half of its samples alone, the Mann-Kendall statistic for a trend is above three
    standard deviations, and Theil's slope (the median of the slopes of all pairs) times the time
    looked at is at least 20 % of the median and at least 32 MiB, 20 descriptors or 10 threads. An
    anomaly is a process and what it leaks. Of less than 20 samples or ``least_s`` seconds nothing
    is said.
    """

    name = "leaks"

    def __init__(self, *, warm_up_s: int = 30, settle_s: int = 5, least_s: int = 60) -> None:
        self._warm_up_t: Final = warm_up_s * _S
        self._settle_t: Final = settle_s * _S
        self._least_t: Final = least_s * _S

    def check(self, history: History, evidence: Evidence) -> Verdict:
        """Judge."""
        del history
        findings = Findings(self.name)
        processes: dict[tuple[int, int], list[Sample]] = defaultdict(list)
        for sample in sorted(evidence.samples, key=lambda sample: sample.t):
            processes[sample.node, sample.pid].append(sample)
        slopes: dict[str, dict[str, float]] = {}
        for (node, pid), samples in sorted(processes.items()):
            calm = self._calm(samples, evidence)
            if len(calm) < _FEWEST_SAMPLES or calm[-1].t - calm[0].t < self._least_t:
                continue
            findings.looked_at += len(calm)
            slopes[f"node {node}, process {pid}"] = {
                kind.field: round(_judge(findings, node, pid, kind, calm), 3) for kind in _KINDS
            }
        return findings.verdict(
            f"no process was sampled for {self._least_t // _S} s outside of faults",
            growth_per_minute=slopes,
        )

    def _calm(self, samples: Sequence[Sample], evidence: Evidence) -> Sequence[Sample]:
        """Those of a process that has warmed up, while nothing is wrong; not too many."""
        since = samples[0].t + self._warm_up_t
        calm = [
            sample
            for sample in samples
            if sample.t >= since
            and not any(
                fault.began_t <= sample.t <= fault.healed_t + self._settle_t
                for fault in evidence.faults
            )
        ]
        step = max(1, math.ceil(len(calm) / _MOST_SAMPLES))
        return calm[::step]


def _judge(findings: Findings, node: int, pid: int, kind: _Kind, calm: Sequence[Sample]) -> float:
    """The growth in a minute."""
    points = [(sample.t, float(getattr(sample, kind.field))) for sample in calm]
    slope = theil_slope(points)
    usual = median(value for _, value in points)
    growth = slope * (points[-1][0] - points[0][0])
    is_trend = all(kendall(part) > _SURE for part in (points, points[len(points) // 2 :]))
    if is_trend and growth >= max(kind.least, kind.share * usual):
        findings.add(
            f"node {node}, process {pid}: {kind.field.replace('_', ' ')} grow by {growth:,.0f} in "
            f"{(points[-1][0] - points[0][0]) / _S:.0f} s without a fault, from "
            f"{points[0][1]:,.0f} to {points[-1][1]:,.0f}",
            *({"t": t, "node": node, "pid": pid, kind.field: value} for t, value in points[::20]),
        )
    return slope * 60 * _S


def theil_slope(points: Sequence[tuple[int, float]]) -> float:
    """The median of the slopes between any two of the points: a few wild ones do not move it."""
    slopes = [
        (other[1] - one[1]) / (other[0] - one[0])
        for place, one in enumerate(points)
        for other in points[place + 1 :]
        if other[0] > one[0]
    ]
    return median(slopes) if slopes else 0.0


def kendall(points: Sequence[tuple[int, float]]) -> float:
    """The Mann-Kendall statistic, in standard deviations of what chance makes of it (with ties)."""
    values = [value for _, value in points]
    count = len(values)
    score = sum(
        (other > one) - (other < one)
        for place, one in enumerate(values)
        for other in values[place + 1 :]
    )
    ties: dict[float, int] = defaultdict(int)
    for value in values:
        ties[value] += 1
    spread = count * (count - 1) * (2 * count + 5)
    spread -= sum(tie * (tie - 1) * (2 * tie + 5) for tie in ties.values())
    if spread <= 0 or score == 0:
        return 0.0
    return (score - math.copysign(1, score)) / math.sqrt(spread / 18)
