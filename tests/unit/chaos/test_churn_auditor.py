"""The auditor of the workload `churn`, against brokers of paper."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import cast

import pytest

from penstock.chaos.checkers import Evidence
from penstock.chaos.checkers.registry import judge
from penstock.chaos.history import FINAL, History, HistoryWriter
from penstock.chaos.recorder import Recorder
from penstock.chaos.verdict import Valid
from penstock.chaos.workloads import Plan, Surroundings
from penstock.chaos.workloads.churn import Churn, topic_name
from tests.unit.chaos.test_claims import Events
from tests.unit.client.fake_broker import FakeCluster


@pytest.mark.parametrize("left", [0, 1])
async def test_something_is_judged_of_every_topic_whatever_the_load_has_left(left: int) -> None:
    plan = Plan(7, 3, 10.0, 0.0, {"topics": 2})
    workload = Churn()
    (spec,) = [one for one in workload.clients(plan) if one.kind == "auditor"]
    events = Events()
    recorder = Recorder(cast(HistoryWriter, events), "auditor/final", 0, phase=FINAL)
    async with FakeCluster(3) as cluster:
        for number in range(left):
            cluster.add_topic(topic_name(number), 3)
        spec = replace(spec, process="auditor/final")
        await workload.client(
            Surroundings(cluster.bootstrap, plan, spec, Random(1), recorder)
        ).finish()
    # Each was deleted and made again, and what was read then is of its new life alone.
    assert [one for one in events.outcomes if one[0] == "delete"] == [("delete", "ok")] * 2
    verdicts = judge(workload.checkers(plan), History(events.added), Evidence())
    assert {one.checker: one.valid for one in verdicts} == {
        "topic-ids": Valid.TRUE,
        "deleted-records": Valid.TRUE,
    }
    assert all(one.looked_at > 0 for one in verdicts)
