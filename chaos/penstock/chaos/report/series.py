"""What a report draws: figures over time, of a history. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from penstock.chaos.history import History, Type
from penstock.chaos.live import percentile
from penstock.chaos.worker import records_in

_LEAST_BUCKET_S: Final = 0.25
_MOST_BUCKETS: Final = 240


@dataclass(slots=True)
class Series:
    """By bucket of time, of the load: final reads are left out."""

    bucket_s: float
    seconds: list[float]
    written: list[float]
    """Records a second that were acknowledged."""
    read: list[float]
    failed: list[int]
    ambiguous: list[int]
    p50_ms: list[float | None]
    p99_ms: list[float | None]
    p999_ms: list[float | None]
    totals: Totals


@dataclass(slots=True)
class Totals:
    """Of the whole load."""

    written: int = 0
    read: int = 0
    read_in_the_end: int = 0
    ok: int = 0
    failed: int = 0
    ambiguous: int = 0
    seconds: float = 0.0
    latencies_ms: list[float] = field(default_factory=list)

    def latency_ms(self, percent: float) -> float | None:
        """A percentile of operations that were done, polls left out."""
        return percentile(self.latencies_ms, percent)


def series_of(history: History) -> Series:
    """Everything that is drawn over time."""
    last_s = max((one.t for one in history.events if not one.phase), default=0) / 1e9
    bucket_s = max(_LEAST_BUCKET_S, last_s / _MOST_BUCKETS)
    count = int(last_s / bucket_s) + 1
    written, read = [0] * count, [0] * count
    failed, ambiguous = [0] * count, [0] * count
    latencies: list[list[float]] = [[] for _ in range(count)]
    totals = Totals(seconds=last_s)
    for operation in history.operations:
        done = operation.completed
        if operation.invoked.phase:
            if done is not None and done.type is Type.OK and done.f == "poll":
                totals.read_in_the_end += records_in("poll", done.value)
            continue
        at = min(count - 1, int((done or operation.invoked).t / 1e9 / bucket_s))
        if done is None or done.type is Type.INFO:
            ambiguous[at] += 1
            totals.ambiguous += 1
        elif done.type is Type.FAIL:
            failed[at] += 1
            totals.failed += 1
        else:
            totals.ok += 1
            records = records_in(done.f, done.value)
            if done.f == "poll":
                read[at] += records
                totals.read += records
                continue
            written[at] += records
            totals.written += records
            latency_ms = (done.t - operation.invoked.t) / 1e6
            latencies[at].append(latency_ms)
            totals.latencies_ms.append(latency_ms)
    totals.latencies_ms.sort()
    for each in latencies:
        each.sort()
    return Series(
        bucket_s,
        [index * bucket_s for index in range(count)],
        [one / bucket_s for one in written],
        [one / bucket_s for one in read],
        failed,
        ambiguous,
        [percentile(each, 50) for each in latencies],
        [percentile(each, 99) for each in latencies],
        [percentile(each, 99.9) for each in latencies],
        totals,
    )


def nice_ticks(top: float, count: int = 4) -> Sequence[float]:
    """Round numbers from 0 to at least ``top``, about so many steps."""
    if top <= 0:
        return [0.0, 1.0]
    raw = top / count
    size = 10.0 ** len(str(int(raw))) / 10 if raw >= 1 else 0.1
    step = next(size * one for one in (1, 2, 2.5, 5, 10, 20) if size * one >= raw)
    ticks = [0.0]
    while ticks[-1] < top:
        ticks.append(ticks[-1] + step)
    return ticks
