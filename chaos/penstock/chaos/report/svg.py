"""Charts over time as inline SVG: small, in the page's colours, readable without a script."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from penstock.chaos.report.series import nice_ticks

WIDTH: Final = 1040
LEFT: Final = 92
RIGHT: Final = 16
TOP: Final = 26
_BOTTOM: Final = 26
_ROW: Final = 20
_LETTER: Final = 6


@dataclass(frozen=True, slots=True)
class Shade:
    """A fault, as it lies behind a chart. Seconds since the load began."""

    start_s: float
    held_s: float
    end_s: float
    label: str
    title: str


@dataclass(frozen=True, slots=True)
class Line:
    """Something over time; gaps where it is None."""

    name: str
    css: str
    values: Sequence[float | None]


class Frame:
    """The axis of time that all charts of a page share."""

    def __init__(self, seconds: float, shades: Sequence[Shade]) -> None:
        self.seconds: Final = max(seconds, 1.0)
        self._shades: Final = shades

    def x(self, second: float) -> float:
        """Where a time is."""
        span = WIDTH - LEFT - RIGHT
        return LEFT + min(max(second, 0.0), self.seconds) / self.seconds * span

    def behind(self, top: float, bottom: float, *, labels: bool) -> Iterator[str]:
        """The faults."""
        free_from_x = 0.0
        for shade in self._shades:
            left, right = self.x(shade.start_s), self.x(shade.end_s)
            held = self.x(shade.held_s)
            title = f"<title>{escape(shade.title)}</title>"
            yield (
                f'<rect class="fault" x="{left:.1f}" y="{top}" width="{max(right - left, 2):.1f}" '
                f'height="{bottom - top}">{title}</rect>'
            )
            yield _upright("fault-edge", held, top, bottom)
            if labels and left > free_from_x:
                free_from_x = left + _LETTER * len(shade.label)
                place = f'x="{left + 2:.1f}" y="{top - 8}"'
                yield f'<text class="fault-label" {place}>{escape(shade.label)}</text>'

    def seconds_axis(self, bottom: float) -> Iterator[str]:
        """Ticks of time."""
        for tick in nice_ticks(self.seconds, 8):
            if tick > self.seconds:
                break
            x = self.x(tick)
            yield _upright("grid", x, bottom, bottom + 4)
            place = f'x="{x:.1f}" y="{bottom + 17}" text-anchor="middle"'
            yield f'<text class="tick" {place}>{tick:g} s</text>'


def line_chart(
    frame: Frame,
    seconds: Sequence[float],
    lines: Sequence[Line],
    *,
    height: int = 190,
    logarithmic: bool = False,
    unit: str = "",
) -> str:
    """Lines over time, from 0 or by powers of ten."""
    top, bottom = TOP, height - _BOTTOM
    known = [value for line in lines for value in line.values if value is not None]
    scale = _Logarithmic(known, top, bottom) if logarithmic else _Linear(known, top, bottom)
    parts = [*frame.behind(top, bottom, labels=True)]
    for tick in scale.ticks:
        y = scale.y(tick)
        parts += [_across(y), _left_of_axis(y + 4, f"{amount(tick)}{unit}")]
    parts += frame.seconds_axis(bottom)
    for line in lines:
        parts.append(
            f'<path class="line {line.css}" d="{_path(frame, seconds, line.values, scale.y)}">'
            f"<title>{escape(line.name)}</title></path>"
        )
    return _svg(height, parts, ", ".join(line.name for line in lines))


def bar_chart(
    frame: Frame,
    seconds: Sequence[float],
    stacks: Sequence[tuple[str, str, Sequence[int]]],
    *,
    height: int = 96,
) -> str:
    """Counts over time, those of one bucket on top of each other: (name, css, counts)."""
    top, bottom = 10, height - _BOTTOM
    sums = [sum(counts) for counts in zip(*(one[2] for one in stacks), strict=True)]
    scale = _Linear([float(one) for one in sums], top, bottom, steps=2)
    width = max(1.0, (frame.x(seconds[1]) - frame.x(0) if len(seconds) > 1 else 4) - 1)
    parts = [*frame.behind(top, bottom, labels=False)]
    for tick in scale.ticks:
        y = scale.y(tick)
        parts += [_across(y), _left_of_axis(y + 4, amount(tick))]
    parts += frame.seconds_axis(bottom)
    for index, second in enumerate(seconds):
        below = 0
        for name, css, counts in stacks:
            if not counts[index]:
                continue
            low, high = scale.y(below), scale.y(below + counts[index])
            below += counts[index]
            parts.append(
                f'<rect class="bar {css}" x="{frame.x(second):.1f}" y="{high:.1f}" '
                f'width="{width:.1f}" height="{max(low - high, 1):.1f}">'
                f"<title>{second:.1f} s: {counts[index]} {escape(name)}</title></rect>"
            )
    return _svg(height, parts, ", ".join(one[0] for one in stacks))


def rows_chart(frame: Frame, rows: Sequence[tuple[str, Sequence[tuple[float, float, str]]]]) -> str:
    """A row for each name, whole but for the stretches (start, end, title) that are marked."""
    top = TOP
    bottom = top + _ROW * len(rows)
    parts = [*frame.behind(top, bottom, labels=True), *frame.seconds_axis(bottom)]
    for number, (name, stretches) in enumerate(rows):
        y = top + number * _ROW + 4
        parts += [_left_of_axis(y + 10, name), _bar("up", LEFT, WIDTH - RIGHT, y)]
        for start, end, title in stretches:
            left, right = frame.x(start), frame.x(end)
            parts.append(_bar("down", left, max(right, left + 2), y, title))
    return _svg(bottom + _BOTTOM, parts, "availability by partition")


def _bar(css: str, left: float, right: float, y: float, title: str = "") -> str:
    place = f'x="{left:.1f}" y="{y}" width="{right - left:.1f}" height="{_ROW - 8}" rx="2"'
    return f'<rect class="{css}" {place}><title>{escape(title)}</title></rect>'


def _upright(css: str, x: float, top: float, bottom: float) -> str:
    return f'<line class="{css}" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>'


def _across(y: float) -> str:
    return f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _left_of_axis(y: float, text: str) -> str:
    x = LEFT - 8
    return f'<text class="tick" x="{x}" y="{y:.1f}" text-anchor="end">{escape(text)}</text>'


def amount(value: float) -> str:
    """A number as an axis shows it: 12k, 1.5M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


