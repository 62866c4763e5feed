"""An idle source asks its system now and then, and one that has something at once."""

from __future__ import annotations

import pytest

from penstock.pipeline.connectors.pacing import Pacing


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.paused_s: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def pause(self, span_s: float) -> None:
        self.paused_s.append(span_s)
        self.now_s += span_s


@pytest.mark.parametrize(
    ("interval_ms", "is_new", "paused_s"),
    [(1_000, False, [1.0, 1.0]), (1_000, True, []), (0, False, [])],
)
def test_only_who_had_nothing_is_waited_with(
    interval_ms: int, is_new: bool, paused_s: list[float]
) -> None:
    clock = Clock()
    pacing = Pacing(interval_ms, clock=clock, pause=clock.pause)
    for _ in range(3):
        pacing.wait()
        pacing.answered(is_new=is_new)
    assert clock.paused_s == paused_s


def test_a_trigger_that_asks_less_often_is_not_held_up() -> None:
    clock = Clock()
    pacing = Pacing(1_000, clock=clock, pause=clock.pause)
    pacing.answered(is_new=False)
    clock.now_s += 5
    pacing.wait()
    assert not clock.paused_s
