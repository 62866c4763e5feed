"""What the demo counts and how it judges. Pure: no process, no clock, no network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

_STATUS_FIELD: Final = 8
_PATH_FIELD: Final = 6
TOP_PATHS: Final = 5


class Sent(NamedTuple):
    """One acknowledged line: which, where it went, and when (seconds on one clock)."""

    line_number: int
    partition: int
    sent_at: float
    acknowledged_at: float


class Read(NamedTuple):
    """One line as a member printed it."""

    member: str
    line_number: int
    partition: int
    offset: int
    text: str


@dataclass(frozen=True, slots=True)
class LogCounts:
    """How often each status and each path occurs."""

    statuses: Mapping[str, int]
    paths: Mapping[str, int]

    def top_paths(self, count: int = TOP_PATHS) -> list[tuple[str, int]]:
        """The paths asked for most, then by name."""
        return sorted(self.paths.items(), key=lambda item: (-item[1], item[0]))[:count]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of the lines. ``ok`` only when every one arrived exactly once, unchanged."""

    lines: int
    acknowledged: int
    consumed: int
    lost: int
    duplicated: int
    altered: int
    by_member: Mapping[str, int]
    counts: LogCounts
    expected_counts: LogCounts

    @property
    def counts_agree(self) -> bool:
        """Whether what was consumed counts as the file does."""
        return self.counts == self.expected_counts

    @property
    def ok(self) -> bool:
        """Whether the demo succeeded."""
        return (
            self.lines == self.acknowledged == self.consumed
            and not self.lost
            and not self.duplicated
            and not self.altered
            and self.counts_agree
        )


def count_lines(lines: Iterable[str]) -> LogCounts:
    """Count fields 9 and 7 of each line, fields being what spaces set apart, as awk does."""
    statuses: Counter[str] = Counter()
    paths: Counter[str] = Counter()
    for line in lines:
        fields = line.split()
        statuses[fields[_STATUS_FIELD]] += 1
        paths[fields[_PATH_FIELD]] += 1
    return LogCounts(dict(statuses), dict(paths))


def judge(
    lines: Sequence[str], sent: Sequence[Sent], reads: Sequence[Read], expected: LogCounts
) -> Verdict:
    """Compare what went in with what came out, line by line; numbers count from 0.

    A line that was read more than once is duplicated once for each time too many; a line that
    was never read is lost, whether it was acknowledged or not; one that was read with another
    text is altered.
    """
    times = Counter(read.line_number for read in reads)
    return Verdict(
        lines=len(lines),
        acknowledged=len({entry.line_number for entry in sent}),
        consumed=len(times),
        lost=sum(1 for number in range(len(lines)) if not times[number]),
        duplicated=sum(count - 1 for count in times.values()),
        altered=sum(1 for read in reads if _text_of(lines, read.line_number) != read.text),
        by_member=dict(Counter(read.member for read in reads)),
        counts=count_lines(read.text for read in reads),
        expected_counts=expected,
    )


def standstill_seconds(
    sent: Iterable[Sent], partitions: Iterable[int], killed_at: float
) -> dict[int, float | None]:
    """For each partition: from the kill to the first acknowledgement of what was sent after it.

    None where nothing that was sent after the kill was acknowledged.
    """
    first: dict[int, float | None] = dict.fromkeys(partitions)
    for entry in sent:
        if entry.partition not in first or entry.sent_at < killed_at:
            continue
        waited = entry.acknowledged_at - killed_at
        known = first[entry.partition]
        first[entry.partition] = waited if known is None else min(known, waited)
    return first


def _text_of(lines: Sequence[str], number: int) -> str | None:
    return lines[number] if 0 <= number < len(lines) else None