class _Linear:
    def __init__(self, values: Sequence[float], top: float, bottom: float, steps: int = 4) -> None:
        self.ticks = nice_ticks(max(values, default=0), steps)
        self._top, self._bottom = top, bottom

    def y(self, value: float) -> float:
        return self._bottom - value / self.ticks[-1] * (self._bottom - self._top)


class _Logarithmic:
    def __init__(self, values: Sequence[float], top: float, bottom: float) -> None:
        positive = [value for value in values if value > 0]
        self._low = math.floor(math.log10(min(positive, default=1)))
        high = math.ceil(math.log10(max(positive, default=10)))
        self._high = max(high, self._low + 1)
        self.ticks = [10.0**power for power in range(self._low, self._high + 1)]
        self._top, self._bottom = top, bottom

    def y(self, value: float) -> float:
        share = (math.log10(max(value, 10.0**self._low)) - self._low) / (self._high - self._low)
        return self._bottom - share * (self._bottom - self._top)


def _path(frame: Frame, seconds: Sequence[float], values: Sequence[float | None], y: object) -> str:
    assert callable(y)
    words: list[str] = []
    pen_up = True
    for second, value in zip(seconds, values, strict=True):
        if value is None:
            pen_up = True
            continue
        words.append(f"{'M' if pen_up else 'L'}{frame.x(second):.1f},{y(value):.1f}")
        if pen_up:
            # So that a lone point is seen: a line of no length with round ends.
            words.append(f"L{frame.x(second):.1f},{y(value):.1f}")
        pen_up = False
    return " ".join(words)


def _svg(height: float, parts: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )
