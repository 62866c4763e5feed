"""Who plays in a workload, and what is drawn for them: the plan and the seed say it alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from random import Random
from typing import Any

import pytest

from penstock.chaos.errors import PlanError
from penstock.chaos.workloads import Plan
from penstock.chaos.workloads.group import Life
from penstock.chaos.workloads.group import Turn as GroupTurn
from penstock.chaos.workloads.membership import MAX_POLL_INTERVAL_MS, SESSION_TIMEOUT_MS
from penstock.chaos.workloads.offsets import Turn as OffsetsTurn
from penstock.chaos.workloads.process import Job
from penstock.chaos.workloads.reader import draw_seek
from penstock.chaos.workloads.registry import WORKLOADS
from penstock.chaos.workloads.transfer import Deed
from penstock.client import TopicPartition

PLAN = Plan(7, 3, 20.0, 300.0)
NAMES = ("append", "group", "offsets", "process", "transfer")
PARTITIONS = [TopicPartition("t", number) for number in range(4)]


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_says_who_plays(name: str) -> None:
    workload = WORKLOADS[name]
    specs = list(workload.clients(PLAN))
    assert specs == list(workload.clients(PLAN))
    processes = [spec.process for spec in specs]
    assert len(set(processes)) == len(processes)
    # They travel as JSON.
    assert json.loads(json.dumps([asdict(one) for one in specs])) == [asdict(one) for one in specs]
    workers = {spec.worker for spec in specs}
    assert workers == set(range(len(workers)))


@pytest.mark.parametrize("name", NAMES)
def test_each_has_checkers_that_are_known_and_none_twice(name: str) -> None:
    checkers = [checker.name for checker in WORKLOADS[name].checkers(PLAN)]
    assert len(set(checkers)) == len(checkers)
    assert "lost-write" in checkers


@pytest.mark.parametrize("name", NAMES)
def test_options_are_those_of_the_workload(name: str) -> None:
    workload = WORKLOADS[name]
    some = Plan(7, 3, 20.0, 300.0, {"partitions": 3, "workers": 1})
    topics = [spec.parameters.get("partitions", 3) for spec in workload.clients(some)]
    assert set(topics) == {3}
    for options, says in (
        ({"colour": "red"}, f"the workload {name} has no option 'colour'"),
        ({"partitions": "many"}, "partitions='many' is no whole number from 1 to"),
        ({"partitions": 0}, "partitions=0 is no whole number from 1 to"),
    ):
        with pytest.raises(PlanError, match=says):
            workload.clients(Plan(7, 3, 20.0, 300.0, options))


def test_who_may_freeze_has_a_worker_for_itself() -> None:
    specs = WORKLOADS["group"].clients(PLAN)
    crowd = Counter(spec.worker for spec in specs)
    members = [spec for spec in specs if spec.kind == "member"]
    assert len(members) == 4
    assert all(crowd[spec.worker] == 1 for spec in members)


@pytest.mark.parametrize(
    "draw",
    [
        Life.drawn,
        GroupTurn.drawn,
        OffsetsTurn.drawn,
        Job.drawn,
        lambda random: Deed.drawn(random, 12),
        lambda random: draw_seek(random, PARTITIONS, {"t-1": 5_000}),
    ],
)
def test_the_same_seed_draws_the_same(draw: Callable[[Random], Any]) -> None:
    one, same, other = Random("7/member-1"), Random("7/member-1"), Random("8/member-1")
    drawn = [draw(one) for _ in range(300)]
    assert [draw(same) for _ in range(300)] == drawn
    assert [draw(other) for _ in range(300)] != drawn


def test_everything_that_may_be_drawn_is_drawn() -> None:
    random = Random(1)
    turns = [GroupTurn.drawn(random) for _ in range(2_000)]
    assert {turn.pause for turn in turns} == {"", "stall", "freeze"}
    # What pauses for shorter is never given up.
    assert all(one.pause_s * 1000 > MAX_POLL_INTERVAL_MS for one in turns if one.pause == "stall")
    assert all(one.pause_s * 1000 > SESSION_TIMEOUT_MS for one in turns if one.pause == "freeze")
    assert {Life.drawn(random).crashes for _ in range(100)} == {False, True}
    deeds = [Deed.drawn(random, 5) for _ in range(2_000)]
    endings = {"commit", "abort", "timeout", "crash", "zombie"}
    assert {deed.ending for deed in deeds} == {Job.drawn(random).ending for _ in range(2_000)}
    assert {deed.ending for deed in deeds} == endings
    transfers = [one for deed in deeds for one in deed.transfers]
    assert all(source != target and amount > 0 for source, target, amount in transfers)
    resets = [OffsetsTurn.drawn(random) for _ in range(2_000)]
    assert {(one.goes_away, one.resets) for one in resets} == {
        (False, False),
        (True, False),
        (True, True),
    }
    wheres = [draw_seek(random, PARTITIONS, {})[1] for _ in range(500)]
    assert {one.get("where", next(iter(one))) for one in wheres} == {
        *("earliest", "latest", "offset", "ago"),
    }
