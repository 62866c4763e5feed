"""The runner's phases, with a cluster and clients of paper."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.chaos import runner as runner_module
from penstock.chaos.checkers import Evidence
from penstock.chaos.cluster import OFFERED, Capability
from penstock.chaos.errors import ClusterError, NotHereError, PlanError
from penstock.chaos.history import History
from penstock.chaos.judging import read_judgement
from penstock.chaos.live import Status
from penstock.chaos.nemeses import Fault, ScheduledFault
from penstock.chaos.run_plan import RunPlan, read_plan
from penstock.chaos.runner import Outcome, Runner, check_plan, conclude, needs_of, plan_faults
from penstock.chaos.schedule import read_schedule
from penstock.chaos.verdict import Valid, Verdict
from penstock.chaos.workers import WorkerError
from penstock.chaos.workloads.registry import WORKLOADS
from tests.unit.chaos.fake_cluster import FakeCluster
from tests.unit.chaos.histories import FAIL, MS, Script
from tests.unit.chaos.paper_worker import COMMAND, Paper

HOUR_S = 3_600


@pytest.fixture(autouse=True)
def _paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKLOADS, "paper", Paper())  # type: ignore[arg-type]  # It is a dict.
    # Nobody answers there: replicas are not read.
    monkeypatch.setattr(runner_module, "_ADMIN_MS", 100)


class Watching:
    """Notes the phases, and asks for the end at the first look at a fault."""

    def __init__(self, stop: threading.Event) -> None:
        self.phases: list[str] = []
        self._stop = stop

    def phase(self, name: str) -> None:
        self.phases.append(name)

    def status(self, status: Status) -> None:
        if status.fault is not None or status.faults_done:
            self._stop.set()


def plan(duration_s: float = HOUR_S, nemesis: str = "kill", **options: str) -> RunPlan:
    return RunPlan("paper", nemesis, 3, duration_s, 7, 100, 1, 1, options=options)


def run(
    directory: Path,
    cluster: FakeCluster,
    *,
    plan: RunPlan,
    faults: list[ScheduledFault] | None = None,
) -> tuple[Outcome, Watching]:
    stop = threading.Event()
    watching = Watching(stop)
    carried_out = Runner(
        plan,
        cluster,
        directory,
        faults=faults,
        onlooker=watching,
        stop=stop,
        common=lambda *_: (),
        worker_command=COMMAND,
    ).run()
    return carried_out, watching


def killing(target: str = "node 2", hold_ms: int = 1000 * HOUR_S) -> list[ScheduledFault]:
    return [ScheduledFault(0, hold_ms, Fault("kill", "kill", target))]


def test_a_stop_in_the_middle_of_a_fault_heals_and_judges_all_the_same(tmp_path: Path) -> None:
    cluster = FakeCluster()
    outcome, watching = run(tmp_path, cluster, plan=plan(), faults=killing())
    assert outcome.interrupted
    assert outcome.valid is Valid.TRUE
    figures = outcome.judgement.figures
    assert 0 <= figures["interrupted_after_s"] < HOUR_S
    assert figures["faults"] == {"planned": 1, "held": 1, "failed": 0}
    assert cluster.done == ["start", "kill 2", "start 2", "heal_all", "wait_ready", "stop"]
    assert watching.phases == [
        "start the nodes",
        "load",
        "heal",
        "final reads",
        "stop the nodes",
        "judge",
    ]
    history = (tmp_path / "history.jsonl").read_text(encoding="utf-8").splitlines()
    assert {json.loads(line).get("phase", "") for line in history} == {"", "final"}
    assert json.loads((tmp_path / "verdict.json").read_text(encoding="utf-8"))["valid"] == "true"
    assert read_schedule(tmp_path / "schedule.json") == killing()
    assert len((tmp_path / "faults.jsonl").read_text(encoding="utf-8").splitlines()) == 1
    assert read_plan(tmp_path) == plan()


def test_a_run_ends_by_itself(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, FakeCluster(), plan=plan(1.0, "none"), faults=[])
    assert not outcome.interrupted
    assert "interrupted_after_s" not in outcome.judgement.figures
    assert outcome.judgement.figures["faults"]["planned"] == 0
    assert [one.checker for one in outcome.judgement.verdicts] == ["recovery"]
    assert outcome.judgement.figures["recovery_ms"] >= 0
    written = (tmp_path / "history.jsonl").read_bytes()
    told = read_judgement(tmp_path).figures["history"]
    assert told["events"] == len(written.splitlines())
    assert told["sha256"] == hashlib.sha256(written).hexdigest()


def test_a_cluster_that_does_not_recover_is_a_broken_promise(tmp_path: Path) -> None:
    cluster = FakeCluster()
    cluster.never_ready = True
    outcome, watching = run(tmp_path, cluster, plan=plan(), faults=killing())
    assert outcome.valid is Valid.FALSE
    assert "it does not come back" in outcome.judgement.verdicts[0].anomalies[0].what
    assert "final reads" not in watching.phases
    assert cluster.done[-1] == "stop"


def test_faults_none_of_which_could_be_injected_prove_nothing(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, FakeCluster(), plan=plan(), faults=killing("node 9", 1))
    assert outcome.valid is Valid.UNKNOWN
    reasons = [one.reason for one in outcome.judgement.verdicts if one.reason]
    assert len(reasons) == 1
    assert "nobody is 'node 9'" in reasons[0]


def test_a_worker_that_fails_ends_the_run_and_everything_is_healed(tmp_path: Path) -> None:
    cluster = FakeCluster()
    with pytest.raises(WorkerError, match="the pen is empty"):
        run(tmp_path, cluster, plan=plan(kind="broken"), faults=killing())
    assert cluster.done[-3:] == ["heal_all", "wait_ready", "stop"]
    assert cluster.up == {1, 2, 3}
    left = {thread.name for thread in threading.enumerate()}
    assert not left & {"samples", "watermarks", "faults"}


def test_a_cluster_that_does_not_start_is_stopped(tmp_path: Path) -> None:
    class Dead(FakeCluster):
        def start(self) -> None:
            raise ClusterError("a port is taken")

    cluster = Dead()
    with pytest.raises(ClusterError, match="a port is taken"):
        run(tmp_path, cluster, plan=plan(), faults=[])
    assert cluster.done == ["stop"]


def test_what_the_cluster_cannot_do_is_refused_before_it_starts(tmp_path: Path) -> None:
    cluster = FakeCluster()
    cluster.capabilities = frozenset()
    with pytest.raises(PlanError, match="kill needs processes"):
        run(tmp_path, cluster, plan=plan(), faults=killing())
    assert cluster.done == []


@pytest.mark.parametrize(
    ("nemesis", "nodes", "duration_s", "what"),
    [
        ("kill", 3, 5.0, "no fault of kill fits into 5 s .* a smaller --interval or a longer"),
        ("halves", 1, 60.0, "halves takes 2 nodes, and there is 1"),
        ("kill+bridge", 2, 60.0, "takes 3 nodes, and there are 2"),
        ("kill,late-acks", 1, 60.0, "late-acks takes 2 nodes"),
        ("voter", 1, 60.0, "voter takes 2 nodes"),
        ("membership", 1, 60.0, "membership takes 2 nodes"),
        ("swapped-directories", 1, 60.0, "swapped-directories takes 2 nodes"),
        ("partition", 1, 60.0, ""),
        ("slow", 1, 60.0, ""),
        ("kill", 3, 13.0, ""),
        ("", 3, 5.0, ""),
    ],
)
def test_a_plan_whose_faults_cannot_happen_is_refused(
    nemesis: str, nodes: int, duration_s: float, what: str
) -> None:
    asked = RunPlan("append", nemesis, nodes, duration_s, 7, 100, 10)
    if not what:
        check_plan(asked)
        return
    with pytest.raises(PlanError, match=what):
        check_plan(asked)


class Looking:
    """Says unknown, having looked at so much."""

    def __init__(self, name: str, looked_at: int) -> None:
        self.name = name
        self._looked_at = looked_at

    def check(self, history: History, evidence: Evidence) -> Verdict:
        return Verdict(self.name, Valid.UNKNOWN, self._looked_at, reason="it is dark")


def test_a_common_checker_that_had_nothing_to_look_at_casts_no_doubt() -> None:
    own = [Verdict("recovery", Valid.TRUE, 1)]
    judges = [Looking("leaks", 0), Looking("replicas", 7)]
    judgement = conclude(plan(), History([]), Evidence(), own, {}, common=lambda *_: judges)
    assert [one.checker for one in judgement.verdicts] == ["recovery", "replicas"]
    assert judgement.figures["not_judged"]["leaks"] == "it is dark"
    assert judgement.valid is Valid.UNKNOWN


def test_the_same_seed_makes_the_same_faults() -> None:
    once, again = plan_faults(plan(60, "kill,pause")), plan_faults(plan(60, "kill,pause"))
    assert once == again
    assert len(once) > 20


@pytest.mark.parametrize("nemesis", ["disk", "netem", "netem+pause"])
def test_families_are_drawn_of_what_the_backend_has(nemesis: str) -> None:
    here = plan(60, nemesis)
    there = replace(here, backend="docker")
    assert plan_faults(there) == plan_faults(there)
    assert needs_of(plan_faults(there)) <= OFFERED["docker"]
    assert not needs_of(plan_faults(here)) <= OFFERED["docker"]
    with pytest.raises(NotHereError, match="the backend docker has none of"):
        plan_faults(replace(here, nemesis="kill,clock", backend="docker"))


def test_only_what_is_drawn_is_needed(tmp_path: Path) -> None:
    cluster = FakeCluster()
    cluster.capabilities = frozenset({Capability.FILES, Capability.PROCESSES})
    drawn = [ScheduledFault(1, 1, Fault("disk", "full-disk", "random", {"errno": "ENOSPC"}))]
    with pytest.raises(NotHereError, match="the nemesis full-disk needs disks"):
        run(tmp_path, cluster, plan=plan(), faults=drawn)
    assert needs_of([replace(drawn[0], fault=Fault("disk", "wiped-disk", "random"))]) == {
        Capability.FILES,
        Capability.PROCESSES,
    }


def test_an_objective_of_the_plan_is_judged() -> None:
    script = Script()
    script.append("p", 0, 1, 0)
    script.append("p", 1, 1, None, type_=FAIL)
    script.t += 3_000 * MS
    script.append("p", 1, 1, 1)
    for most_ms, valid in ((9_000, Valid.TRUE), (2_000, Valid.FALSE)):
        stated = replace(plan(), objective={"window": most_ms})
        judgement = conclude(stated, script.history, Evidence(), [], {})
        found = {one.checker: one.valid for one in judgement.verdicts}
        assert found["availability"] is valid


def test_a_plan_knows_the_command_that_repeats_it() -> None:
    assert plan(60, "kill,pause", size="1").command() == (
        "penstock chaos run --workload paper --nemesis kill,pause --nodes 3 --duration 60 "
        "--seed 7 --rate 100 --interval 1 --recovery 1 --set size=1"
    )
