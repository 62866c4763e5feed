"""What is told of a loop that ran late, on a loop of virtual time."""

from __future__ import annotations

from penstock.raft_meta.punctuality import BEAT_S, Punctuality
from tests.simulation.quorum.virtual_time import Clock, ProcessLoop, Scheduler


class Watched:
    """A process that is looked after, and what was told."""

    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.loop = ProcessLoop(self.scheduler, Clock(self.scheduler, 500.0, 1.0))
        self.told: list[tuple[float, float]] = []  # Since when, and when it was told.
        self.punctuality = Punctuality(
            lambda since_s: self.told.append((since_s, self.loop.time()))
        )
        self.loop.enter(self.punctuality.start)


def test_a_loop_that_runs_when_it_should_is_told_of_nothing():
    watched = Watched()
    watched.scheduler.run_until(30.0)
    assert watched.told == []


def test_a_spell_is_told_once_with_its_length_but_for_a_beat():
    watched = Watched()
    watched.scheduler.run_until(5.0)
    watched.loop.hold(13.0)
    watched.scheduler.run_until(60.0)
    [(since_s, told_s)] = watched.told
    assert told_s >= 518.0
    assert 505.0 <= since_s <= 505.0 + BEAT_S + 1e-6


def test_short_spells_are_no_news():
    watched = Watched()
    watched.scheduler.run_until(5.0)
    watched.loop.hold(0.09)
    watched.scheduler.run_until(60.0)
    assert watched.told == []


def test_other_threads_see_that_the_loop_is_late_until_it_was_told():
    watched = Watched()
    loop, late_since_s = watched.loop, watched.punctuality.late_since_s
    seen: list[float | None] = []
    watched.punctuality._on_late = lambda _since_s: seen.append(late_since_s(loop.time()))
    watched.scheduler.run_until(5.0)
    loop.hold(2.0)
    for at_s in (5.05, 6.0, 6.9, 7.5):
        watched.scheduler.run_until(at_s)
        seen.append(late_since_s(loop.time()))
    on_time, early, later, told, after = seen
    assert on_time is None
    assert early is not None
    assert 505.0 <= early <= 505.0 + BEAT_S + 1e-6
    assert early == later == told
    assert after is None


def test_a_loop_at_which_nobody_looks_is_not_late():
    watched = Watched()
    watched.scheduler.run_until(5.0)
    watched.loop.enter(watched.punctuality.stop)
    watched.scheduler.run_until(60.0)
    assert watched.punctuality.late_since_s(560.0) is None


def test_who_looks_no_more_when_it_is_told_is_left_alone():
    watched = Watched()
    watched.punctuality._on_late = lambda _since_s: watched.punctuality.stop()
    watched.scheduler.run_until(5.0)
    watched.loop.hold(2.0)
    watched.scheduler.run_until(60.0)
    assert watched.punctuality.late_since_s(560.0) is None
    assert not any(not handle.is_cancelled for _, _, handle in watched.loop._timers)


def test_nothing_is_told_after_the_end():
    watched = Watched()
    watched.scheduler.run_until(5.0)
    watched.loop.enter(watched.punctuality.stop)
    watched.loop.hold(13.0)
    watched.scheduler.run_until(60.0)
    assert watched.told == []
